"""How the benchmarks of scale lay out the model, start processes and make rows."""

import jax
import pytest
from jax.sharding import PartitionSpec as P

from benchmarks import collectives, harness
from benchmarks.scale import bench_layouts, bench_processes, layouts, processes

SIZE = layouts.Size(width=16, layers=1, context=8, batch=8, steps=1)


@pytest.fixture(autouse=True, scope="module")
def as_users_run_it():
    """Allows what flax and AdamW rely on, in all threads."""
    names = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    old = {name: getattr(jax.config, name) for name in names}
    for name, value in names.items():
        jax.config.update(name, value)
    yield
    for name, value in old.items():
        jax.config.update(name, value)


def context(notes=None):
    return harness.Context("smoke", {}, None, iter, (notes if notes is not None else []).append)


def test_layouts_split_the_axes_that_their_names_say():
    """Outputs of the first product and inputs of the second; the first axis; nothing."""

    def specs(layout, kind="auto", count=8):
        run = layouts.on_mesh(SIZE._replace(batch=24), layout, kind, jax.devices()[:count])
        params = run.state.params["params"]
        block = params["block_0"]
        found = block["up"], block["down"], params["embed"], params["head"], block["mlp_norm"]
        return [leaf.sharding.spec for x in found for leaf in x.values()]

    tensor = [P(None, "model"), P("model"), P("model"), P(None, "model"), P()]
    assert specs(layouts.TENSOR) == tensor
    explicit = [tuple(spec) for spec in specs(layouts.TENSOR, "explicit")]
    assert [spec.index("model") if "model" in spec else None for spec in explicit] == [
        1, 0, 0, 1, None,
    ]  # fmt: skip
    assert specs(layouts.FULLY) == [P("data")] * 5
    assert specs(layouts.FULLY, count=3) == [P()] * 5  # 16 and 256 do not divide
    assert specs(layouts.DATA) == [P()] * 5


def test_what_a_rival_refuses_is_said():
    """Muon of optax cannot be traced with Explicit axes; the first line of its error is kept."""
    job = layouts.TENSOR, "explicit", layouts.MUON
    assert layouts._build(SIZE, job).startswith("ShardingTypeError: ")


def test_measuring_finds_losses_bytes_and_seconds():
    """All of it for both methods; the batch's rows in reverse give the same loss to rounding."""
    runs, refused = layouts.measure(SIZE, (layouts.FULLY,), ("auto",), 2)
    assert refused == {}
    one = runs.pop(layouts.ONE)
    assert abs(runs.pop(layouts.REVERSED)["losses"][0] - one["losses"][0]) < 1e-5
    assert list(runs) == [
        layouts.name_of(layouts.FULLY, "auto", method) for method in layouts.MAKERS
    ]
    for found in runs.values():
        assert len(found["losses"]) == SIZE.steps and len(found["seconds"]) == 2
        assert abs(found["losses"][0] - one["losses"][0]) < 1e-5
        assert 7 < one["state"] / found["state"] <= 8.1
    ours, muon = runs.values()
    assert "all-gather" not in ours["update"] and muon["update"]["all-gather"] > 0
    assert sum(ours["update"].values()) < sum(ours["step"].values())


@pytest.mark.slow
def test_optimizer_of_eight_sharded_layers_moves_a_twentieth_of_muon():
    """Both move all matrices of the blocks; ours once in each direction, Muon each by itself.

    With fewer layers buckets are not full, and the difference is smaller.
    """
    moved = {}
    for method in layouts.MAKERS:
        run = layouts.on_mesh(
            SIZE._replace(width=64, layers=8), layouts.FULLY, "auto", method=method
        )
        params, opt_state = run.state.params, run.state.opt_state
        compiled = jax.jit(run.tx.update).lower(params, opt_state, params).compile()
        moved[method] = collectives.collective_bytes(compiled)
    assert "all-gather" not in moved[layouts.OURS]
    assert sum(moved[layouts.OURS].values()) <= sum(moved[layouts.MUON].values()) / 20


