"""The estimator at query points: what it asks, hands on, costs, and refuses."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_close, assert_equal, compile_for

from jaxkit import blr, denoise, train, zo

KEY = jax.random.key(0)
TX = {
    "ema": lambda: denoise.ema(0.3),
    "igt": lambda: denoise.igt(0.3),
    "order_3": lambda: denoise.denoise(0.3, order=3),
    "random": lambda: denoise.denoise(0.3, order=3, random_node=True),
    "disk": lambda: denoise.disk(0.3),
    "storm": lambda: denoise.storm(0.3),
    "hvp": lambda: denoise.hvp(0.3),
    "auto": lambda: denoise.denoise("auto", order=1),
}


def moved(tx, params):
    """Returns the state of ``tx`` whose last update was at 0.98 of the parameters."""
    before = jax.tree.map(lambda p: 0.98 * p, params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    extra = {"queried": True, "hvp": zeros, "query_variance": 1.0}
    return tx.update(zeros, tx.init(before), before, **extra)[1]


def _case(name, **kwargs):
    return contract.Case(
        name,
        lambda: lambda loss_fn: denoise.gradient_estimator(train.backprop(loss_fn)),
        public="gradient_estimator",
        opt_state=lambda params: moved(TX[name](), params),
        **kwargs,
    )


test_contract = contract.estimator(
    _case("order_3"),
    _case("hvp"),
    _case("auto", num_micro=2),
)


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape), jnp.float32)


PARAMS = {"v": draw(16), "w": draw(8, 16)}
BATCH = draw(32, 8), draw(32)


def loss_fn(params, batch, key):
    x, y = batch
    x = x + 0.1 * jax.random.normal(key, x.shape)
    hidden = jnp.tanh(x @ params["w"])
    return jnp.mean((hidden @ params["v"] - y) ** 2), {"mean": jnp.mean(hidden)}


def quiet_loss(params, batch, key):
    del key
    return jnp.mean((jnp.tanh(batch[0] @ params["w"]) @ params["v"] - batch[1]) ** 2)


def ask(tx, inner=None, *, key=KEY, batch=BATCH, params=PARAMS, **options):
    """Returns the estimate of a denoiser that has moved, under jit."""
    estimator = denoise.gradient_estimator(inner or train.backprop(loss_fn), **options)
    return jax.jit(estimator)(key, params, moved(tx, params), batch)


@pytest.mark.parametrize("name", ["ema", "igt", "order_3", "disk", "storm"])
def test_an_estimate_is_the_combination_at_the_points_by_hand(name):
    """Value and gradient with the same key and batch at each point; aux is that of the first."""
    state = moved(TX[name](), PARAMS)
    points, weights = denoise.query_points(state, PARAMS)
    rows = [
        train.backprop(loss_fn)(KEY, jax.tree.map(lambda p, j=j: p[j], points), (), BATCH)
        for j in range(len(weights))
    ]
    estimate = ask(TX[name]())
    for got, *terms in zip(
        jax.tree.leaves(estimate[:2]), *(jax.tree.leaves(row[:2]) for row in rows), strict=True
    ):
        want = sum(
            float(w) * np.asarray(x, np.float64) for w, x in zip(weights, terms, strict=True)
        )
        np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    assert_close(estimate.aux, rows[0].aux, 1e-6)
    assert estimate.extras == {"queried": 1}


def test_a_random_node_splits_the_key():
    """One half draws the node, the other goes to the loss."""
    state = moved(TX["random"](), PARAMS)
    own, rest = jax.random.split(KEY)
    points, weights = denoise.query_points(state, PARAMS, own)
    point = jax.tree.map(lambda p: p[0], points)
    want = jax.jit(train.backprop(loss_fn))(rest, point, (), BATCH)
    scale = float(weights[0])
    got = ask(TX["random"]())
    assert_close(got.grads, jax.tree.map(lambda g: scale * g, want.grads), 1e-5)


def test_the_product_is_the_change_of_the_gradient_along_the_step():
    """hvp = H((x + x_prev) / 2) d, to 1e-4 the difference of gradients of a smooth loss."""
    estimate = ask(TX["hvp"]())
    before = jax.tree.map(lambda p: 0.98 * p, PARAMS)
    grad = jax.jit(lambda p: train.backprop(loss_fn)(KEY, p, (), BATCH).grads)
    want = jax.tree.map(jnp.subtract, grad(PARAMS), grad(before))
    assert_close(estimate.extras["hvp"], want, 1e-3)
    assert_close(estimate.grads, grad(PARAMS), 1e-6)
    middle = jax.tree.map(lambda p: 0.99 * p, PARAMS)
    steps = jax.tree.map(lambda p: p - 0.98 * p, PARAMS)
    _, exact = jax.jvp(grad, (middle,), (steps,))
    assert_close(estimate.extras["hvp"], exact, 1e-5)


@pytest.mark.parametrize("name", TX)
def test_the_value_at_the_parameters(name):
    """With the option it is the loss there, however far ahead the denoiser asks."""
    if name == "auto":  # each part has a key of its own
        inner = train.accumulate(train.backprop(loss_fn), 2)
    else:
        inner = train.backprop(loss_fn)
    key = jax.random.split(KEY)[1] if name == "random" else KEY
    want = jax.jit(inner)(key, PARAMS, (), BATCH).value
    np.testing.assert_allclose(ask(TX[name](), value_at_params=True).value, want, rtol=1e-6)
    if name in ("igt", "order_3", "random"):
        assert abs(ask(TX[name]()).value - want) > 1e-4 * want


def test_the_value_at_the_parameters_costs_one_forward_pass():
    """The program has the operations of a gradient and of a loss, not those of two gradients."""
    params, batch = {"v": draw(64), "w": draw(64, 64)}, (draw(256, 64), draw(256))
    state = moved(TX["igt"](), params)

    def flops(estimator):
        return compile_for(estimator, KEY, params, state, batch).cost_analysis()["flops"]

    inner = train.backprop(loss_fn)
    plain = flops(inner)
    forward = flops(lambda *args: inner(*args).value)
    asked = flops(denoise.gradient_estimator(inner))
    valued = flops(denoise.gradient_estimator(inner, value_at_params=True))
    assert forward < 0.7 * plain
    assert asked < 1.1 * plain
    assert valued - asked < 1.1 * forward
    state = moved(TX["storm"](), params)
    first = flops(denoise.gradient_estimator(inner, value_at_params=True))
    assert first < 1.01 * flops(denoise.gradient_estimator(inner))  # the first point is there


@pytest.mark.parametrize("name", TX)
def test_inner_is_traced_once(name):
    """Whatever the number of points, the product, the value at the parameters and the parts."""
    traces = []

    def counted(*args):
        traces.append(1)
        return train.backprop(loss_fn)(*args)

    ask(TX[name](), counted, value_at_params=True)
    assert len(traces) == 1


def test_several_points_take_the_memory_of_one():
    """With large activations the program of order 5 needs less than 1.2 times that of order 2."""
    params, batch = {"v": draw(256), "w": draw(8, 256)}, (draw(2048, 8), draw(2048))

    def temporary(tx):
        estimator = denoise.gradient_estimator(train.backprop(loss_fn))
        compiled = compile_for(estimator, KEY, params, moved(tx, params), batch)
        return compiled.memory_analysis().temp_size_in_bytes

    many = denoise.denoise(0.3, taus=(1.0, 0.5, -0.3, -0.7))
    assert temporary(many) < 1.2 * temporary(TX["igt"]())


@pytest.mark.parametrize("num", [2, 4])
def test_the_variance_is_that_of_the_mean_of_parts(num):
    """sum_j |y_j - y|^2 / (k (k - 1) size) of interleaved parts, each with its own key."""
    rows = [
        train.backprop(loss_fn)(
            jax.random.fold_in(KEY, i), PARAMS, (), jax.tree.map(lambda x, i=i: x[i::num], BATCH)
        )
        for i in range(num)
    ]
    estimate = ask(TX["auto"](), num_parts=num)
    assert estimate.extras.keys() == {"queried", "query_variance"}
    for name, got in estimate.extras["query_variance"].items():
        parts = np.stack([np.asarray(row.grads[name], np.float64) for row in rows])
        want = parts.var(0, ddof=1).mean() / num
        assert got.shape == () and got.dtype == jnp.float32
        np.testing.assert_allclose(got, want, rtol=1e-5)
        np.testing.assert_allclose(estimate.grads[name], parts.mean(0), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(estimate.aux["mean"], rows[0].aux["mean"], rtol=1e-5)
    if num == 2:
        assert_equal(ask(TX["auto"]()), estimate)


def test_a_variance_far_below_the_gradient_is_not_lost():
    """Parts that differ in the fourth digit have the variance that float64 finds, to 1e-3."""
    x = 1000 + jnp.array([0.1, -0.1, 0.2, 0.0])
    tx, params = TX["auto"](), jnp.zeros([])
    inner = train.backprop(lambda params, batch, key: params * jnp.mean(batch))
    estimate = ask(tx, inner, batch=x, params=params, num_parts=4)
    want = np.var(np.float64(x), ddof=1) / 4
    np.testing.assert_allclose(estimate.extras["query_variance"], want, rtol=1e-3)


def test_equal_parts_have_no_variance():
    """Exactly zero, so that the gain of a clean gradient is 1."""
    batch = jax.tree.map(lambda x: jnp.concatenate([x[:1]] * 32), BATCH)
    estimate = ask(TX["auto"](), train.backprop(quiet_loss), batch=batch, num_parts=2)
    for variance in estimate.extras["query_variance"].values():
        assert variance == 0


def test_extras_of_inner_are_combined_as_the_gradient():
    """A linear extra arrives with the weights of the points, in its own dtype."""

    def inner(key, params, opt_state, batch):
        grads = jax.tree.map(jnp.zeros_like, params)
        extra = jax.tree.map(lambda p: (2 * p).astype(jnp.bfloat16), params)
        return train.Estimate(jnp.float32(0), grads, None, {"twice": extra})

    state = moved(TX["order_3"](), PARAMS)
    points, weights = denoise.query_points(state, PARAMS)
    got = ask(TX["order_3"](), inner).extras["twice"]
    for name, point in points.items():
        want = 2 * np.tensordot(weights, point, 1)
        assert got[name].dtype == jnp.bfloat16
        np.testing.assert_allclose(np.float32(got[name]), want, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize("name", ["igt", "order_3", "auto"])
def test_estimators_of_every_kind_fit_inside_and_around(name):
    """accumulate, zo and blr inside, accumulate around (not of auto), posterior state hidden."""
    backprop = train.backprop(loss_fn)
    tx = optax.chain(TX[name](), blr.gblr(0.1, ess=100.0))
    state = tx.init(PARAMS)
    for inner in (
        train.accumulate(backprop, 2),
        zo.gradient_estimator(lambda *args: loss_fn(*args)[0]),
        blr.gradient_estimator(backprop),
        train.accumulate(blr.gradient_estimator(train.accumulate(backprop, 2)), 2),
    ):
        got = jax.eval_shape(denoise.gradient_estimator(inner), KEY, PARAMS, state, BATCH)
        assert jax.tree.map(jnp.shape, got.grads) == jax.tree.map(jnp.shape, PARAMS)
    one = denoise.gradient_estimator(train.backprop(quiet_loss))
    around = train.accumulate(one, 2)
    if name == "auto":
        with pytest.raises(ValueError, match="must not measure the variance of a gradient"):
            jax.eval_shape(around, KEY, PARAMS, state, BATCH)
    else:
        got = jax.jit(around)(KEY, PARAMS, state, BATCH)
        want = jax.jit(one)(KEY, PARAMS, state, BATCH)
        assert got.extras == {"queried": 1}
        assert_close(got.grads, want.grads, 1e-5)


def test_what_trains_wrongly_is_refused():
    """Nested denoisers, denoisers inside blr, private inside, no state, and extras set twice."""
    backprop = train.backprop(loss_fn)
    one = denoise.gradient_estimator(backprop)
    tx = optax.chain(TX["igt"](), blr.gblr(0.1, ess=100.0))
    state = tx.init(PARAMS)

    def sealed(*args):
        return backprop(*args)

    sealed.is_private = True

    def with_extra(name):
        def inner(*args):
            return backprop(*args)._replace(extras={name: jnp.float32(1)})

        return inner

    auto, hvp = TX["auto"]().init(PARAMS), TX["hvp"]().init(PARAMS)
    for make, opt_state, match in (
        (
            lambda: denoise.gradient_estimator(one),
            state,
            "DenoiseState is already used by an outer",
        ),
        (lambda: blr.gradient_estimator(one), state, "DenoiseState is already used by an outer"),
        (lambda: one, optax.adam(0.1).init(PARAMS), "must hold a DenoiseState, got none"),
        (lambda: one, (state, state), "must hold one DenoiseState, got 2"),
        (
            lambda: denoise.gradient_estimator(sealed),
            state,
            "inner of denoise.gradient_estimator must not be private",
        ),
        (
            lambda: denoise.gradient_estimator(with_extra("queried")),
            state,
            "inner must leave the extra 'queried' to this estimator",
        ),
        (lambda: denoise.gradient_estimator(with_extra("hvp")), hvp, "leave the extra 'hvp' to"),
        (
            lambda: denoise.gradient_estimator(with_extra("query_variance")),
            auto,
            "leave the extra 'query_variance' to",
        ),
        (
            lambda: denoise.gradient_estimator(backprop, num_parts=2),
            state,
            "num_parts must be None unless gain='auto', got 2",
        ),
        (
            lambda: denoise.gradient_estimator(backprop, num_parts=3),
            auto,
            "batch must have a leading axis that divides by num_parts=3, got 32",
        ),
        (
            lambda: denoise.gradient_estimator(backprop, num_parts=1),
            auto,
            "num_parts must be at least 2, got 1",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(make(), KEY, PARAMS, opt_state, BATCH)
    with pytest.raises(TypeError, match="inner must be a function, got NoneType"):
        denoise.gradient_estimator(None)
