"""Tests of train.fit: compiled once, exact, and it consumes nothing but its state."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import BOTH_AGREE, assert_close, assert_equal, run_two_processes

from jaxkit import train

KEY = jax.random.key(0)


def draw(*shape):
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), jnp.float32)


PARAMS = {"w": draw(8, 16), "b": draw(16), "v": draw(16)}
BATCHES = draw(20, 16, 8)


def loss_fn(params, batch, key):
    """A regression with noise on its input, so that keys matter."""
    x = batch + 0.1 * jax.random.normal(key, batch.shape)
    hidden = jnp.tanh(x @ params["w"] + params["b"][None, :])
    return jnp.mean((hidden @ params["v"] - 1) ** 2), {"mean": jnp.mean(hidden)}


def momentum():
    return optax.sgd(0.1, momentum=0.9)


def make(tx, *, params=PARAMS, counter=None, **kwargs):
    """Returns a step and a state; ``counter`` gets one item for each trace of the loss."""

    def counted(params, batch, key):
        if counter is not None:
            counter.append(1)
        return loss_fn(params, batch, key)

    step = train.make_step(train.backprop(counted), tx, **kwargs)
    return step, train.create(params, tx, KEY)


@pytest.fixture
def compiled(caplog):
    """Returns a function that says how many programs of ``fit`` were compiled so far."""
    caplog.set_level(logging.WARNING)
    with jax.log_compiles():
        yield lambda: sum(
            "_scan" in text and text.startswith("Finished XLA compilation")
            for text in map(logging.LogRecord.getMessage, caplog.records)
        )


def on(mesh, tree, *axes):
    return jax.device_put(tree, NamedSharding(mesh, P(*axes)))


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_a_second_fit_of_the_same_shapes_compiles_nothing(compiled, ema_decay):
    """Three calls trace the loss once and compile one program."""
    traces = []
    step, state = make(momentum(), counter=traces, ema_decay=ema_decay)
    before = compiled()
    for _ in range(3):
        state, _ = train.fit(step, state, BATCHES)
    assert len(traces) == 1 and compiled() == before + 1


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_second_fit_on_a_mesh_compiles_nothing(compiled, axis_type):
    """Leaves come back where they were, so one program serves all calls, sharded or not."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)

    def loss_fn(params, batch, key):
        traces.append(1)
        hidden = batch @ params["w"] + params["b"][None, :]
        return jnp.mean(jnp.square(hidden)) + jnp.sum(params["v"])

    # Left alone in an Auto mesh, the compiler shards the new bias like the columns of w.
    bias = () if axis_type == AxisType.Auto else ("model",)
    specs = {"w": (None, "model"), "b": bias, "v": ()}
    params = {name: on(mesh, PARAMS[name], *spec) for name, spec in specs.items()}
    traces, tx = [], momentum()
    step = train.make_step(train.backprop(loss_fn), tx, ema_decay=0.9)
    state = train.create(params, tx, KEY)
    places = [leaf.sharding for leaf in jax.tree.leaves((state.params, state.opt_state))]
    batches, before = on(mesh, BATCHES, None, "data"), compiled()
    for _ in range(3):
        state, _ = train.fit(step, state, batches)
    assert len(traces) == 1 and compiled() == before + 1
    got = jax.tree.leaves((state.params, state.opt_state))
    for leaf, place in zip(got, places, strict=True):
        assert leaf.sharding.is_equivalent_to(place, leaf.ndim)


def test_a_step_made_again_compiles_nothing(compiled):
    """The same estimator and optimizer make the same step, even if it was dropped meanwhile."""
    traces, tx = [], momentum()

    def counted(params, batch, key):
        traces.append(1)
        return loss_fn(params, batch, key)

    estimator = train.backprop(counted)
    state = train.create(PARAMS, tx, KEY)
    before = compiled()
    for _ in range(2):
        state, _ = train.fit(train.make_step(estimator, tx), state, BATCHES)
    assert len(traces) == 1 and compiled() == before + 1


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_the_scan_equals_a_loop_of_the_jitted_step(ema_decay):
    """State and metrics are those of a Python loop, bit for bit."""
    step, state = make(momentum(), ema_decay=ema_decay)
    scanned, metrics = train.fit(step, state, BATCHES)
    _, state = make(momentum())
    jitted, losses, means = jax.jit(step), [], []
    for batch in BATCHES:
        state, one = jitted(state, batch)
        losses.append(one["loss"])
        means.append(one["mean"])
    assert_equal(scanned, state)
    assert_equal(metrics, {"loss": jnp.stack(losses), "mean": jnp.stack(means)})


