"""Runs of ``train.loop`` on the language model, by the tests and by processes that they start."""

import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.scale import layouts
from jaxkit import train

SIZE = layouts.Size(width=16, layers=1, context=8, batch=8, steps=8)


def on_mesh(devices=None):
    """Returns the fully sharded run on all devices, or on the given ones."""
    return layouts.on_mesh(SIZE, layouts.FULLY, "auto", devices)


def go_on(run, folder=None, num_steps=SIZE.steps, batches=None, **options):
    """Returns the parameters at the end, the losses of all steps and the first one done here."""
    asked = []

    def batch(index):
        asked.append(index)
        return (batches or run.windows.__getitem__)(index)

    state, history = train.loop(
        run.step,
        train.create(run.state.params, run.tx, jax.random.key(0)),
        batch,
        num_steps=num_steps,
        checkpoint_dir=folder,
        log_every=1,
        progress=False,
        **options,
    )
    return state.params, [record["loss"] for record in history], asked[0]


def until_killed(folder, hold):
    """Trains with checkpoints; process 1 waits in step ``hold`` for its end."""
    run = on_mesh()

    def batches(index):
        if index == hold and jax.process_index() == 1:
            pathlib.Path(folder, "ready").touch()
            time.sleep(300)
        return run.windows[index]

    go_on(run, folder, batches=batches, checkpoint_every=2)


def several(folders, mixed):
    """Goes on in each folder; then meets a NaN in one share, and a folder only one can write."""
    run = on_mesh()
    found = {"resumed": [go_on(run, folder)[1:] for folder in folders]}
    for name, call in (
        ("nan", lambda: nan_in_the_last_share(jax.devices())),
        ("folder", lambda: go_on(run, mixed[jax.process_index()])),
    ):
        try:
            call()
        except (FloatingPointError, ValueError) as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


def nan_in_the_last_share(devices, bad_step=3):
    """Trains on batches of which one holds a single NaN, on the last of the devices."""
    types = (AxisType.Auto,)
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=types, devices=devices)
    rows, tx = NamedSharding(mesh, PartitionSpec("data")), optax.sgd(0.1)
    step = train.make_step(train.backprop(lambda w, x, key: jnp.mean((x - w) ** 2)), tx)

    def batches(index):
        x = np.ones((8, 1), np.float32)
        x[-1] = np.nan if index == bad_step else 1
        return jax.make_array_from_callback(x.shape, rows, lambda i: x[i])

    params = jax.device_put(np.zeros((8, 1), np.float32), NamedSharding(mesh, PartitionSpec()))
    state = train.create(params, tx, jax.random.key(0))
    train.loop(step, state, batches, num_steps=6, log_every=5, progress=False)
