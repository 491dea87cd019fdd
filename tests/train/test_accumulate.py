"""Tests of train.accumulate."""

import contextlib
import re

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import assert_close

from jaxkit import train

KEY = jax.random.key(0)

test_contract = contract.estimator(
    contract.Case(
        "accumulate",
        lambda: lambda loss_fn: train.accumulate(train.backprop(loss_fn), 2),
        num_micro=2,
    )
)


def loss_fn(params, batch, key):
    x, y = batch
    hidden = jnp.tanh(x @ params["w"])
    return jnp.mean((hidden @ params["v"] - y) ** 2), {"mean": jnp.mean(hidden)}


def problem(size=32):
    rng = np.random.default_rng(0)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    return {"w": draw(8, 16), "v": draw(16)}, (draw(size, 8), draw(size))


@pytest.mark.parametrize("num_micro", [1, 2, 8, 32])
def test_slices_of_a_mean_loss_give_the_gradient_of_the_whole_batch(num_micro):
    """Value and gradient equal those of one call on the whole batch."""
    params, batch = problem()
    whole = jax.jit(train.backprop(loss_fn))(KEY, params, (), batch)
    estimator = train.accumulate(train.backprop(loss_fn), num_micro)
    sliced = jax.jit(estimator)(KEY, params, (), batch)
    assert_close(sliced[:2], whole[:2], 1e-6)


def test_accumulate_within_accumulate_is_accumulate():
    """Two slices of two slices give the whole batch's gradient again."""
    params, batch = problem()
    whole = train.backprop(loss_fn)(KEY, params, (), batch)
    nested = train.accumulate(train.accumulate(train.backprop(loss_fn), 2), 2)
    assert_close(jax.jit(nested)(KEY, params, (), batch)[:2], whole[:2], 1e-6)


def recording(params, batch, key):
    """A loss whose model state notes what each call was given."""
    (calls, seen, keys), examples = batch
    state = calls + 1, seen.at[calls].set(examples), keys.at[calls].set(jax.random.key_data(key))
    return jnp.sum(params), {"model_state": state, "first": examples[0], "key": key, "const": 3}


@pytest.mark.parametrize("jit", [False, True])
def test_slice_i_holds_every_nth_example_from_i_and_its_own_key(jit):
    """Slice i gets examples i, i + n, ..., the key fold_in(key, i) and the state of i - 1."""
    num_micro, size = 4, 12
    start = (jnp.int32(0), jnp.zeros((num_micro, 3)), jnp.zeros((num_micro, 2), jnp.uint32))
    batch = train.Stateful(start, jnp.arange(size, dtype=jnp.float32))
    estimator = train.accumulate(train.backprop(recording), num_micro)
    estimate = (jax.jit(estimator) if jit else estimator)(KEY, jnp.ones(2), (), batch)
    calls, seen, keys = estimate.aux["model_state"]
    assert calls == num_micro
    np.testing.assert_array_equal(seen, np.arange(size).reshape(3, 4).T)
    want = [jax.random.key_data(jax.random.fold_in(KEY, i)) for i in range(num_micro)]
    np.testing.assert_array_equal(keys, np.stack(want))


def test_aux_is_that_of_the_first_slice_with_its_types():
    """Everything in aux but the model state comes from slice 0: numbers, keys and constants."""
    start = (jnp.int32(0), jnp.zeros((4, 3)), jnp.zeros((4, 2), jnp.uint32))
    batch = train.Stateful(start, jnp.arange(12, dtype=jnp.float32) + 5)
    aux = train.accumulate(train.backprop(recording), 4)(KEY, jnp.ones(2), (), batch).aux
    assert set(aux) == {"model_state", "first", "key", "const"}
    assert aux["first"] == 5 and aux["const"] == 3 and aux["const"].dtype == jnp.int32
    assert aux["key"] == jax.random.fold_in(KEY, 0)


def test_extras_and_half_precision_gradients_are_means_taken_in_float32():
    """A bfloat16 sum of 512 ones would stop at 256; means of grads and extras are exact."""

    def inner(key, params, opt_state, batch):
        ones = jax.tree.map(jnp.ones_like, params)
        return train.Estimate(batch[0], ones, None, {"hess": jax.tree.map(jnp.add, ones, ones)})

    params = {"w": jnp.zeros(3, jnp.bfloat16)}
    batch = jnp.arange(512, dtype=jnp.float32)
    estimate = train.accumulate(inner, 512)(KEY, params, (), batch)
    assert estimate.value == 255.5 and estimate.value.dtype == jnp.float32
    for tree, want in ((estimate.grads, 1), (estimate.extras["hess"], 2)):
        assert tree["w"].dtype == jnp.bfloat16 and bool(jnp.all(tree["w"] == want))


def test_a_nonfinite_gradient_of_one_slice_stays_visible():
    """NaN in one slice makes the gradient NaN, so guards on the gradient see it."""
    params, (x, y) = problem()
    estimator = jax.jit(train.accumulate(train.backprop(loss_fn), 4))
    estimate = estimator(KEY, params, (), (x, y.at[3].set(jnp.nan)))
    assert bool(jnp.isnan(estimate.value)) and bool(jnp.all(jnp.isnan(estimate.grads["v"])))