@pytest.mark.parametrize("ema_decay", [None, 0.9])
def test_twelve_and_eight_steps_are_twenty(ema_decay):
    """A run in two parts ends with the same bits as one in one part."""
    step, state = make(momentum(), ema_decay=ema_decay)
    whole, metrics = train.fit(step, state, BATCHES)
    _, state = make(momentum())
    state, first = train.fit(step, state, BATCHES[:12])
    state, second = train.fit(step, state, BATCHES[12:])
    assert_equal(state, whole)
    assert_equal(jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, second), metrics)
    assert state.step == 20


@pytest.mark.parametrize("place", ["none", "Auto", "Explicit"])
def test_the_callers_arrays_survive(place):
    """Parameters, key and batches can be read and used after the state was consumed."""
    params, batches, key = PARAMS, BATCHES, KEY
    if place != "none":
        mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType[place],))
        params, batches, key = on(mesh, (PARAMS, BATCHES, KEY))
    before = jax.tree.map(np.array, params)
    tx = momentum()
    step = train.make_step(train.backprop(loss_fn), tx, ema_decay=0.9)
    for _ in range(2):
        state = train.create(params, tx, key)
        train.fit(step, state, batches)
        assert state.params["w"].is_deleted()
    jax.tree.map(np.testing.assert_array_equal, params, before)
    np.testing.assert_array_equal(batches, BATCHES)
    assert_equal(key, KEY)


def test_a_consumed_state_cannot_be_used_again():
    """The second use of a donated state is JAX's own error, not a wrong result."""
    step, state = make(momentum())
    train.fit(step, state, BATCHES)
    with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
        train.fit(step, state, BATCHES)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_eight_devices_give_the_numbers_of_one(axis_type):
    """With the batch sharded over 8 devices params and losses agree to 1e-5."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    step, state = make(momentum())
    results = [train.fit(step, state, BATCHES)]
    state = train.create(on(mesh, PARAMS), momentum(), KEY)
    results.append(train.fit(step, state, on(mesh, BATCHES, None, "data")))
    want, got = [(state.params, metrics["loss"]) for state, metrics in results]
    assert_close(got, want, 1e-5)


def test_seeds_in_one_vmap_equal_seeds_one_by_one():
    """A vmap over keys around create and fit gives each key's own run."""
    tx = momentum()
    step = train.make_step(train.backprop(loss_fn), tx)

    def losses(key):
        return train.fit(step, train.create(PARAMS, tx, key), BATCHES)[1]["loss"]

    keys = jax.random.split(KEY, 3)
    together = jax.jit(jax.vmap(losses))(keys)
    for key, got in zip(keys, together, strict=True):
        np.testing.assert_allclose(got, losses(key), rtol=1e-5)


def test_without_batches_every_step_gets_none():
    """A loss that draws its own data needs num_steps only."""

    def drawn(params, batch, key):
        assert batch is None
        return jnp.mean((params - jax.random.normal(key, (4,))) ** 2)

    tx = momentum()
    step = train.make_step(train.backprop(drawn), tx)
    state, metrics = train.fit(step, train.create(jnp.zeros(4), tx, KEY), None, 7)
    assert state.step == 7 and metrics["loss"].shape == (7,)


def test_no_steps_change_nothing():
    """num_steps=0 returns the state as it was and empty metrics."""
    step, state = make(momentum())
    state, metrics = train.fit(step, state, BATCHES[:0], 0)
    assert_equal(state, make(momentum())[1])
    assert metrics["loss"].shape == (0,)


