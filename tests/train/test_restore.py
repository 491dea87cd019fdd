"""Reading checkpoints back: the best, the newest, and what is refused."""

import pathlib
import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import assert_equal

from jaxkit import train

SCRIPT = pathlib.Path(__file__).with_name("loop_run.py")
RUN = types.SimpleNamespace(**runpy.run_path(str(SCRIPT)))


def test_the_best_checkpoint_is_found_by_the_history(tmp_path):
    """The state of the lowest metric comes back bit for bit, though the loop went on from it."""
    targets = [0.0, 8.0, 0.1, 5.0, 9.0]
    batches = lambda i: np.full(3, targets[i], np.float32)  # noqa: E731
    options = {"checkpoint_dir": tmp_path, "checkpoint_every": 1, "keep": 1, "best_metric": "size"}
    size = lambda state: {"size": jnp.abs(state.params[0] - 2)}  # noqa: E731
    _, history = RUN.small(5, batches, eval_fn=size, eval_every=1, **options)
    best = min(history, key=lambda record: record["size"])["step"]
    assert best == 3 and RUN.numbers(tmp_path) == [3, 5]
    want, _ = RUN.small(best, batches)
    like = RUN.small_state(7.0)
    got = train.restore(tmp_path, like, num_steps=best)
    assert_equal(got, want)
    assert like.params.is_deleted()
    assert int(train.restore(tmp_path, RUN.small_state()).step) == 5
    # A state that is further is no reason to keep it.
    ahead = got._replace(step=jnp.int32(99))
    assert_equal(train.restore(tmp_path, ahead, num_steps=best), want)


def test_what_cannot_be_restored_is_named(tmp_path):
    """A missing folder or number, another model and another kind of state raise; nothing moves."""
    with pytest.raises(ValueError, match="checkpoint_dir must be a folder that exists, got"):
        train.restore(tmp_path / "absent", RUN.small_state())
    with pytest.raises(ValueError, match=r"one of the checkpoints \[\] in .*, got None"):
        train.restore(tmp_path, RUN.small_state())
    RUN.small(2, checkpoint_dir=tmp_path)
    with pytest.raises(ValueError, match=r"one of the checkpoints \[2\] in .*, got 7"):
        train.restore(tmp_path, RUN.small_state(), num_steps=7)
    with pytest.raises(TypeError, match="state must be a TrainState, got dict"):
        train.restore(tmp_path, {})
    other = train.create(jnp.ones(4), RUN.SGD, jax.random.key(0))
    with pytest.raises(ValueError, match=r"another model: state has params float32\[4\]"):
        train.restore(tmp_path, other)
    assert not other.params.is_deleted()
    assert RUN.numbers(tmp_path) == [2]
