"""The learning rule inside what optax offers, under vmap, in scans and in half precision."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkit import blr, train

KEY = jax.random.key(0)
# Two leaves of one size share the program of their noise, which is long to compile.

PARAMS = {"b": jnp.ones(2), "w": jnp.full(2, 2.0)}


def loss_fn(params, batch, key):
    del key
    return jnp.mean((batch * params["w"][None] + params["b"][None]) ** 2)


BATCHES = np.float32(np.random.default_rng(0).normal(size=(60, 8, 2)))
rule = functools.partial(blr.gblr, 0.2, ess=200.0, alpha=1.5, b2=0.9)
PLACES = {
    "alone": rule,
    "behind clip": lambda: optax.chain(optax.clip_by_global_norm(3.0), rule()),
    "scaled in a chain": lambda: optax.chain(
        blr.scale_by_gblr(ess=200.0, b2=0.9), optax.scale_by_learning_rate(0.2)
    ),
    "masked": lambda: optax.chain(
        optax.masked(rule(), {"b": False, "w": True}),
        optax.masked(optax.sgd(0.2), {"b": True, "w": False}),
    ),
    "partition": lambda: optax.partition(
        {"rule": rule(), "other": optax.adam(0.1)}, {"b": "other", "w": "rule"}
    ),
    "two rules": lambda: optax.partition(
        {"one": rule(), "two": rule(alpha=1.0)}, {"b": "one", "w": "two"}
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(blr.gblr)(
        learning_rate=0.2, ess=200.0, alpha=1.5, b2=0.9
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(rule(), 3),
    "multi_steps": lambda: optax.MultiSteps(rule(), 2),
}


@pytest.mark.parametrize("place", PLACES)
def test_it_trains_inside_what_optax_offers(place):
    """In a scan with two samples a step the loss falls, types stay, and nothing compiles twice."""
    with jax.numpy_dtype_promotion("standard"):
        tx = PLACES[place]()
        estimator = blr.gradient_estimator(train.backprop(loss_fn), num_samples=2)
        traces = []

        def counted(*args):
            traces.append(1)
            return estimator(*args)

        step = train.make_step(counted, tx)
        state = train.create(PARAMS, tx, KEY)
        types = jax.tree.map(jax.typeof, state)
        state, metrics = train.fit(step, state, BATCHES)
        assert metrics["loss"][-5:].mean() < 0.5 * metrics["loss"][0]
        assert jax.tree.map(jax.typeof, state) == types
        before = len(traces)
        train.fit(step, state, BATCHES)
        assert len(traces) == before


def test_leaves_outside_the_mask_get_no_noise_and_no_curvature():
    """Their samples are the parameters, their hess is 0, and clipping sees their gradient."""
    state = PLACES["masked"]().init(PARAMS)
    theta, noise = jax.jit(lambda: blr.sample_posterior(KEY, PARAMS, state))()
    np.testing.assert_array_equal(theta["b"], PARAMS["b"])
    assert not noise["b"].any() and noise["w"].all()
    estimator = jax.jit(blr.gradient_estimator(train.backprop(loss_fn)))
    estimate = estimator(KEY, PARAMS, state, BATCHES[0])
    assert not estimate.extras["hess"]["b"].any() and estimate.grads["b"].all()
    assert estimate.extras["hess"]["w"].any()


def test_a_masked_rule_cuts_the_curvature_to_its_leaves():
    """With the full tree of hess, or one that was masked along, the update is the same."""
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    hess = jax.tree.map(lambda x: jnp.full(x.shape, 3.0), PARAMS)
    got = []
    for compatible in (False, True):
        mask = {"b": False, "w": True}
        tx = optax.masked(rule(), mask, mask_compatible_extra_args=compatible)
        got.append(tx.update(grads, tx.init(PARAMS), PARAMS, hess=hess)[0])
    np.testing.assert_array_equal(got[0]["w"], got[1]["w"])
    alone = rule()
    own = {"w": PARAMS["w"]}
    want, _ = alone.update({"w": grads["w"]}, alone.init(own), own, hess={"w": hess["w"]})
    np.testing.assert_array_equal(got[0]["w"], want["w"])


def test_multi_steps_averages_gradients_and_keeps_the_last_curvature():
    """The documented limit: of two slices the mean gradient and the second hess count."""
    tx = blr.gblr(0.1, ess=1.0, b1=0.0, b2=0.0, weight_decay=0.0)
    params = jnp.array([1.0])
    multi = optax.MultiSteps(tx, 2)
    with jax.numpy_dtype_promotion("standard"):
        state = multi.init(params)
        for g, h in ((1.0, 5.0), (3.0, 2.0)):
            updates, state = multi.update(jnp.array([g]), state, params, hess=jnp.array([h]))
    want, _ = tx.update(jnp.array([2.0]), tx.init(params), params, hess=jnp.array([2.0]))
    np.testing.assert_allclose(updates, want, rtol=1e-6)


def test_apply_if_finite_skips_a_curvature_that_is_not():
    """An infinite hess makes the gradient NaN, and the guard leaves parameters and state alone."""

    def exploding(params, batch, key):
        return jnp.sum(params["b"]) * 1e38 * batch  # g z / sigma overflows, g does not

    tx = optax.apply_if_finite(blr.gblr(0.1, ess=1e8), 3)
    state = tx.init(PARAMS)
    estimator = jax.jit(blr.gradient_estimator(train.backprop(exploding)))
    estimate = estimator(KEY, PARAMS, state, jnp.float32(1.0))
    assert not jnp.isfinite(estimate.extras["hess"]["b"]).all()
    np.testing.assert_array_equal(
        jnp.isnan(estimate.grads["b"]), ~jnp.isfinite(estimate.extras["hess"]["b"])
    )
    with jax.numpy_dtype_promotion("standard"):
        updates, after = tx.update(estimate.grads, state, PARAMS, **estimate.extras)
    assert not updates["b"].any() and after.notfinite_count == 1
    np.testing.assert_array_equal(after.inner_state.hess["b"], state.inner_state.hess["b"])


def test_schedules_and_injected_numbers_reach_the_posterior_without_compiling():
    """alpha, ess and the rate change between steps of one program; the next draw uses them."""
    tx = optax.inject_hyperparams(blr.gblr)(learning_rate=0.1, ess=100.0, alpha=1.0, b2=0.9)
    params = jnp.ones(4)

    @jax.jit
    def step(key, params, state):
        run = blr.gblr_value_and_grad(lambda p: jnp.sum(p**2))
        _, grads, hess = run(key, params, state)
        updates, state = tx.update(grads, state, params, hess=hess)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for i, (rate, ess, alpha) in enumerate([(0.1, 100.0, 1.0), (0.0, 400.0, 2.0), (0.2, 9.0, 1.5)]):
        old = params
        numbers = {"learning_rate": rate, "ess": ess, "alpha": alpha}
        state.hyperparams.update({k: jnp.float32(v) for k, v in numbers.items()})
        params, state = step(jax.random.fold_in(KEY, i), params, state)
        assert (state.inner_state.ess, state.inner_state.alpha) == (ess, alpha)
        assert jnp.array_equal(params, old) == (rate == 0.0)
        np.testing.assert_allclose(state.inner_state.reference, ess * (1 + 1e-4), rtol=1e-6)
    assert step._cache_size() == 1


def test_a_schedule_of_the_rate_counts_from_zero():
    """The first update uses schedule(0), the second schedule(1)."""
    tx = blr.gblr(lambda step: jnp.where(step == 0, 0.5, 0.25), ess=1.0, b1=0.0, b2=0.0)
    params, state, sizes = jnp.ones(1), tx.init(jnp.ones(1)), []
    for _ in range(2):
        updates, state = tx.update(jnp.ones(1), state, params, hess=jnp.ones(1))
        sizes.append(updates[0])
    np.testing.assert_allclose(sizes[0] / sizes[1], 2, rtol=1e-6)


def test_seeds_and_alphas_may_be_mapped_over():
    """A vmap over seeds and alpha trains each as a run of its own."""

    def run(key, alpha):
        tx = blr.gblr(0.2, ess=100.0, alpha=alpha, b2=0.9)
        estimator = blr.gradient_estimator(train.backprop(loss_fn))

        def step(carry, batch):
            params, state, i = carry
            est = estimator(jax.random.fold_in(key, i), params, state, batch)
            updates, state = tx.update(est.grads, state, params, **est.extras)
            return (optax.apply_updates(params, updates), state, i + 1), est.value

        carry = PARAMS, tx.init(PARAMS), jnp.int32(0)
        return jax.lax.scan(step, carry, BATCHES[:4])[0][0]

    keys, alphas = jax.random.split(KEY, 3), jnp.array([0.9, 1.0, 2.0])
    got = jax.jit(jax.vmap(run))(keys, alphas)
    one = jax.jit(run)
    for i in range(3):
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-4, atol=1e-5),
            got,
            one(keys[i], alphas[i]),
        )


def test_bfloat16_parameters_train_in_the_joint():
    """The loss falls, parameters stay bfloat16 and are their masters rounded."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), PARAMS)

    def half_loss(params, batch, key):
        return loss_fn(params, batch.astype(jnp.bfloat16), key)

    tx = rule()
    step = train.make_step(blr.gradient_estimator(train.backprop(half_loss), num_samples=2), tx)
    state, metrics = train.fit(step, train.create(params, tx, KEY), BATCHES)
    assert metrics["loss"][-5:].mean() < 0.5 * metrics["loss"][0]
    for p, master in zip(
        *map(jax.tree.leaves, (state.params, state.opt_state.master)), strict=True
    ):
        np.testing.assert_array_equal(p, master.astype(jnp.bfloat16))