def fake_runs():
    """Returns runs as measured, of numbers to tell apart."""
    muon = layouts.name_of(layouts.FULLY, "auto", layouts.MUON)
    ours = layouts.name_of(layouts.FULLY, "auto")
    step = {"all-gather": 2e6, "all-to-all": 1e6}
    own = {"losses": [1.0, 2.5], "state": 1e6, "step": step, "update": {"all-to-all": 1e6}}
    return {
        layouts.ONE: {"losses": [1.0, 2.0], "state": 8e6},
        layouts.REVERSED: {"losses": [1.25, 2.0], "state": 8e6},
        ours: {**own, "seconds": [0.5]},
        muon: {**own, "step": {"all-gather": 9e6}, "update": None, "seconds": [0.25]},
    }


@pytest.mark.parametrize("count", [1, 8])
def test_rows_of_layouts(count, monkeypatch):
    """Differences, memory and bytes in MB, sums over kinds, speed; or of own devices."""
    refused = {"some rival": "its reason"}
    on_devices = lambda count, function, *args: (fake_runs(), refused)  # noqa: E731
    monkeypatch.setattr(jax, "device_count", lambda: count)
    monkeypatch.setattr(collectives, "on_devices", on_devices if count == 1 else None)
    monkeypatch.setattr(layouts, "measure", lambda *args: (fake_runs(), refused))
    notes = []
    rows = list(bench_layouts.run(context(notes)))
    assert notes == ["some rival, does not run: its reason"]
    assert all("8 devices" in row.case for row in rows)
    found = {(row.metric.split(",")[0], row.metric.split(", ")[-1], row.method): row.value
             for row in rows}  # fmt: skip
    ours = f"{layouts.OURS}, auto axes"
    apart = "largest difference of the loss from one device"
    assert found[apart, apart, layouts.name_of(layouts.FULLY, "auto")] == 0.5
    assert found[apart, apart, layouts.REVERSED] == 0.25
    assert found["optimizer state", "optimizer state", layouts.ONE] == 8.0
    assert found["moved by the step", "all", ours] == 3.0
    assert found["moved by the step", "all-to-all", f"{layouts.MUON}, auto axes"] == 0.0
    assert found["speed", "speed", ours] == 2 * 16 * 8
    assert not any(metric == "moved by the optimizer alone" for metric, *_ in found)


def test_processes_are_joined_and_hand_back_their_results():
    """Each knows its number among all, and the result of each comes back in that order."""
    assert processes.results(processes.start(2, "jax:process_index")) == [0, 1]


def test_a_process_that_fails_is_quoted():
    """The error has what the process said, and none is left running."""
    running = processes.start(1, "math:sqrt", -1)
    with pytest.raises(RuntimeError, match="ended with 1:\n(.*\n)*ValueError: "):
        processes.results(running)
    assert running[0].returncode == 1


def test_rows_of_processes(monkeypatch):
    """Speed is that of the slower process, from its share of the tokens of all steps of a lap."""
    works = [
        {
            "losses": [3.0, 2.0],
            "seconds": {bench_processes.JOINED: [0.5], bench_processes.ALONE: [alone]},
        }
        for alone in (0.125, 0.25)
    ]
    monkeypatch.setattr(processes, "start", lambda *args: None)
    monkeypatch.setattr(processes, "results", lambda running: works)
    monkeypatch.setattr(layouts, "references", lambda size: ([3.0, 2.5], [3.0, 2.25]))
    found = {(row.unit, row.method): row.value for row in bench_processes.run(context())}
    tokens = 4 * 8 * 2
    assert found == {
        ("nats per byte", bench_processes.JOINED): 0.5,
        ("nats per byte", layouts.REVERSED): 0.25,
        ("tokens per second", bench_processes.JOINED): tokens / 0.5,
        ("tokens per second", bench_processes.ALONE): tokens / 0.25,
    }
