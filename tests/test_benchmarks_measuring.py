"""How the benchmarks measure, tune and read their data."""

import importlib
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from benchmarks import __main__ as command
from benchmarks import collectives, harness, lm, text, tuning

NAMES = command.discover()


# Measuring.


def test_alternate_turns_the_order_around():
    """Every call runs once a round, and none always follows the same one."""
    order = []
    calls = {name: lambda name=name: order.append(name) for name in "abc"}
    seconds = harness.alternate(calls, range(3))
    assert "".join(order) == "abccbaabc"
    assert all(len(times) == 3 and min(times) >= 0 for times in seconds.values())


def test_measure_compiles_anew_each_time():
    """Each compilation traces the function again, so that no cache answers."""
    traces = []

    def fun(x):
        traces.append(x)
        return jnp.sin(x @ x)

    found = harness.measure({"fun": (fun, jnp.ones((8, 8)))}, rounds=4, compiles=3)["fun"]
    assert len(traces) == 3
    assert (len(found.compile_s), len(found.run_s)) == (3, 4)
    assert found.text_bytes > 100
    assert found.temp_bytes >= 0


def on_rows(fun, x):
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    sharded = jax.shard_map(fun, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec())
    return jax.jit(sharded).lower(x).compile()


@pytest.mark.parametrize(
    ("fun", "kind", "size"),
    [
        # 64 float32 numbers a device.
        (lambda x: jax.lax.psum(x, "d"), "all-reduce", 256),
        (
            lambda x: jax.lax.psum(jax.lax.psum_scatter(x, "d", tiled=True), "d"),
            "reduce-scatter",
            256,
        ),
        (lambda x: jax.lax.psum(jax.lax.all_gather(x, "d")[0] * x, "d"), "all-gather", 2048),
        (
            lambda x: jax.lax.psum(jax.lax.all_to_all(x.reshape(8, 8), "d", 0, 0), "d"),
            "all-to-all",
            256,
        ),
        (
            lambda x: jax.lax.psum(
                jax.lax.ppermute(x, "d", [(i, (i + 1) % 8) for i in range(8)]), "d"
            ),
            "collective-permute",
            256,
        ),
    ],
    ids=["psum", "psum_scatter", "all_gather", "all_to_all", "ppermute"],
)
def test_collective_bytes_of_known_programs(fun, kind, size):
    """What one device puts in or gets out, whichever is larger: 64 numbers, or all 8 x 64."""
    found = collectives.collective_bytes(on_rows(fun, jnp.ones(8 * 64)))
    assert found[kind] == size


def test_collective_in_a_loop_counts_once_a_turn():
    """Seven turns of a scan move seven times as much as one."""

    def fun(x):
        def body(carry, _):
            total = jax.lax.pcast(jax.lax.psum(jnp.sin(carry), "d"), "d", to="varying")
            return carry + total, None

        return jax.lax.psum(jax.lax.scan(body, x, length=7)[0], "d")

    assert collectives.collective_bytes(on_rows(fun, jnp.ones(8 * 64))) == {"all-reduce": 8 * 256}


def test_local_program_moves_nothing():
    """A program of one device has no collectives."""
    compiled = jax.jit(lambda x: x @ x.T).lower(jnp.ones((8, 8))).compile()
    assert collectives.collective_bytes(compiled) == {}


def test_on_devices_gives_the_function_its_devices():
    """The function runs in a process of its own with as many devices as asked for."""
    assert collectives.on_devices(3, "jax:device_count") == 3


def test_on_devices_hands_on_the_error():
    """What went wrong in the other process is in the message."""
    with pytest.raises(RuntimeError, match="no_such_name"):
        collectives.on_devices(1, "json:no_such_name")


# Settings and data.


@pytest.mark.parametrize("topic", sorted({name.split(".")[0] for name in NAMES}))
def test_tuned_settings_are_fair(topic):
    """All methods had grids of equal size, and no best value is at the end of a grid."""
    for settings in command._settings(topic).values():
        assert list(tuning.faults(settings)) == []
        assert {"date", "criterion", "seeds", "size", "methods"} == set(settings)


