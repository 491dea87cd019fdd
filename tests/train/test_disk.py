import contextlib
import resource
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkit import train
from jaxkit.train import _disk

TX = optax.sgd(0.1, momentum=0.9)


def state_at(step, params, impl=None, model_state=None):
    state = train.create(params, TX, jax.random.key(3, impl=impl), model_state=model_state)
    return state._replace(step=jnp.int32(step))


def bits(tree):
    def numpy(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(numpy, tree)


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x, y, strict=True), bits(a), bits(b))


def saved(folder, *states, keep=9):
    with _disk.open_manager(_disk.writable(folder), keep, None) as manager:
        for state in states:
            _disk.save(manager, int(state.step), state, {})


def restored(folder, state):
    with _disk.open_manager(_disk.writable(folder), 9, None) as manager:
        return _disk.restore(manager, state)


def test_every_kind_of_leaf_comes_back(tmp_path):
    """Dtypes, empty leaves, lists, keys of any implementation: values and types are the same."""

    def state(fill):
        params = {"a/b": np.full(3, fill, jnp.bfloat16), "a": {"b": np.full((2, 1), fill, "f2")}}
        params["list"] = [np.zeros((0, 3), np.float32), np.float32(fill)]
        keys = jax.random.wrap_key_data(np.full((2, 4), fill, np.uint32), impl="rbg")
        rest = {"keys": keys, "flag": np.array(fill > 1), "small": np.full(4, fill, np.int8)}
        return state_at(5 * (fill > 1), params, model_state=rest | {"none": None})

    def types(tree):
        return jax.tree.map(lambda x: (jax.typeof(x), x.committed), tree)

    want, like = state(7), state(1)
    wanted_types = types(like)
    saved(tmp_path, want)
    got = restored(tmp_path, like)
    assert_same(got, want)
    assert types(got) == wanted_types


@pytest.mark.parametrize(
    ("params", "impl", "message"),
    [
        ({"v": (4,), "w": (2, 5)}, None, r"params/w float32\[2, 5\] .* params/w float32\[2, 3\]"),
        ({"v": (4,), "u": (2, 3)}, None, r"params/u float32\[2, 3\] .* params/v float32\[4\]"),
        ({"v": (4,)}, None, r"opt_state/0/trace/v float32\[4\] .* params/w float32\[2, 3\]"),
        ({"v": (4,), "w": (2, 3)}, "rbg", r"key key<rbg>\[\] .* key key<fry>\[\]"),
    ],
)
def test_the_first_leaf_that_differs_is_named(tmp_path, params, impl, message):
    """Shape, name, a leaf too many and the kind of key are compared, in order of the leaves."""
    saved(tmp_path, state_at(5, {"v": jnp.ones(4), "w": jnp.ones((2, 3))}))
    like = state_at(0, {name: jnp.ones(shape) for name, shape in params.items()}, impl)
    with pytest.raises(ValueError, match=rf"Checkpoint 5 in .*state has {message}"):
        restored(tmp_path, like)
    assert not like.params["v"].is_deleted()


def test_another_dtype_is_named(tmp_path):
    """Nothing is cast: a float32 leaf does not fit a bfloat16 checkpoint."""
    saved(tmp_path, state_at(5, {"w": jnp.ones(3, jnp.bfloat16)}))
    with pytest.raises(ValueError, match=r"params/w float32\[3\] where .* bfloat16\[3\]"):
        restored(tmp_path, state_at(0, {"w": jnp.ones(3)}))


def test_missing_leaves_at_the_end_are_named(tmp_path):
    """A checkpoint that stops before the state does differs in the first leaf it lacks."""
    saved(tmp_path, state_at(5, {"w": jnp.ones(3)}))
    like = state_at(0, {"w": jnp.ones(3)}, model_state=jnp.ones(2))
    with pytest.raises(ValueError, match=r"model_state float32\[2\] where it has no leaf"):
        restored(tmp_path, like)


def test_a_further_state_of_another_model_is_refused(tmp_path):
    """The model is compared also where the state is used as it is."""
    saved(tmp_path, state_at(5, {"w": jnp.ones(3)}))
    with pytest.raises(ValueError, match="another model"):
        restored(tmp_path, state_at(7, {"w": jnp.ones(4)}))


def test_eight_devices_to_four(tmp_path):
    """Each leaf is put where the given state has it, on whatever devices it was saved."""

    def on(num, value):
        mesh = jax.make_mesh((num,), ("d",), devices=jax.devices()[:num])
        sharding = jax.sharding.NamedSharding(mesh, jax.P("d"))
        return state_at(0, {"w": jax.device_put(value, sharding)})

    want = on(8, jnp.arange(16.0))._replace(step=jnp.int32(2))
    saved(tmp_path, want)
    like = on(4, jnp.zeros(16))
    shardings = jax.tree.map(lambda x: x.sharding, like)
    got = restored(tmp_path, like)
    assert_same(got, want)
    assert jax.tree.map(lambda x: x.sharding, got) == shardings


