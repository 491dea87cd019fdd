"""The estimator in the joint, and over devices and processes."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from problems import BOTH_AGREE, run_two_processes

from benchmarks.collectives import collective_bytes
from jaxkit import zo

KEY = jax.random.key(0)


def _estimator(loss_fn):
    return zo.gradient_estimator(
        loss_fn, num_samples=4, mu=1e-2, direction=zo.rademacher(), aggregate="mean"
    )


test_contract = contract.estimator(
    contract.Case(
        "gradient_estimator",
        lambda: _estimator,
        rtol=1e-2,  # losses that round differently are divided by mu
        draws=True,
    )
)


def loss_fn(params, batch, key):
    noise = 0.1 * jax.random.normal(key, (3,))
    error = jnp.tanh(batch[0] @ params["w"]) @ params["v"] + jnp.sum(noise) - batch[1]
    return jnp.mean(error**2)


def problem(size=16):
    rng = np.random.default_rng(0)
    params = {"w": np.float32(rng.normal(size=(6, 3))), "v": np.float32(rng.normal(size=3))}
    batch = np.float32(rng.normal(size=(size, 6))), np.float32(rng.normal(size=size))
    return params, batch


def test_the_key_is_split_between_directions_and_loss():
    """The estimate is value_and_zo_grad of one half of the key, the loss given the other."""
    params, batch = problem()
    options = {"num_samples": 2, "mu": 0.01, "mode": "one_sided"}
    got = jax.jit(zo.gradient_estimator(loss_fn, **options))(KEY, params, (), batch)
    own, handed = jax.random.split(KEY)
    want = jax.jit(zo.value_and_zo_grad(loss_fn, **options))(own, params, batch, handed)
    assert got.value == want[0] and got.aux is None and got.extras == {}
    jax.tree.map(np.testing.assert_array_equal, got.grads, want[1])


def test_a_loss_per_example_and_aux_are_passed_on():
    """The mean over [B] is the value, and aux is that of the first call with nothing averaged."""

    def per_example(params, batch, key):
        del key
        error = batch[0] @ params["w"] @ params["v"] - batch[1]
        return error**2, {"error": error, "size": len(error)}

    params, batch = problem()
    run = jax.jit(zo.gradient_estimator(per_example, per_example=True, num_samples=2))
    got = run(KEY, params, (), batch)

    def mean(params, batch, key):
        return jnp.mean(per_example(params, batch, key)[0])

    want = jax.jit(zo.gradient_estimator(mean, num_samples=2))(KEY, params, (), batch)
    np.testing.assert_allclose(got.value, want.value, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-2), got.grads, want.grads)
    assert got.aux["size"] == 16 and got.aux["error"].shape == (16,)


def test_mu_may_be_traced():
    """An estimator made inside a traced function takes the radius of the moment."""
    params, batch = problem()

    @jax.jit
    def at(mu):
        return zo.gradient_estimator(loss_fn, mu=mu)(KEY, params, (), batch).grads

    for mu in (0.1, 0.2):
        want = jax.jit(zo.gradient_estimator(loss_fn, mu=mu))(KEY, params, (), batch).grads
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4), at(mu), want)


def sharded(batch_spec, **options):
    """Returns the estimate under shard_map over eight devices, each output replicated."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    estimator = zo.gradient_estimator(loss_fn, axis_name="data", mu=0.1, **options)

    def run(key, params, batch):
        estimate = estimator(key, params, (), batch)
        return estimate.value, estimate.grads

    specs = P(), P(), (batch_spec, batch_spec)
    return jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P())


@pytest.mark.parametrize("mode", ["one_sided", "rloo", "orthogonal"])
def test_devices_with_their_own_directions_are_one_with_all_of_them(mode):
    """Eight devices with two directions each give the estimate of one with sixteen."""
    options = {
        "rloo": {"mode": "one_sided", "aggregate": "rloo"},
        "orthogonal": {"direction": zo.orthogonal()},
    }.get(mode, {"mode": mode})
    params, batch = problem()
    run = sharded(P(), num_samples=2, axis_directions="own", **options)
    compiled = jax.jit(run).lower(KEY, params, batch).compile()
    value, grads = compiled(KEY, params, batch)
    one = zo.gradient_estimator(loss_fn, num_samples=16, mu=0.1, **options)
    want = jax.jit(one)(KEY, params, (), batch)
    np.testing.assert_allclose(value, want.value, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), grads, want.grads
    )
    for x in jax.tree.leaves(grads):
        assert len({np.asarray(shard.data).tobytes() for shard in x.addressable_shards}) == 1
    moved = collective_bytes(compiled)
    assert moved.keys() == {"all-reduce"} and moved["all-reduce"] <= 4 * (16 + 2)