def test_a_step_of_ones_own_and_a_jitted_one_work():
    """Any pure function (state, batch) -> (state, metrics) may be fitted, also a jitted step."""
    state, totals = train.fit(lambda s, b: (s + b, s), jnp.float32(0), jnp.arange(4.0))
    assert state == 6
    np.testing.assert_array_equal(totals, [0, 0, 1, 3])
    step, state = make(momentum(), ema_decay=0.9)
    want, _ = train.fit(step, state, BATCHES)
    got, _ = train.fit(jax.jit(step), make(momentum())[1], BATCHES)
    assert_equal(got, want)


def test_numpy_batches_are_taken_as_they_are():
    """Batches may be NumPy arrays."""
    step, state = make(momentum())
    want, _ = train.fit(step, state, BATCHES)
    got, _ = train.fit(step, make(momentum())[1], np.asarray(BATCHES))
    assert_equal(got, want)


@pytest.mark.parametrize(
    ("batches", "num_steps", "error", "match"),
    [
        (None, None, TypeError, "num_steps must be given if batches is None"),
        (None, 1.5, TypeError, "num_steps must be a static whole number, got 1.5"),
        (None, -1, ValueError, "num_steps must be at least 0, got -1"),
        (BATCHES, 19, ValueError, "leading axis of batches, 20, got 19"),
        ({}, None, ValueError, "batches must hold at least one array"),
        ({}, 3, ValueError, "batches must hold at least one array"),
        ({"x": BATCHES, "y": BATCHES[:3]}, None, ValueError, "got 20 at x and 3 at y"),
        ({"x": jnp.float32(1)}, None, ValueError, r"leading axis in every leaf, got \[\] at x"),
        ({"x": "text"}, None, TypeError, "batches must hold arrays only, got str at x"),
    ],
)
def test_bad_batches_are_refused_before_the_state_is_consumed(batches, num_steps, error, match):
    """Missing, ragged, empty or disagreeing batches raise, and the state stays usable."""
    step, state = make(momentum())
    with pytest.raises(error, match=match):
        train.fit(step, state, batches, num_steps)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_second_fit_compiles_nothing_for_a_spec_that_ends_in_none():
    """P("data", None) and P("data") are one layout; compilations are counted, not traces."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data", None)))
    tx = optax.sgd(0.1)
    step = train.make_step(train.backprop(lambda w, x, key: jnp.sum((w - x) ** 2)), tx)
    batches, compiled = np.zeros((3, 8, 4), np.float32), []

    def note(event, *_, **__):
        if "backend_compile" in event:
            compiled.append(event)

    state, _ = train.fit(step, train.create(params, tx, jax.random.key(0)), batches)
    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        state, _ = train.fit(step, state, batches)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiled == []


PROCESS = """
import jax.numpy as jnp, numpy as np, optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxkit import train
mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.%s,) * 2)
rng = np.random.default_rng(0)
w, b = np.float32(rng.normal(size=(64, 32))), np.float32(rng.normal(size=(5, 8, 64)))

def put(x, *spec):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])

def loss_fn(w, batch, key):
    return jnp.mean((batch @ w) ** 2)

tx = optax.sgd(0.1, momentum=0.9)
step = train.make_step(train.backprop(loss_fn), tx)
state = train.create(put(w, None, "model"), tx, jax.random.key(0))
state, metrics = train.fit(step, state, put(b, None, "data"))
single, want = train.fit(step, train.create(w, tx, jax.random.key(0)), b)
got = metrics["loss"].addressable_data(0)
np.testing.assert_allclose(got, want["loss"], rtol=1e-5)
for shard in state.params.addressable_shards:
    np.testing.assert_allclose(shard.data, single.params[shard.index], rtol=1e-5, atol=1e-6)
"""


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_two_processes_train_like_one(kind):
    """A state on a mesh over two processes is created and trained; numbers are those of one."""
    assert run_two_processes(PROCESS % kind) == BOTH_AGREE
