"""The posterior benchmark on the real images of a folder: eight classes are learned, two unseen."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from benchmarks import data
from benchmarks.blr import tasks

SEEN = 8  # classes; the others lie outside
WIDTHS = 32, 64, 64


class ConvNet(nn.Module):
    """Convolutions of ``widths`` that halve the sides, with rectifiers, and a dense layer."""

    widths: tuple[int, ...] = WIDTHS
    dtype: Any = None  # of the computation, as of an MLP

    @nn.compact
    def __call__(self, x):
        x = x.astype(jnp.float32) / 255 - 0.5
        for width in self.widths:
            x = nn.relu(nn.Conv(width, (3, 3), strides=2, dtype=self.dtype)(x))
        return nn.Dense(SEEN, dtype=self.dtype)(x.reshape(len(x), -1)).astype(jnp.float32)


def found(folder):
    """Returns ``{name: Task}`` of the data sets in ``folder``; the data are one for all seeds."""
    net = f"classes 0 to {SEEN - 1}, conv net {'-'.join(map(str, WIDTHS))}"
    return {
        f"{name}, {net}": tasks.Task(lambda images=images: _data(images), ConvNet())
        for name, images in data.read(folder).items()
    }


def _data(images):
    """Returns the :class:`tasks.Data`; all rows outside are of the published test set."""
    seen = [(x[y < SEEN], y[y < SEEN]) for x, y in data.split(images)]
    x, y = images.test
    return jax.tree.map(jnp.asarray, tasks.Data(*seen, x[y >= SEEN]))