def test_every_benchmark_that_tunes_has_settings():
    """The settings of each benchmark are committed, from seeds that it never reports."""
    for name in NAMES:
        topic, method = name.split(".")
        module = importlib.import_module(f"benchmarks.{topic}.bench_{method}")
        if hasattr(module, "tune"):
            reported = set().union(*module.SEEDS.values())
            assert reported.isdisjoint(command._settings(topic)[method]["seeds"])


def test_tuning_takes_the_lowest_finite_value_and_sees_unfair_grids():
    """The chosen point is the arg min of the table; NaN never wins; unequal grids are faults."""
    grid = {"a": (1.0, 2.0, 3.0), "b": (4.0, 5.0, 6.0)}
    table = np.arange(9.0, 0.0, -1).reshape(3, 3)
    table[1, 1], table[2, 2] = 0.5, math.nan
    about = {"criterion": "c", "size": "s", "seeds": (1,)}
    entry = tuning.entry({"x": table, "y": table}, grids={"x": grid, "y": grid}, **about)
    assert entry["methods"]["x"]["chosen"] == {"a": 2.0, "b": 5.0}
    assert entry["methods"]["x"]["value"] == 0.5
    assert list(tuning.faults(entry)) == []
    json.dumps(entry, allow_nan=False)

    table[2, 1] = 0.1
    small = {"a": (1.0, 2.0, 3.0), "b": (5.0,)}
    tables, grids = {"x": table, "y": table[:, 1:2]}, {"x": grid, "y": small}
    faults = list(tuning.faults(tuning.entry(tables, grids=grids, **about)))
    assert len([fault for fault in faults if "equal" in fault]) == 1
    assert len([fault for fault in faults if fault.startswith("a of x")]) == 1


def test_missing_settings_name_the_method():
    """A method without tuned settings is an error that says what makes them."""
    context = harness.Context("short", {"methods": {}}, None, iter, print)
    with pytest.raises(ValueError, match="some.method.*--tune"):
        tuning.chosen(context, "some.method")


def test_held_out_text_is_not_trained_on():
    """The windows follow the training text without overlap and do not overlap each other."""
    train, held_out = text.split(np.arange(1000), 9)
    assert np.array_equal(train, np.arange(900))
    assert np.array_equal(held_out.ravel(), np.arange(900, 1000))
    assert held_out.shape == (10, 10)


def test_help_topics_are_half_a_megabyte_of_english():
    """Nearly all bytes are printable, and a sixth are blanks, as in any English text."""
    tokens, vocabulary = text.help_topics()
    assert 3e5 < len(tokens) < 2e6
    assert set(np.unique(tokens)) == set(range(vocabulary))
    assert 60 < vocabulary < 128
    assert np.max(np.bincount(tokens)) / len(tokens) > 1 / 8


def test_batches_depend_on_the_seed_alone():
    """A second run sees the same windows, another seed others, and all lie in the text."""
    size = lm.Size("help_topics", 16, 1, 2, 8, 4, 500, 2, 8)
    task = lm.Task(size)
    starts = task.batches(3)
    assert starts.shape == (500, 4)
    assert np.array_equal(starts, task.batches(3))
    assert not np.array_equal(starts, task.batches(4))
    task.tokens = task.tokens[:20]  # so few that the first and last starts, 0 and 11, are drawn
    starts = task.batches(3)
    assert (starts.min(), starts.max() + size.context) == (0, 19)
    assert task.held_out.shape == (2, 4, 9)


@pytest.mark.slow
def test_same_method_under_two_names_ties():
    """A race is paired: the same method and rates from the same seeds give the same losses."""
    from benchmarks.spectral import methods

    size = lm.Size("help_topics", 16, 1, 2, 8, 4, 10, 2, 8)
    makers = {"one": methods.adamw, "two": methods.adamw, "other": methods.ours}
    rates = {name: {"learning_rate": 0.01, "other_learning_rate": 0.01} for name in makers}
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        found = lm.race(size, makers, rates, (1, 2), iter)
    one, two, other = (found[name] for name in makers)
    assert np.array_equal(one.train_loss, two.train_loss)
    assert np.array_equal(one.validation_loss, two.validation_loss)
    assert one.train_loss.shape == (2, 10)
    assert one.step_seconds.shape == (2,)
    assert np.array_equal(one.train_loss[:, 0], other.train_loss[:, 0])
    assert not np.array_equal(one.train_loss, other.train_loss)
