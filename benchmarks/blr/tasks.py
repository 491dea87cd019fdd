"""Classification tasks on real data, their models, and what predictions are judged by."""

from collections.abc import Callable
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_breast_cancer, load_digits

from benchmarks.mlp import MLP

LABEL_NOISE = 0.4
SHARES = (0.6, 0.2)  # of the rows for training and validation, the rest is the test
BINS = 15  # of the calibration error


class Data(NamedTuple):
    """Rows of one split; ``outside`` holds inputs of classes that training has not seen."""

    train: tuple
    validation: tuple
    test: tuple
    outside: np.ndarray


class Task(NamedTuple):
    """A data set and its model."""

    make: Callable  # seed -> Data
    model: nn.Module


def breast_cancer(seed):
    """Two classes, 30 features of mean 0 and variance 1; nothing lies outside."""
    x, y = load_breast_cancer(return_X_y=True)
    x = (x - x.mean(0)) / x.std(0)
    parts = _split(np.random.default_rng(seed), x, y)
    return Data(*parts, np.zeros((0, x.shape[1]), np.float32))


def noisy_digits(seed):
    """Digits 0 to 7 with 40 % wrong labels, but in the test; 8 and 9 lie outside."""
    x, y = load_digits(return_X_y=True)
    x, rng = x / 16, np.random.default_rng(seed)
    train, validation, test = _split(rng, x[y < 8], y[y < 8])
    return Data(_spoil(rng, *train), _spoil(rng, *validation), test, np.float32(x[y >= 8]))


TASKS = {
    "breast cancer, logistic regression": Task(breast_cancer, MLP((2,))),
    "digits, 40 % wrong labels, MLP 64-64-8": Task(noisy_digits, MLP((64, 8))),
}


def stacked(make, seeds):
    """Returns the :class:`Data` of all seeds, on a leading axis."""
    return jax.tree.map(lambda *parts: jnp.asarray(np.stack(parts)), *map(make, seeds))


def loss_fn(model, params, batch):
    """Returns the mean loss in nats."""
    x, y = batch
    logits = model.apply(params, x)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def negative_log_likelihood(log_probs, y):
    """Returns the mean of ``-log p(y)``, ``[]``."""
    return -jnp.mean(jnp.take_along_axis(log_probs, y[:, None], axis=1))


def judge(log_probs, y, outside):
    """Returns ``{metric: []}`` of log-probabilities ``[n, C]`` and those of rows outside."""
    top = jnp.max(log_probs, axis=1)
    right = jnp.argmax(log_probs, axis=1) == y
    found = {
        "nll": negative_log_likelihood(log_probs, y),
        "accuracy": jnp.mean(right),
        "calibration error": calibration_error(jnp.exp(top), right),
    }
    if len(outside):
        found["AUROC of unseen classes"] = auroc(top, jnp.max(outside, axis=1))
    return found


def calibration_error(confidence, right):
    """Returns the mean gap between confidence and accuracy over bins of confidence, ``[]``."""
    bins = jnp.minimum((confidence * BINS).astype(jnp.int32), BINS - 1)
    gaps = jax.ops.segment_sum(right.astype(confidence.dtype) - confidence, bins, BINS)
    return jnp.sum(jnp.abs(gaps)) / len(confidence)


def auroc(inside, outside):
    """Returns how often a row inside has the higher score than one outside, ties for a half."""
    gaps = inside[:, None] - outside[None]
    return jnp.mean(jnp.where(gaps > 0, 1.0, jnp.where(gaps == 0, 0.5, 0.0)))


def _split(rng, x, y):
    order = rng.permutation(len(x))
    ends = [int(len(x) * share) for share in np.cumsum(SHARES)]
    x, y = x.astype(np.float32), y.astype(np.int32)
    return [(x[rows], y[rows]) for rows in np.split(order, ends)]


def _spoil(rng, x, y):
    """Gives rows another class, each wrong one as likely."""
    wrong = rng.random(len(y)) < LABEL_NOISE
    return x, np.where(wrong, (y + rng.integers(1, 8, len(y))) % 8, y).astype(np.int32)
