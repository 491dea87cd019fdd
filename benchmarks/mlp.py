"""The network of dense layers that several benchmarks train."""

from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp


class MLP(nn.Module):
    """Dense layers of ``widths`` with an activation between them; float32 comes out."""

    widths: tuple[int, ...]
    activation: Callable[[jax.Array], jax.Array] = nn.relu
    dtype: Any = None  # of the computation, None for that of the parameters, which are float32

    @nn.compact
    def __call__(self, x):
        for width in self.widths[:-1]:
            x = self.activation(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(self.widths[-1], dtype=self.dtype)(x).astype(jnp.float32)
