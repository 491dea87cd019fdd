"""The estimator in the joint: keys, nesting, model state, accumulation."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import BOTH_AGREE, run_two_processes

from jaxkit import blr, train, zo

KEY = jax.random.key(0)


def _state(params):
    return blr.gblr(0.1, ess=1e4, alpha=1.5).init(params)


def _make(**options):
    return lambda loss_fn: blr.gradient_estimator(train.backprop(loss_fn), **options)


test_contract = contract.estimator(
    contract.Case(
        "gradient_estimator", lambda: _make(num_samples=2), opt_state=_state, draws=True, rtol=1e-3
    )
)


def loss_fn(params, batch, key):
    noise = 0.1 * jax.random.normal(key, ())
    error = jnp.tanh(batch[0] @ params["w"]) + batch[0] @ params["v"] + noise - batch[1]
    return jnp.mean(error**2), {"error": jnp.max(error)}


def problem(size=16):
    rng = np.random.default_rng(0)
    params = {"w": np.float32(rng.normal(size=6)), "v": np.float32(rng.normal(size=6))}
    return params, (np.float32(rng.normal(size=(size, 6))), np.float32(rng.normal(size=size)))


@pytest.mark.parametrize("hessian", ["reparam", "antithetic"])
def test_it_is_value_and_grad_with_the_key_split_in_two(hessian):
    """One half draws, the other goes to the loss; the index of a sample or pair is folded in."""
    params, batch = problem()
    state = _state(params)
    got = jax.jit(_make(num_samples=4, hessian=hessian)(loss_fn))(KEY, params, (1, state), batch)
    own, handed = jax.random.split(KEY)

    @jax.jit
    def by_hand():
        rows = []
        for i in range(2 if hessian == "antithetic" else 4):
            theta, z = blr.sample_posterior(jax.random.fold_in(own, i), params, state)
            others = [theta]
            if hessian == "antithetic":
                others.append(jax.tree.map(lambda p, t: 2 * p - t, params, theta))
            for t in others:
                (value, aux), g = jax.value_and_grad(loss_fn, has_aux=True)(
                    t, batch, jax.random.fold_in(handed, i)
                )
                rows.append(((value, g), aux))
        mean = jax.tree.map(lambda *xs: sum(xs) / len(xs), *(row for row, _ in rows))
        return mean, rows[0][1]

    (value, grads), aux = by_hand()
    np.testing.assert_allclose(got.value, value, rtol=1e-5)
    np.testing.assert_allclose(got.aux["error"], aux["error"], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), got.grads, grads)
    assert got.extras.keys() == {"hess"}


def test_accumulate_averages_gradients_and_curvatures_over_slices():
    """Outside: slices with their own draws. Inside: the draws are shared, the batch is sliced."""
    params, batch = problem()
    state = _state(params)

    def quiet(params, batch, key):
        del key
        return loss_fn(params, batch, KEY)

    estimate = jax.jit(_make()(quiet))
    got = jax.jit(train.accumulate(_make()(quiet), 2))(KEY, params, state, batch)
    slices = [jax.tree.map(lambda x, i=i: x[i::2], batch) for i in range(2)]
    parts = [
        estimate(jax.random.fold_in(KEY, i), params, state, part) for i, part in enumerate(slices)
    ]
    want = jax.tree.map(lambda a, b: (a + b) / 2, *((p.grads, p.extras["hess"]) for p in parts))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
        (got.grads, got.extras["hess"]),
        want,
    )
    inner = train.accumulate(train.backprop(quiet), 2)
    got = jax.jit(blr.gradient_estimator(inner))(KEY, params, state, batch)
    want = estimate(KEY, params, state, batch)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-2),
        (got.value, got.grads, got.extras),
        (want.value, want.grads, want.extras),
    )


def test_a_zeroth_order_inner_estimator_gives_a_curvature():
    """With all directions of a basis it is that of the exact gradient."""
    params, batch = problem()
    state = _state(params)
    inner = zo.gradient_estimator(loss_fn, mode="coordinate", mu=1e-2)
    got = jax.jit(blr.gradient_estimator(inner))(KEY, params, state, batch)
    assert jax.tree.map(jnp.shape, got.extras["hess"]) == jax.tree.map(jnp.shape, params)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(got.extras))


def test_the_model_state_is_that_of_the_first_sample():
    """Counters move once, whatever the number of samples."""
    params, batch = problem()

    def counting(params, batch, key):
        value, _ = loss_fn(params, batch.batch, key)
        return value, {"model_state": batch.model_state + 1, "value": value}

    tx = blr.gblr(0.1, ess=1e4)
    step = train.make_step(_make(num_samples=3)(counting), tx)
    state = train.create(params, tx, KEY, model_state=jnp.int32(5))
    state, metrics = jax.jit(step)(state, batch)
    assert state.model_state == 6 and metrics.keys() == {"loss", "value"}


def test_nesting_and_extras_are_checked():
    """blr(blr) and blr(private) are refused, so is a second hess, a missing state, hutchinson."""
    params, batch = problem()
    state = _state(params)
    estimator = _make()(loss_fn)
    for run, opt_state, match in (
        (blr.gradient_estimator(estimator), state, "GBLRState is already used by an outer"),
        (estimator, (), "opt_state must hold a GBLRState, got none"),
        (
            blr.gradient_estimator(
                lambda k, p, s, b: train.Estimate(jnp.float32(0), p, None, {"hess": p})
            ),
            state,
            "inner must leave the extra 'hess'",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(run, KEY, params, opt_state, batch)
    inner = train.backprop(loss_fn)
    for options, error, match in (
        ({"hessian": "hutchinson"}, ValueError, "hessian must be one of .* got 'hutchinson'"),
        ({"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
        ({"num_samples": 1, "hessian": "antithetic"}, ValueError, "num_samples must be even"),
        ({"mode": "map"}, ValueError, "mode must be one of"),
    ):
        with pytest.raises(error, match=match):
            blr.gradient_estimator(inner, **options)
    with pytest.raises(TypeError, match="inner must be a function, got None"):
        blr.gradient_estimator(None)

    def private(*args):
        return inner(*args)

    private.is_private = True  # each sample would be a release of its own
    with pytest.raises(ValueError, match="inner of blr.gradient_estimator must not be private"):
        blr.gradient_estimator(private)


def test_extras_of_the_inner_estimator_are_averaged():
    """They pass on beside hess, as means over samples."""
    params, batch = problem()

    def inner(key, params, opt_state, batch):
        del opt_state, batch
        number = jax.random.uniform(key)
        return train.Estimate(number, params, None, {"number": number})

    got = jax.jit(blr.gradient_estimator(inner, num_samples=3))(KEY, params, _state(params), batch)
    handed = jax.random.split(KEY)[1]
    want = np.mean([jax.random.uniform(jax.random.fold_in(handed, i)) for i in range(3)])
    np.testing.assert_allclose(got.extras["number"], want, rtol=1e-6)
    np.testing.assert_allclose(got.value, want, rtol=1e-6)


PROCESS = """
import jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxkit import blr, train
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
w, x = np.float32(rng.normal(size=(6, 3))), np.float32(rng.normal(size=(8, 6)))
tx, key = blr.gblr(0.1, ess=1e3, alpha=1.5, b2=0.9), jax.random.key(0)

