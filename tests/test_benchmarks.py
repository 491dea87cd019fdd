"""The benchmarks command: its flags, its measuring, its reports, and fair settings."""

import importlib
import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from benchmarks import __main__ as command
from benchmarks import collectives, harness, lm, report, text, tuning

NAMES = command.discover()


def row(value, *, method="ours", rival="theirs", metric="loss", unit="nats", seed=0, **more):
    fields = {"topic": "t", "case": "c", "method": method, "rival": rival, "size": "s"}
    fields |= {"metric": metric, "unit": unit, "better": "down", "seed": seed, "value": value}
    about = {"device": "d", "versions": {"jax": "1"}, "commit": "unknown", "command": "x"}
    return fields | about | more


def rows(values, **more):
    return [row(value, seed=seed, **more) for seed, value in enumerate(values)]


# The command line.


@pytest.mark.parametrize("name", ["no_such_topic", "spectral.no_such_method", "muon"])
def test_unknown_name_exits_2_and_lists_the_valid_ones(name, capsys):
    """A name that is neither a topic nor a benchmark ends the program before anything runs."""
    with pytest.raises(SystemExit) as stop:
        command.main(["spectral", name])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert repr(name) in error
    assert all(known in error for known in (*NAMES, "spectral"))


def test_list_names_each_benchmark_and_what_it_shows(capsys):
    """The list has a line for every file, with the first line of its docstring."""
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == NAMES
    assert {"spectral.muon", "spectral.update"} <= set(NAMES)
    assert all(len(line.split(": ", 1)[1]) > 20 for line in lines)
    command.main(["--list", "spectral.update"])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_new_file_is_found_without_a_list(tmp_path, monkeypatch):
    """A file named bench_<method>.py in a folder of its topic is a benchmark."""
    (tmp_path / "topic").mkdir()
    (tmp_path / "topic" / "bench_some_method.py").write_text("")
    (tmp_path / "topic" / "helper.py").write_text("")
    monkeypatch.setattr(command, "HERE", tmp_path)
    assert command.discover() == ["topic.some_method"]


@pytest.mark.parametrize(
    "flags",
    [
        ["spectral", "--data", "."],
        ["--tune", "--json", "x"],
        ["--tune", "--smoke"],
        ["--full", "--smoke"],
        ["--list", "--json", "x"],
        ["--list", "--full"],
        ["--compare", "a", "b", "--smoke"],
        ["--compare", "no_such_file", "no_such_file"],
        ["spectral.update", "--tune"],
    ],
)
def test_flag_that_would_be_ignored_exits_2(flags, capsys):
    """No flag is accepted and then not used."""
    with pytest.raises(SystemExit) as stop:
        command.main(flags)
    assert stop.value.code == 2
    assert capsys.readouterr().err


def test_commit_is_unknown_without_a_checkout(tmp_path, monkeypatch):
    """A source tree without git runs too, and does not take the commit of a tree around it."""
    monkeypatch.setattr(command, "HERE", tmp_path / "benchmarks")
    assert command._commit() == "unknown"


# A run, with benchmarks that need no time.


@pytest.fixture
def stubbed(monkeypatch, tmp_path):
    """Two benchmarks: one works, the one before it in the order raises."""

    def good(context):
        for _ in context.track(["only stage"]):
            yield from harness.versus(
                "ours",
                {"ours": [1.0, 2.0], "theirs": [2.0, 4.0]},
                case="case",
                size="size",
                metric="loss",
                unit="nats",
                better="down",
                seeds=(7, 8),
            )
        for method in ("ours", "theirs"):
            yield harness.Curve("case", method, "step", "loss", np.arange(3), np.ones((2, 3)))

    def bad(context):
        raise RuntimeError("the reason it failed")
        yield

    modules = {
        "stub.bad": types.SimpleNamespace(run=bad),
        "stub.good": types.SimpleNamespace(run=good, READS_DATA=True),
    }
    monkeypatch.setattr(command, "discover", lambda: list(modules))
    monkeypatch.setattr(command, "_import", modules.get)
    monkeypatch.setattr(command, "OUT", tmp_path / "out")
    return tmp_path


def test_json_lines_have_exactly_the_agreed_fields(stubbed):
    """One line a method and seed; the fields are those of the design, in its order."""
    path = stubbed / "lines.jsonl"
    assert command.main(["stub.good", "--json", str(path), "--data", str(stubbed)]) == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    fields = "topic case method rival size metric unit better seed value device versions commit"
    assert all(list(line) == [*fields.split(), "command"] for line in lines)
    assert [(x["method"], x["seed"], x["value"]) for x in lines] == [
        ("ours", 7, 1.0),
        ("ours", 8, 2.0),
        ("theirs", 7, 2.0),
        ("theirs", 8, 4.0),
    ]
    assert {line["rival"] for line in lines} == {"theirs"}
    assert lines[0]["versions"]["jax"] == jax.__version__
    assert lines[0]["command"].startswith("python -m benchmarks stub.good")
    assert report.read(path) == lines


