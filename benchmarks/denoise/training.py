"""What the benchmarks of denoise share: tasks, and runs whose settings are traced, in a vmap."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from benchmarks import costs, lm
from benchmarks.mlp import MLP
from jaxkit import train

HELD_OUT = 360  # digits, half for the settings and half for the report


class Task(NamedTuple):
    """A data set and its model."""

    start: Callable[..., Any]  # key -> params
    loss_fn: Callable[..., Any]  # (params, batch, key) -> [] loss
    draw: Callable[..., Any]  # key -> batch
    judge: Callable[..., Any]  # params -> {metric: []}


class Method(NamedTuple):
    """How to train; each part gets the settings of one run, of which all are traced numbers."""

    estimator: Callable[..., Any]  # (loss_fn, settings) -> estimator
    optimizer: Callable[..., Any]  # (learning rate or schedule, settings) -> transformation


@functools.cache
def digits_rows():
    """Returns the images and classes for training, validation and test, the same for all seeds."""
    x, y = load_digits(return_X_y=True)
    x, y = np.float32(x / 16), np.int32(y)
    order = np.random.default_rng(0).permutation(len(x))
    ends = [len(x) - HELD_OUT, len(x) - HELD_OUT // 2]
    return [(x[rows], y[rows]) for rows in np.split(order, ends)]


def images(parts, widths, draw, largest=1.0, dtype=None):
    """Returns the task of ``parts``, the rows for training, validation and test, by an MLP.

    ``draw(key, examples)`` gives a batch of the first; ``largest`` is that of a pixel.
    """
    rows, validation, test = parts
    model = MLP(widths, jnp.tanh, dtype)

    def apply(params, x):
        return model.apply(params, x.astype(jnp.float32) / largest)

    def loss_fn(params, batch, key):
        del key
        x, y = batch
        logits = apply(params, x)
        return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y).mean()

    def judge(params):
        right = jnp.argmax(apply(params, test[0]), -1) == test[1]
        return {
            "validation": loss_fn(params, validation, None),
            "loss": loss_fn(params, test, None),
            "accuracy": jnp.mean(right),
        }

    one = jnp.zeros((1, rows[0].shape[1]))
    return Task(lambda key: model.init(key, one), loss_fn, lambda key: draw(key, rows), judge)


def help_text(size, batch, dtype=None):
    """Returns the task of the language model of ``lm`` with another batch."""
    known = lm.Task(size, dtype)
    tokens, held_out = jnp.asarray(known.tokens), known.held_out.reshape(-1, size.context + 1)

    def loss_fn(params, windows, key):
        del key
        return lm.loss(known.model, params, windows)

    def draw(key):
        high = len(tokens) - size.context
        starts = jax.random.randint(key, (batch, 1), 0, high)
        return tokens[starts + jnp.arange(size.context + 1)[None]]

    def judge(params):
        even, odd = (loss_fn(params, held_out[part::2], None) for part in (0, 1))
        return {"validation": even, "loss": odd}

    return Task(lambda key: known.model.init(key, held_out[:1, :-1]), loss_fn, draw, judge)


def uniform(batch):
    """Returns ``draw(key, examples)`` of ``batch`` rows, with replacement."""

    def draw(key, examples):
        rows = jax.random.randint(key, (batch,), 0, len(examples[0]))
        return jax.tree.map(lambda x: jnp.asarray(x)[rows], examples)

    return draw


def step_of(name, task, method, settings, tokens):
    """Returns one step of :func:`run` with the settings of a run, a dict, at a constant rate."""
    (key,), settings = arrays([0], [settings])
    settings = jax.tree.map(lambda x: x[0], settings)
    tx = method.optimizer(lambda step: settings["learning_rate"], settings)
    estimator = method.estimator(task.loss_fn, settings)
    return costs.training_step(name, estimator, tx, task.start(key), task.draw(key), tokens)


def run(task, method, steps):
    """Returns the jitted ``(keys, settings) -> {metric: [runs]}``.

    ``settings`` is a dict of ``[runs]``. ``learning_rate`` falls linearly to zero over the steps
    where ``decay`` is 1, and stays where it is 0; what is judged is the average of the weights in
    which the newest count ``average``, 1 for the last ones alone. The losses while training are
    ``[runs, steps]``.
    """

    def one(key, settings):
        start_key, state_key, draw_key = jax.random.split(key, 3)
        rate = settings["learning_rate"]

        def schedule(step):
            return rate * (1 - settings["decay"] * step / steps)

        tx = method.optimizer(schedule, settings)
        do = train.make_step(method.estimator(task.loss_fn, settings), tx)
        params = task.start(start_key)

        def step(carry, key):
            state, average = carry
            state, metrics = do(state, task.draw(key))
            average = optax.incremental_update(state.params, average, settings["average"])
            return (state, average), metrics["loss"]

        carry = train.create(params, tx, state_key), params
        keys = jax.random.split(draw_key, steps)
        (_, average), losses = jax.lax.scan(step, carry, keys)
        return {"train": losses, **task.judge(average)}

    return jax.jit(jax.vmap(one))


def arrays(seeds, settings):
    """Returns keys and settings as the arrays that :func:`run` takes, from a list of dicts."""
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    filled = [
        {"decay": 0.0, "average": 1.0, "seed": seed, **one}
        for seed, one in zip(seeds, settings, strict=True)
    ]
    return keys, jax.tree.map(lambda *x: jnp.asarray(x, jnp.float32), *filled)
