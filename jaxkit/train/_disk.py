"""What a run keeps on disk: orbax checkpoints and the history of its metrics."""

import contextlib
import itertools
import json
import math
import os
import pathlib
import shutil
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import _tree
from jaxkit.train import _host


def writable(checkpoint_dir, state=None):
    """Returns the absolute folder after creating it and writing to it; it has room for ``state``.

    If one process cannot write, all raise: else the others would wait for it.
    """
    folder, error = pathlib.Path(checkpoint_dir).absolute(), None  # orbax takes no relative paths
    wanted = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:  # a full disk takes a name, but no content
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        disk = shutil.disk_usage(folder)
        if 0 < disk.total and disk.free < wanted:  # a mount without a size says zero
            raise OSError(f"{disk.free} bytes are free, a checkpoint has {wanted}")
    except OSError as caught:
        error = caught
    if _host.largest(error is not None):
        raise ValueError(
            f"checkpoint_dir must be a folder that can be written, got {str(folder)!r} "
            f"({error or 'refused in another process'})."
        ) from error
    return folder


@contextlib.contextmanager
def open_manager(folder, keep, score):
    """Yields an orbax manager that keeps the last ``keep`` checkpoints and the best one.

    The best has the lowest ``score`` of the metrics saved with it; without a score none is best.
    """
    import orbax.checkpoint as ocp

    policies = ocp.checkpoint_managers
    preserved = [policies.LatestN(keep)]
    if score is not None:
        preserved.append(
            policies.BestN(
                get_metric_fn=score, reverse=True, n=1, keep_checkpoints_without_metrics=False
            )
        )
    options = ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy(preserved),
        best_fn=score,
        cleanup_tmp_directories=keep is not None,  # a reader leaves those of a running writer
    )
    manager, lost = ocp.CheckpointManager(folder, options=options), False
    try:
        yield manager
    except ConnectionError as error:
        lost = isinstance(error.__cause__, jax.errors.JaxRuntimeError)  # else it is the caller's
        raise
    finally:
        if not lost:  # closing waits until all processes have written
            manager.close()


def best_score(manager, score):
    """Returns the lowest score among the checkpoints, ``inf`` if none has one."""
    found = (manager.metrics(number) for number in manager.all_steps())
    return min((score(metrics) for metrics in found if metrics), default=math.inf)


def save(manager, number, state, metrics):
    """Starts to write ``state`` as checkpoint ``number``, unless that is there already."""
    import orbax.checkpoint as ocp

    if number in manager.all_steps():
        return
    finite = jax.device_get(_finite(state.params))
    for (path, _), good in zip(_tree.leaves_with_paths(state.params), finite, strict=True):
        if not good:
            raise FloatingPointError(
                f"params/{path} is not finite after {number} steps, though every loss is."
            )
    arrays, layout = _flatten(state)
    items = ocp.args.Composite(
        state=ocp.args.StandardSave(arrays), layout=ocp.args.JsonSave(layout)
    )
    manager.save(number, args=items, metrics=metrics, force=True)


def restore(manager, state, numbers=None):
    """Returns the state of the newest readable checkpoint, or ``state`` if that is as far.

    Leaves get the shardings of ``state``, whose buffers are freed first. A folder that cannot be
    read is set aside under another name, if an older one can. With ``numbers`` only these
    checkpoints count, however far ``state`` is.
    """
    import orbax.checkpoint as ocp

    arrays, wanted = _flatten(state)
    # An uncommitted leaf goes through numpy and stays uncommitted: else jit compiles again.
    targets = [
        jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        if x.committed
        else np.empty(x.shape, x.dtype)
        for x in arrays
    ]
    start, unreadable = int(state.step) if numbers is None else -1, {}
    for number in sorted(manager.all_steps() if numbers is None else numbers, reverse=True):
        try:
            items = ocp.args.Composite(layout=ocp.args.JsonRestore())
            found = manager.restore(number, args=items).layout
            # Freed once, the state is gone: then an older checkpoint has to do.
            if found == wanted and (number > start or arrays[0].is_deleted()):
                for x in arrays:
                    if not x.is_deleted():
                        x.delete()
                items = ocp.args.Composite(state=ocp.args.StandardRestore(targets))
                state = _unflatten(state, manager.restore(number, args=items).state)
        except Exception as error:
            if jax.process_count() > 1:
                raise  # processes must not resume from different checkpoints
            unreadable[number] = error
            continue
        for want, have in itertools.zip_longest(wanted, found):
            if want != have:
                raise ValueError(
                    f"Checkpoint {number} in {manager.directory} is of another model: state has "
                    f"{_describe(want)} where it has {_describe(have)}."
                )
        for bad in unreadable:
            aside = tempfile.mkdtemp(prefix=f"unreadable-{bad}-", dir=manager.directory)
            os.replace(manager.directory / str(bad), aside)
            print(f"Checkpoint {bad} cannot be read; moved to {aside}.", file=sys.stderr)
            manager.reload()
        return state
    if unreadable:
        raise ValueError(
            f"checkpoint_dir must hold a readable checkpoint or none, got {manager.directory} "
            f"with {sorted(unreadable)}, none of them readable."
        ) from unreadable[max(unreadable)]
    return state


def read_history(folder, last):
    """Returns the records up to step ``last``; a torn last line is left out."""
    history, path = [], folder / "history.jsonl"
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            record = json.loads(line)
        except ValueError:
            break
        if record["step"] <= last:
            history.append({k: v if k == "step" else float(v) for k, v in record.items()})
    return history


def open_history(folder, history):
    """Returns the history file, open for more lines, after writing ``history`` to it at once."""
    path = folder / "history.jsonl"
    draft = path.with_suffix(".tmp")
    draft.write_text("".join(map(line, history)))
    os.replace(draft, path)
    return path.open("a")


def line(record):
    """Returns a record as a line of JSON, in which numbers that JSON lacks are strings."""
    return json.dumps({k: v if math.isfinite(v) else str(v) for k, v in record.items()}) + "\n"


@jax.jit
def _finite(params):
    """Says for each leaf whether all of it is finite."""
    return [
        jnp.isfinite(x).all() if jnp.issubdtype(x.dtype, jnp.inexact) else True
        for x in jax.tree.leaves(params)
    ]


def _is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _flatten(state):
    """Returns the arrays that orbax can store, and ``[path, shape, dtype]`` of each leaf.

    The dtype of a typed key names its implementation. Orbax stores no empty arrays.
    """
    leaves = _tree.leaves_with_paths(state)
    layout = [[path, list(x.shape), str(x.dtype)] for path, x in leaves]
    return [jax.random.key_data(x) if _is_key(x) else x for _, x in leaves if x.size], layout


def _unflatten(state, arrays):
    """Returns ``state`` with the values that :func:`_flatten` took from it."""
    arrays = iter(arrays)

    def value(x):
        if not x.size:
            return x
        new = jnp.asarray(next(arrays))
        return jax.random.wrap_key_data(new, impl=jax.random.key_impl(x)) if _is_key(x) else new

    return jax.tree.map(value, state)


def _describe(entry):
    """Returns ``path dtype[shape]`` of an entry of the layout."""
    return "no leaf" if entry is None else f"{entry[0]} {entry[2]}{entry[1]}"
