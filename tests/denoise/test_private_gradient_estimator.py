"""The private estimator in the joint: what it releases, hands on, and refuses."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from denoise.private_problem import (
    BATCH,
    CLIP,
    KEY,
    PARAMS,
    TX,
    by_hand,
    flat,
    jitted,
    loss_fn,
    make,
    moved,
    norms_fn,
    padded,
)  # fmt: skip
from problems import assert_close, assert_equal, cross_entropy, digits

from jaxkit import blr, denoise, spectral, train

_STATE = {"with_stateful": "a state made from examples would leave the step without noise"}


def _case(name, **options):
    return contract.Case(
        name,
        lambda: functools.partial(make, noise=1e-3, denoised=name != "plain", **options),
        public="private_gradient_estimator",
        opt_state=lambda params: moved(name, params),
        draws=True,
        skip=_STATE,
    )


test_contract = contract.estimator(_case("order_3", num_micro=2))


@pytest.mark.parametrize("name", TX)
def test_the_release_is_the_sum_of_clipped_combinations(name):
    """Each example has its own key, the same at all query points; value and aux are means."""
    got = jitted(name, batch_size=1)(KEY, PARAMS, (1, {"a": moved(name)}), padded())
    grads, values, errors = by_hand(name)
    np.testing.assert_allclose(flat(got.grads), grads.sum(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(got.value, values.mean(), rtol=1e-5)
    np.testing.assert_allclose(got.aux["error"], errors.mean(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(got.aux["hit"], np.mean(errors > 0))
    assert got.value.dtype == got.aux["hit"].dtype == jnp.float32
    norms = np.linalg.norm(grads, axis=1)
    assert norms.max() > CLIP * (1 - 1e-6) and (norms.min() < 0.9 * CLIP or name == "storm")


@pytest.mark.parametrize("name", TX)
def test_one_example_moves_the_sum_by_the_clip_at_most(name):
    """For any rule: left out C, replaced 2 C, before the noise, at an expected size of 1."""
    run, state = jitted(name, batch_size=1), (1, {"a": moved(name)})

    def total(batch):
        return flat(run(KEY, PARAMS, state, batch).grads)

    whole = total(padded())
    away = [np.linalg.norm(whole - total(padded(np.arange(8) != i))) for i in range(8)]
    assert CLIP * (1 - 1e-4) < max(away) <= CLIP * (1 + 1e-5)
    x, y = BATCH
    one, other = (total(padded(examples=(x, y.at[3].set(label)))) for label in (1e3, -1e3))
    assert CLIP < np.linalg.norm(one - other) <= 2 * CLIP * (1 + 1e-5)


@pytest.mark.parametrize("options", [{"num_micro": 2}, {"num_micro": 4, "norms_fn": norms_fn}])
def test_slices_and_norms_change_memory_and_not_the_numbers(options):
    """Gradient, value, aux and extras are those of one slice and single gradients, with noise."""
    want = jitted("order_3", 1.0)(KEY, PARAMS, moved("order_3"), BATCH)
    got = jitted("order_3", 1.0, **options)(KEY, PARAMS, moved("order_3"), BATCH)
    assert_close(got, want, 1e-5)
    grads, values, _ = by_hand("order_3")
    np.testing.assert_allclose(want.value, values.mean(), rtol=1e-5)


def flat_loss(params, batch, key):
    del key
    return 0 * sum(jnp.sum(p) for p in jax.tree.leaves(params)) * jnp.mean(batch)


@pytest.mark.parametrize("name", ["plain", "storm"])
def test_the_noise_has_the_stated_width_whatever_the_weights(name):
    """Its deviation is noise_multiplier C / batch_size; leaves and keys have draws of their own."""
    params = {"a": jnp.ones(40), "b": jnp.ones((5, 8)), "c": jnp.ones(())}
    estimator = make(flat_loss, 3.0, batch_size=20, denoised=name != "plain")
    keys, state = jax.random.split(KEY, 1000), moved(name, params)
    rows = jax.jit(jax.vmap(lambda key: estimator(key, params, state, jnp.ones(4)).grads))(keys)
    width = 3.0 * CLIP / 20
    rows = np.concatenate([np.asarray(x).reshape(1000, -1) for x in jax.tree.leaves(rows)], 1)
    rows = rows / width
    num = rows.size
    np.testing.assert_allclose(rows.std(), 1, atol=4.5 / np.sqrt(2 * num))
    np.testing.assert_allclose(rows.mean(), 0, atol=4.5 / np.sqrt(num))
    pairs = rows.T @ rows / 1000
    np.testing.assert_allclose(pairs[~np.eye(81, dtype=bool)], 0, atol=5.5 / np.sqrt(1000))
    np.testing.assert_allclose((rows[1:] * rows[:-1]).mean(), 0, atol=4.5 / np.sqrt(num))


def test_the_noise_is_drawn_from_a_half_of_the_key_that_the_loss_never_sees():
    """One split for the noise of each leaf, out of the half that is not handed on."""
    args = KEY, PARAMS, moved("order_3"), BATCH
    quiet, loud = (jitted("order_3", noise)(*args).grads for noise in (0.0, 1.0))
    own, _ = jax.random.split(KEY)
    keys = jax.random.split(jax.random.split(own)[1], 2)
    for key, name in zip(keys, sorted(PARAMS), strict=True):
        noise = CLIP * jax.random.normal(key, PARAMS[name].shape) / 8
        np.testing.assert_allclose(loud[name] - quiet[name], noise, rtol=1e-4, atol=1e-6)


def test_a_random_node_is_drawn_from_the_other_part_of_that_half():
    """On a sphere the gradient is the point, times its weight; over keys both nodes occur."""
    state, params = moved("random", PARAMS["v"]), PARAMS["v"]
    estimator = denoise.private_gradient_estimator(
        lambda p, b, k: jnp.sum(p**2) / 2 * b[0], l2_clip_norm=1e6, noise_multiplier=0.0
    )

    def both(key):
        node_key = jax.random.split(jax.random.split(key)[0])[0]
        points, weights = denoise.query_points(state, params, node_key)
        return estimator(key, params, state, jnp.ones(2)).grads, weights[0] * points[0]

    got, want = jax.jit(jax.vmap(both))(jax.random.split(KEY, 32))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert len(np.unique(np.round(want[:, 0], 4))) == 2


@pytest.mark.parametrize("name", ["order_3", "radius"])
def test_the_variance_handed_on_is_that_of_the_estimate(name):
    """After some steps along a path, over many noises: within 4.5 standard errors."""
    tx, estimator = TX[name](), make(flat_loss, 2.0, batch_size=4)
    path = jnp.cumsum(0.03 * contract.normal(6, 50), 0)

    def run(key):
        def step(state, x):
            i, params = x
            grads, extras = estimator(jax.random.fold_in(key, i), params, state, jnp.ones(2))[1::2]
            out, state = tx.update(grads, state, params, **extras)
            return state, (out, extras["noise_variance"])

        return jax.lax.scan(step, tx.init(path[0]), (jnp.arange(6), path))[1]

    out, told = jax.jit(jax.vmap(run))(jax.random.split(KEY, 400))
    np.testing.assert_allclose(told[:, 0], (2 * CLIP / 4) ** 2, rtol=1e-6)
    assert (told == told[:1]).all() and told[0, 3] < 0.6 * told[0, 0]
    measured = np.mean(np.square(out), (0, 2))
    np.testing.assert_allclose(measured, told[0], rtol=4.5 * np.sqrt(2 / out[:, 0].size))


def test_extras_say_what_is_known():
    """Of the estimate, of the release, for the gain without tuning, and nothing if unwanted."""
    v = (2.0 * CLIP / 8) ** 2
    for name, options, want in (
        ("plain", {}, {"noise_variance": v}),
        ("plain", {"noise_variance": False}, {}),
        ("plain", {"batch_size": 16.5}, {"noise_variance": (2 * CLIP / 16.5) ** 2}),
        ("igt", {}, {"queried": 1, "noise_variance": 0.8**2 * 2e-4 + 0.2**2 * v}),
        ("igt", {"noise_variance": False}, {"queried": 1}),
        ("auto", {}, {"queried": 1, "query_variance": v}),
    ):
        estimator = make(loss_fn, 2.0, denoised=name != "plain", **options)
        # Of what is not returned nothing is compiled.
        got = jax.jit(lambda *args, run=estimator: run(*args).extras)(
            KEY, PARAMS, moved(name), BATCH
        )
        assert got.keys() == want.keys()
        assert all(x.dtype == jnp.float32 and x.shape == () for x in got.values())
        np.testing.assert_allclose([got[k] for k in want], list(want.values()), rtol=1e-5)


def test_padding_and_broken_examples_count_as_nothing():
    """A batch is its examples, bit for bit, whatever the padding holds; NaN is as padding."""
    run, state = jitted("order_3", batch_size=1), (1, {"a": moved("order_3")})
    want = run(KEY, PARAMS, state, padded(np.arange(8) < 6))
    for value in (jnp.nan, -jnp.inf, 1e30, 0.0):
        filled = jax.tree.map(lambda x, value=value: x.at[6:].set(value), BATCH)
        assert_equal(run(KEY, PARAMS, state, padded(np.arange(8) < 6, filled)), want)
    broken = BATCH[0].at[6:].set(jnp.nan), BATCH[1]
    assert_equal(run(KEY, PARAMS, state, padded(examples=broken)), want)
    grads, values, _ = by_hand("order_3")
    np.testing.assert_allclose(flat(want.grads), grads[:6].sum(0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(want.value, values[:6].mean(), rtol=1e-5)
    empty = run(KEY, PARAMS, state, padded(np.zeros(8, bool)))
    assert empty.value == 0 and not flat(empty.grads).any()


def test_poisson_batches_train_in_one_program():
    """Sampling, clipping, noise and a denoiser in one scan, with the key of the step for both."""
    x, y = (jnp.asarray(z[0]) for z in digits(1, 256))
    traces = []

    def counted(params, batch, key):
        traces.append(1)
        x, y = batch
        x *= jax.random.bernoulli(key, 0.9, x.shape).astype(x.dtype)
        return cross_entropy(jnp.tanh(x @ params["w"]) @ params["v"], y)

    estimator = denoise.private_gradient_estimator(
        counted, l2_clip_norm=1.0, noise_multiplier=0.5, batch_size=32, num_micro=2
    )
    tx = optax.chain(denoise.denoise(0.2, order=3), optax.adam(1e-2))
    params = {"w": 0.3 * contract.normal(64, 12), "v": contract.normal(12, 10)}
    step, state = train.make_step(estimator, tx), train.create(params, tx, KEY)

    def batches(first):
        keys = jax.vmap(lambda i: jax.random.fold_in(KEY, i))(first + jnp.arange(40))
        sample = functools.partial(denoise.poisson_sample, rate=32 / 256, max_size=64)
        return jax.jit(jax.vmap(sample, (0, None)))(keys, (x, y))

    losses = []
    for first in (0, 40):
        with jax.numpy_dtype_promotion("standard"):  # for adam
            state, metrics = train.fit(step, state, batches(first))
        losses.append(np.asarray(metrics["loss"]))
    assert losses[1][-10:].mean() < 0.8 * losses[0][:10].mean()
    assert len(traces) == 1


def test_the_noise_of_a_step_does_not_know_who_was_sampled():
    """With one key for both, inclusion and noise have no correlation: 5 standard errors."""
    num = 4000
    estimator = make(flat_loss, 1.0, batch_size=1, denoised=False)

    def both(key):
        rows, mask = denoise.poisson_sample(key, jnp.arange(8), rate=0.5, max_size=8)
        drawn = jnp.zeros(8, jnp.bool).at[rows].max(mask)
        return drawn, estimator(key, jnp.ones(8), (), jnp.ones(2)).grads

    drawn, noise = jax.jit(jax.vmap(both))(jax.random.split(KEY, num))
    pairs = (2.0 * np.asarray(drawn) - 1).T @ np.asarray(noise / CLIP) / num
    assert np.abs(pairs).max() < 5 / np.sqrt(num)


def test_the_variance_reaches_a_noise_aware_step_in_one_line():
    """Behind chain(denoise, muon) it damps directions that hold nothing but noise."""
    estimator, params = make(flat_loss, 4.0, batch_size=8), {"kernel": contract.normal(6, 4)}
    matrices = spectral.muon(1.0, b1=0.0, other=optax.sgd(1.0))
    tx = optax.chain(denoise.igt(0.3), matrices)

    @jax.jit
    def norms():
        state = tx.init(params)
        _, grads, _, extras = estimator(KEY, params, state, jnp.ones(2))
        aware, _ = tx.update(grads, state, params, **extras)
        blind, _ = tx.update(grads, state, params, queried=extras["queried"])
        return optax.tree.norm(aware), optax.tree.norm(blind)

    aware, blind = norms()
    assert aware < 0.6 * blind


def test_a_model_state_is_read_and_stays():
    """It is handed to every example, comes back unchanged, and a new one is refused."""

    def reads(params, batch, key):
        shift, (x, y) = batch
        value, aux = loss_fn(params, (x + shift, y), key)
        return value, aux

    tx = optax.sgd(0.1)
    estimator = make(reads, denoised=False)
    step = jax.jit(train.make_step(estimator, tx))
    state, metrics = step(train.create(PARAMS, tx, KEY, model_state=jnp.float32(0.5)), BATCH)
    assert state.model_state == 0.5 and metrics.keys() == {"loss", "error", "hit"}
    key = jax.random.fold_in(KEY, 0)
    want = jitted("plain")(key, PARAMS, (), (BATCH[0] + 0.5, BATCH[1]))
    np.testing.assert_allclose(metrics["loss"], want.value, rtol=1e-6)

    def writes(params, batch, key):
        value, _ = loss_fn(params, batch.batch, key)
        return value, {"model_state": batch.model_state + 1}

    def estimate(loss_fn):
        batch = train.Stateful(jnp.float32(0.5), BATCH)
        return jax.eval_shape(make(loss_fn, denoised=False), KEY, PARAMS, (), batch)

    with pytest.raises(ValueError, match="aux must hold no 'model_state' from a private gradient"):
        estimate(writes)
    with pytest.raises(TypeError, match="aux must be a dict for a model with a state, got "):
        estimate(lambda p, b, k: (loss_fn(p, b.batch, k)[0], jnp.ones(2)))
    alone = estimate(lambda p, b, k: loss_fn(p, b.batch, k)[0])
    assert alone.aux.keys() == {"model_state"}


def test_half_precision_parameters_get_a_gradient_of_theirs():
    """bfloat16 in and out, float32 between; norms_fn refuses them, for its sum would be rounded."""
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)

    def loss(params, batch, key):
        return loss_fn(jax.tree.map(lambda p: p.astype(jnp.float32), params), batch, key)

    state = moved("order_3", half)
    got = jax.jit(make(loss))(KEY, half, state, BATCH).grads
    wide = jax.tree.map(lambda p: p.astype(jnp.float32), half)
    want = jitted("order_3")(KEY, wide, state, BATCH).grads
    assert all(g.dtype == jnp.bfloat16 for g in jax.tree.leaves(got))
    assert_close(jax.tree.map(lambda g: g.astype(jnp.float32), got), want, 0.02)
    with pytest.raises(TypeError, match="params must be float32 or wider for norms_fn, got bfloat"):
        make(loss, norms_fn=norms_fn)(KEY, half, state, BATCH)


def test_it_is_never_wrapped():
    """Accumulation, posterior samples and other query points would each add a release."""
    private = make(loss_fn)
    for outer, wrap in (
        ("train.accumulate", lambda: train.accumulate(private, 2)),
        ("blr.gradient_estimator", lambda: blr.gradient_estimator(private)),
        ("denoise.gradient_estimator", lambda: denoise.gradient_estimator(private)),
    ):
        with pytest.raises(ValueError, match=f"inner of {outer} must not be private"):
            wrap()


def test_the_denoiser_must_be_there_or_not():
    """One state if denoised, none if not, and none of a kind that asks for Hessians."""
    igt, both = moved("igt"), (moved("igt"), moved("disk"))
    hvp = denoise.hvp(0.3).init(PARAMS)
    for options, state, match in (
        ({}, (), "opt_state must hold a DenoiseState, got none"),
        ({}, both, "opt_state must hold one DenoiseState, got 2"),
        ({"denoised": False}, (1, {"a": igt}), "must hold no DenoiseState for denoised=False"),
        ({}, hvp, "a denoiser that asks for gradients only, got one of kind 'hvp'"),
    ):
        with pytest.raises(ValueError, match=match):
            make(loss_fn, **options)(KEY, PARAMS, state, BATCH)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"l2_clip_norm": 0.0}, ValueError, r"l2_clip_norm must be in \(0, inf\), got 0.0"),
        ({"l2_clip_norm": float("inf")}, ValueError, r"l2_clip_norm must be in .* got inf"),
        ({"l2_clip_norm": "1"}, TypeError, "l2_clip_norm must be a number, got '1'"),
        ({"noise_multiplier": -1.0}, ValueError, r"noise_multiplier must be in \[0, inf\), got -1"),
        ({"batch_size": 0}, ValueError, r"batch_size must be in \(0, inf\), got 0"),
        ({"num_micro": 0}, ValueError, "num_micro must be at least 1, got 0"),
        ({"norms_fn": 3}, TypeError, "norms_fn must be a function, got int"),
        ({"norms_fn": len, "axis_name": "data"}, ValueError, "axis_name must be None with norms"),
        ({"loss_fn": None}, TypeError, "loss_fn must be a function, got NoneType"),
    ],
)
def test_bad_options_are_named(options, error, match):
    """The message has the option and its value."""
    options = {"loss_fn": loss_fn, "l2_clip_norm": 1.0, "noise_multiplier": 1.0, **options}
    with pytest.raises(error, match=match):
        denoise.private_gradient_estimator(options.pop("loss_fn"), **options)


def test_bad_batches_are_named():
    """What does not divide, has a wrong mask, or no expected size; and norms of another shape."""
    padded = denoise.Padded(BATCH, jnp.ones(8, jnp.bool))
    for options, batch, error, match in (
        ({"num_micro": 3}, BATCH, ValueError, "divides by num_micro=3, got 8"),
        ({}, padded, ValueError, "batch_size must be the expected number of examples of a padded"),
        ({"batch_size": 4}, padded._replace(mask=jnp.ones(7, jnp.bool)), ValueError, r"mask must "),
        ({"batch_size": 4}, padded._replace(mask=jnp.ones(8)), TypeError, "mask must be bool, got"),
        ({}, (), ValueError, "batch must hold at least one array"),
        ({"norms_fn": lambda *args: 1.0}, BATCH, ValueError, r"the result of norms_fn must have"),
        (
            {"norms_fn": lambda *args: jnp.ones(8, jnp.bfloat16)},
            BATCH,
            TypeError,
            "the result of norms_fn must be float32 or wider, got bfloat16",
        ),
    ):
        with pytest.raises(error, match=match):
            make(loss_fn, denoised=False, **options)(KEY, PARAMS, (), batch)
    with pytest.raises(TypeError, match="params must be real floating, got int32"):
        make(loss_fn, denoised=False)(KEY, {"w": jnp.arange(3)}, (), BATCH)
