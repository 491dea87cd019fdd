"""Tests of the joint between estimators and optimizers: lookup, tombstones, losses, sums."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkit import _estimator


class GainState(NamedTuple):
    gain: jax.Array


class OtherState(NamedTuple):
    width: jax.Array


def link(kind, number=0.5):
    """Returns a transformation that changes nothing and whose state is of type ``kind``."""
    return optax.GradientTransformation(
        lambda params: kind(jnp.float32(number)),
        lambda updates, state, params=None: (updates, state),
    )


def wrap(inner, kind, hidden):
    """Returns an estimator that reads the state of type ``kind`` and hides ``hidden``."""

    def estimator(key, params, opt_state, batch):
        _estimator.find_state(opt_state, kind)
        return inner(key, params, _estimator.hide(opt_state, hidden), batch)

    return estimator


def leaf(key, params, opt_state, batch):
    return _estimator.Estimate(jnp.float32(0), params, None, {})


PARAMS = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}

PLACES = {
    "alone": lambda tx: tx,
    "chain": lambda tx: optax.chain(optax.clip(1.0), optax.chain(tx, optax.trace(0.9))),
    "masked": lambda tx: optax.masked(tx, {"w": True, "b": False}),
    "partition": lambda tx: optax.partition({0: tx, 1: optax.sgd(0.1)}, {"w": 0, "b": 1}),
    "inject_hyperparams": lambda tx: optax.inject_hyperparams(
        lambda rate: optax.chain(tx, optax.scale(rate))
    )(rate=0.1),
    "multi_steps": lambda tx: optax.MultiSteps(tx, 2),
    "apply_if_finite": lambda tx: optax.apply_if_finite(tx, 3),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_state_is_found_wherever_it_lies(place):
    """Lookup by type passes through every container of optax."""
    opt_state = PLACES[place](link(GainState)).init(PARAMS)
    state = _estimator.find_state(opt_state, GainState)
    assert isinstance(state, GainState) and state.gain == 0.5


@pytest.mark.parametrize("place", PLACES)
def test_a_hidden_state_leaves_the_rest_alone(place):
    """Hiding one type removes its leaves and no other, and a second lookup is refused."""
    opt_state = PLACES[place](link(GainState)).init(PARAMS)
    hidden = _estimator.hide(opt_state, GainState)
    assert len(jax.tree.leaves(hidden)) == len(jax.tree.leaves(opt_state)) - 1
    with pytest.raises(ValueError, match="GainState is already used by an outer estimator"):
        _estimator.find_states(hidden, GainState)
    with pytest.raises(ValueError, match="must hold a OtherState, got none"):
        _estimator.find_state(hidden, OtherState)


def test_lookup_by_a_base_class_finds_and_hides_its_subclasses():
    """A state is found by a class it derives from, hidden by it, and then refused to both."""

    class Base:
        pass

    @jax.tree_util.register_static
    class Derived(Base):
        pass

    hidden = _estimator.hide((Derived(), 1.0), Base)
    for kind in (Base, Derived):
        assert isinstance(_estimator.find_state((Derived(), 1.0), kind), Derived)
        with pytest.raises(ValueError, match=f"{kind.__name__} is already used"):
            _estimator.find_state(hidden, kind)


def test_none_and_several_states_are_told_apart():
    """A missing state is named, several are counted, and ``find_states`` returns them in order."""
    several = optax.chain(link(GainState, 1.0), link(OtherState), link(GainState, 2.0)).init(PARAMS)
    assert [s.gain for s in _estimator.find_states(several, GainState)] == [1.0, 2.0]
    with pytest.raises(ValueError, match="must hold one GainState, got 2"):
        _estimator.find_state(several, GainState)
    for find in (_estimator.find_state, _estimator.find_states):
        with pytest.raises(ValueError, match="must hold a GainState, got none"):
            find(optax.adam(0.1).init(PARAMS), GainState)


def test_a_private_estimator_is_never_wrapped():
    """The mark on the estimator refuses it, by the name of the one that would wrap it."""

    def private(key, params, opt_state, batch):
        return leaf(key, params, opt_state, batch)

    _estimator.check_inner("some.wrapper", private)
    private.is_private = True
    for inner in (private, jax.jit(private)):
        with pytest.raises(ValueError, match="inner of some.wrapper must not be private, got a"):
            _estimator.check_inner("some.wrapper", inner)
    with pytest.raises(TypeError, match="inner must be a function, got GradientTransformation"):
        _estimator.check_inner("some.wrapper", optax.identity())


OPT_STATE = optax.chain(link(GainState), link(OtherState)).init(PARAMS)


@pytest.mark.parametrize(
    ("estimator", "refused"),
    [
        (wrap(leaf, GainState, GainState), None),
        (wrap(wrap(leaf, OtherState, None), GainState, GainState), None),
        (wrap(wrap(leaf, GainState, GainState), OtherState, OtherState), None),
        (wrap(wrap(leaf, GainState, GainState), GainState, GainState), "GainState"),
        (wrap(wrap(leaf, OtherState, None), OtherState, None), "OtherState"),
        (wrap(wrap(leaf, GainState, GainState), OtherState, None), "GainState"),
    ],
)
@pytest.mark.parametrize("jit", [False, True])
def test_nesting_is_legal_unless_an_outer_estimator_has_the_state(estimator, refused, jit):
    """A state serves one estimator; one that hides all of the state allows none inside."""
    run = jax.jit(estimator) if jit else estimator
    if refused is None:
        run(jax.random.key(0), PARAMS, OPT_STATE, None)
    else:
        with pytest.raises(ValueError, match=f"{refused} is already used by an outer estimator"):
            run(jax.random.key(0), PARAMS, OPT_STATE, None)


def test_a_tombstone_is_a_static_tree():
    """Tombstones have no leaves, and equal ones make equal tree structures."""
    trees = [_estimator.hide(OPT_STATE, GainState) for _ in range(2)]
    assert jax.tree.structure(trees[0]) == jax.tree.structure(trees[1])
    assert jax.tree.leaves(_estimator.hide(OPT_STATE)) == []


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
@pytest.mark.parametrize("aux", [None, {"a": jnp.ones(2)}, (jnp.ones(2), 3)])
def test_a_loss_comes_back_in_float32_with_its_aux(dtype, aux):
    """The loss is float32 whatever its dtype; aux is the second of a pair, else None."""
    loss = jnp.asarray(1.5, dtype)
    out = loss if aux is None else (loss, aux)
    value, got = _estimator.call_loss(lambda *_: out, PARAMS, None, jax.random.key(0))
    assert value.dtype == jnp.float32 and value == 1.5 and got is aux


@pytest.mark.parametrize(
    ("out", "error", "match"),
    [
        (jnp.ones(4), ValueError, r"the loss must have shape \[\], got \(4,\)"),
        ((jnp.ones((1, 1)), {}), ValueError, r"got \(1, 1\)"),
        (jnp.int32(1), TypeError, "must be real floating, got int32"),
        (True, TypeError, "must be real floating, got bool"),
        (jnp.complex64(1), TypeError, "must be real floating, got complex64"),
        (None, TypeError, r"the tuple \(loss, aux\), got NoneType"),
        ("low", TypeError, "the loss must hold arrays only, got str"),
        ((1.0, {}, {}), TypeError, "got tuple of length 3"),
        ((1.0,), TypeError, "got tuple of length 1"),
        ([1.0, {}], TypeError, "got list of length 2"),
        ({"loss": 1.0}, TypeError, "got dict"),
        ((1.0, {"m": {"name": "x"}}), TypeError, "aux must hold arrays only, got str at m/name"),
        ((1.0, np.array(["x"])), TypeError, "aux must hold arrays only, got ndarray at <root>"),
    ],
)
def test_what_is_no_loss_is_refused(out, error, match):
    """Anything but a scalar real loss, alone or in a pair with arrays, is an error."""
    with pytest.raises(error, match=match):
        _estimator.call_loss(lambda *_: out, PARAMS, None, jax.random.key(0))


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        (jnp.ones(2, jnp.int32), "int32"),
        (jnp.ones(2, bool), "bool"),
        (jnp.ones(2, jnp.complex64), "complex64"),
        (jax.random.key(0), "key<fry>"),
        (3, "int32"),
        ("text", "str"),
        (jnp.tanh, "function|PjitFunction|ufunc"),
    ],
)
def test_params_that_have_no_gradient_are_refused_with_their_path(bad, got):
    """Only real floating leaves are parameters; another one is named by its path."""
    with pytest.raises(TypeError, match=f"got ({got}) at layer/0/w"):
        _estimator.check_params({"layer": [{"w": bad, "b": jnp.ones(2), "none": None}]})


def test_sums_of_half_precision_are_exact_in_float32():
    """Adding 1 to a bfloat16 sum stops at 256; the sum in float32 goes on."""
    tree = {"w": jnp.ones(3, jnp.bfloat16)}
    types = jax.eval_shape(lambda: tree)
    total = _estimator.wide_zeros(types)
    for _ in range(300):
        total = _estimator.add_scaled(total, 1.0, tree)
    assert total["w"].dtype == jnp.float32 and bool(jnp.all(total["w"] == 300))
    assert _estimator.cast_like(total, types)["w"].dtype == jnp.bfloat16


def test_a_weight_of_another_dtype_scales_a_sum():
    """A float64 weight, as of mixed parameters, meets a float32 sum, which stays float32."""
    with jax.enable_x64(True):
        total = _estimator.add_scaled(jnp.ones(2, jnp.float32), jnp.float64(0.5), jnp.ones(2))
    assert total.dtype == jnp.float32 and bool(jnp.all(total == 1.5))


def test_zeros_vary_as_what_they_stand_for():
    """In a shard_map they start a scan over what differs between devices and what does not."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def body(own, same):
        types = jax.eval_shape(lambda: (own, same))
        start = _estimator.wide_zeros(types)
        total, _ = jax.lax.scan(
            lambda c, _: (_estimator.add_scaled(c, 1.0, (own, same)), None), start, None, 3
        )
        return total

    specs = jax.P("data"), jax.P()
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs))
    own, same = run(jnp.arange(8.0), jnp.ones(2))
    np.testing.assert_array_equal(own, 3 * np.arange(8))
    np.testing.assert_array_equal(same, 3)


def test_sums_of_float64_stay_float64():
    """Float32 is the narrowest dtype of a sum, not the widest."""
    with jax.enable_x64(True):
        zeros = _estimator.wide_zeros(jax.eval_shape(lambda: jnp.ones(2, jnp.float64)))
    assert zeros.dtype == jnp.float64