@pytest.mark.parametrize("mode", ["two_sided", "jvp"])
def test_devices_with_the_same_directions_are_one_with_all_of_the_data(mode):
    """Losses of eight shards are averaged first; scalars cross, and replicas are bit-equal."""
    params, batch = problem()
    run = sharded(P("data"), num_samples=2, mode=mode)
    compiled = jax.jit(run).lower(KEY, params, batch).compile()
    value, grads = compiled(KEY, params, batch)
    one = zo.gradient_estimator(loss_fn, num_samples=2, mu=0.1, mode=mode)
    want = jax.jit(one)(KEY, params, (), batch)
    np.testing.assert_allclose(value, want.value, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), grads, want.grads
    )
    for x in jax.tree.leaves(grads):
        assert len({np.asarray(shard.data).tobytes() for shard in x.addressable_shards}) == 1
    moved = collective_bytes(compiled)
    assert moved.keys() == {"all-reduce"} and moved["all-reduce"] <= 4 * 2 * 4


def test_aux_and_steps_under_shard_map():
    """zo_update runs on each device, aux is the device's own, parameters stay replicated."""
    params, batch = problem()
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def with_aux(params, batch, key):
        value = loss_fn(params, batch, key)
        return value, value

    def run(key, params, state, batch):
        params, state, info = zo.zo_update(
            key,
            with_aux,
            params,
            state,
            batch,
            key,
            learning_rate=0.1,
            has_aux=True,
            axis_name="data",
            axis_directions="own",
        )
        return params, state, info._replace(aux=info.aux[None])

    specs = P(), P(), P(), (P("data"), P("data"))
    outs = P(), P(), zo.ZOInfo(P(), P(), P(), P("data"))
    step = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=outs))
    state = zo.zo_init(KEY, num_samples=16)
    new, state, info = step(KEY, params, state, batch)
    assert info.aux.shape == (8,) and info.slopes.shape == (16,) and state.step == 1
    assert not jnp.array_equal(new["w"], params["w"])
    with pytest.raises(ValueError, match="divides by the 8 devices, got 9"):
        step(KEY, params, zo.zo_init(KEY, num_samples=9), batch)


def test_a_batch_over_devices_needs_no_axis_name():
    """Under plain jit with the batch on eight devices the numbers are those of one."""
    params, batch = problem()
    run = jax.jit(zo.gradient_estimator(loss_fn, num_samples=2, mu=0.1))
    want = run(KEY, params, (), batch)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    placed = jax.device_put(batch, jax.sharding.NamedSharding(mesh, P("data")))
    replicated = jax.device_put(params, jax.sharding.NamedSharding(mesh, P()))
    compiled = run.lower(KEY, replicated, (), placed).compile()
    got = compiled(KEY, replicated, (), placed)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), got.grads, want.grads
    )
    assert sum(collective_bytes(compiled).values()) <= 4 * 8


PROCESS = """
import jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxkit import zo
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
rng = np.random.default_rng(0)
w, x = np.float32(rng.normal(size=(6, 3))), np.float32(rng.normal(size=(8, 6)))

def put(x, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

def loss_fn(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)

def run(key, w, state, x):
    return zo.zo_update(key, loss_fn, w, state, x, learning_rate=0.1, momentum=0.9, mu=0.1,
                        axis_name="data", axis_directions="own")

key = jax.random.key(0)
step = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=(P(), P(), P(), P("data")), out_specs=P()))
one = jax.jit(lambda w, state: zo.zo_update(
    key, lambda w: loss_fn(w, x[:2]), w, state, learning_rate=0.1, momentum=0.9, mu=0.1))
state = zo.zo_init(key, num_samples=8, num_probes=2)
same = np.tile(x[:2], (4, 1))
got, new, info = step(key, put(w), state, put(same, "data"))
want, _, _ = one(w, state)
for shard in got.addressable_shards:
    np.testing.assert_allclose(shard.data, want, rtol=1e-3, atol=1e-4)
bits = {np.asarray(s.data).tobytes() for s in got.addressable_shards}
assert len(bits) == 1
from jax.experimental import multihost_utils
both = multihost_utils.process_allgather(np.frombuffer(bits.pop(), np.uint32))
assert (both[0] == both[1]).all()
"""


def test_two_processes_step_like_one():
    """Replicas of two processes are bit-equal, and step as one device with all directions."""
    assert run_two_processes(PROCESS) == BOTH_AGREE


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: zo.gradient_estimator(None), TypeError, "loss_fn must be a function, got None"),
        (lambda: zo.gradient_estimator(loss_fn, num_samples=0), ValueError, "num_samples must"),
        (lambda: zo.gradient_estimator(loss_fn, mu=-1), ValueError, "mu must be in"),
    ],
)
def test_bad_options_are_named(make, error, match):
    """Each message names the option."""
    with pytest.raises(error, match=match):
        make()


def test_what_the_loss_may_not_be():
    """Non-scalar losses, whole-number parameters and empty ones are refused with their path."""
    params, batch = problem()
    for bad, error, match in (
        (lambda p, b, k: p["v"], ValueError, r"shape \[\], got \(3,\)"),
        (lambda p, b, k: (1.0, 2, 3), TypeError, "tuple of length 3"),
    ):
        with pytest.raises(error, match=match):
            zo.gradient_estimator(bad)(KEY, params, (), batch)
    with pytest.raises(TypeError, match="got int32 at n"):
        zo.gradient_estimator(loss_fn)(KEY, {"n": jnp.arange(3)}, (), batch)
    with pytest.raises(ValueError, match="params must hold at least one number"):
        zo.gradient_estimator(loss_fn)(KEY, {}, (), batch)
