import contextlib
import pathlib
import runpy
import shutil
import signal
import tempfile
import threading
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkit import train

SCRIPT = pathlib.Path(__file__).with_name("loop_run.py")
RUN = types.SimpleNamespace(**runpy.run_path(str(SCRIPT)))


# The steps.


def test_equals_a_loop_by_hand():
    """State and records are those of a Python loop over the jitted step, bit for bit."""
    step, state, records = jax.jit(RUN.STEP), RUN.new_state(), []
    for index in range(7):
        state, metrics = step(state, RUN.batch_of(index))
        if index + 1 in (3, 6, 7):
            scalars = {name: float(metrics[name]) for name in ("loss", "size")}
            records.append({"step": index + 1} | scalars)
    options = {"num_steps": 7, "log_every": 3, "progress": False}
    got, history = train.loop(RUN.STEP, RUN.new_state(), RUN.batch_of, **options)
    RUN.assert_same_bits(got, state)
    assert history == records


def test_an_iterable_equals_a_function():
    """A list and a generator give the bits of the function with the same items."""
    want, history = RUN.small(4, lambda i: np.full(3, i, np.float32))
    items = [np.full(3, i, np.float32) for i in range(4)]
    for batches in (items, iter(items)):
        got, records = RUN.small(4, batches)
        RUN.assert_same_bits(got, want)
        assert records == history


def test_batches_gets_python_ints():
    """The function gets each index once, in order, as an int."""
    seen = []
    RUN.small(4, lambda i: seen.append(i) or RUN.ones(i))
    assert seen == [0, 1, 2, 3]
    assert {type(i) for i in seen} == {int}


@contextlib.contextmanager
def compilations():
    names = []

    def listen(name, duration, **kwargs):
        if name.endswith("backend_compile_duration"):
            names.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("axis_type", [None, "Auto", "Explicit"])
def test_compiles_once(axis_type):
    """The step is traced once, and all is compiled after its first run: on a mesh as well."""
    traces = []

    def loss_fn(params, x, key):
        traces.append(None)
        return jnp.mean((jnp.ones((8, 4)) * x @ params["w"] + params["b"][None, :]) ** 2)

    params, tx = {"w": jnp.ones((4, 8)), "b": jnp.ones(8)}, optax.sgd(0.1, momentum=0.5)
    if axis_type is not None:
        kind = getattr(jax.sharding.AxisType, axis_type)
        mesh = jax.make_mesh((8,), ("d",), axis_types=(kind,))
        # Left alone in an Auto mesh, the compiler shards the new bias like the columns of w.
        specs = {"w": jax.P(None, "d"), "b": jax.P() if axis_type == "Auto" else jax.P("d")}
        shardings = {name: jax.sharding.NamedSharding(mesh, spec) for name, spec in specs.items()}
        params = jax.device_put(params, shardings)
    step = train.make_step(train.backprop(loss_fn), tx)

    def call(num_steps):
        state = train.create(params, tx, jax.random.key(0))
        options = {"num_steps": num_steps, "log_every": 2, "progress": False}
        return train.loop(step, state, lambda i: np.float32(i), **options)

    with compilations() as first:
        call(1)
    with compilations() as later:
        state, _ = call(5)
    assert len(traces) == 1
    assert first and not later
    for new, old in zip(jax.tree.leaves(state.params), jax.tree.leaves(params), strict=True):
        assert new.sharding.is_equivalent_to(old.sharding, old.ndim)


def test_the_given_state_is_consumed():
    """The state is donated: its parameters cannot be read afterwards."""
    state = RUN.small_state()
    RUN.small(1, state=state)
    assert state.params.is_deleted()


def test_runs_outside_the_main_thread():
    """In another thread, where no handler can be set, the loop gives the same result."""
    results = []
    thread = threading.Thread(target=lambda: results.append(RUN.small(3)))
    thread.start()
    thread.join()
    RUN.assert_same_bits(results[0][0], RUN.small(3)[0])


# What stops a run.


@pytest.mark.parametrize("log_every", [1, 100])
def test_a_loss_that_is_not_finite_names_its_step(tmp_path, log_every):
    """The first such step is named, and its state is never saved, nor a later one."""

    def batches(index):
        return np.full(3, np.nan if index == 4 else 1, np.float32)

    with pytest.raises(FloatingPointError, match="loss of step 4 "):
        RUN.small(9, batches, log_every=log_every, checkpoint_every=2, checkpoint_dir=tmp_path)
    assert RUN.numbers(tmp_path) == [2, 4]


