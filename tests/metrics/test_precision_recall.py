"""Precision and recall: closed forms, all pairs in float64, and the swap of the samples."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from metrics.pairs import by_pairs

from jaxkit import metrics

REAL, FAKE = contract.normal(24, 3), 0.8 * contract.normal(16, 3)
precision_recall = jax.jit(metrics.precision_recall, static_argnames=("k", "per_point", "chunk"))

test_contract = contract.function(
    contract.Case(
        "precision_recall",
        lambda: (lambda r, f: metrics.precision_recall(real=r, fake=f), (REAL, FAKE)),
        dtypes=("float32", "float64"),
    )
)


@pytest.mark.parametrize("k", [1, 3])
def test_they_are_the_shares_in_balls(k):
    """By all pairs in float64; per point they are 0 or 1 and have these means."""
    want = (by_pairs(REAL, FAKE, k)[1] > 0, by_pairs(FAKE, REAL, k)[1] > 0)
    got = precision_recall(real=REAL, fake=FAKE, k=k)
    np.testing.assert_allclose(got, [x.mean() for x in want], rtol=1e-6)
    points = precision_recall(real=REAL, fake=FAKE, k=k, per_point=True)
    for x, y in zip(points, want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_digits_are_those_of_all_pairs():
    """Real features, noise added to the fakes."""
    digits = pytest.importorskip("sklearn.datasets").load_digits().data / 16
    noise = np.random.default_rng(0).normal(size=(300, 64))
    real, fake = np.float32(digits[:300]), np.float32(digits[300:600] + 0.08 * noise)
    want = [np.mean(by_pairs(*sides, 3)[1] > 0) for sides in ((real, fake), (fake, real))]
    assert 0.1 < want[0] < want[1] < 0.99
    got = precision_recall(real=jnp.asarray(real), fake=jnp.asarray(fake))
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_they_swap_with_the_samples():
    """Precision of the one is recall of the other."""
    got = precision_recall(real=REAL, fake=FAKE)
    swapped = precision_recall(real=FAKE, fake=REAL)
    np.testing.assert_array_equal(swapped, got[::-1])
    assert got.precision != got.recall


def test_equal_samples_have_both():
    """Each row lies in its own ball; a sample far away has neither."""
    assert precision_recall(real=REAL, fake=REAL) == (1, 1)
    assert precision_recall(real=REAL, fake=REAL + 100) == (0, 0)
    assert precision_recall(real=jnp.ones((24, 3)), fake=jnp.ones((24, 3))) == (1, 1)


def test_wide_noise_reaches_all_recall():
    """The weakness of recall that density and coverage do not have."""
    noise = 10 * contract.normal(24, 3, seed=5)
    assert precision_recall(real=0.1 * REAL, fake=noise) == (0, 1)
    assert metrics.density_coverage(real=0.1 * REAL, fake=noise).coverage == 0


def test_bad_input_is_named():
    """Each message names the argument; under jit the values are NaN."""
    assert jnp.isnan(jnp.array(precision_recall(real=REAL.at[0].set(jnp.nan), fake=FAKE))).all()
    for kwargs, error, match in (
        ({"k": 16}, ValueError, "fake must have at least 17 rows, got 16"),
        ({"real": REAL[:3]}, ValueError, "real must have at least 4 rows, got 3"),
        ({"k": 0}, ValueError, "k must be at least 1, got 0"),
        ({"real": REAL.at[0].set(jnp.nan)}, ValueError, "real must be finite, .* in 1 of 24"),
        ({"real": REAL.astype(int)}, TypeError, "real must be real floating, got int32"),
    ):
        with pytest.raises(error, match=match):
            metrics.precision_recall(**{"real": REAL, "fake": FAKE, **kwargs})
