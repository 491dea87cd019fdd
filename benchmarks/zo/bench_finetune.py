"""A small decoder, pretrained on Python sources, adapts to English by forward passes only."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import harness, lm, text
from benchmarks.zo import training
from jaxkit import train, zo

ON_REQUEST = True


class Size(NamedTuple):
    """A decoder, and the steps of both trainings; ``probes`` are two-sided."""

    width: int
    mlp: int
    layers: int
    context: int
    batch: int
    pretraining: int
    steps: int
    probes: int
    held_out: int  # windows

    def __str__(self):
        return (
            f"{self.layers} x {self.width}, batch {self.batch} x {self.context}, "
            f"{self.pretraining} + {self.steps} steps, {2 * self.probes} forward passes, "
            "node and SZO one more"
        )


SIZES = {
    "smoke": Size(8, 16, 1, 8, 4, 3, 3, 1, 4),
    "short": Size(32, 64, 1, 32, 16, 400, 400, 8, 128),
    "full": Size(256, 1024, 5, 128, 16, 3000, 3000, 8, 512),
}
SEEDS = {"smoke": (1, 2), "short": range(1, 6), "full": range(1, 11)}
TUNE_SEEDS = (1001, 1002)  # never reported
SOURCES = 1_000_000  # bytes; they end before the help texts, which are a source file too
PRETRAINING_RATE = 1e-2  # of Adam
NODE, MEZO, BACKPROP, BEFORE = "node, per example", "isotropic (MeZO)", "backprop", "before"
DIRECTIONS = {
    "SZO 1/2, centered": zo.activation(0.5, floor=0.0),
    "low rank 1": zo.low_rank(1),
    MEZO: zo.gaussian(),
}
OURS = (*list(DIRECTIONS)[:2], NODE)
SMOKE = (NODE, MEZO, BACKPROP)  # the programs of the others take long to compile
GRIDS = {
    **dict.fromkeys(DIRECTIONS, (1e-3, 3e-3, 1e-2, 3e-2)),
    NODE: (3e-4, 1e-3, 3e-3, 1e-2),
    BACKPROP: (3e-3, 1e-2, 3e-2, 1e-1),
}
ABOUT = {"case": "fine-tuning, sources to English", "better": "down"}


def run(context):
    size, seeds = SIZES[context.form], SEEDS[context.form]
    used = SMOKE if context.form == "smoke" else GRIDS
    rates = {name: np.repeat(training.rate_of(context, name), len(seeds)) for name in used}
    found = _race(size, rates, seeds, context.track, context.dtype)
    yield from harness.versus(
        [name for name in OURS if name in found],
        {name: result["loss"] for name, result in found.items()},
        **ABOUT,
        size=str(size),
        metric="validation loss",
        unit="nats per byte",
        seeds=seeds,
    )
    del found[BEFORE]
    for name, result in found.items():
        yield harness.loss_curve(ABOUT["case"], name, result["train"], "nats per byte")
    if context.form != "full":  # a toy size says nothing of memory, and compiling takes long
        return
    memory = {name: functools.partial(_memory, size, name, context.dtype) for name in GRIDS}
    yield from harness.versus(
        OURS,
        {name: [value] for name, value in harness.in_pairs(memory, context.track).items()},
        **ABOUT,
        size=str(size),
        metric="memory of a step",
        unit="MiB",
    )


def tune(context):
    size = SIZES[context.form]
    return training.search(
        lambda rates, seeds: _race(size, rates, seeds, context.track),
        GRIDS,
        TUNE_SEEDS,
        lambda result: result["loss"],
        criterion="lowest mean validation loss, nats per byte, after the last step",
        size=str(size),
    )


def steps(context):
    """Yields the steps of all methods, ours and MeZO first."""
    size = SIZES[context.form]
    tokens = size.batch * size.context
    windows = jnp.asarray(_windows(size, text.help_topics()[0], 1, [0])[0, 0])
    params = _model(size).init(jax.random.key(0), windows[:1, :-1])
    for name in dict.fromkeys((NODE, MEZO, *GRIDS)):
        estimator, rate = _estimator(size, name, context.dtype), training.rate_of(context, name)
        yield training.step_of(
            name, estimator, optax.adam, rate, size.steps, params, windows, tokens
        )


def _race(size, rates, seeds, track, dtype=None):
    """Pretrains once for each run, then adapts with each method."""
    sources = text.library_sources()[0][:SOURCES]
    english, held_out = text.split(text.help_topics()[0], size.context)
    held_out = held_out[:: max(1, len(held_out) // size.held_out)][: size.held_out]
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    model = _model(size, dtype)

    def pretrain(key, batches):
        params = model.init(key, batches[0, :1, :-1])
        run = training.runner(train.backprop(_mean_loss(model)), optax.adam, size.pretraining)
        return run(params, key, PRETRAINING_RATE, batches)[0]

    evaluate = jax.jit(jax.vmap(lambda params: lm.loss(model, params, held_out)))
    windows = _windows(size, sources, size.pretraining, seeds)
    start = jax.jit(jax.vmap(pretrain))(keys, windows)
    windows = _windows(size, english, size.steps, seeds)

    def call(name):
        run = training.runner(_estimator(size, name, dtype), optax.adam, size.steps)
        runs = start, keys, jnp.asarray(rates[name], jnp.float32), windows
        params, losses = training.side_by_side(run, runs, in_turn=name.startswith("SZO"))
        return {"train": losses, "loss": evaluate(params)}

    found = harness.in_pairs({name: functools.partial(call, name) for name in rates}, track)
    return found | {BEFORE: {"loss": np.asarray(evaluate(start))}}


def _memory(size, name, dtype):
    """Returns the MiB of one step with Adam; it is compiled only."""
    tx = optax.adam(1e-3)

    def start(key):
        params = _model(size).init(key, jnp.zeros((1, size.context), jnp.int32))
        return train.create(params, tx, key)

    state = jax.eval_shape(start, jax.random.key(0))
    batch = jax.ShapeDtypeStruct((size.batch, size.context + 1), jnp.int32)
    step = jax.jit(train.make_step(_estimator(size, name, dtype), tx), donate_argnums=0)
    return training.total_memory(step.lower(state, batch).compile()) / 2**20


def _model(size, dtype=None):
    return lm.Decoder(256, size.width, size.mlp, size.layers, 4, dtype)


def _windows(size, tokens, steps, seeds):
    """Returns ``[seeds, steps, batch, context + 1]``."""
    shape, high = (steps, size.batch, 1), len(tokens) - size.context
    starts = np.stack([np.random.default_rng(seed).integers(high, size=shape) for seed in seeds])
    return tokens[starts + np.arange(size.context + 1)]


def _losses(model, params, windows, key):
    """Returns the loss of each example."""
    del key
    return lm.window_losses(model, params, windows)


def _mean_loss(model):
    return lambda *args: _losses(model, *args).mean()


def _estimator(size, name, dtype):
    model = _model(size, dtype)
    if name == BACKPROP:
        return train.backprop(_mean_loss(model))
    if name == NODE:
        return zo.gradient_estimator(
            functools.partial(_losses, model),
            direction=zo.node(),
            num_samples=size.probes,
            mu=1e-2,
            per_example=True,
        )
    # bf16 has 8 bits: a smaller radius is lost in rounding.
    mu = 1e-2 if dtype == jnp.bfloat16 else 1e-3
    direction = DIRECTIONS[name]
    return zo.gradient_estimator(
        _mean_loss(model), direction=direction, num_samples=size.probes, mu=mu
    )
