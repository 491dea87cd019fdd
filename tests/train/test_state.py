"""Tests of train.create and TrainState."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxkit import spectral, train

KEY = jax.random.key(0)
PARAMS = {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}


def pointers(tree):
    """Returns the address of each shard of each leaf."""
    return [
        (shard.device, shard.data.unsafe_buffer_pointer())
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    ]


def aliased(params):
    """A transformation whose state is the parameters twice, and one array twice."""
    zero = jnp.zeros(3)
    return (params, params, zero, {"again": zero})


ALIASING = optax.GradientTransformation(aliased, lambda g, s, p=None: (g, s))


@pytest.mark.parametrize("tx", [ALIASING, optax.adamw(1e-3), optax.MultiSteps(optax.sgd(0.1), 2)])
def test_no_two_leaves_share_a_buffer(tx):
    """All leaves of the state and all arguments lie in different memory."""
    shared = jnp.ones((8, 4))
    params = {"w": shared, "tied": shared, "b": jax.device_put(shared, shared.sharding)}
    stats = {"mean": jnp.zeros(4), "w": shared}
    state = train.create(params, tx, KEY, model_state=stats)
    taken = pointers(state)
    assert len(taken) == len(set(taken)) == len(jax.tree.leaves(state))
    assert not set(taken) & set(pointers((params, stats, KEY)))


def vmapped(params, tx, key, model_state):
    """Returns two states made in one vmap."""
    make = jax.vmap(lambda params, key, stats: train.create(params, tx, key, model_state=stats))
    return make(params, key, model_state)


@pytest.mark.parametrize("make", [train.create, jax.jit(train.create, static_argnums=1), vmapped])
def test_a_donated_state_leaves_the_arguments_alive(make):
    """After the state is consumed, the parameters, model state and key can still be read."""
    arguments = {"w": jnp.ones((2, 4)), "b": jnp.zeros(2)}, KEY, {"mean": jnp.ones((2, 3))}
    params, key, stats = arguments
    if make is vmapped:
        key = jax.random.split(KEY, 2)
    state = make(params, ALIASING, key, model_state=stats)

    @partial(jax.jit, donate_argnums=0)
    def consume(state):
        key = jax.random.wrap_key_data(jax.random.key_data(state.key) + jnp.uint32(1))
        rest = jax.tree.map(lambda x: x * 0 - 7, state._replace(key=None))
        return rest._replace(key=key)

    jax.block_until_ready(consume(state))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    for name, want in {"w": 1, "b": 0}.items():
        assert bool((params[name] == want).all())
    assert bool((stats["mean"] == 1).all())
    jax.random.key_data(key).block_until_ready()


def test_a_later_change_of_a_numpy_array_does_not_reach_the_state():
    """NumPy parameters are copied, also where JAX could use their memory as it is."""
    raw = np.ones(256 + 16, np.float32)
    start = -raw.ctypes.data % 64 // 4  # the alignment at which JAX shares memory
    params = raw[start : start + 256]
    state = train.create(params, optax.sgd(0.1), KEY)
    params[:] = 5
    assert bool((state.params == 1).all())


def test_the_state_starts_at_step_zero_with_what_it_was_given():
    """The step is an int32 zero; params, key and the optimizer's state are as given."""
    tx = optax.adam(1e-3)
    state = train.create(PARAMS, tx, KEY)
    assert state.step.dtype == jnp.int32 and state.step == 0 and state.key == KEY
    assert state.model_state is None and state.ema_params is None
    jax.tree.map(np.testing.assert_array_equal, state.params, PARAMS)
    jax.tree.map(np.testing.assert_array_equal, state.opt_state, tx.init(PARAMS))


