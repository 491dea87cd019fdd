"""The language model on a mesh: how it lies there, how it trains, what moves between devices."""

import concurrent.futures
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import collectives, costs, harness, lm
from jaxkit import _tree, spectral, train

KINDS = {"auto": AxisType.Auto, "explicit": AxisType.Explicit}
DATA, FULLY, TENSOR = LAYOUTS = ("data parallel", "fully sharded", "tensor parallel")
# Which axis of a kernel lies over the mesh axis "model": the outputs of a product, or the inputs
# of the one that takes these, so that a block sums over the devices twice.
_MODEL_AXES = dict.fromkeys(("query", "key", "value", "gate", "up", "head"), 1)
_MODEL_AXES |= dict.fromkeys(("out", "down", "embed"), 0)
OURS, MUON = "spectral.symmetry_compatible", "optax.contrib.muon"
RATE = 3e-3
MAKERS = {
    OURS: lambda sharding: spectral.symmetry_compatible(RATE, sharding=sharding),
    MUON: lambda sharding: optax.contrib.muon(RATE),
}
ONE, REVERSED = "one device", "one device, rows of each batch reversed"


class Size(NamedTuple):
    """How large the model and its training are."""

    width: int
    layers: int
    context: int
    batch: int
    steps: int
    dtype: str = "float32"  # of the computation

    def __str__(self):
        return f"{self.layers} x {self.width}, batch {self.batch} x {self.context}"


class Run(NamedTuple):
    """A training that is ready to start."""

    step: Any  # (state, windows) -> (state, metrics)
    state: train.TrainState
    windows: list[jax.Array]  # [batch, context + 1] of each step
    tx: optax.GradientTransformation


def size_in(sizes, context):
    """Returns the size of a form, with the dtype of the context."""
    return sizes[context.form]._replace(dtype=jnp.dtype(context.dtype).name)


def on_one_device(size):
    """Returns the run on JAX's default device."""
    loss_fn, params, windows = _problem(size)
    return _run(loss_fn, params, list(windows), MAKERS[OURS](None))


