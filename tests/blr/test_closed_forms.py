"""Closed forms of the joint q-Gaussian against quadrature and the textbook's gamma functions."""

import blr_oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit.blr import _closed_forms as forms

NATURAL = 1.7


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def _peak(alpha, n=1, log_det=None):
    log_det = np.log(NATURAL) if log_det is None else log_det
    return forms.log_peak_of_precision(jnp.float64(alpha), jnp.float64(log_det), n)


@pytest.mark.parametrize("alpha", blr_oracles.ALPHAS)
def test_closed_forms_equal_quadrature(alpha):
    """Density, variance, and the four entropies, of a density normalized by root finding."""
    grid, peak = blr_oracles.density(alpha, NATURAL), _peak(alpha)
    scale = forms.scale_of_peak(alpha, peak)
    got = [
        scale / NATURAL,
        forms.log_peak(alpha) - jnp.log(scale / NATURAL) / 2,
        forms.shannon(jnp.float64(alpha), peak),
        forms.negentropy(alpha, peak),
        forms.renyi(alpha, peak),
        forms.conjugate(alpha, peak),
    ]
    log_p = np.log(np.where(grid.p > 0, grid.p, 1))
    variance, negentropy = grid.mean(np.square), blr_oracles.negentropy(alpha, grid)
    entropy = -grid.integral(grid.p * log_p)
    renyi = entropy if alpha == 1 else np.log(grid.integral(grid.p**alpha)) / (1 - alpha)
    conjugate = -NATURAL * variance / 2 - negentropy
    np.testing.assert_allclose(
        got, [variance, peak, entropy, negentropy, renyi, conjugate], rtol=1e-7
    )
    # At the edge itself the logarithm of the oracle has no digits.
    some = (grid.p > 1e-6 * grid.p.max()) & (abs(grid.x) < 0.99 * abs(grid.x).max())
    log_density = peak + forms.log_density(alpha, jnp.square(grid.x[some]) * NATURAL / scale)
    np.testing.assert_allclose(log_density, log_p[some], atol=1e-6)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 101])
@pytest.mark.parametrize("k", [0.3, 2.0, 40.0, -1.01, -3.0, -40.0])
def test_normalizer_is_that_of_gamma_functions(n, k):
    """In n dimensions, on both sides of the Gaussian, against lgamma; alpha = 1 + 1 / k."""
    from scipy.special import gammaln

    k = k - (n + 2) / 2 if k < 0 else k  # the covariance exists for -k > n / 2 + 1
    alpha, size = 1 + 1 / k, abs(k)
    if k > 0:
        want = gammaln(size + 1 + n / 2) - gammaln(size + 1)
    else:
        want = gammaln(size) - gammaln(size - n / 2)
    spread = 1 + (n + 2) / (2 * k)
    want -= n / 2 * np.log(2 * np.pi * size * spread)
    assert forms.log_peak(jnp.float64(alpha), n) == pytest.approx(want, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.4, 3.0])
def test_entropies_of_the_textbook_in_three_dimensions(alpha):
    """Omega, Omega*, Shannon entropy and covariance with R^2 and a = 2 / (alpha - 1)."""
    from scipy.special import gammaln, psi

    n, log_det = 3, 0.4
    peak = _peak(alpha, n, log_det)
    got = [
        forms.scale_of_peak(alpha, peak, n),
        forms.negentropy(alpha, peak, n),
        forms.conjugate(alpha, peak, n),
        forms.shannon(jnp.float64(alpha), peak, n),
    ]
    if alpha == 1:
        log_z = (n * np.log(2 * np.pi) - log_det) / 2
        want = [1, -log_z - n / 2, log_z, log_z + n / 2]
    else:
        a, k, pi = 2 / (alpha - 1), 1 / abs(alpha - 1), np.log(np.pi)
        if alpha > 1:
            gammas = gammaln(k + 1 + n / 2) - gammaln(k + 1)
            r2 = np.exp((k * np.log(2 * k) + log_det / 2 + gammas - n / 2 * pi) * 2 / (2 * k + n))
            shannon = -k * (np.log(r2 / (2 * k)) + psi(k + 1) - psi(k + 1 + n / 2))
        else:
            gammas = gammaln(k - n / 2) - gammaln(k)
            r2 = -np.exp((k * np.log(2 * k) + n / 2 * pi + gammas - log_det / 2) / (k - n / 2))
            shannon = k * (np.log(-r2 / (2 * k)) + psi(k) - psi(k - n / 2))
        below, rest = 2 * (n + a + 2), a * a / (2 * (a + 2))
        want = [2 * r2 / below, a * r2 / below - rest, rest - r2 * (n + a) / below, shannon]
    np.testing.assert_allclose(got, want, rtol=1e-9)


def test_closed_values():
    """alpha = 2, 3, 1/2 and 10^6 at precision one, on paper."""
    want = {2.0: 1.5 ** (2 / 3) / 5, 3.0: 1 / (2 * np.pi), 0.5: (8 * np.pi) ** (2 / 3), 1.0: 1.0}
    for alpha, variance in want.items():
        assert forms.scale_of_peak(alpha, _peak(alpha, log_det=0.0)) == pytest.approx(variance)
    assert forms.scale_of_peak(1e6, _peak(1e6, log_det=0.0)) == pytest.approx(1 / 12, rel=1e-4)