def test_there_are_no_weak_types():
    """Python numbers in params, model state and the optimizer's state become strong arrays."""
    weak = optax.GradientTransformation(
        lambda p: (0, jnp.asarray(0.5)), lambda g, s, p=None: (g, s)
    )
    state = train.create({"scale": 1.0}, weak, KEY, model_state={"count": 0})
    leaves = jax.tree.leaves(state._replace(key=None))
    assert not any(leaf.weak_type for leaf in leaves)
    assert {str(x.dtype) for x in leaves} == {"int32", "float32"}


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_leaves_outside_the_mesh_of_the_params_are_put_on_it(axis_type):
    """Sharded leaves stay as they are; all others are replicated over the same mesh."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    rows = NamedSharding(mesh, P("data", None))
    params = {"w": jax.device_put(jnp.ones((8, 4)), rows), "b": jnp.zeros(4)}
    state = train.create(params, optax.adam(1e-3), KEY, model_state=np.zeros(3, np.float32))
    sharded = [state.params["w"], state.opt_state[0].mu["w"], state.opt_state[0].nu["w"]]
    assert all(leaf.sharding == rows for leaf in sharded)
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(state))
    assert state.step.is_fully_replicated and state.params["b"].is_fully_replicated
    assert len(set(pointers(state))) == len(pointers(state))
    assert isinstance(params["b"].sharding, SingleDeviceSharding)


def test_leaves_follow_params_to_the_device_that_was_chosen_for_them():
    """Beside params that are committed to a device nothing stays elsewhere; others are free."""
    device = jax.devices()[3]
    state = train.create(jax.device_put(PARAMS, device), optax.adam(1e-3), KEY)
    assert {(x.committed, *x.devices()) for x in jax.tree.leaves(state)} == {(True, device)}
    free = train.create(PARAMS, optax.adam(1e-3), KEY)
    assert not any(x.committed for x in jax.tree.leaves(free))


def test_numbers_and_wide_numpy_arrays_are_params_too():
    """Python numbers and float64 NumPy arrays become float32 for the optimizer's init as well."""
    params = {"w": np.ones((3, 4)), "b": 2.0}
    state = train.create(params, spectral.muon(0.1), KEY)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}


def test_params_on_two_meshes_are_refused():
    """A state belongs to one mesh; the error names both meshes and a path on each."""
    put = {
        name: jax.device_put(jnp.ones(8), NamedSharding(jax.make_mesh((8,), (name,)), P(name)))
        for name in ("rows", "columns")
    }
    with pytest.raises(ValueError, match="one mesh, got .*'columns'.* at columns and .* at rows"):
        train.create(put, optax.sgd(0.1), KEY)


def test_create_runs_abstractly():
    """``eval_shape`` and ``vmap`` over keys give the types of the eager state."""
    make = partial(train.create, PARAMS, optax.adam(1e-3))
    state = make(KEY)
    types = jax.eval_shape(make, KEY)
    assert jax.tree.structure(types) == jax.tree.structure(state)
    assert all(jax.tree.leaves(jax.tree.map(lambda t, x: t.dtype == x.dtype, types, state)))
    many = jax.vmap(make, out_axes=0)(jax.random.split(KEY, 3))
    assert many.key.shape == (3,) and many.params["w"].shape == (3, 8, 4)


def test_trees_of_model_libraries_pass():
    """States of flax nnx, variables of linen and equinox modules with None go through."""
    nnx, eqx = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")
    _, nnx_params = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
    eqx_params = eqx.filter(eqx.nn.MLP(2, 2, 4, 1, key=KEY), eqx.is_inexact_array)
    for params in (nnx_params, eqx_params, {"params": {"none": None, "empty": {}}}, jnp.ones(2)):
        state = train.create(params, optax.adam(1e-3), KEY)
        assert jax.tree.structure(state.params) == jax.tree.structure(params)


@pytest.mark.parametrize(
    ("key", "error", "match"),
    [
        (np.zeros(2, np.uint32), TypeError, r"jax.random.key\(0\), got uint32\[2\]"),
        (jnp.zeros(2, jnp.uint32), TypeError, r"a typed key.*got uint32\[2\]"),
        (0, TypeError, "a typed key.*got int"),
        (None, TypeError, "a typed key.*got NoneType"),
        (jax.random.split(KEY, 2), ValueError, r"key must have shape \[\], got \(2,\)"),
    ],
)
def test_the_key_must_be_one_typed_key(key, error, match):
    """Old keys, numbers and several keys are refused."""
    with pytest.raises(error, match=match):
        train.create(PARAMS, optax.sgd(0.1), key)


def stateful(value):
    return optax.GradientTransformation(lambda params: {"a": [value]}, lambda g, s, p=None: (g, s))


@pytest.mark.parametrize(
    ("params", "tx", "model_state", "match"),
    [
        ({"a": jnp.ones(2, jnp.int32)}, optax.sgd(0.1), None, "params .* got int32 at a"),
        ({"a": "text"}, optax.sgd(0.1), None, "params must hold arrays only, got str at a"),
        (PARAMS, stateful("text"), None, "opt_state must hold arrays only, got str at a/0"),
        (PARAMS, stateful(len), None, "opt_state .* got builtin_function_or_method at a/0"),
        (PARAMS, optax.sgd(0.1), {"m": object()}, "model_state .* got object at m"),
    ],
)
def test_leaves_that_are_no_arrays_are_refused(params, tx, model_state, match):
    """A leaf that no array could hold is an error that names its path."""
    with pytest.raises(TypeError, match=match):
        train.create(params, tx, KEY, model_state=model_state)
