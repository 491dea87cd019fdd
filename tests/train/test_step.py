"""Tests of train.make_step."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkit import train

KEY = jax.random.key(0)
PARAMS = {"w": jnp.asarray([1.0, -2.0, 3.0])}


def loss_fn(params, batch, key):
    return jnp.mean((params["w"] - batch) ** 2) / 2


def estimate(value=0.0, aux=None, extras=None):
    """Returns an estimator with a gradient of ones and what it is told beside."""

    def estimator(key, params, opt_state, batch):
        ones = jax.tree.map(jnp.ones_like, params)
        return train.Estimate(jnp.float32(value), ones, aux, extras or {})

    return estimator


def note_extras(**wanted):
    """Returns a transformation that keeps the extra arguments of its last update as state."""
    start = {name: jnp.zeros_like(x) for name, x in wanted.items()}

    def update(updates, state, params=None, **extras):
        return updates, {name: extras[name] for name in wanted}

    return optax.GradientTransformationExtraArgs(lambda params: start, update)


def run(step, tx, batch=None, steps=1, params=PARAMS, **kwargs):
    state, step = train.create(params, tx, KEY, **kwargs), jax.jit(step)
    for _ in range(steps):
        state, metrics = step(state, batch)
    return state, metrics


def test_gradient_descent_contracts_to_the_target():
    """With rate r the error of a quadratic shrinks by 1 - r/n a step, n entries in the mean."""
    tx = optax.sgd(0.75)
    step = train.make_step(train.backprop(loss_fn), tx)
    state, metrics = run(step, tx, jnp.zeros(3), steps=4)
    np.testing.assert_allclose(state.params["w"], PARAMS["w"] * 0.75**4, rtol=1e-6)
    np.testing.assert_allclose(metrics["loss"], 14 / 6 * 0.75**6, rtol=1e-6)
    assert state.step == 4 and state.step.dtype == jnp.int32 and set(metrics) == {"loss"}


def test_step_uses_the_key_folded_with_its_number():
    """Step i draws from ``fold_in(key, i)``; the key of the state stays."""

    def noisy(params, batch, key):
        return jnp.sum(params["w"]), {"bits": jax.random.bits(key)}

    tx = optax.sgd(0.1)
    state, metrics = run(train.make_step(train.backprop(noisy), tx), tx, steps=3)
    assert metrics["bits"] == jax.random.bits(jax.random.fold_in(KEY, 2)) and state.key == KEY


@pytest.mark.parametrize("place", ["alone", "chain", "multi_steps"])
def test_value_and_extras_reach_the_optimizer(place):
    """``tx.update`` gets the loss as float32 and each of the extras by its name."""
    hess = {"w": jnp.asarray([1.0, 2.0, 3.0])}
    noting = note_extras(value=jnp.float32(0), hess=hess["w"])
    tx = {
        "alone": lambda: noting,
        "chain": lambda: optax.chain(optax.clip(1.0), noting, optax.scale(-1.0)),
        "multi_steps": lambda: optax.MultiSteps(noting, 1),
    }[place]()
    estimator = estimate(2.5, extras={"hess": hess["w"]})
    with jax.numpy_dtype_promotion("standard"):  # MultiSteps needs it
        state, _ = run(train.make_step(estimator, tx), tx)
    noted = {
        "alone": lambda s: s,
        "chain": lambda s: s[1],
        "multi_steps": lambda s: s.inner_opt_state,
    }[place](state.opt_state)
    assert noted["value"] == 2.5 and noted["value"].dtype == jnp.float32
    np.testing.assert_array_equal(noted["hess"], hess["w"])


def test_an_optimizer_without_extra_arguments_is_given_none():
    """A plain transformation works behind an estimator that has extras."""
    tx = optax.GradientTransformation(lambda p: (), lambda g, s, p=None: (g, s))
    state, _ = run(train.make_step(estimate(extras={"hess": jnp.ones(3)}), tx), tx)
    np.testing.assert_array_equal(state.params["w"], PARAMS["w"] + 1)


def test_multi_steps_updates_every_kth_step_with_the_mean_gradient():
    """Two steps of MultiSteps(sgd, 2) are one step of sgd on both batches."""
    batches = jnp.asarray([[1.0, 2.0, 3.0], [3.0, 4.0, -5.0]])
    tx = optax.MultiSteps(optax.sgd(0.3), 2)
    step = jax.jit(train.make_step(train.backprop(loss_fn), tx))
    with jax.numpy_dtype_promotion("standard"):  # MultiSteps needs it
        state, _ = step(train.create(PARAMS, tx, KEY), batches[0])
        np.testing.assert_array_equal(state.params["w"], PARAMS["w"])
        state, _ = step(state, batches[1])
    whole = optax.sgd(0.3)
    want, _ = run(train.make_step(train.backprop(loss_fn), whole), whole, batches.mean(0))
    np.testing.assert_allclose(state.params["w"], want.params["w"], rtol=1e-6)


@pytest.mark.parametrize(
    ("aux", "names"),
    [
        (None, {"loss"}),
        ({}, {"loss"}),
        ({"acc": jnp.ones(2), "deep": {"x": 1}}, {"loss", "acc", "deep"}),
        (jnp.ones(2), {"loss", "aux"}),
        ((1, [2.0]), {"loss", "aux"}),
    ],
)
def test_metrics_are_the_loss_and_aux(aux, names):
    """A dict in aux is spread, anything else is one metric, None is none."""
    tx = optax.sgd(0.1)
    _, metrics = run(train.make_step(estimate(2.0, aux), tx), tx)
    assert set(metrics) == names and metrics["loss"] == 2.0


def test_the_same_parts_make_the_same_step():
    """Estimator, optimizer and decay name the step; another of any is another step."""
    estimator, tx = train.backprop(loss_fn), optax.sgd(0.1)
    step = train.make_step(estimator, tx)
    assert train.make_step(estimator, tx) is step
    others = [
        train.make_step(train.backprop(loss_fn), tx),
        train.make_step(estimator, optax.sgd(0.1)),
        train.make_step(estimator, tx, ema_decay=0.5),
        train.make_step(estimator, tx, ema_decay=0.9),
    ]
    assert len({step, *others}) == 5
    multi = optax.MultiSteps(tx, 2)
    assert train.make_step(estimator, multi) is train.make_step(estimator, multi)


def test_a_step_that_nobody_holds_is_forgotten():
    """The cache keeps no estimator alive, so closures over large arrays can go."""

    def large(params, batch, key):
        return jnp.sum(params)

    alive = weakref.ref(large)
    train.make_step(train.backprop(large), optax.sgd(0.1))
    del large
    gc.collect()
    assert alive() is None


def test_the_average_is_the_exponential_one_from_the_first_params():
    """After n updates ema = d^n p_0 + (1 - d) sum d^(n - i) p_i, in float64 by hand."""
    tx, decay = optax.sgd(0.75), 0.8
    step = jax.jit(train.make_step(train.backprop(loss_fn), tx, ema_decay=decay))
    state = train.create(PARAMS, tx, KEY)
    want = np.asarray(PARAMS["w"], np.float64)
    for _ in range(5):
        state, _ = step(state, jnp.zeros(3))
        want = decay * want + (1 - decay) * np.asarray(state.params["w"], np.float64)
    np.testing.assert_allclose(state.ema_params["w"], want, rtol=1e-6)


def test_the_average_of_half_precision_params_moves_in_float32():
    """An average in bfloat16 would stay at 1; in float32 it takes steps of 1 - d."""
    tx = optax.sgd(-1.0)
    step = train.make_step(estimate(), tx, ema_decay=0.999)
    state, _ = run(step, tx, params={"w": jnp.ones(3, jnp.bfloat16)}, steps=2)
    assert state.params["w"].dtype == jnp.bfloat16
    assert state.ema_params["w"].dtype == jnp.float32
    # From 1, towards 2 and then 3, by a thousandth of the way each.
    np.testing.assert_allclose(state.ema_params["w"], 1.001 + 0.001 * 1.999, rtol=1e-6)


def test_an_average_that_the_step_would_not_keep_is_refused():
    """A state with an average needs a step with a decay; it would silently go stale."""
    estimator, tx = train.backprop(loss_fn), optax.sgd(0.1)
    state, _ = run(train.make_step(estimator, tx, ema_decay=0.9), tx, jnp.zeros(3))
    with pytest.raises(ValueError, match="no ema_params for a step without ema_decay"):
        train.make_step(estimator, tx)(state, jnp.zeros(3))


def test_types_and_tree_of_the_state_do_not_change():
    """Structure, shapes, dtypes and weak types stay, even where the optimizer's state is weak."""
    weak = optax.GradientTransformation(
        lambda params: {"rate": jnp.asarray(0.5)},
        lambda g, s, p=None: (jax.tree.map(lambda x: -0.5 * x, g), {"rate": jnp.asarray(0.25)}),
    )
    step = train.make_step(train.backprop(loss_fn), weak)
    state, _ = run(step, weak, jnp.zeros(3))
    start = train.create(PARAMS, weak, KEY)
    assert jax.tree.map(jax.typeof, state) == jax.tree.map(jax.typeof, start)


