import collections
import json
import os
import pathlib
import runpy
import shutil
import signal
import subprocess
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import train

SCRIPT = pathlib.Path(__file__).with_name("loop_run.py")
RUN = types.SimpleNamespace(**runpy.run_path(str(SCRIPT)))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run that nothing interrupts: state, history, lines of the history file."""
    folder = tmp_path_factory.mktemp("whole")
    state, history = RUN.run(folder)
    return state, history, RUN.lines(folder)


def assert_equals_whole(result, folder, whole):
    state, history = result
    RUN.assert_same_bits(state, whole[0])
    assert history == whole[1]
    assert RUN.lines(folder) == whole[2]


# Resume.


def start_and_hold(folder, hold):
    """Starts the script and returns its process once it waits in step ``hold``."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, str(SCRIPT), str(folder), str(hold)], env=env)
    deadline = time.monotonic() + 240
    while not pathlib.Path(folder, "ready").exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise AssertionError(f"the script ended early, with {process.wait()}")
        time.sleep(0.02)
    return process


def test_sigterm_loses_no_step(tmp_path, whole):
    """After SIGTERM the running step is saved, the exit status is 143, the rest has equal bits."""
    process = start_and_hold(tmp_path, 17)
    process.send_signal(signal.SIGTERM)
    pathlib.Path(tmp_path, "go").touch()
    assert process.wait(240) == 143
    assert RUN.numbers(tmp_path)[-1] == 18
    seen = []
    result = RUN.run(tmp_path, lambda i: seen.append(i) or RUN.batch_of(i))
    assert seen == list(range(18, RUN.NUM_STEPS))
    assert_equals_whole(result, tmp_path, whole)


def test_sigkill_resumes_from_the_newest_complete_checkpoint(tmp_path, whole):
    """After SIGKILL in a write, and beside torn folders, the run ends with the same bits."""
    process = start_and_hold(tmp_path, 20)  # checkpoint 20 is being written
    process.kill()
    assert process.wait(240) == -signal.SIGKILL
    newest = RUN.numbers(tmp_path)[-1]
    assert newest in (15, 20)
    # As a kill and a lost disk leave them: a draft, a folder without content, one without data.
    draft = tmp_path / "21.orbax-checkpoint-tmp"
    shutil.copytree(tmp_path / str(newest), draft)
    (draft / "layout" / "metadata").unlink(missing_ok=True)
    (tmp_path / "22").mkdir()
    shutil.copytree(tmp_path / str(newest), tmp_path / "23")
    shutil.rmtree(tmp_path / "23" / "state")
    with open(tmp_path / "history.jsonl", "a") as file:
        file.write('{"step": 21, "loss": 0.1}\n{"step": 24, "lo')
    seen = []
    result = RUN.run(tmp_path, lambda i: seen.append(i) or RUN.batch_of(i))
    assert seen == list(range(newest, RUN.NUM_STEPS))
    assert_equals_whole(result, tmp_path, whole)
    assert RUN.numbers(tmp_path) == [20, 25, 30]


def test_more_steps_later_equal_all_at_once(tmp_path, whole):
    """20 steps and then 10 from a new state, here with an iterable, have the bits of 30."""
    RUN.run(tmp_path, num_steps=21)
    batches = collections.deque(RUN.batch_of(i) for i in range(RUN.NUM_STEPS))
    assert_equals_whole(RUN.run(tmp_path, batches), tmp_path, whole)


def test_a_finished_run_returns_at_once(tmp_path, whole):
    """Called again, a finished run asks for no batch and returns its state and history."""
    RUN.run(tmp_path)
    assert_equals_whole(RUN.run(tmp_path, lambda i: pytest.fail("a batch")), tmp_path, whole)


def test_the_further_of_state_and_checkpoint_counts(tmp_path):
    """A state at least as far as the checkpoint is used; one that is behind is replaced."""
    state, _ = RUN.small(3, checkpoint_dir=tmp_path)
    moved = state._replace(params=state.params + 1)
    want = jax.device_get(moved.params)
    got, _ = RUN.small(3, state=moved, checkpoint_dir=tmp_path)
    np.testing.assert_array_equal(got.params, want)
    ahead, history = RUN.small(5, state=RUN.small(4)[0], checkpoint_dir=tmp_path)
    assert [record["step"] for record in history] == [1, 2, 3, 5]
    behind, _ = RUN.small(5, state=RUN.small_state(7.0), checkpoint_dir=tmp_path)
    RUN.assert_same_bits(behind, ahead)


def test_fewer_steps_than_done_are_refused(tmp_path):
    """num_steps below the steps done raises, with both numbers, and leaves the history alone."""
    RUN.small(5, checkpoint_dir=tmp_path)
    before = RUN.lines(tmp_path)
    with pytest.raises(ValueError, match="num_steps must be at least the 5 steps done, got 3"):
        RUN.small(3, checkpoint_dir=tmp_path)
    assert RUN.lines(tmp_path) == before