def on_mesh(size, layout, kind, devices=None, method=OURS):
    """Returns the run in a layout on all devices of all processes, or on the given ones.

    Start and batches are those of one device.
    """
    loss_fn, params, windows = _problem(size)
    devices = jax.devices() if devices is None else devices
    model = 1 if layout != TENSOR else 4 if len(devices) % 4 == 0 else len(devices)
    sizes, types = (len(devices) // model, model), (KINDS[kind],) * 2
    mesh = jax.make_mesh(sizes, ("data", "model"), axis_types=types, devices=devices)
    shardings = jax.tree.unflatten(
        jax.tree.structure(params),
        [
            NamedSharding(mesh, _spec(layout, path, x.shape, len(devices)))
            for path, x in _tree.leaves_with_paths(params)
        ],
    )

    def place(x, sharding):
        return jax.make_array_from_callback(x.shape, sharding, lambda i: np.asarray(x)[i])

    rows = NamedSharding(mesh, PartitionSpec("data"))
    # A process needs its share of each batch, no more.
    own = np.split(np.asarray(windows), jax.process_count(), axis=1)[jax.process_index()]
    windows = [jax.make_array_from_process_local_data(rows, x) for x in own]
    if kind == "explicit":  # flax's layers are written for automatic axes
        loss_fn = jax.sharding.auto_axes(loss_fn, out_sharding=NamedSharding(mesh, PartitionSpec()))
    tx = MAKERS[method](shardings if kind == "auto" else None)
    return _run(loss_fn, jax.tree.map(place, params, shardings), windows, tx)


def steps(size):
    """Yields a step of ours and of the rival on one device."""
    loss_fn, params, windows = _problem(size)
    for name, make in MAKERS.items():
        estimator, tokens = train.backprop(loss_fn), size.batch * size.context
        yield costs.training_step(name, estimator, make(None), params, windows[0], tokens)


def compile_step(run):
    """Returns the compiled step; it refuses a state that does not lie where the first one lay."""
    return jax.jit(run.step, donate_argnums=0).lower(run.state, run.windows[0]).compile()


def losses(run, step):
    """Trains with the compiled step; returns the state at the end and the loss of each step."""
    state, found = run.state, []
    for windows in run.windows:
        state, metrics = step(state, windows)
        found.append(metrics["loss"])
    return state, [float(loss) for loss in found]


def state_bytes(state):
    """Returns the bytes of the optimizer's state on one device."""
    shards = [x.addressable_shards[0].data for x in jax.tree.leaves(state.opt_state)]
    return sum(x.nbytes for x in shards)


def references(size):
    """Returns the losses of one device, and those with the rows of each batch reversed."""
    run, again = on_one_device(size), on_one_device(size)
    step = compile_step(run)
    again = again._replace(windows=[x[::-1] for x in again.windows])
    return losses(run, step)[1], losses(again, step)[1]


def measure(size, layouts, kinds, rounds):
    """Trains in each layout and kind of axes on all devices of this process.

    Returns ``(runs, refused)`` for JSON. ``runs`` holds losses, bytes of the optimizer's state on
    a device, bytes moved by the step and, fully sharded, by the update alone (else None), and the
    seconds of ``rounds`` steps; ``refused`` says why a rival does not run.
    """
    size = Size(*size)
    one, backward = references(size)
    whole = state_bytes(on_one_device(size).state)
    runs = {ONE: {"losses": one, "state": whole}, REVERSED: {"losses": backward, "state": whole}}
    jobs = [(layout, kind, method) for layout in layouts for kind in kinds for method in MAKERS]
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        built = dict(zip(jobs, pool.map(functools.partial(_build, size), jobs), strict=True))
    refused = {}
    for layout in layouts:
        calls = {}
        for job, parts in built.items():
            name = name_of(*job)
            if isinstance(parts, str):
                refused[name] = parts
            elif parts and job[0] == layout:
                runs[name], calls[name] = _train(*parts)
        for name, seconds in harness.alternate(calls, range(rounds)).items():
            runs[name]["seconds"] = seconds
    return runs, refused


def name_of(layout, kind, method=OURS):
    """Returns the name of a run."""
    return f"{method}, {layout}, {kind} axes"


def _train(run, step, update):
    """Returns what a run shows but for its time, and a function that does one more step."""
    per_device = state_bytes(run.state)
    state, found = losses(run, step)
    states = [state]

    def call():
        states[0], metrics = step(states[0], run.windows[0])
        return metrics

    return {
        "losses": found,
        "state": per_device,
        "step": collectives.collective_bytes(step),
        "update": update and collectives.collective_bytes(update),
    }, call


def _build(size, job):
    """Returns ``(run, compiled step, compiled update or None)``, or a text on why there is none.

    Both kinds of axes move the same; of a rival only whether it runs is to be seen in both.
    """
    layout, kind, method = job
    run = on_mesh(size, layout, kind, method=method)
    params, opt_state = run.state.params, run.state.opt_state
    try:
        lowered = jax.jit(run.tx.update).lower(params, opt_state, params)
    except Exception as error:
        if method == OURS:
            raise
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    if method != OURS and kind != "auto":
        return None
    has_update = layout == FULLY and kind == "auto"
    return run, compile_step(run), lowered.compile() if has_update else None


@functools.cache
def _problem(size):
    examples = size.batch * size.steps
    loss_fn, params, windows = lm.one_batch(
        size.width, size.layers, size.context, examples, jnp.dtype(size.dtype)
    )
    return loss_fn, params, windows.reshape(size.steps, size.batch, size.context + 1)


def _run(loss_fn, params, windows, tx):
    step = train.make_step(train.backprop(loss_fn), tx)
    return Run(step, train.create(params, tx, jax.random.key(0)), windows, tx)


def _spec(layout, path, shape, count):
    """Returns the spec of a leaf; what does not divide is whole on each device."""
    if layout == FULLY:
        return PartitionSpec("data") if shape[0] % count == 0 else PartitionSpec()
    axis = next((x for name, x in _MODEL_AXES.items() if name in path.split("/")), None)
    if layout == DATA or axis is None:
        return PartitionSpec()
    return PartitionSpec(*[None] * axis, "model")