@pytest.mark.parametrize(
    ("estimator", "error", "match"),
    [
        (estimate(aux={"loss": 1.0}), ValueError, "aux must not hold 'loss'"),
        (estimate(aux={"a": {"b": "x"}}), TypeError, "arrays only, got str at a/b"),
        (estimate(aux="x"), TypeError, "arrays only, got str at <root>"),
        (estimate(aux={"model_state": 1.0}), ValueError, "no 'model_state' for a state without"),
        (estimate(extras={"value": jnp.ones(1)}), ValueError, "extras must not hold 'value'"),
        (estimate(extras={"n": jnp.ones(1, int)}), TypeError, "floating, got int32 at n"),
        (estimate(extras={"n": "x"}), TypeError, "extras .* got str at n"),
    ],
)
def test_estimates_that_cannot_be_used_are_refused(estimator, error, match):
    """Names that clash and leaves that are no arrays raise when the step is traced."""
    tx = optax.sgd(0.1)
    with pytest.raises(error, match=match):
        train.make_step(estimator, tx)(train.create(PARAMS, tx, KEY), None)


@pytest.mark.parametrize(
    ("tx", "decay", "error", "match"),
    [
        (None, None, TypeError, "an optax transformation, got NoneType"),
        (loss_fn, None, TypeError, "an optax transformation, got loss_fn"),
        (optax.sgd(0.1), 1.0, ValueError, r"ema_decay must be in \[0, 1\), got 1.0"),
        (optax.sgd(0.1), -0.1, ValueError, "got -0.1"),
        (optax.sgd(0.1), "0.9", TypeError, "ema_decay must be a number, got '0.9'"),
    ],
)
def test_bad_parts_are_refused_when_the_step_is_made(tx, decay, error, match):
    """What is no optimizer and a decay out of range raise at once."""
    with pytest.raises(error, match=match):
        train.make_step(train.backprop(loss_fn), tx, ema_decay=decay)