def test_a_relative_folder_works(tmp_path, monkeypatch):
    """A relative checkpoint_dir, not there yet, is made and resumed from."""
    monkeypatch.chdir(tmp_path)
    RUN.small(2, checkpoint_dir="runs/a")
    assert RUN.numbers(tmp_path / "runs" / "a") == [2]
    assert [record["step"] for record in RUN.small(3, checkpoint_dir="runs/a")[1]] == [1, 2, 3]


def test_another_model_is_refused(tmp_path):
    """The error names the first leaf that differs, and nothing on disk changes."""
    RUN.small(2, checkpoint_dir=tmp_path)
    before = RUN.lines(tmp_path), RUN.numbers(tmp_path)
    state = train.create(jnp.zeros(4), RUN.SGD, jax.random.key(0))
    with pytest.raises(ValueError, match=r"params float32\[4\] where it has params float32\[3\]"):
        RUN.small(4, state=state, checkpoint_dir=tmp_path)
    assert (RUN.lines(tmp_path), RUN.numbers(tmp_path)) == before


# What is kept.


def test_last_and_best_are_kept(tmp_path):
    """The last ``keep`` checkpoints stay, and the best by a metric of eval_fn beside them."""
    scores = {1: 5.0, 2: 1.0, 3: 2.0, 4: float("nan"), 5: 1.5, 6: 3.0}

    def eval_fn(state):
        return {"score": scores[int(state.step)]}

    options = {"eval_fn": eval_fn, "eval_every": 1, "checkpoint_every": 1, "keep": 2}
    RUN.small(6, checkpoint_dir=tmp_path / "min", best_metric="score", **options)
    assert RUN.numbers(tmp_path / "min") == [2, 5, 6]
    RUN.small(6, checkpoint_dir=tmp_path / "max", best_metric="score", best_mode="max", **options)
    assert RUN.numbers(tmp_path / "max") == [1, 5, 6]


def test_the_best_survives_a_resume(tmp_path):
    """A resumed run saves at an evaluation only what beats the best of the earlier run."""
    scores = {1: 5.0, 2: 1.0, 3: 2.0, 4: 1.5, 5: 0.5, 6: 0.7}
    options = {"eval_fn": lambda s: {"score": scores[int(s.step)]}, "eval_every": 1, "keep": 1}
    options |= {"best_metric": "score", "checkpoint_dir": tmp_path}
    RUN.small(3, **options)
    assert RUN.numbers(tmp_path) == [2, 3]
    RUN.small(4, **options)
    assert RUN.numbers(tmp_path) == [2, 4]
    RUN.small(6, **options)
    assert RUN.numbers(tmp_path) == [5, 6]


def test_best_by_a_training_metric(tmp_path):
    """Without eval_fn the metrics of the step decide."""
    values = [3.0, 1.0, 2.0, 4.0]
    batches = [np.full(3, v, np.float32) for v in values]
    step = train.make_step(train.backprop(lambda w, x, key: jnp.sum(0 * w + x)), RUN.SGD)
    options = {"log_every": 1, "progress": False, "best_metric": "loss", "keep": 1}
    train.loop(step, RUN.small_state(), batches, num_steps=4, checkpoint_dir=tmp_path, **options)
    assert RUN.numbers(tmp_path) == [2, 4]


def test_evaluation_joins_the_record(tmp_path):
    """Results of eval_fn are in the records of every eval_every-th step and of the last."""
    steps = []

    def eval_fn(state):
        steps.append(int(state.step))
        return {"accuracy": jnp.float32(0.5), "count": 3}

    _, history = RUN.small(7, log_every=4, eval_fn=eval_fn, eval_every=3, checkpoint_dir=tmp_path)
    assert steps == [3, 6, 7]
    assert [(r["step"], r.get("accuracy"), r.get("count")) for r in history] == [
        (3, 0.5, 3.0),
        (4, None, None),
        (6, 0.5, 3.0),
        (7, 0.5, 3.0),
    ]
    assert [json.loads(line) for line in RUN.lines(tmp_path).splitlines()] == history


def test_numbers_that_json_lacks_survive(tmp_path):
    """NaN and infinities make valid JSON and come back as they were."""

    def eval_fn(state):
        return {"a": np.nan, "b": np.inf, "c": -np.inf}

    def refuse(name):
        pytest.fail(f"{name} is not JSON")

    RUN.small(1, eval_fn=eval_fn, checkpoint_dir=tmp_path)
    json.loads(RUN.lines(tmp_path), parse_constant=refuse)
    _, history = RUN.small(1, eval_fn=eval_fn, checkpoint_dir=tmp_path)
    assert np.isnan(history[0]["a"])
    assert (history[0]["b"], history[0]["c"]) == (np.inf, -np.inf)
