"""The stand-ins and the oracles of the metrics benchmarks."""

import numpy as np
import pytest

from benchmarks.metrics import bench_distances, bench_nearest, samples


def test_stand_ins_are_of_one_size_and_share_no_real_row():
    """Each has as many rows as the real sample; only the repeated images repeat."""
    for seed in range(1, 6):
        real, fakes = samples.split(seed, 500)
        assert len(fakes) == 7
        for name, fake in fakes.items():
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
            assert len(np.unique(fake, axis=0)) == (10 if name == samples.FEW else 500)
            assert not (fake[:, None] == real[None]).all(-1).any()


def test_digits_are_as_many_different_rows_as_asked_for():
    """More than there are images, by noise."""
    assert len(np.unique(samples.digits(4000), axis=0)) == 4000


def test_principal_components_keep_distances_of_large_variance():
    """Four coordinates hold more than a third of the variance of 64."""
    whole, part = (bench_nearest._clouds(500, d)[0] for d in (64, 4))
    assert part.shape == (500, 4)
    assert 1 / 3 < part.var(0).sum() / whole.var(0).sum() < 1


@pytest.mark.parametrize(
    "recipe", [bench_distances.SCIPY, bench_distances.EIGENVALUES, bench_distances.ROOTS]
)
def test_recipes_of_the_frechet_distance_agree_in_double_precision(recipe):
    """On a set of full rank, with the closed form for covariances that commute."""
    pytest.importorskip("scipy")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 5))
    x = np.linalg.qr(x - x.mean(0))[0] * np.sqrt(199)
    first, second = np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([2.0, 2.0, 1.0, 0.5, 5.0])
    got = bench_distances._by_recipe(recipe, x * first, x * second + 1)
    np.testing.assert_allclose(got, np.sum((first - second) ** 2) + 5, rtol=1e-9)