def test_a_donated_state_is_saved_as_it_was(tmp_path):
    """Steps that reuse the buffers while the write goes on do not reach the checkpoint."""
    advance = jax.jit(lambda w: w + 1, donate_argnums=0)
    for number in (1, 2, 3):
        state = state_at(number, jnp.zeros((500, 500)))
        folder = _disk.writable(tmp_path / str(number))
        with _disk.open_manager(folder, 9, None) as manager:
            _disk.save(manager, number, state, {})
            params = state.params
            for _ in range(10):
                params = advance(params)
        assert not np.any(restored(folder, state_at(0, jnp.ones((500, 500)))).params)


def test_an_error_of_the_caller_waits_for_the_write(tmp_path):
    """What is being saved is complete when the error arrives, a lost connection of theirs too."""
    state = state_at(1, jnp.ones(3))
    with pytest.raises(ConnectionError, match="data server"):
        with _disk.open_manager(_disk.writable(tmp_path), 9, None) as manager:
            _disk.save(manager, 1, state, {})
            raise ConnectionError("data server")
    assert (tmp_path / "1").exists()


def test_unreadable_folders_are_set_aside(tmp_path, capsys):
    """The newest readable checkpoint counts; what cannot be read is kept under another name."""
    saved(tmp_path, *(state_at(n, jnp.full(3, float(n))) for n in (1, 2)))
    shutil.copytree(tmp_path / "2", tmp_path / "7")
    shutil.rmtree(tmp_path / "7" / "state")
    got = restored(tmp_path, state_at(0, jnp.zeros(3)))
    np.testing.assert_array_equal(got.params, np.full(3, 2.0, np.float32))
    assert not (tmp_path / "7").exists()
    (aside,) = tmp_path.glob("unreadable-7-*")
    assert (aside / "layout").exists()
    assert "Checkpoint 7 cannot be read" in capsys.readouterr().err
    saved(tmp_path, state_at(7, jnp.full(3, 7.0)))
    assert restored(tmp_path, state_at(0, jnp.zeros(3))).step == 7


def test_a_state_freed_for_an_unreadable_checkpoint_is_replaced(tmp_path):
    """Where a further checkpoint turns out unreadable, the result still has values."""
    saved(tmp_path, state_at(1, jnp.ones(3)), state_at(9, jnp.ones(3)))
    shutil.rmtree(tmp_path / "9" / "state")
    got = restored(tmp_path, state_at(4, jnp.zeros(3)))
    assert got.step == 1
    np.testing.assert_array_equal(got.params, np.ones(3, np.float32))


def test_a_folder_with_unreadable_checkpoints_only_is_refused(tmp_path):
    """A run whose checkpoints cannot be read does not silently start from nothing."""
    saved(tmp_path, state_at(2, jnp.zeros(3)))
    (tmp_path / "2" / "layout" / "metadata").unlink()
    with pytest.raises(ValueError, match=r"with \[2\], none of them readable"):
        restored(tmp_path, state_at(0, jnp.zeros(3)))
    assert (tmp_path / "2" / "state").exists()


def test_a_torn_last_line_is_left_out(tmp_path):
    """Records up to the given step are read; a line that a kill cut short is not."""
    records = [{"step": 1, "a": float("inf")}, {"step": 2, "a": 0.1}, {"step": 3, "a": 0.2}]
    text = "".join(map(_disk.line, records))
    for cut in range(len(_disk.line(records[-1]))):
        (tmp_path / "history.jsonl").write_text(text[: len(text) - 1 - cut])
        assert _disk.read_history(tmp_path, 3) == records[: 3 if cut == 0 else 2]
    with _disk.open_history(tmp_path, records[:1]) as file:
        file.write(_disk.line(records[1]))
    assert _disk.read_history(tmp_path, 9) == records[:2]
    assert _disk.read_history(tmp_path, 1) == records[:1]


@contextlib.contextmanager
def no_file_may_grow():
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_a_folder_that_takes_names_but_no_content_is_refused(tmp_path):
    """As on a full disk, a file can be made there and not be filled: that is seen by writing."""
    with no_file_may_grow(), pytest.raises(ValueError, match="can be written, got .*too large"):
        _disk.writable(tmp_path)
    assert _disk.writable(tmp_path) == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_for_the_state_is_refused(tmp_path, monkeypatch):
    """The message has both sizes; a mount that does not know its size is taken."""
    state = state_at(0, {"w": jnp.ones(100)})  # momentum as large, a step and a key
    usage = types.SimpleNamespace(total=10_000, free=811)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match=r"\(811 bytes are free, a checkpoint has 812\)"):
        _disk.writable(tmp_path, state)
    usage.free = 812
    _disk.writable(tmp_path, state)
    usage.total = usage.free = 0
    _disk.writable(tmp_path, state)
