"""Posteriors of a small language model: held-out loss of the mean prediction, and at the mean."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from blackjax.vi import meanfield_vi

from benchmarks import costs, harness, lm, tuning
from benchmarks.blr import tasks
from jaxkit import blr, train

ON_REQUEST = True


class Size(NamedTuple):
    """The model and its training, samples of a prediction, and how many runs train at once."""

    model: lm.Size
    samples: int
    at_once: int

    def __str__(self):
        return f"{self.model}, {self.samples} samples"


class Task(NamedTuple):
    """The text and its model."""

    size: Size
    model: nn.Module
    loss_fn: Callable  # (params, windows, key) -> [] loss
    tokens: jax.Array
    held_out: jax.Array  # [PIECES, windows, context + 1]


SIZES = {  # all steps are one lap
    "smoke": Size(lm.Size("help_topics", 8, 16, 1, 2, 8, 2, 3, 3, 8), 2, 2),
    "short": Size(lm.Size("help_topics", 32, 96, 1, 2, 32, 8, 300, 300, 128), 8, 4),
    "full": Size(lm.Size("help_topics", 64, 192, 2, 4, 64, 16, 2000, 2000, 512), 32, 8),
}
SEEDS = {"smoke": (1, 2), "short": range(1, 13), "full": range(1, 25)}
TUNE_SEEDS = (1001, 1002, 1003, 1004)  # never reported
PIECES = 4  # of the held-out windows, judged one by one to save memory
HALVES = {"validation": slice(0, None, 2), "test": slice(1, None, 2)}  # of the pieces
OURS = {"alpha 1 (IVON)": 1.0, "alpha 2": 2.0}
ADAMW, VI = "optax.adamw", "blackjax mean-field VI"
LONG = (VI,)  # in the full form only
POSTERIOR = "blr.gblr"  # the program of all in OURS
DECAYS = (1e-5, 1e-4, 1e-3, 1e-2)


def _grid(rates, ess):
    """Returns a grid of a posterior; ess is in units of the number of bytes to train on."""
    return {"learning_rate": rates, "weight_decay": DECAYS, "ess": ess}


GRIDS = {  # in this order two at once are of different programs
    "alpha 1 (IVON)": _grid((0.1, 0.3, 1.0, 3.0), (0.1, 1.0, 10.0, 100.0)),
    ADAMW: {  # its decay is multiplied by the learning rate
        "learning_rate": (0.01, 0.03, 0.1, 0.3),
        "weight_decay": (0.03, 0.1, 0.3, 1.0),
        "b2": (0.8, 0.9, 0.99, 0.999),
    },
    "alpha 2": _grid((0.1, 0.3, 1.0, 3.0), (0.001, 0.01, 0.1, 1.0)),
    VI: _grid((0.005, 0.01, 0.02, 0.04), (0.01, 0.1, 1.0, 10.0)),
}


def run(context):
    size, seeds = SIZES[context.form], list(SEEDS[context.form])
    methods = [method for method in GRIDS if context.form == "full" or method not in LONG]

    def race(method):
        settings = [tuning.chosen(context, method)] * len(seeds)
        return _race(size, context.dtype, method, seeds, settings)

    races = {method: functools.partial(race, method) for method in methods}
    found = harness.in_pairs(races, context.track)
    means = {f"{method}, at the mean": found[method]["test at the mean"] for method in OURS}
    losses = {method: result["test"] for method, result in found.items()}
    pairs = [((*OURS, *means), losses | means), (("alpha 2",), {x: losses[x] for x in OURS})]
    for method, mean in zip(OURS, means, strict=True):
        pairs.append(((method,), {method: losses[method], mean: means[mean]}))
    for ours, values in pairs:
        yield from harness.versus(
            ours,
            values,
            case="language model",
            size=str(size),
            metric="test loss",
            unit="nats per byte",
            better="down",
            seeds=seeds,
        )


def steps(context):
    """Yields the steps of a posterior and of AdamW, at a constant rate."""
    task, key = _task(SIZES[context.form], context.dtype), jax.random.key(0)
    windows, params = _draw(task, key), _start(task, key)
    for name, more in (("alpha 2", {"alpha": OURS["alpha 2"]}), (ADAMW, {})):
        settings = tuning.chosen(context, name) | more
        parts = _parts(task, name, settings, settings["learning_rate"])
        yield costs.training_step(name, *parts, params, windows, windows[:, 1:].size)


def tune(context):
    """Searches the settings of every method, by the loss on one half of the held-out windows."""
    size, labels = SIZES[context.form], iter(context.track(list(GRIDS)))

    def race(method, settings, seeds):
        next(labels)
        return _race(size, context.dtype, method, seeds, settings)["validation"]

    return tuning.search(
        race,
        GRIDS,
        TUNE_SEEDS,
        criterion="lowest mean validation loss, nats per byte, after the last step",
        size=str(size),
    )


def _race(size, dtype, method, seeds, settings):
    """Returns ``{metric: [runs]}``; run i has its own seed and settings."""
    if method in OURS:
        settings = [{**one, "alpha": OURS[method]} for one in settings]
    settings = jax.tree.map(lambda *x: jnp.asarray(x, jnp.float32), *settings)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    program = _program(size, dtype, POSTERIOR if method in OURS else method)
    return jax.tree.map(np.asarray, program(keys, settings))


@functools.cache
def _program(size, dtype, kind):
    """Returns the compiled run over many seeds and settings; alpha is one of these."""
    one = functools.partial(_one, _task(size, dtype), kind)

    def run(keys, settings):
        return jax.lax.map(lambda own: one(*own), (keys, settings), batch_size=size.at_once)

    return jax.jit(run)


@functools.cache
def _task(size, dtype):
    """Returns the :class:`Task` of a size, its model computing in ``dtype``."""
    known = lm.Task(size.model, dtype)
    model = known.model

    def loss_fn(params, windows, key):
        del key
        return lm.loss(model, params, windows)

    held_out = known.held_out.reshape(-1, PIECES, size.model.context + 1).swapaxes(0, 1)
    return Task(size, model, loss_fn, jnp.asarray(known.tokens), jnp.asarray(held_out))


def _one(task, kind, key, settings):
    """Trains once, and returns the losses of the mean prediction and of the mean parameters."""
    start, training, prediction = jax.random.split(key, 3)
    fit = _vi if kind == VI else functools.partial(_fit, kind)
    params, predict = fit(task, settings, _start(task, start), training)

    def judge(windows):
        at_mean = task.loss_fn(params, windows, None)
        if predict is None:
            return {"": at_mean}
        log_probs, y = predict(prediction, windows[:, :-1]), windows[:, 1:].ravel()
        averaged = tasks.negative_log_likelihood(log_probs.reshape(len(y), -1), y)
        return {"": averaged, " at the mean": at_mean}

    losses = jax.lax.map(judge, task.held_out)
    return {half + by: jnp.mean(losses[by][part]) for by in losses for half, part in HALVES.items()}


def _start(task, key):
    return task.model.init(key, task.held_out[0, :1, :-1])


def _draw(task, key):
    """Returns a batch of windows of the training text."""
    size = task.size.model
    starts = jax.random.randint(key, (size.batch, 1), 0, len(task.tokens) - size.context)
    return task.tokens[starts + jnp.arange(size.context + 1)[None]]


def _falling(task, settings):
    """Returns the schedule that falls linearly from the rate, which may be traced, to zero."""
    return lambda step: settings["learning_rate"] * (1 - step / task.size.model.steps)


def _parts(task, kind, settings, rate):
    """Returns the estimator and the optimizer of AdamW or, with one sample a step, of ours."""
    estimator, decay = train.backprop(task.loss_fn), settings["weight_decay"]
    if kind == ADAMW:
        return estimator, optax.adamw(rate, b2=settings["b2"], weight_decay=decay)
    tx = blr.gblr(
        rate,
        ess=settings["ess"] * len(task.tokens),
        alpha=settings["alpha"],
        weight_decay=decay,
        b2=0.99,
    )
    return blr.gradient_estimator(estimator), tx


def _fit(kind, task, settings, params, key):
    """Returns the last parameters, and what predicts with the posterior if there is one."""
    estimator, tx = _parts(task, kind, settings, _falling(task, settings))
    key, draw_key = jax.random.split(key)
    do = train.make_step(estimator, tx)
    keys = jax.random.split(draw_key, task.size.model.steps)
    state = train.create(params, tx, key)
    state, _ = jax.lax.scan(lambda state, key: do(state, _draw(task, key)), state, keys)

    def predict(key, x):
        return blr.predictive_log_probs(
            task.model.apply, key, state.params, state.opt_state, x, task.size.samples
        )

    return state.params, None if kind == ADAMW else predict


def _vi(task, settings, params, key):
    """Fits with one sample a step, as ours; the prior, the loss and the first width are as there.

    A step of its own, since this rival is no transformation of gradients.
    """
    ess = settings["ess"] * len(task.tokens)
    optimizer = optax.adam(_falling(task, settings))
    log_width = -0.5 * jnp.log(ess * (1 + settings["weight_decay"]))
    rho = jax.tree.map(lambda x: jnp.full_like(x, log_width), params)
    state = meanfield_vi.init(params, optimizer)._replace(mu=params, rho=rho)

    def step(state, key):
        draw, key = jax.random.split(key)
        windows = _draw(task, draw)

        def log_density(params):
            square = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params))
            loss = task.loss_fn(params, windows, None)
            return -ess * (loss + settings["weight_decay"] * square / 2)

        return meanfield_vi.step(key, state, log_density, optimizer, num_samples=1)[0], None

    state, _ = jax.lax.scan(step, state, jax.random.split(key, task.size.model.steps))

    def predict(key, x):
        samples = meanfield_vi.sample(key, state, task.size.samples)

        def log_probs(params):
            return jax.nn.log_softmax(task.model.apply(params, x).astype(jnp.float32))

        total = jax.nn.logsumexp(jax.lax.map(log_probs, samples), axis=0)
        return total - jnp.log(float(task.size.samples))

    return state.mu, predict