def test_swapped_or_unfit_parts_are_named():
    """What cannot be called or hashed, and a factory in place of its result, raise at once."""

    class Unhashable:
        __hash__ = None

        def __call__(self, key, params, opt_state, batch):
            raise AssertionError

    for estimator, tx, match in (
        (3, optax.sgd(0.1), "estimator must be a function, got int"),
        (optax.sgd(0.1), train.backprop(loss_fn), "estimator must be a function, got Gradient"),
        (train.backprop(loss_fn), optax.sgd, "tx must be an optax transformation, got sgd"),
        (Unhashable(), optax.sgd(0.1), "estimator and tx must be hashable, got .*Unhashable"),
    ):
        with pytest.raises(TypeError, match=match):
            train.make_step(estimator, tx)
    for make, match in (
        (lambda: train.backprop(3), "loss_fn must be a function, got int"),
        (lambda: train.accumulate(2, train.backprop(loss_fn)), "inner must be a function, got int"),
        (lambda: train.create(PARAMS, optax.sgd, KEY), "tx must be an optax .*, got sgd"),
    ):
        with pytest.raises(TypeError, match=match):
            make()
    step = train.make_step(train.backprop(loss_fn), optax.sgd(0.1))
    with pytest.raises(TypeError, match="state must be a TrainState, got dict"):
        train.fit(step, PARAMS, None, 1)
    with pytest.raises(TypeError, match="step must be a function, got TrainState"):
        train.fit(train.create(PARAMS, optax.sgd(0.1), KEY), step, None, 1)


def test_kinds_of_transformation_do_not_share_a_step():
    """The same two functions as another kind of tuple take extra arguments, and so do get them."""
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(sorted(extra))
        return updates, state

    def init(params):
        return ()

    estimator, steps = train.backprop(lambda params, batch, key: jnp.sum(params**2)), []
    for kind in (optax.GradientTransformation, optax.GradientTransformationExtraArgs):
        tx = kind(init, update)
        state = train.create(jnp.ones(2), tx, jax.random.key(0))
        steps.append(train.make_step(estimator, tx))  # held, so that the first stays known
        steps[-1](state, None)
    assert seen == [[], ["value"]]
