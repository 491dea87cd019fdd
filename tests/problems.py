"""What several test files share: real digits in batches, and equality bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest


@functools.cache
def digits(steps, size):
    """Returns batches of digits: images ``[steps, size, 64]`` in [0, 1] and labels, NumPy."""
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    rows = np.random.default_rng(0).integers(0, len(images), (steps, size))
    return np.float32(images[rows] / 16), np.int32(labels[rows])


def cross_entropy(logits, labels):
    """Returns the mean cross-entropy in nats of ``logits`` ``[size, 10]``."""
    hits = jax.nn.one_hot(labels, 10)
    return -jnp.mean(jnp.sum(hits * jax.nn.log_softmax(logits), axis=-1))


def step_of(batches, i):
    """Returns the batch of step ``i``."""
    return jax.tree.map(lambda x: x[i], batches)


def assert_equal(got, want):
    """Checks that two trees, random keys included, agree bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def assert_close(got, want, rtol):
    """Checks each leaf to ``rtol`` of its largest entry."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())
