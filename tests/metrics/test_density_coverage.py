"""Density and coverage: closed forms, all pairs in float64."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from metrics.pairs import by_pairs

from jaxkit import metrics

REAL, FAKE = contract.normal(24, 3), 0.8 * contract.normal(16, 3)
density_coverage = jax.jit(metrics.density_coverage, static_argnames=("k", "per_point", "chunk"))

test_contract = contract.function(
    contract.Case(
        "density_coverage",
        lambda: (lambda r, f: metrics.density_coverage(real=r, fake=f), (REAL, FAKE)),
        dtypes=("float32", "float64"),
    )
)


@pytest.mark.parametrize("k", [1, 5])
def test_they_are_counts_of_balls(k):
    """By all pairs in float64; per point they have these means."""
    inside, around = by_pairs(REAL, FAKE, k)
    got = density_coverage(real=REAL, fake=FAKE, k=k)
    np.testing.assert_allclose(got, (around.mean() / k, np.mean(inside > 0)), rtol=1e-6)
    points = density_coverage(real=REAL, fake=FAKE, k=k, per_point=True)
    np.testing.assert_allclose(points.density, around / k, rtol=1e-6)
    np.testing.assert_array_equal(points.coverage, inside > 0)


def test_equal_samples_have_a_density_above_one():
    """Each ball holds its center and k neighbors: (k + 1) / k."""
    got = density_coverage(real=REAL, fake=REAL, k=5)
    np.testing.assert_allclose(got, (6 / 5, 1), rtol=1e-6)


def test_rows_that_are_all_equal():
    """Every ball holds every fake: density N / k, coverage 1; of fakes elsewhere zero and zero."""
    real = jnp.ones((24, 3))
    np.testing.assert_allclose(density_coverage(real=real, fake=real[:16]), (24 / 5, 1), rtol=1e-6)
    np.testing.assert_array_equal(density_coverage(real=real, fake=real[:16] + 1e-3), (0, 0))


def test_copies_of_fakes_change_neither():
    """Both are of the distribution; and outliers take only their share of the density."""
    got = density_coverage(real=REAL, fake=FAKE)
    np.testing.assert_allclose(
        density_coverage(real=REAL, fake=jnp.concatenate([FAKE, FAKE])), got, rtol=1e-6
    )
    spoiled = density_coverage(real=REAL, fake=jnp.concatenate([FAKE, FAKE + 100]))
    np.testing.assert_allclose(spoiled, (got.density / 2, got.coverage), rtol=1e-6)


def test_bad_input_is_named():
    """Each message names the argument; under jit the values are NaN."""
    assert jnp.isnan(jnp.array(density_coverage(real=REAL, fake=FAKE.at[0].set(jnp.nan)))).all()
    for kwargs, error, match in (
        ({"k": 24}, ValueError, "real must have at least 25 rows, got 24"),
        ({"fake": FAKE[:0]}, ValueError, "fake must have at least 1 rows, got 0"),
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"fake": FAKE.at[0].set(jnp.nan)}, ValueError, "fake must be finite, .* in 1 of 16"),
        ({"fake": FAKE[:, :2]}, ValueError, r"fake must have shape \[n, d\] with d=3"),
    ):
        with pytest.raises(error, match=match):
            metrics.density_coverage(**{"real": REAL, "fake": FAKE, **kwargs})
