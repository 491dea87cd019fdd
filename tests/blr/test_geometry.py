"""The closed forms of one dimension against quadrature and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit.blr import _geometry

ALPHAS = (0.4, 0.5, 0.8, 0.999, 1.0, 1.001, 1.5, 2.0, 3.0, 10.0)


def density(alpha, precision=1.0):
    """Returns variance, edge and peak of the density of natural precision S by its definition.

    That is p(t) = [b - (alpha - 1) S t^2 / 2]_+^(1 / (alpha - 1)) with b that makes its mass 1.
    With t = x sqrt(2 b / S) the integrals are free of b, and with x = exp(u) their tails are short.
    """
    if alpha == 1:
        return 1 / precision, np.inf, np.sqrt(precision / (2 * np.pi))
    integrate = pytest.importorskip("scipy.integrate")
    power = 1 / (alpha - 1)
    end = -np.log(alpha - 1) / 2 if alpha > 1 else 150.0

    def moment(n):
        def along(u):
            return np.maximum(1 - (alpha - 1) * np.exp(2 * u), 0) ** power * np.exp((n + 1) * u)

        return 2 * integrate.quad(along, -30, end, epsabs=1e-9, epsrel=1e-9, limit=500)[0]

    mass = moment(0)
    b = (np.sqrt(precision / 2) / mass) ** (1 / (power + 0.5))
    edge = np.sqrt(2 * b * power / precision) if alpha > 1 else np.inf
    return 2 * b / precision * moment(2) / mass, edge, b**power


def variance_at_one(alpha):
    """Returns the variance at precision 1 with the base measure of the parameters."""
    one = jnp.ones(())
    return _geometry.stddev(one, _geometry.gamma(alpha), _geometry.lebesgue(alpha)) ** 2


@pytest.mark.parametrize("alpha", ALPHAS)
def test_variance_support_and_peak_are_those_of_the_density(alpha):
    """By quadrature of the definition at precision 1, and at 3 by the exponent gamma."""
    variance, edge, peak = density(alpha)
    with jax.enable_x64(True):
        np.testing.assert_allclose(variance_at_one(alpha), variance, rtol=1e-6)
        np.testing.assert_allclose(_geometry.half_width(alpha), edge / variance**0.5, rtol=1e-6)
        # p(0) of unit variance is exp(ratio) / sqrt(pi (3 alpha - 1)).
        want = np.log(peak * np.sqrt(variance * np.pi * (3 * alpha - 1)))
        np.testing.assert_allclose(_geometry.log_gamma_ratio(alpha), want, atol=1e-6)
        reference = _geometry.lebesgue(alpha)
        width = _geometry.stddev(jnp.asarray(3.0), _geometry.gamma(alpha), reference)
        np.testing.assert_allclose(width**2, density(alpha, 3.0)[0], rtol=1e-6)
        back = _geometry.precision(width, _geometry.gamma(alpha), reference)
        np.testing.assert_allclose(back, 3.0, rtol=1e-12)


def test_closed_values():
    """Variances at precision 1 for alpha 1/2, 1, 2, 3 and beyond, and half widths."""
    for alpha, want in (
        (0.5, (8 * np.pi) ** (2 / 3)),
        (1.0, 1.0),
        (2.0, 1.5 ** (2 / 3) / 5),
        (3.0, 1 / (2 * np.pi)),
        (1e8, 1 / 12),
    ):
        np.testing.assert_allclose(variance_at_one(alpha), want, rtol=5e-6)
    for alpha, want in ((1.5, 7**0.5), (2, 5**0.5), (3, 2.0), (5, 3.5**0.5), (1e9, 3**0.5)):
        np.testing.assert_allclose(_geometry.half_width(alpha), want, rtol=1e-6)
    np.testing.assert_array_equal(_geometry.half_width(jnp.array([0.5, 1.0])), jnp.inf)
    np.testing.assert_allclose(_geometry.gamma(3.0), 0.5)
    np.testing.assert_allclose(_geometry.gamma(3.0, "logdet"), 1.0)


def test_kappa_is_one_half_for_the_gaussian_and_for_logdet():
    """Else (3 + alpha) / (4 (1 + alpha)): one half at 1."""
    for alpha in (0.5, 1.0, 2.0):
        got = _geometry.kappa(_geometry.gamma(alpha))
        np.testing.assert_allclose(got, (3 + alpha) / (4 * (1 + alpha)), rtol=1e-6)
        np.testing.assert_allclose(_geometry.kappa(_geometry.gamma(alpha, "logdet")), 0.5)


@pytest.mark.parametrize("alpha", [0.65, 0.8, 1.0, 1.5, 3.0])
def test_kurtosis_is_that_of_scipys_distributions(alpha):
    """Student's t below 1, the normal at 1, a scaled beta above."""
    stats = pytest.importorskip("scipy.stats")
    if alpha == 1:
        excess = 0.0
    elif alpha > 1:
        k = 1 / (alpha - 1)
        excess = stats.beta(k + 1, k + 1).stats("k")
    else:
        excess = stats.t((1 + alpha) / (1 - alpha)).stats("k")
    np.testing.assert_allclose(_geometry.kurtosis(alpha), 3 + excess, rtol=1e-5)
    np.testing.assert_array_equal(_geometry.kurtosis(jnp.array([0.5, 0.6])), jnp.inf)


def test_everything_is_smooth_at_the_gaussian():
    """Values and slopes in alpha at 1 are the limits from both sides."""
    funs = (
        _geometry.log_gamma_ratio,
        lambda a: jnp.log(_geometry.lebesgue(a)),
        _geometry.kurtosis,
    )

    @jax.jit
    def run(alpha):
        return jnp.stack([jnp.stack(jax.value_and_grad(fun)(alpha)) for fun in funs])

    with jax.enable_x64(True):
        low, mid, high = (np.asarray(run(1 + s * 1e-4)) for s in (-1, 0, 1))
    np.testing.assert_allclose(mid[:, 0], (low + high)[:, 0] / 2, atol=1e-6)
    np.testing.assert_allclose(mid[:, 1], (high - low)[:, 0] / 2e-4, atol=1e-5)


def test_kinds_of_numbers():
    """Whole numbers count as floats, halves are widened, doubles stay, and geometry is named."""
    assert _geometry.as_float(2).dtype == jnp.float32
    assert _geometry.as_float(jnp.bfloat16(2)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert _geometry.as_float(2.0).dtype == jnp.float64
    with pytest.raises(ValueError, match="geometry must be one of"):
        _geometry.gamma(1.0, "flat")
    with pytest.raises(ValueError, match=r"alpha must be in \(0.5, inf\), got 0.5"):
        _geometry.check_alpha("alpha", 0.5, n=2)
