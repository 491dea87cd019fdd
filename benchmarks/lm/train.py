"""Trains a language model of bytes: one file to copy and to start a project of your own from.

The model and the text are those of the benchmarks. All else that a run needs is here, in the order
in which it is needed: processes, mesh, data, parameters, optimizer, estimator, loop.
"""

import argparse
import functools
import math
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import lm, text
from jaxkit import blr, denoise, spectral, train, zo

HELP = """
A mesh has axes among data (the batch), fsdp (the batch, and the rows of matrices) and model (the
columns of matrices, the rows of those behind). An axis that does not divide a side of a matrix
leaves that side whole. Without --mesh all devices are on data.

Several processes run the same command, each on its share of the devices. They join by
jax.distributed.initialize under srun or mpirun, with several hosts in TPU_WORKER_HOSTNAMES, with
--distributed where JAX finds the others by itself, as on a TPU, and anywhere with
JAX_COORDINATOR_ADDRESS=host:port JAX_NUM_PROCESSES=n JAX_PROCESS_ID=i in the environment.

Ctrl-C and SIGTERM stop cleanly; with --checkpoint the same command goes on where it stopped.
"""
CORPORA = ("help_topics", "library_sources")
AXES = ("data", "fsdp", "model")
DTYPES = {"float32": jnp.float32, "bf16": jnp.bfloat16}
RATES = {"symmetry_compatible": 0.02, "muon": 0.02, "normuon": 0.02, "hybrid": 0.02}
RATES |= {"adamw": 3e-3, "lion": 1e-3, "gblr": 0.5}


