"""Points in balls, counted pair by pair in float64."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from metrics.pairs import by_pairs

from jaxkit.metrics import _balls


def _assert_counts(centers, points, k, chunk=1024):
    got = _balls.counts(centers, points, k=k, chunk=chunk)
    for x, y in zip(got, by_pairs(centers, points, k), strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("n", "m", "d", "k", "chunk"), [(37, 53, 3, 2, 1024), (37, 53, 3, 5, 16), (90, 70, 64, 1, 33)]
)
def test_counts_are_those_of_all_pairs(n, m, d, k, chunk):
    """Also where sizes are no multiple of a chunk."""
    _assert_counts(contract.normal(n, d, seed=1), contract.normal(m, d, seed=2), k, chunk)


@pytest.mark.parametrize("d", [2, 64, 600])
@pytest.mark.parametrize("offset", [0.0, 100.0])
def test_a_point_on_the_boundary_is_inside(d, offset):
    """Of a set with itself each ball holds its center, its k neighbors, and nothing else."""
    x = contract.normal(60, d) + offset
    inside, around = _balls.counts(x, x[::-1], k=3, chunk=16)
    np.testing.assert_array_equal(inside, 4)
    assert around.sum() == 4 * 60
    _assert_counts(x, x[::-1], 3)


def test_balls_of_radius_zero_hold_the_copies():
    """Four copies of each of six rows: with k = 3 a ball is a point, with k = 4 it is not."""
    x = jnp.repeat(contract.normal(6, 5), 4, axis=0)
    for k in (3, 4):
        _assert_counts(x, jnp.concatenate([x, contract.normal(3, 5)]), k)


def test_memory_is_bounded():
    """50,000 by 50,000 rows of 64."""
    rows = jax.ShapeDtypeStruct((50_000, 64), jnp.float32)
    compiled = _balls.counts.lower(rows, rows, k=5, chunk=1024).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 2**26 + 3 * 4 * 50_000 * 64


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_bad_values_stay_visible(bad):
    """A comparison with NaN is False, so counts would look sound."""
    x = contract.normal(8, 2)
    for centers, points in ((x.at[1, 0].set(bad), x), (x, x.at[1, 0].set(bad))):
        inside, around = _balls.counts(centers, points, k=1, chunk=8)
        assert jnp.isnan(inside).all() and jnp.isnan(around).all()
