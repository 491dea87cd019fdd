"""Training on several devices and processes: numbers, bytes, memory, and what may go wrong."""

import itertools
import shutil
import signal
import time

import jax
import numpy as np
import optax
import pytest
import scale_run
from problems import assert_close, assert_same_layout, compile_for

from benchmarks.collectives import collective_bytes
from benchmarks.scale import layouts, processes
from jaxkit import spectral

HEARTBEAT = 10
LAST = scale_run.SIZE.steps
ALL = list(itertools.product(layouts.LAYOUTS, layouts.KINDS))


@pytest.fixture(autouse=True, scope="module")
def as_users_run_it():
    """Allows what flax and AdamW rely on."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(scope="module")
def whole():
    """Parameters and losses of one device, which nothing interrupts."""
    return scale_run.go_on(layouts.on_one_device(scale_run.SIZE))


@pytest.mark.parametrize(("layout", "kind"), ALL)
def test_a_layout_trains_as_one_device(layout, kind, whole):
    """Losses are those of one device to rounding; parameters and state stay where they lay.

    Parameters are gathered at most once, for the loss: the optimizer needs no whole ones.
    """
    run = layouts.on_mesh(scale_run.SIZE, layout, kind)
    want = jax.tree.map(lambda x: x.sharding, run.state)
    step = layouts.compile_step(run)
    state, losses = layouts.losses(run, step)
    np.testing.assert_allclose(losses, whole[1], rtol=1e-5)
    assert_same_layout(state, want)
    leaves = jax.tree.leaves(state.params)
    parts = [x.addressable_shards[0].data.size / x.size for x in leaves]
    assert min(parts) == {layouts.DATA: 1, layouts.FULLY: 1 / 8, layouts.TENSOR: 1 / 4}[layout]
    gathered = collective_bytes(step).get("all-gather", 0)
    assert gathered <= (layout == layouts.FULLY) * sum(x.nbytes for x in leaves) * 1.01


def test_a_single_nan_in_one_share_names_its_step():
    """One NaN among the rows of the last of eight devices stops the run at that step."""
    with pytest.raises(FloatingPointError, match="loss of step 3 "):
        scale_run.nan_in_the_last_share(jax.devices())


# Bytes and memory.


def test_fully_sharded_state_is_an_eighth():
    """A device holds one eighth of the optimizer's state, and of its few counters all."""
    run = layouts.on_mesh(scale_run.SIZE, layouts.FULLY, "auto")
    whole = layouts.state_bytes(layouts.on_one_device(scale_run.SIZE).state)
    counters = sum(x.nbytes for x in jax.tree.leaves(run.state.opt_state) if not x.ndim)
    assert 8 * (layouts.state_bytes(run.state) - counters) == whole - counters
    assert counters < 0.001 * whole


def test_the_optimizer_moves_a_twentieth_of_muon_leaf_by_leaf():
    """For eight blocks, fully sharded: matrices cross once each way, and nothing is gathered."""

    def moved(tx, params):
        return collective_bytes(compile_for(tx.update, params, tx.init(params), params))

    leaves = layouts.on_mesh(scale_run.SIZE, layouts.FULLY, "auto").state.params["params"]
    blocks = {f"block_{index}": leaves["block_0"] for index in range(8)}
    params = {**leaves, **blocks}
    ours = moved(spectral.symmetry_compatible(1e-3, sharding=params), params)
    assert ours.keys() <= {"all-to-all", "all-reduce"}
    muon = optax.contrib.muon(1e-3)  # takes each leaf by itself
    theirs = sum(moved(muon, leaves).values()) + 7 * sum(moved(muon, leaves["block_0"]).values())
    assert sum(ours.values()) <= theirs / 20


# Checkpoints and faults.


@pytest.fixture(scope="module")
def halfway(tmp_path_factory):
    """A folder with the first half of the run, trained on eight devices."""
    folder = tmp_path_factory.mktemp("eight")
    scale_run.go_on(scale_run.on_mesh(), folder, LAST // 2)
    return folder


def test_eight_devices_resume_on_four(halfway, tmp_path, whole):
    """A checkpoint of eight devices goes on on four with the numbers of one device."""
    shutil.copytree(halfway, tmp_path, dirs_exist_ok=True)
    params, losses, first = scale_run.go_on(scale_run.on_mesh(jax.devices()[:4]), tmp_path)
    assert first == LAST // 2
    np.testing.assert_allclose(losses, whole[1], rtol=1e-5)
    assert_close(params, whole[0], 1e-4)


def wait_for(condition, running, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline and all(x.poll() is None for x in running)
        time.sleep(0.05)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of two processes of which the second was killed, and what the first did."""
    folder = tmp_path_factory.mktemp("killed")
    hold = LAST - 3
    running = processes.start(
        2, "tests.scale_run:until_killed", str(folder), hold, heartbeat=HEARTBEAT
    )
    try:
        wait_for((folder / "ready").exists, running)
        # A checkpoint is complete, and perhaps a second one is being written.
        wait_for((folder / "2").exists, running)
        running[1].kill()
        start = time.monotonic()
        _, errors = running[0].communicate(timeout=120)
        seconds = time.monotonic() - start
    finally:
        for process in running:
            process.kill()
            process.communicate()
    assert running[1].returncode == -signal.SIGKILL
    return folder, running[0].returncode, errors, seconds


def test_a_killed_process_ends_the_other_with_a_clear_error(killed):
    """The error says that another process is lost and what to do, soon after it happened."""
    _, code, errors, seconds = killed
    assert code != 0
    assert "ConnectionError: Process 0 of 2 has lost another one; start all of them again" in errors
    assert seconds < HEARTBEAT + 30  # the machine may be busy


@pytest.fixture(scope="module")
def resumed(killed, halfway, tmp_path_factory):
    """What two new processes find: see ``scale_run.several``."""
    folder = tmp_path_factory.mktemp("resumed")
    shutil.copytree(halfway, folder / "eight")
    shutil.copytree(killed[0], folder / "killed")
    (folder / "file").touch()
    folders = [str(folder / "eight"), str(folder / "killed")]
    mixed = [str(folder / "good"), str(folder / "file")]
    return processes.results(processes.start(2, "tests.scale_run:several", folders, mixed))


def test_two_processes_resume_from_eight_devices_and_after_a_kill(resumed, killed, whole):
    """Both go on with the numbers of one device; the kill cost only steps since a checkpoint."""
    newest = max(int(path.name) for path in killed[0].iterdir() if path.name.isdigit())
    assert newest in (2, 4)
    for found in resumed:
        for (losses, first), start in zip(found["resumed"], (LAST // 2, newest), strict=True):
            assert first == start
            np.testing.assert_allclose(losses, whole[1], rtol=1e-5)


def test_two_processes_name_the_step_of_a_nan(resumed):
    """Both stop at the step in whose batch the second one's share holds a NaN."""
    for found in resumed:
        assert found["nan"] == "FloatingPointError: The loss of step 3 (from 0) is not finite."


def test_a_folder_that_one_process_cannot_write_stops_both(resumed):
    """The one that could write does not wait for the other: both raise at the start."""
    writer, other = (found["folder"] for found in resumed)
    assert "ValueError: checkpoint_dir must be a folder that can be written" in writer
    assert "refused in another process" in writer
    assert "File exists" in other
