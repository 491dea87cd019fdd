"""The benchmarks command: its flags, its output and its reports."""

import json
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as command
from benchmarks import catalog, harness, report

NAMES = catalog.discover()


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
    assert {"spectral.muon", "spectral.rules", "spectral.stack", "spectral.update"} <= set(NAMES)
    assert all(len(line.split(": ", 1)[1]) > 20 for line in lines)
    command.main(["--list", "spectral.update"])
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_new_file_is_found_without_a_list(tmp_path, monkeypatch):
    """A file named bench_<method>.py in a folder of its topic is a benchmark."""
    (tmp_path / "topic").mkdir()
    (tmp_path / "topic" / "bench_some_method.py").write_text("")
    (tmp_path / "topic" / "helper.py").write_text("")
    monkeypatch.setattr(catalog, "HERE", tmp_path)
    assert catalog.discover() == ["topic.some_method"]


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
        ["spectral.update", "--dtype", "bf16"],
        ["spectral", "--tune", "--dtype", "bf16"],
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
    monkeypatch.setattr(command, "ROOT", tmp_path)
    assert command._commit() == "unknown"


# A run, with benchmarks that need no time.


@pytest.fixture
def stubbed(monkeypatch, tmp_path):
    """Two benchmarks: one works, the one before it in the order raises."""

    def good(context):
        for _ in context.track(["only stage"]):
            yield from harness.versus(
                ("ours",),
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
    monkeypatch.setattr(catalog, "discover", lambda: list(modules))
    monkeypatch.setattr(catalog, "load", modules.get)
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
    assert "| loss, nats | ours | theirs | 1.5 ± 0.5 | 3 ± 1 | 0.5 | 2/2 | 0.5 to 0.5 |" in table
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


def test_what_runs_on_request_is_left_out_of_the_short_form_of_all_only(
    stubbed, monkeypatch, capsys
):
    """Without names it is named at the end; its name, its topic or another form runs it."""
    ran = []

    def run(context):
        ran.append(context.form)
        yield from ()

    modules = {"stub.long": types.SimpleNamespace(run=run, ON_REQUEST=True)}
    monkeypatch.setattr(catalog, "discover", lambda: list(modules))
    monkeypatch.setattr(catalog, "load", modules.get)
    assert command.main([]) == 0
    assert not ran and "stub.long" in capsys.readouterr().out.splitlines()[-1]
    for flags in (["stub.long"], ["stub"], ["--full"], ["--smoke"]):
        command.main(flags)
    assert ran == ["short", "short", "full", "smoke"]


def test_dtype_reaches_those_that_train_and_marks_their_rows(stubbed, monkeypatch):
    """The context has it, the size in each row says it, and what trains nothing does not run."""
    seen = []

    def run(context):
        seen.append(context.dtype)
        about = {"case": "c", "size": "s", "metric": "m", "unit": "1", "better": "up"}
        yield from harness.alone("ours", [1.0], **about)

    trains = types.SimpleNamespace(run=run, steps=None)
    modules = {"stub.other": types.SimpleNamespace(run=run), "stub.trains": trains}
    monkeypatch.setattr(catalog, "discover", lambda: list(modules))
    monkeypatch.setattr(catalog, "load", modules.get)
    path = stubbed / "lines.jsonl"
    assert command.main(["--dtype", "bf16", "--json", str(path)]) == 0
    assert [row["size"] for row in report.read(path)] == ["s, bf16"]
    assert command.main(["--json", str(path)]) == 0
    assert [row["size"] for row in report.read(path)] == ["s", "s"]
    assert seen == [jnp.bfloat16, jnp.float32, jnp.float32]


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


def test_several_methods_meet_one_rival():
    """Each method of ours is compared with each rival by its own pairs, in one section."""
    values = {"a": [1.0, 4.0], "b": [3.0, 3.0], "theirs": [2.0, 2.0], "others": [1.0, 1.0]}
    about = {"case": "c", "size": "s", "metric": "loss", "unit": "nats", "better": "down"}
    found = harness.versus(("a", "b"), values, **about, seeds=(0, 1))
    lines = [{"topic": "t", **x._asdict()} for x in found]
    pairs = {(c["method"], c["rival"]): c["pairs"].tolist() for c in report.comparisons(lines)}
    assert pairs == {
        (ours, theirs): [list(pair) for pair in zip(values[ours], values[theirs], strict=True)]
        for ours in ("a", "b")
        for theirs in ("theirs", "others")
    }
    ((_, body),) = report.sections(lines).items()
    assert [line[1:3] for line in body] == [tuple(pair) for pair in pairs]


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


def times(ours, theirs):
    return rows(ours, unit="ms") + rows(theirs, unit="ms", method="theirs")


def test_of_times_only_the_ratio_counts_and_beyond_25_percent():
    """Twice as slow for both is the machine; a ratio of 1.2 is drift; one of 1.3 is a change."""
    old = times([10.0, 10.0], [10.0, 10.0])
    for ours, theirs, real in (
        ([20.0, 20.0], [20.0, 20.0], False),
        ([12.0, 12.0], [10.0, 10.0], False),
        ([13.0, 13.0], [10.0, 10.0], True),
    ):
        ((key, before, after, _, found),) = report.changes(old, times(ours, theirs))
        assert found == real
        assert (key[2], before, after) == ("ours / theirs", 1.0, ours[0] / theirs[0])
    assert is_real([10.0, 10.0], [12.0, 12.0], unit="MB")


def test_of_speeds_too_only_the_ratio_counts_and_higher_is_better():
    """Tokens per second are by the clock as well: half the ratio to the rival is worse."""
    unit = {"unit": harness.SPEED, "better": "up"}
    old, new = (
        rows([ours] * 2, **unit) + rows([10.0] * 2, method="theirs", **unit) for ours in (10.0, 5.0)
    )
    ((key, before, after, _, found),) = report.changes(old, new)
    assert (before, after, found, key[-1]) == (1.0, 0.5, True, "up")


def test_single_values_and_nan():
    """A single value has no spread, so any change counts; so does a value that became NaN."""
    assert is_real([94.4], [94.3])
    assert not is_real([94.4], [94.4])
    assert is_real([1.0, 2.0], [1.0, math.nan])
    assert not is_real([1.0, math.nan], [1.0, math.nan])


def test_compare_prints_only_what_changed(tmp_path, capsys):
    """The command reads two files and says which means changed, which way, and what is missing."""
    old = rows([1.0, 2.0]) + rows([5.0], metric="size") + rows([1.0], metric="gone")
    new = rows([1.5, math.nan]) + rows([5.0], metric="size")
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