def test_parameters_that_are_not_finite_are_not_saved(tmp_path):
    """A gradient that is not finite under a finite loss leaves no checkpoint either."""

    def loss_fn(params, x, key):
        return jnp.sum(jnp.sqrt(params["w"])) + jnp.sum(x)  # infinite slope at zero

    state = train.create({"w": jnp.zeros(3)}, RUN.SGD, jax.random.key(0))
    step = train.make_step(train.backprop(loss_fn), RUN.SGD)
    options = {"num_steps": 1, "checkpoint_dir": tmp_path, "progress": False}
    with pytest.raises(FloatingPointError, match="params/w is not finite after 1 steps"):
        train.loop(step, state, RUN.ones, **options)
    assert RUN.numbers(tmp_path) == []


def test_ctrl_c_saves_and_returns(tmp_path, capsys):
    """After Ctrl-C in step 3 the state after it is returned and saved, and stderr says so."""

    def batches(index):
        if index == 3:
            signal.raise_signal(signal.SIGINT)
        return RUN.ones(index)

    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    state, history = RUN.small(9, batches, checkpoint_dir=tmp_path)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == handlers
    assert int(state.step) == 4
    assert [record["step"] for record in history] == [1, 2, 3, 4]
    assert RUN.numbers(tmp_path) == [4]
    assert f"after step 4 of 9, saved in {tmp_path}" in capsys.readouterr().err
    RUN.assert_same_bits(RUN.small(9, checkpoint_dir=tmp_path)[0], RUN.small(9)[0])
    assert int(RUN.small(9, batches)[0].step) == 4
    assert "not saved" in capsys.readouterr().err


def test_a_second_ctrl_c_interrupts():
    """Two Ctrl-C in one step raise KeyboardInterrupt there, and the handlers come back."""

    def batches(index):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        RUN.small(9, batches)
    assert signal.getsignal(signal.SIGINT) is handler


def test_sigterm_during_the_last_write_is_not_lost(tmp_path):
    """SIGTERM in the last evaluation lets the run end and be saved, then exits with 143."""

    def eval_fn(state):
        signal.raise_signal(signal.SIGTERM)
        return {}

    with pytest.raises(SystemExit) as stop:
        RUN.small(3, eval_fn=eval_fn, checkpoint_dir=tmp_path)
    assert stop.value.code == 143
    assert RUN.numbers(tmp_path) == [3]


def test_an_iterable_that_ends_early_is_named(tmp_path):
    """The error has both numbers, and the steps done are saved before it."""
    with pytest.raises(ValueError, match="batches must last for num_steps=8, got 5 items"):
        RUN.small(8, [RUN.ones(i) for i in range(5)], checkpoint_dir=tmp_path)
    assert RUN.numbers(tmp_path) == [5]
    assert int(RUN.small(8, [RUN.ones(i) for i in range(8)], checkpoint_dir=tmp_path)[0].step) == 8


# Bad input.