@pytest.mark.parametrize("num_micro", [1, 2, 16])
def test_the_loss_is_traced_once(num_micro):
    """Tracing the estimator traces the loss once, whatever the number of slices."""
    traces = []

    def counted(params, batch, key):
        traces.append(1)
        return loss_fn(params, batch, key)

    params, batch = problem()
    jax.jit(train.accumulate(train.backprop(counted), num_micro)).trace(KEY, params, (), batch)
    assert len(traces) == 1


def collectives(compiled):
    """Returns how often each exchange between devices occurs in a compiled program."""
    names = r"(all-gather|all-to-all|collective-permute|reduce-scatter|collective-broadcast)"
    return len(re.findall(names + r"(?:-start)?\(", compiled.as_text()))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_slicing_a_sharded_batch_exchanges_nothing(axis_type):
    """On 8 devices only the gradient's all-reduce crosses, and the numbers are those of one."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    params, batch = problem()
    want = jax.jit(train.backprop(loss_fn))(KEY, params, (), batch)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    key = jax.device_put(KEY, NamedSharding(mesh, P()))
    estimator = jax.jit(train.accumulate(train.backprop(loss_fn), 4))
    compiled = estimator.lower(key, params, (), batch).compile()
    assert collectives(compiled) == 0 and "all-reduce" in compiled.as_text()
    assert_close(estimator(key, params, (), batch)[:2], want[:2], 1e-5)


@pytest.mark.parametrize("in_context", [False, True])
def test_sharded_params_keep_their_sharding_in_the_gradient(in_context):
    """In an Explicit mesh, set or not, the gradient has the sharding type of the parameters."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    specs = {"w": P(None, "model"), "b": P("model")}
    params = {"w": jnp.ones((8, 16)), "b": jnp.ones(16)}
    params = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in params.items()}
    batch = jax.device_put(jnp.ones((32, 8)), NamedSharding(mesh, P("data")))

    def squares(params, batch, key):
        return jnp.mean((batch @ params["w"]) ** 2) + jnp.sum(params["b"])

    estimator = train.accumulate(train.backprop(squares), 2)
    key = jax.device_put(KEY, NamedSharding(mesh, P()))
    with jax.set_mesh(mesh) if in_context else contextlib.nullcontext():
        for run in (estimator, jax.jit(estimator)):
            grads = run(key, params, (), batch).grads
            assert {name: g.sharding.spec for name, g in grads.items()} == specs


@pytest.mark.parametrize(
    ("batch", "match"),
    [
        (jnp.ones(10), "divides by num_micro=4, got 10"),
        ({"x": jnp.ones(8), "y": [jnp.ones(4)]}, "got 8 at x and 4 at y/0"),
        ({"x": jnp.ones(8), "y": jnp.float32(1)}, r"leading axis in every leaf, got \[\] at y"),
        ({}, "at least one array"),
        (None, "at least one array"),
    ],
)
def test_batches_that_cannot_be_sliced_are_refused(batch, match):
    """A ragged, empty or indivisible batch is an error that names paths and sizes."""
    estimator = train.accumulate(train.backprop(lambda p, b, k: jnp.sum(p)), 4)
    with pytest.raises(ValueError, match=match):
        estimator(KEY, jnp.ones(2), (), batch)


@pytest.mark.parametrize(
    ("num_micro", "error", "match"),
    [(0, ValueError, "at least 1, got 0"), (2.0, TypeError, "whole number, got 2.0")],
)
def test_the_number_of_slices_is_a_positive_whole_number(num_micro, error, match):
    """A count that is none is refused when the estimator is made."""
    with pytest.raises(error, match=match):
        train.accumulate(train.backprop(loss_fn), num_micro)


def test_a_model_state_that_changes_its_shape_is_refused():
    """The model state of a slice must have the types of the one before."""

    def grows(params, batch, key):
        return jnp.sum(params), {"model_state": {"n": jnp.ones(2)}}

    estimator = train.accumulate(train.backprop(grows), 2)
    batch = train.Stateful({"n": jnp.ones(1)}, jnp.ones(4))
    with pytest.raises(ValueError, match=r"wanted float32\[1\] at n, got float32\[2\]"):
        estimator(KEY, jnp.ones(2), (), batch)


def test_a_private_estimator_is_not_accumulated():
    """Each slice would be a release of its own."""

    def private(*args):
        return train.backprop(loss_fn)(*args)

    private.is_private = True
    with pytest.raises(ValueError, match="inner of train.accumulate must not be private"):
        train.accumulate(private, 2)


def test_a_variance_is_not_averaged_over_slices():
    """The mean of the variances of slices is not the variance of the mean: it is refused."""

    def measuring(*args):
        return train.backprop(loss_fn)(*args)._replace(extras={"query_variance": jnp.float32(1)})

    params, batch = problem()
    estimator = train.accumulate(measuring, 2)
    with pytest.raises(ValueError, match="must not measure the variance of a gradient"):
        jax.eval_shape(estimator, KEY, params, (), batch)