def loss_fn(w, x, key):
    return jnp.mean(jnp.tanh(x @ w) ** 2)

def run(key, w, state, x, axis_name=None):
    estimator = blr.gradient_estimator(train.backprop(loss_fn), axis_name=axis_name)
    estimate = estimator(key, w, state, x)
    return estimate.grads, estimate.extras["hess"]

def step(key, w, state, x):
    grads, hess = run(key, w, state, x, "data")
    updates, state = tx.update(grads, state, w, hess=hess)
    return grads, hess, w + updates

sharded = jax.make_array_from_callback(
    x.shape, NamedSharding(mesh, P("data")), lambda i: x[i])
specs = P(), P(), P(), P("data")
together = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P()))
grads, hess, new = together(key, w, tx.init(jnp.asarray(w)), sharded)
one, parts = jax.jit(run), []
for i in range(4):
    mine = x[2 * i : 2 * i + 2]
    parts.append(one(jax.random.fold_in(key, i), w, tx.init(jnp.asarray(w)), mine))
for got, want in zip((grads, hess), zip(*parts)):
    want = np.mean(np.stack(want), 0)
    for shard in got.addressable_shards:
        np.testing.assert_allclose(shard.data, want, rtol=1e-4, atol=1e-5)
bits = {np.asarray(shard.data).tobytes() for shard in new.addressable_shards}
assert len(bits) == 1
from jax.experimental import multihost_utils
both = multihost_utils.process_allgather(np.frombuffer(bits.pop(), np.uint32))
assert (both[0] == both[1]).all()
"""


def test_two_processes_average_their_samples_and_step_alike():
    """Four devices of two processes give the mean of four runs, and the same bits everywhere."""
    assert run_two_processes(PROCESS) == BOTH_AGREE