def test_run_writes_table_and_figure(stubbed, capsys):
    """Table and figure exist after a run, and a toy run does not replace those of a real one."""
    assert command.main(["stub.good"]) == 0
    table = (stubbed / "out" / "table.md").read_text()
    assert "| loss, nats | theirs | 1.5 ± 0.5 | 3 ± 1 | 0.5 | 2/2 | 0.5 to 0.5 |" in table
    assert (stubbed / "out" / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "0.5 to 0.5" in capsys.readouterr().out
    command.main(["stub.good", "--smoke"])
    names = {path.name for path in (stubbed / "out").iterdir()}
    assert names == {"table.md", "figure.png", "smoke_table.md", "smoke_figure.png"}


def test_one_failure_does_not_stop_the_others(stubbed, capsys):
    """An exception is shown, the other benchmarks run, and the exit code is 1."""
    assert command.main([]) == 1
    printed = capsys.readouterr()
    assert "the reason it failed" in printed.err
    assert "stub.bad" in printed.err.splitlines()[-1]
    assert "theirs" in printed.out


def test_trace_writes_a_profile(stubbed):
    """The profiler's files are in the folder that --trace names."""
    command.main(["stub.good", "--trace", str(stubbed / "trace")])
    assert list((stubbed / "trace").rglob("*.xplane.pb"))


# Reports.


def test_ratio_and_wins_pair_the_values_of_a_seed():
    """Ratios are taken seed by seed: 1/2, 1/4, 3/1 have the median 1/2; ours is lower twice."""
    ours, theirs = rows([1.0, 1.0, 3.0]), rows([2.0, 4.0, 1.0], method="theirs")
    (found,) = report.comparisons(ours + theirs[::-1])
    assert found["ratio"] == 0.5
    assert found["wins"] == 2
    up = [x | {"better": "up"} for x in ours + theirs]
    assert report.comparisons(up)[0]["wins"] == 1


def is_real(old, new, **more):
    ((*_, real),) = report.changes(rows(old, **more), rows(new, **more))
    return real


def test_change_counts_beyond_two_standard_errors_of_the_paired_differences():
    """Differences 1, 2, 3 have mean 2 and error 3^-1/2: real. -1, 0, 2: mean 1/3, error .88: not.

    The seeds themselves differ by 100, which pairing takes out.
    """
    old = np.array([0.0, 100.0, 200.0])
    assert is_real(old, old + [1.0, 2.0, 3.0])
    assert not is_real(old, old + [-1.0, 0.0, 2.0])
    ((_, before, after, error, _),) = report.changes(rows(old), rows(old + [1.0, 2.0, 3.0]))
    assert (before, after) == (100.0, 102.0)
    assert math.isclose(error, 3**-0.5)


def test_time_counts_as_changed_beyond_25_percent_only():
    """A machine may be a fifth slower on another day, in all rounds alike."""
    assert not is_real([10.0, 10.0], [12.0, 12.0], unit="ms")
    assert is_real([10.0, 10.0], [13.0, 13.0], unit="ms")
    assert is_real([10.0, 10.0], [12.0, 12.0], unit="MB")


def test_single_values_and_nan():
    """A single value has no spread, so any change counts; so does a value that became NaN."""
    assert is_real([94.4], [94.3])
    assert not is_real([94.4], [94.4])
    assert is_real([1.0, 2.0], [1.0, math.nan])
    assert not is_real([1.0, math.nan], [1.0, math.nan])


def test_compare_prints_only_what_changed(tmp_path, capsys):
    """The command reads two files and says which means changed, which way, and what is missing."""
    old = rows([1.0, 2.0]) + rows([5.0], metric="size") + rows([1.0], metric="gone")
    new = rows([1.5, 2.5]) + rows([5.0], metric="size")
    for name, lines in (("old", old), ("new", new)):
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert command.main(["--compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    assert "1 of 2 means changed" in printed
    assert "in one file only: 1." in printed
    assert "worse" in printed
    assert "size" not in printed


def test_file_that_holds_no_measurements_is_named(tmp_path):
    """The error names the file and the line."""
    (tmp_path / "bad").write_text(json.dumps(row(1.0)) + '\n{"value": 1}\n')
    with pytest.raises(ValueError, match="bad, line 2"):
        report.read(tmp_path / "bad")


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
    assert starts.min() >= 0
    assert starts.max() + size.context < len(task.tokens)
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
