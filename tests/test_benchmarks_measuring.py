"""How the benchmarks measure, tune and read their data."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from benchmarks import catalog, collectives, harness, lm, text, tuning
from benchmarks.spectral import bench_rules, bench_stack, methods

NAMES = catalog.discover()


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
    traces.clear()
    untimed = harness.measure({"fun": (fun, jnp.ones((8, 8)))}, rounds=2, compiles=0)["fun"]
    assert (len(traces), untimed.compile_s, len(untimed.run_s)) == (1, [], 2)


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
    for settings in catalog.settings(topic).values():
        assert list(tuning.faults(settings)) == []
        assert {"date", "criterion", "seeds", "size", "methods"} == set(settings)


def test_every_benchmark_that_tunes_has_settings():
    """The settings of each benchmark are committed, from seeds that it never reports."""
    for name in NAMES:
        topic, method = name.split(".")
        module = catalog.load(name)
        if hasattr(module, "tune"):
            reported = set().union(*module.SEEDS.values())
            assert reported.isdisjoint(catalog.settings(topic)[method]["seeds"])


def test_ties_go_to_the_inside_of_the_grid():
    """Of equal values, to four digits, the one with the most settings inside is taken."""
    table = np.array([[0.10001, 0.1, 0.1], [0.5, 0.10004, 0.1], [0.5, 0.5, 0.5]])
    grid = {"a": (1, 2, 3), "b": (4, 5, 6)}
    about = {"criterion": "c", "size": "s", "seeds": [0]}
    chosen = tuning.entry({"x": table}, grids={"x": grid}, **about)["methods"]["x"]["chosen"]
    assert chosen == {"a": 2, "b": 5}


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
    assert vocabulary == 256
    assert np.mean((tokens >= 32) & (tokens < 127) | (tokens == 10)) > 0.99
    assert np.mean(tokens == ord(" ")) > 1 / 8


def test_words_are_numbered_by_frequency_and_rare_ones_are_token_0():
    """The most frequent words come first; 2047 of them cover 95 percent of the text."""
    tokens, vocabulary = text.help_words()
    assert vocabulary == 2048
    assert 1e5 < len(tokens) < 2e5
    counts = np.bincount(tokens, minlength=vocabulary)
    assert len(counts) == 2048
    assert np.all(np.diff(counts[1:]) <= 0)
    assert 0 < counts[0] < 0.05 * len(tokens)
    few, _ = text.help_words(3)
    assert np.array_equal(few, np.where(tokens < 3, tokens, 0))


# The language model and its races.

SIZE = lm.Size("help_topics", 16, 32, 1, 2, 8, 4, 20, 5, 8)
RATES = {"learning_rate": 0.01, "other_learning_rate": 0.02}


def test_windows_depend_on_the_seed_alone():
    """A second run sees the same windows, another seed others, and all lie in the text."""
    task = lm.Task(SIZE._replace(steps=500))

    def windows(*seeds):
        laps = list(task.laps(seeds))
        assert len(laps) == 100
        return np.concatenate(laps, axis=1)

    both = windows(3, 4)
    assert both.shape == (2, 500, 4, 9)
    assert np.array_equal(both[:1], windows(3))
    assert np.array_equal(both[::-1], windows(4, 3))
    assert not np.array_equal(both[0], both[1])
    task.tokens = np.arange(20)  # so few that the first and last starts, 0 and 11, are drawn
    few = windows(3)
    assert (few.min(), few.max()) == (0, 19)
    assert np.all(np.diff(few) == 1)
    assert task.held_out.shape == (2, 4, 9)


@pytest.mark.parametrize("steps", [10, 20])
def test_rate_is_constant_and_falls_over_the_last_40_percent(steps, standard_promotion):
    """Step 0.6 N is the last at the whole rate, step N the last that moves, by 1 / 0.4 N of it."""
    tx = lm.decaying(_sgd_of_two_rates)
    state = tx.init(jnp.zeros(2))
    state = optax.tree.set(state, learning_rate=1.0, other_learning_rate=0.0, horizon=float(steps))
    rates = []
    for _ in range(steps + 3):
        updates, state = tx.update(jnp.ones(2), state)
        rates.append(-float(updates[0]))
    fall = np.arange(0.4 * steps, 0, -1) / (0.4 * steps)
    want = [1.0] * round(0.6 * steps) + list(fall) + [0.0] * 3
    np.testing.assert_allclose(rates, want, rtol=1e-6)


def _sgd_of_two_rates(learning_rate, other_learning_rate):
    return optax.sgd(learning_rate + other_learning_rate)


def updates_at(make, *rates):
    """Returns the first updates of the small model at each pair of rates, leaf by leaf, by path."""
    task = lm.Task(SIZE)
    shapes = jax.eval_shape(task.model.init, jax.random.key(0), task.held_out[0, :1, :-1])
    draw = np.random.default_rng(0).standard_normal
    params = jax.tree.map(lambda x: draw(x.shape, np.float32), shapes)

    @jax.jit
    def update(first, second):
        tx = make(first, second)
        return tx.update(params, tx.init(params), params)[0]

    for first, second in rates:
        found, _ = jax.tree_util.tree_flatten_with_path(update(first, second))
        yield {jax.tree_util.keystr(p, simple=True, separator="/"): np.asarray(x) for p, x in found}


@pytest.mark.parametrize("make", [methods.muon, methods.stack, methods.adamw, methods.optax_muon])
def test_blocks_have_the_first_rate_and_all_else_the_second(make, standard_promotion):
    """Twice the first rate doubles the matrices of the blocks; all else follows the second."""
    one, two = updates_at(make, (0.01, 0.02), (0.02, 0.06))
    for path, x in one.items():
        is_matrix = "block" in path and path.endswith("kernel")
        np.testing.assert_allclose(two[path], (2 if is_matrix else 3) * x, rtol=1e-5, err_msg=path)


@pytest.mark.slow
def test_only_embedding_and_head_differ_between_the_rules(standard_promotion):
    """All methods of the word model move the other leaves alike, and these two by own rates."""
    factors = {"params/embed/embedding": 2, "params/head/kernel": 3}
    seen = []
    for make in bench_rules.MAKERS.values():
        one, two = updates_at(make, (0.01, 0.02), (0.02, 0.06))
        for path, x in one.items():
            np.testing.assert_allclose(two[path], factors.get(path, 1) * x, rtol=1e-5, err_msg=path)
            for other in seen:
                assert np.allclose(x, other[path], rtol=1e-5) == (path not in factors)
        seen.append(one)


def test_equal_time_gives_the_quickest_all_steps():
    """Twice as slow is half the steps; 1.3 times as slow is 77 of 100."""
    seconds = {"a": np.array([1.0, 2.0, 4.0]), "b": np.array([2.0, 4.0, 8.0])}
    seconds["c"] = 1.3 * seconds["a"]
    results = {name: lm.Result(np.zeros((5, 100)), np.zeros(5), x) for name, x in seconds.items()}
    assert bench_stack.equal_time_steps(results) == {"a": 100, "b": 50, "c": 77}


@pytest.mark.slow
def test_race_is_paired(standard_promotion):
    """The same method under two names gives the same losses, and with half the steps the first.

    Until the rate falls, that is: at step 7 of 10, and the loss of a step is from before it.
    After its last step nothing moves, so that two laps of one batch would have the same losses.
    """
    makers = dict.fromkeys(("one", "two", "half"), methods.adamw)
    task, rates = lm.Task(SIZE), dict.fromkeys(makers, RATES)
    found = task.race(makers, rates, (1, 2), iter, horizons={"one": 20, "two": 20, "half": 10})
    one, two, half = (found[name] for name in makers)
    assert np.array_equal(one.train_loss, two.train_loss)
    assert np.array_equal(one.validation_loss, two.validation_loss)
    assert one.train_loss.shape == half.train_loss.shape == (2, 20)
    assert np.array_equal(one.train_loss[:, :8], half.train_loss[:, :8])
    assert np.all(one.train_loss[:, 8:] != half.train_loss[:, 8:])
    assert np.all(one.train_loss[0, 1:] != one.train_loss[1, 1:])
    assert np.all(one.validation_loss < np.log(256))
    assert one.step_seconds.shape == (SIZE.steps // SIZE.lap,)
    assert np.all(one.step_seconds > 0)


@pytest.mark.slow
def test_search_finds_what_a_race_finds(standard_promotion):
    """A point of the table is the mean over the seeds of the race with its rates."""
    task, makers = lm.Task(SIZE), {"one": methods.adamw}
    grid = {"learning_rate": (0.003, 0.01), "other_learning_rate": (0.02, 0.05, 0.1)}
    table = task.search(makers, {"one": grid}, (1, 2), iter)["one"]
    assert table.shape == (2, 3)
    found = task.race(makers, {"one": RATES}, (1, 2), iter)["one"]
    np.testing.assert_allclose(table[1, 0], found.validation_loss.mean(), rtol=1e-6)