@pytest.mark.parametrize("alpha", [0.5, 0.8, 1.0, 1.5, 1.9])
def test_gradients_of_the_two_potentials_are_moments_under_two_densities(alpha):
    """That of Omega* is the ordinary mean of (x, x^2), that of A the mean under p^(2 - alpha)."""

    def natural_of(natural):
        precision = -2 * natural[1]
        peak = _peak(alpha, log_det=jnp.log(precision))
        return peak, jnp.square(natural[0]) / (2 * precision)

    def conjugate(natural):
        peak, square = natural_of(natural)
        return square + forms.conjugate(alpha, peak)

    def normalizer(natural):
        peak, square = natural_of(natural)
        return square - peak * forms.expm1_ratio((alpha - 1) * peak)

    mean, grid = 0.3, blr_oracles.density(alpha, NATURAL)
    natural = jnp.array([NATURAL * mean, -NATURAL / 2])
    assert normalizer(natural) - NATURAL * mean**2 / 2 == pytest.approx(grid.log_normalizer)
    second = mean**2 + grid.mean(np.square)
    np.testing.assert_allclose(jax.grad(conjugate)(natural), [mean, second], rtol=1e-8)
    escort = grid.p ** (2 - alpha)
    variance = grid.integral(escort * np.square(grid.x)) / grid.integral(escort)
    got = jax.grad(normalizer)(natural)
    np.testing.assert_allclose(got, [mean, mean**2 + variance], rtol=1e-7)


@pytest.mark.parametrize("alpha", [0.7, 1.0, 1.5, 4.0])
def test_gradient_of_the_conjugate_is_the_covariance_in_two_dimensions(alpha):
    """-2 d Omega* / dS is V at mean zero."""
    precision = jnp.array([[1.3, 0.4], [0.4, 0.9]])

    def conjugate(precision):
        log_det = jnp.linalg.slogdet(precision)[1]
        return forms.conjugate(alpha, _peak(alpha, 2, log_det), 2)

    scale = forms.scale_of_peak(alpha, _peak(alpha, 2, jnp.linalg.slogdet(precision)[1]), 2)
    got = -2 * jax.grad(conjugate)(precision)
    np.testing.assert_allclose(got, scale * np.linalg.inv(precision), rtol=1e-9)


@pytest.mark.parametrize("alpha", blr_oracles.ALPHAS)
def test_discrepancy_equals_quadrature(alpha):
    """Omega(q) + Omega*(f) - <q, f>, each term an integral."""
    means, naturals = (0.4, -0.2), (3.0, 1.2)
    want = blr_oracles.discrepancy(alpha, means[0], naturals[0], means[1], naturals[1])
    scales = [forms.scale_of_peak(alpha, _peak(alpha, log_det=np.log(x))) for x in naturals]
    variance, prior = (scale / x for scale, x in zip(scales, naturals, strict=True))
    shift = (means[0] - means[1]) ** 2 / prior
    log_det = jnp.log(variance / prior)
    got = forms.discrepancy(alpha, shift, variance / prior, log_det, scales[1])
    assert got == pytest.approx(want, rel=1e-7)
    assert forms.discrepancy(alpha, 0.0, 1.0, 0.0, scales[1]) == 0


def test_discrepancy_of_disjoint_supports():
    """alpha = 2, S = 3 at 9 from S = 1.2 at -9: both supports are shorter than 2."""
    variances = [1.5 ** (2 / 3) / 5 * s ** (-2 / 3) for s in (3.0, 1.2)]
    assert np.sqrt(5 * max(variances)) < 9
    shift, ratio = 18**2 / variances[1], variances[0] / variances[1]
    got = forms.discrepancy(2.0, shift, ratio, jnp.log(ratio), 1.2 * variances[1])
    assert got == pytest.approx(194.435829, abs=1e-6)


def test_posterior_of_many_parameters_stops_contracting():
    """V falls as S^(-2k / (2k + n)): at alpha = 2 in 1,000 dimensions by 2 % for 10^4."""
    n, alpha = 1000, 2.0
    scale = [forms.scale_of_peak(alpha, _peak(alpha, n, n * np.log(s)), n) / s for s in (1.0, 1e4)]
    assert np.log(scale[1] / scale[0]) / np.log(1e4) == pytest.approx(-2 / (2 + n), rel=1e-6)
    assert scale[1] / scale[0] == pytest.approx(0.98, abs=0.005)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_everything_is_smooth_at_the_gaussian(n):
    """Central differences over alpha = 1 equal the derivatives there, which autodiff gives."""

    def values(alpha):
        peak = _peak(alpha, n)
        return jnp.stack(
            [
                peak,
                forms.log_peak(alpha, n),
                forms.scale_of_peak(alpha, peak, n),
                forms.shannon(alpha, peak, n),
                forms.renyi(alpha, peak, n),
                forms.negentropy(alpha, peak, n),
                forms.conjugate(alpha, peak, n),
                forms.log_density(alpha, jnp.float64(3.0), n),
                forms.discrepancy(alpha, 0.7, 1.3 * n, 0.2, forms.scale_of_peak(alpha, peak, n), n),
            ]
        )

    one, step = jnp.float64(1.0), 1e-4
    want = (values(one + step) - values(one - step)) / (2 * step)
    got = jax.jacfwd(values)(one)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-7)
    for near in (1 - 1e-12, 1 + 1e-12):
        np.testing.assert_allclose(values(jnp.float64(near)), values(one), atol=1e-9)


def test_density_has_no_nan_at_and_beyond_the_edge():
    """Beyond it is -inf with slope 0; a NaN stays; infinity is no NaN."""
    alpha = jnp.array([2.0, 2.0, 2.0, 1.0, 0.5, 2.0])
    square = jnp.array([5, 5.1, np.inf, np.inf, np.inf, np.nan])
    got = forms.log_density(alpha, square)
    np.testing.assert_array_equal(got, [-np.inf] * 5 + [np.nan])
    slopes = jax.grad(lambda a, s: jnp.sum(forms.log_density(a, s)), (0, 1))(alpha[:5], square[:5])
    np.testing.assert_array_equal(jnp.stack(slopes), 0)
