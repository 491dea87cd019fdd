"""The Frechet distance: closed forms, a matrix square root in float64, sets without full rank."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import metrics

REAL, FAKE = contract.normal(24, 3), contract.normal(16, 3)


@jax.jit
def frechet(real, fake):
    return metrics.frechet_distance(real=real, fake=fake)


test_contract = contract.function(
    contract.Case(
        "frechet_distance", lambda: (frechet, (REAL, FAKE)), dtypes=("float32", "float64")
    )
)


def _cloud(n, mean, scales, turn=None):
    """Returns rows with exactly these moments: an orthonormal cloud, scaled, turned, moved."""
    d = len(scales)
    x = np.random.default_rng(n).normal(size=(n, d))
    x = np.linalg.qr(x - x.mean(0))[0] * np.sqrt(n - 1) * scales
    return jnp.asarray(x @ (np.eye(d) if turn is None else turn) + mean, jnp.float32)


def _formula(real, fake):
    """Returns the distance by the square root of a matrix in float64."""
    linalg = pytest.importorskip("scipy.linalg")
    real, fake = np.float64(real), np.float64(fake)
    first, second = np.cov(real.T), np.cov(fake.T)
    cross = np.trace(linalg.sqrtm(first @ second)).real
    gap = np.sum((real.mean(0) - fake.mean(0)) ** 2)
    return gap + np.trace(first) + np.trace(second) - 2 * cross


def test_it_is_the_formula_of_the_moments():
    """By scipy's matrix square root, for sets of different sizes."""
    real, fake = contract.normal(60, 8), 0.5 * contract.normal(40, 8) + 0.3
    np.testing.assert_allclose(frechet(real, fake), _formula(real, fake), rtol=1e-5)
    with jax.enable_x64(True):
        real, fake = np.float64(real), np.float64(fake)
        np.testing.assert_allclose(frechet(real, fake), _formula(real, fake), rtol=1e-12)


def test_covariances_that_commute():
    """The sum of squares of the mean's gap and of the gaps of standard deviations."""
    first, second = np.array([1.0, 2.0, 3.0]), np.array([2.0, 0.5, 3.0])
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    mean = np.array([1.0, -2.0, 0.5])
    got = frechet(_cloud(30, 0, first, turn), _cloud(50, mean, second, turn))
    want = np.sum(mean**2) + np.sum((first - second) ** 2)
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("rows", [20, 100])
def test_equal_sets_are_at_zero(rows):
    """Also with fewer rows than features, within 1e-4 of the trace; here 1e-6."""
    x = 10 * contract.normal(rows, 64)
    trace = jnp.sum(jnp.var(x, axis=0))
    assert abs(frechet(x, x[::-1])) < 1e-6 * trace


def test_a_distance_between_sets_without_full_rank():
    """On a line each: 1 and 2 long, at a right angle, nothing cancels."""
    line = np.zeros((2, 4))
    line[0, 0], line[1, 3] = 1.0, 2.0
    step = np.array([[-1.0], [1.0], [0.0]])
    got = frechet(
        jnp.asarray(step * line[0], jnp.float32), jnp.asarray(step * line[1], jnp.float32)
    )
    np.testing.assert_allclose(got, 1 + 4, rtol=1e-6)


def test_digits_that_lack_rank_keep_seven_places():
    """Pixels that are always dark; rounding stays below 1e-6 of the trace."""
    digits = pytest.importorskip("sklearn.datasets").load_digits().data / 16
    real, fake = digits[:300], digits[300:600]
    # Of the two halves in turn, by eigenvalues in float64.
    first, second = np.cov(real.T), np.cov(fake.T)
    values, vectors = np.linalg.eigh(first)
    root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
    cross = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ second @ root), 0)).sum()
    want = np.sum((real.mean(0) - fake.mean(0)) ** 2)
    want += np.trace(first) + np.trace(second) - 2 * cross
    got = frechet(jnp.asarray(real, jnp.float32), jnp.asarray(fake, jnp.float32))
    assert abs(got - want) < 1e-6 * (np.trace(first) + np.trace(second))


def test_motions_change_nothing_and_squares_scale():
    """Order, a swap, translation and rotation; a factor 3 is one of 9."""
    want = frechet(REAL, FAKE)
    turn = jnp.asarray(np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0], jnp.float32)
    for move in (lambda x: x[::-1], lambda x: x + 7, lambda x: x @ turn):
        np.testing.assert_allclose(frechet(move(REAL), move(FAKE)), want, rtol=1e-4)
    np.testing.assert_allclose(frechet(FAKE, REAL), want, rtol=1e-4)
    np.testing.assert_allclose(frechet(3 * REAL, 3 * FAKE), 9 * want, rtol=1e-4)


@pytest.mark.parametrize("shape", [(12, 4), (5, 9)])
def test_the_derivative_is_that_of_differences(shape):
    """In float64, for more and for fewer rows than features."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        real, fake, step = (jnp.asarray(rng.normal(size=shape)) for _ in range(3))
        first, second = jax.grad(frechet, argnums=(0, 1))(real, fake)
        for slope, move in (
            (first, lambda t: frechet(real + t * step, fake)),
            (second, lambda t: frechet(real, fake + t * step)),
        ):
            want = (move(1e-5) - move(-1e-5)) / 2e-5
            np.testing.assert_allclose(jnp.sum(slope * step), want, rtol=1e-5)


def test_the_derivative_is_zero_where_sets_are_equal():
    """A minimum, with dependent rows and features that never move; no NaN."""
    x = contract.normal(9, 4).at[:, 2].set(1.0)
    x = jnp.concatenate([x, x])
    slope = jax.grad(lambda fake: frechet(x, fake))(x)
    np.testing.assert_allclose(slope, 0, atol=1e-5)


def test_directions_that_fakes_lack_get_no_arbitrary_slope():
    """There the distance has a cusp, symmetric in sign; the rest of the slope is right."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        real, fake, step = (jnp.asarray(rng.normal(size=(9, 4))) for _ in range(3))
        fake = fake.at[3:].set(jnp.concatenate([fake[:3], fake[:3]]))
        slope = jnp.sum(jax.grad(lambda fake: frechet(real, fake))(fake) * step)
        plus, minus = (frechet(real, fake + t * step) for t in (1e-5, -1e-5))
        np.testing.assert_allclose(slope, (plus - minus) / 2e-5, rtol=1e-4)


def test_half_precision_is_computed_in_single():
    """The result is float32 and that of the rounded rows."""
    real, fake = REAL.astype(jnp.bfloat16), FAKE.astype(jnp.bfloat16)
    got = frechet(real, fake)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, frechet(jnp.float32(real), jnp.float32(fake)))


def test_bad_input_is_named():
    """Each message names the sample; under jit the value is NaN."""
    assert jnp.isnan(frechet(REAL.at[0, 0].set(jnp.inf), FAKE))
    assert jnp.isnan(frechet(REAL, FAKE.at[0, 0].set(jnp.nan)))
    for real, fake, error, match in (
        (REAL[:1], FAKE, ValueError, "real must have at least 2 rows, got 1"),
        (REAL, FAKE[:, :2], ValueError, r"fake must have shape \[n, d\] with d=3"),
        (REAL, FAKE.astype(int), TypeError, "fake must be real floating, got int32"),
        (REAL.at[0, 0].set(jnp.nan), FAKE, ValueError, "real must be finite"),
    ):
        with pytest.raises(error, match=match):
            metrics.frechet_distance(real=real, fake=fake)