def parse(argv):
    """Returns the flags and their parser, which is also for errors that are found later."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lm.train",
        description=__doc__.split("\n\n")[0],
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--text", default=CORPORA[0], help=f"{' or '.join(CORPORA)} (of Python), or a file")
    add("--estimator", default="backprop", choices=["backprop", "zo", "blr"], help="of gradients")
    add("--samples", type=_count, help="directions of zo, 8 by default; draws of blr, 1")
    add("--optimizer", default="symmetry_compatible", choices=RATES)
    add("--denoise", default="off", choices=["off", *"123", "auto"], help="order, or auto")
    add("--gain", type=float, help="of --denoise 1, 2 or 3; default 0.1")
    add("--mesh", type=_mesh, metavar="AXIS=N,...", help="such as data=4,model=2")
    add("--dtype", default="float32", choices=DTYPES, help="of the computation; state is float32")
    add("--steps", type=_count, default=300)
    add("--batch", type=_count, default=32, help="windows of a step, of all devices together")
    add("--accumulate", type=_count, default=1, help="slices of a batch that follow each other")
    add("--context", type=_count, default=128)
    add("--width", type=_count, default=128)
    add("--layers", type=_count, default=4)
    add("--heads", type=_count, default=4)
    add("--lr", type=float, help="learning rate; default: one to start from with the optimizer")
    add("--seed", type=int, default=0)
    add("--checkpoint", metavar="DIR", help="save here, and go on from what is here")
    add("--every", type=_count, metavar="N", help="steps from one checkpoint to the next")
    add("--log", type=_count, default=50, metavar="N", help="steps from line to line")
    add("--distributed", action="store_true", help="join other processes; see below")
    args = parser.parse_args(argv)
    if (args.estimator == "blr") != (args.optimizer == "gblr"):
        parser.error("--estimator blr and --optimizer gblr need each other, got one of them")
    if args.samples and args.estimator == "backprop":
        parser.error("--samples needs --estimator zo or blr, got backprop")
    if args.gain is not None and args.denoise in ("off", "auto"):
        parser.error(f"--gain needs --denoise 1, 2 or 3, got {args.denoise}")
    if args.every and not args.checkpoint:
        parser.error("--every needs --checkpoint")
    if args.width % args.heads:
        parser.error(f"--heads must divide --width {args.width}, got {args.heads}")
    return args, parser


def _count(word):
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of at least 1, got {word!r}")
    return int(word)


def _mesh(word):
    pairs = [pair.partition("=") for pair in word.split(",")]
    sizes = {axis: _count(size) for axis, _, size in pairs}
    if len(sizes) < len(pairs) or not set(sizes) <= set(AXES):
        raise argparse.ArgumentTypeError(f"must name {', '.join(AXES)} at most once, got {word!r}")
    return sizes


def join(args):
    """Joins the other processes, if the flags or the environment say that there are some."""
    env, names = os.environ, ("num_processes", "process_id")
    given = {x: int(env[f"JAX_{x.upper()}"]) for x in names if f"JAX_{x.upper()}" in env}
    counts = {env.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")}
    several = counts != {"1"} or "," in env.get("TPU_WORKER_HOSTNAMES", "")
    if args.distributed or several or "JAX_COORDINATOR_ADDRESS" in env:
        jax.distributed.initialize(**given)


def make_mesh(args, parser):
    """Returns the mesh, with automatic axes, and those of its axes that split a batch."""
    sizes = args.mesh or {"data": jax.device_count()}
    total = math.prod(sizes.values())
    if total > jax.device_count() or jax.process_count() > 1 and total < jax.device_count():
        parser.error(f"--mesh must fit the {jax.device_count()} devices, got {total}")
    auto, devices = (AxisType.Auto,) * len(sizes), jax.devices()[:total]
    mesh = jax.make_mesh(tuple(sizes.values()), tuple(sizes), auto, devices=devices)
    split = tuple(axis for axis in sizes if axis != "model")
    slices = args.accumulate * (2 if args.denoise == "auto" else 1)
    parts = slices * math.prod(sizes[axis] for axis in split)
    if args.batch % parts:
        told = f"{parts}, {slices} slices of --accumulate and --denoise auto times the devices"
        parser.error(f"--batch must divide by {told} of --mesh that share it, got {args.batch}")
    return mesh, split


def read(args, parser):
    """Returns the training tokens and the held-out windows, ``[batches, batch, context + 1]``."""
    is_known = args.text in CORPORA
    if not is_known and not os.path.isfile(args.text):
        parser.error(f"--text must be {', '.join(CORPORA)} or a file, got {args.text!r}")
    tokens = getattr(text, args.text)()[0] if is_known else np.fromfile(args.text, np.uint8)
    tokens, held_out = text.split(tokens, args.context)
    if len(held_out) < args.batch:
        parser.error(f"--text must hold one --batch in its last tenth, got {len(held_out)} windows")
    # Evenly spread, since neighboring windows are of one subject.
    number = min(len(held_out) // args.batch, 8) * args.batch
    held_out = held_out[:: len(held_out) // number][:number]
    return tokens, held_out.reshape(-1, args.batch, args.context + 1).astype(np.int32)


def shardings(shapes, mesh, axes=AXES):
    """Returns how each parameter lies on those of ``axes`` that the mesh has."""

    def leaf(path, x):
        if x.ndim < 2:
            return NamedSharding(mesh, PartitionSpec())
        # Columns first, then rows: between the two nothing has to be exchanged.
        is_second = any(getattr(part, "key", None) in ("out", "down", "embed") for part in path)
        wanted = ("model", "fsdp") if is_second else ("fsdp", "model")
        spec = (
            axis if axis in axes and size % mesh.shape.get(axis, size + 1) == 0 else None
            for axis, size in zip(wanted, x.shape, strict=True)
        )
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(leaf, shapes)


def make_optimizer(args, params, tokens):
    constant = args.steps * 6 // 10
    rate = RATES[args.optimizer] if args.lr is None else args.lr
    rate = optax.linear_schedule(rate, 0.0, args.steps - constant, constant)
    if args.optimizer == "gblr":  # each token counts once; a longer run takes a larger b2
        tx = blr.gblr(rate, ess=tokens, b2=0.999)
    elif hasattr(spectral, args.optimizer):
        tx = getattr(spectral, args.optimizer)(rate, sharding=params)
    else:
        tx = getattr(optax, args.optimizer)(rate)
    if args.denoise == "off":
        return tx
    if args.denoise == "auto":
        return optax.chain(denoise.denoise("auto", order=1), tx)
    gain = 0.1 if args.gain is None else args.gain
    return optax.chain(denoise.denoise(gain, order=int(args.denoise)), tx)


def make_estimator(args, loss_fn):
    estimator = train.backprop(loss_fn)
    if args.estimator == "zo":
        # bf16 has 8 bits: a smaller radius is lost in rounding.
        mu = 1e-2 if args.dtype == "bf16" else 1e-3
        estimator = zo.gradient_estimator(loss_fn, num_samples=args.samples or 8, mu=mu)
    if args.accumulate > 1:
        estimator = train.accumulate(estimator, args.accumulate)
    if args.estimator == "blr":
        estimator = blr.gradient_estimator(estimator, num_samples=args.samples or 1)
    return estimator if args.denoise == "off" else denoise.gradient_estimator(estimator)


def main(argv=None):
    """Trains as the flags say, and returns the last state and the history."""
    args, parser = parse(argv)
    join(args)
    mesh, split = make_mesh(args, parser)
    tokens, held_out = read(args, parser)
    width, dtype = args.width, DTYPES[args.dtype]
    model = lm.Decoder(256, width, 4 * width, args.layers, args.heads, dtype)
    init = functools.partial(model.init, jax.random.key(args.seed), held_out[0, :1, :-1])
    shapes = jax.eval_shape(init)
    whole = shardings(shapes, mesh, axes=("model",))

    def loss_fn(params, windows, key):
        del key
        # What fsdp has split comes together where it is used, and the gradients part again.
        params = jax.lax.with_sharding_constraint(params, whole)
        return lm.loss(model, params, windows)

    params = jax.jit(init, out_shardings=shardings(shapes, mesh))()
    tx = make_optimizer(args, params, len(tokens))
    step = train.make_step(make_estimator(args, loss_fn), tx)
    state = train.create(params, tx, jax.random.key(args.seed))
    del params  # the state has a copy

    def place(x, *axes):  # each process hands over what its devices hold
        sharding = NamedSharding(mesh, PartitionSpec(*axes, split))
        return jax.make_array_from_callback(x.shape, sharding, lambda part: x[part])

    say = functools.partial(print, flush=True) if jax.process_index() == 0 else lambda line: None
    marks = []  # steps and seconds: of the first two batches, then of each printed line

    def batch(index):
        if len(marks) < 2:
            marks.append((index, time.perf_counter()))
        draw = np.random.default_rng((args.seed, index))
        starts = draw.integers(len(tokens) - args.context, size=(args.batch, 1))
        return place(tokens[starts + np.arange(args.context + 1)].astype(np.int32))

    def mean_loss(params, batches):
        return jnp.mean(jax.lax.map(functools.partial(loss_fn, params, key=None), batches))

    held_out, judge = place(held_out, None), jax.jit(mean_loss)

    def report(state):
        now, (done, since) = time.perf_counter(), marks[-1]
        rate = (int(state.step) - done) * args.batch * args.context / (now - since)
        loss = float(judge(state.params, held_out))
        marks.append((int(state.step), time.perf_counter()))
        say(f"step {state.step}: held-out loss {loss:.4f}, {rate:,.0f} tokens per second")
        return {"held_out_loss": loss, "tokens_per_second": rate}

    told = {"log_every": args.log, "eval_every": args.log, "eval_fn": report}
    saved = {"checkpoint_dir": args.checkpoint, "checkpoint_every": args.every}
    state, history = train.loop(step, state, batch, num_steps=args.steps, **told, **saved)
    for record in history[-1:]:
        say(", ".join(f"{name} {value:.5g}" for name, value in record.items()))
    return state, history


if __name__ == "__main__":
    main()