@pytest.mark.parametrize(
    ("error", "message", "options"),
    [
        (ValueError, "num_steps must be at least 0, got -1", {"num_steps": -1}),
        (TypeError, "num_steps must be a static whole number, got 2.0", {"num_steps": 2.0}),
        (ValueError, "log_every must be at least 1, got 0", {"log_every": 0}),
        (ValueError, "keep must be at least 1, got 0", {"keep": 0}),
        (ValueError, "checkpoint_every must be None without checkpoint", {"checkpoint_every": 2}),
        (
            ValueError,
            "checkpoint_every must be at least 1, got 0",
            {"checkpoint_every": 0, "checkpoint_dir": "x"},
        ),
        (ValueError, "eval_every must be None without eval_fn, got 2", {"eval_every": 2}),
        (
            ValueError,
            "eval_every must be at least 1, got 0",
            {"eval_every": 0, "eval_fn": lambda s: {}},
        ),
        (ValueError, "best_metric must be None without checkpoint_dir", {"best_metric": "loss"}),
        (ValueError, "best_mode must be one of 'min', 'max', got 'low'", {"best_mode": "low"}),
        (TypeError, "batches must be a function .* got dict", {"batches": {"x": np.ones((8, 3))}}),
        (TypeError, "batches must be a function .* got int", {"batches": 3}),
        (TypeError, "eval_fn must be a function, got dict", {"eval_fn": {}}),
        (TypeError, "state must be a TrainState, got dict", {"state": {"w": np.ones(3)}}),
        (TypeError, "eval_fn must return a dict, got float", {"eval_fn": lambda s: 1.0}),
        (TypeError, r"real scalars .* at \['a'\]", {"eval_fn": lambda s: {"a": s.params}}),
        (TypeError, r"real scalars .* at \['a'\]", {"eval_fn": lambda s: {"a": "high", "b": 1}}),
        (ValueError, r"eval_fn must not use .* got \['loss'\]", {"eval_fn": lambda s: {"loss": 1}}),
        (ValueError, r"eval_fn must not use .* got \['step'\]", {"eval_fn": lambda s: {"step": 1}}),
    ],
)
def test_bad_input(error, message, options, tmp_path, monkeypatch):
    """Each bad argument is named with the wanted and the given value."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        RUN.small(**options)


def test_no_steps_return_the_state_as_it_is():
    """Zero steps in all do nothing and log nothing, as in fit."""
    state, history = RUN.small(0)
    assert int(state.step) == 0 and history == []


def test_a_batch_of_states_and_metrics_without_a_loss_are_refused():
    """The loop trains one state and watches its loss; the messages say what they found."""
    many = jax.tree.map(lambda x: jnp.stack([x, x]), RUN.small_state())
    with pytest.raises(ValueError, match=r"state.step must have shape \[\], got \(2,\)"):
        RUN.small(state=many)
    for metrics, got in (({"error": 1.0}, r"\['error'\]"), (jnp.float32(1), "ArrayImpl")):
        step = lambda state, batch, metrics=metrics: (state, metrics)  # noqa: E731
        with pytest.raises(ValueError, match=f"metrics with 'loss', got {got}"):
            train.loop(step, RUN.small_state(), RUN.ones, num_steps=1, progress=False)


def test_step_must_be_a_function():
    """A step that cannot be called is refused by type."""
    with pytest.raises(TypeError, match="step must be a function, got int"):
        train.loop(3, RUN.small_state(), RUN.ones, num_steps=1)


def test_an_unknown_best_metric_lists_the_known_ones(tmp_path):
    """The error lists the names that occur, with those of eval_fn."""
    options = {"best_metric": "accuracy", "checkpoint_dir": tmp_path}
    with pytest.raises(ValueError, match="best_metric must be one of 'loss', got 'accuracy'"):
        RUN.small(**options)
    with pytest.raises(ValueError, match="one of 'loss', 'error', got 'accuracy'"):
        RUN.small(eval_fn=lambda s: {"error": 1.0}, **options)


def test_a_folder_that_cannot_be_written_is_refused_at_once(tmp_path, monkeypatch):
    """A path below a file, or a folder that takes no file, raises before the first batch."""
    (tmp_path / "file").write_text("")
    message = "checkpoint_dir must be a folder that can be written, got .*"
    for folder, reason in ((tmp_path / "file" / "run", "Not a directory"), (tmp_path, "full")):
        with pytest.raises(ValueError, match=message + reason):
            RUN.small(batches=lambda i: pytest.fail("a batch"), checkpoint_dir=folder)

        def refuse(dir):
            raise OSError("full")

        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)


def test_a_disk_without_room_is_refused_at_once(tmp_path, monkeypatch):
    """The state is known to be too large for it before the first batch."""
    usage = types.SimpleNamespace(total=10_000, free=7)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match="7 bytes are free, a checkpoint has 24"):
        RUN.small(batches=lambda i: pytest.fail("a batch"), checkpoint_dir=tmp_path)


def test_metrics_named_step_are_refused():
    """A metric that hides the number of the record is refused."""

    def step(state, batch):
        state, metrics = RUN.SMALL(state, batch)
        return state, metrics | {"step": jnp.float32(1)}

    with pytest.raises(ValueError, match=r"metrics must not use .* got \['step'\]"):
        train.loop(step, RUN.small_state(), RUN.ones, num_steps=1, progress=False)
