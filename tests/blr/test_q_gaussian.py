"""QGaussian against scipy and quadrature; edges, limits, trees, and what its messages say."""

import functools
import subprocess
import sys

import blr_oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import blr

distrax = pytest.importorskip("distrax")
stats = pytest.importorskip("scipy.stats")

ALPHAS = (0.4, 0.8, 1.0, 1.5, 3.0)
LOC, STDDEV = 0.5, 2.0


def scipy_twin(alpha):
    """Returns the same distribution of scipy, by its own parameters."""
    if alpha == 1:
        return stats.norm(LOC, STDDEV)
    k = 1 / abs(alpha - 1)
    if alpha > 1:
        edge = STDDEV * np.sqrt(2 * k + 3)
        return stats.beta(k + 1, k + 1, loc=LOC - edge, scale=2 * edge)
    df = 2 * k - 1
    return stats.t(df, LOC, STDDEV * np.sqrt((df - 2) / df))


def batch(dtype=jnp.float32):
    return blr.QGaussian(LOC, STDDEV, jnp.asarray(ALPHAS, dtype))


def test_density_and_distribution_functions_are_those_of_scipy():
    """log_prob, cdf, log_cdf, survival function and quantile, over a batch of indices."""
    x = np.linspace(-6, 7, 27)
    got = jax.jit(
        lambda q, x: (q.log_prob(x), q.cdf(x), q.log_cdf(x), q.survival_function(x), q.prob(x))
    )(batch(), jnp.float32(x)[:, None])
    for i, alpha in enumerate(ALPHAS):
        twin = scipy_twin(alpha)
        wants = twin.logpdf(x), twin.cdf(x), twin.logcdf(x), twin.sf(x), twin.pdf(x)
        for values, want in zip(got, wants, strict=True):
            # Near the edge the logarithm hangs on the rounding of the edge.
            rtol = np.where(np.isfinite(twin.logcdf(x)) & (twin.logpdf(x) > -8), 1e-5, 1e-3)
            np.testing.assert_array_less(
                np.abs(np.where(np.isfinite(want), values[:, i] - want, 0)),
                rtol * (1 + np.abs(np.where(np.isfinite(want), want, 0))),
            )
            np.testing.assert_array_equal(np.isfinite(values[:, i]), np.isfinite(want))
    p = np.array([1e-5, 0.2, 0.5, 0.9])
    quantiles = jax.jit(lambda q, p: q.quantile(p))(batch(), jnp.float32(p)[:, None])
    for i, alpha in enumerate(ALPHAS):
        np.testing.assert_allclose(quantiles[:, i], scipy_twin(alpha).ppf(p), rtol=2e-5, atol=1e-5)


def test_entropies_are_integrals():
    """Shannon, Tsallis and Renyi, with the density by quadrature; and the kurtosis."""
    q = blr.QGaussian.from_natural(LOC, 1.7, jnp.float32(blr_oracles.ALPHAS))
    entropies = q.entropy(), q.tsallis_entropy(), q.renyi_entropy(), q.variance()
    for i, alpha in enumerate(blr_oracles.ALPHAS):
        grid = blr_oracles.density(alpha, 1.7)
        shannon = -grid.integral(grid.p * np.log(np.where(grid.p > 0, grid.p, 1)))
        renyi = shannon
        if alpha != 1:
            renyi = np.log(grid.integral(grid.p**alpha)) / (1 - alpha)
        want = shannon, -blr_oracles.negentropy(alpha, grid), renyi, grid.mean(np.square)
        np.testing.assert_allclose([x[i] for x in entropies], want, rtol=1e-5, atol=2e-6)
        if alpha > 0.7:
            kurtosis = grid.mean(lambda x: x**4) / grid.mean(np.square) ** 2
            assert q.kurtosis()[i] == pytest.approx(kurtosis, rel=1e-5)


def test_moments_and_support():
    """Mean, mode and median are one; the support ends r(alpha) deviations from it."""
    q = batch()
    for values in (q.mean(), q.mode(), q.median(), q.quantile(0.5)):
        np.testing.assert_array_equal(values, LOC)
    np.testing.assert_allclose(q.stddev() ** 2, q.variance())
    low, high = q.support()
    want = STDDEV * np.array([np.inf, np.inf, np.inf, 7**0.5, 2])
    np.testing.assert_allclose(high - LOC, want, rtol=1e-6)
    np.testing.assert_allclose(LOC - low, want, rtol=1e-6)
    np.testing.assert_array_equal(q.quantile(1.0), high)
    np.testing.assert_array_equal(q.cdf(high), 1)
    np.testing.assert_allclose(q.cdf(low), 0, atol=1e-12)


def test_samples_have_the_distribution():
    """Kolmogorov and Smirnov's test for each index, and the support holds every draw."""
    q = batch()
    draws = q.sample(seed=jax.random.key(0), sample_shape=(20_000,))
    assert draws.shape == (20_000, len(ALPHAS))
    for i, alpha in enumerate(ALPHAS):
        assert stats.kstest(np.float64(draws[:, i]), scipy_twin(alpha).cdf).pvalue > 1e-3
    low, high = q.support()
    assert jnp.all((draws >= low[None]) & (draws <= high[None]))


def test_log_prob_has_no_nan_at_and_beyond_the_edge():
    """There it is -inf; derivatives in value, mean, deviation and alpha are finite."""
    edge = np.float32(np.sqrt(5))
    x = jnp.array([np.nextafter(edge, np.float32(0)), edge, 2.2361, 3.0, 1e30, -1e30])

    def log_prob(x, loc, stddev, alpha):
        return blr.QGaussian(loc, stddev, alpha).log_prob(x)

    for alpha in (2.0, 1.0, 0.5):
        args = x, jnp.zeros(6), jnp.ones(6), jnp.full(6, alpha)
        values, slopes = jax.jit(jax.vmap(jax.value_and_grad(log_prob, (0, 1, 2, 3))))(*args)
        assert not jnp.isnan(values).any()
        assert jnp.isfinite(jnp.stack(slopes)).all()
        if alpha == 2:
            np.testing.assert_array_equal(values[1:], -jnp.inf)
            np.testing.assert_array_equal(slopes[0][1:], 0)
    assert jnp.isnan(blr.QGaussian(0.0, 1.0, 2.0).log_prob(jnp.nan))


def test_log_prob_does_not_jump_at_the_gaussian():
    """Around alpha = 1 it moves by the first-order term, -He4(z) / 8, alone."""
    z = jnp.linspace(-4, 4, 41)
    want = stats.norm.logpdf(np.float64(z))
    # The fourth cumulant is -3 (alpha - 1), so the series of Gram and Charlier has -1/8 He4.
    hermite = -(np.float64(z) ** 4 - 6 * np.float64(z) ** 2 + 3) / 8

    @jax.jit
    @functools.partial(jax.vmap, in_axes=(None, 0))
    def both(alpha, z):
        return jax.value_and_grad(lambda a: blr.QGaussian(0.0, 1.0, a).log_prob(z))(alpha)

    for eps in (-1e-4, -1e-6, 0, 1e-6, 1e-4):
        alpha = jnp.float32(1 + eps)
        value, slope = both(alpha, z)
        eps = np.float64(alpha) - 1
        np.testing.assert_allclose(value, want + eps * hermite, atol=3e-6)
        np.testing.assert_allclose(slope, hermite, atol=1e-5 + 300 * abs(eps))


def test_natural_precision_and_reference():
    """Closed values at the Lebesgue measure; a reference is where S is 1 / variance."""
    variances = {
        2.0: 1.5 ** (2 / 3) / 5,
        3.0: 1 / (2 * np.pi),
        0.5: (8 * np.pi) ** (2 / 3),
        1.0: 1.0,
    }
    for alpha, variance in variances.items():
        q = blr.QGaussian.from_natural(LOC, 1.0, alpha)
        assert float(q.variance()) == pytest.approx(variance, rel=1e-5)
        assert float(q.natural()) == pytest.approx(1, rel=1e-5)
        q = blr.QGaussian.from_natural(LOC, 3.0, alpha, reference=3.0)
        assert float(q.variance()) == pytest.approx(1 / 3, rel=1e-5)
        q = blr.QGaussian.from_natural(LOC, 12.0, alpha, reference=3.0)
        # The deviation follows S by the power -1 / (1 + alpha).
        assert float(q.stddev()) == pytest.approx(3**-0.5 * 4 ** (-1 / (1 + alpha)), rel=1e-5)
        assert float(q.natural(reference=3.0)) == pytest.approx(12, rel=1e-5)


def test_from_support_has_that_support():
    """And the index."""
    q = blr.QGaussian.from_support(jnp.array([1.0, 2.0]), 0.5, 3.0)
    np.testing.assert_allclose(jnp.stack(q.support()), [[0.5, 1.5], [1.5, 2.5]], rtol=1e-6)
    np.testing.assert_array_equal(q.alpha, 3.0)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 2.0, 10.0])
def test_fenchel_young_discrepancy_is_an_integral(alpha):
    """By quadrature; 0 for the same distribution; the Kullback-Leibler divergence at alpha = 1."""
    q = blr.QGaussian.from_natural(0.4, 3.0, alpha)
    p = blr.QGaussian.from_natural(-0.2, 1.2, alpha)
    want = blr_oracles.discrepancy(alpha, 0.4, 3.0, -0.2, 1.2)
    assert float(q.fenchel_young(p)) == pytest.approx(want, rel=2e-5)
    assert float(q.fenchel_young(q)) == pytest.approx(0, abs=1e-6)
    if alpha == 1:
        twin = distrax.Normal(0.4, 3**-0.5).kl_divergence(distrax.Normal(-0.2, 1.2**-0.5))
        assert float(q.fenchel_young(p)) == pytest.approx(float(twin), rel=1e-5)
        assert float(q.kl_divergence(p)) == pytest.approx(float(twin), rel=1e-5)


def test_fenchel_young_discrepancy_is_finite_for_disjoint_supports():
    """alpha = 2, S = 3 at 9 from S = 1.2 at -9."""
    q, p = (blr.QGaussian.from_natural(*x, 2.0) for x in ((9.0, 3.0), (-9.0, 1.2)))
    assert q.support()[0] > p.support()[1]
    assert float(q.fenchel_young(p)) == pytest.approx(194.435829, rel=1e-6)


def test_fenchel_young_discrepancy_is_positive_and_does_not_depend_on_the_unit():
    """With the reference changed along; over random pairs."""
    rng = np.random.default_rng(0)
    loc, other, width, other_width = jnp.float32(rng.normal(size=(4, 50)))
    alpha = jnp.float32(rng.uniform(0.4, 4, 50))
    q = blr.QGaussian(loc, jnp.exp(width), alpha)
    p = blr.QGaussian(other, jnp.exp(other_width), alpha)
    got = q.fenchel_young(p, 2.0)
    assert jnp.all(got > 0)
    q, p = (blr.QGaussian(10 * x.loc, 10 * x.stddev(), alpha) for x in (q, p))
    np.testing.assert_allclose(q.fenchel_young(p, 0.02), got, rtol=2e-4)
    assert not np.allclose(q.fenchel_young(p), got, rtol=0.1)


def test_kullback_leibler_divergence_from_a_normal():
    """Equals the integral of p log(p / normal) for bounded support and heavy tails."""
    for alpha in (0.5, 2.0):
        grid = blr_oracles.density(alpha)
        log_normal = stats.norm.logpdf(grid.x, 0.7, 1.5)
        log_p = np.log(np.where(grid.p > 0, grid.p, 1))
        want = grid.integral(grid.p * (log_p - log_normal))
        q = blr.QGaussian.from_natural(0.0, 1.0, alpha)
        got = q.kl_divergence(blr.QGaussian(0.7, 1.5, 1.0))
        assert float(got) == pytest.approx(want, rel=1e-5)


def test_a_tree_of_arrays_under_jit_and_vmap():
    """Built inside vmap and used outside it has the batch axis of every array, and back."""
    locs = jnp.arange(4.0)

    def build(loc):
        return blr.QGaussian(loc + jnp.zeros(3), 2.0, 1.5)

    q = jax.jit(jax.vmap(build))(locs)
    assert q.batch_shape == (4, 3)
    assert q.sample(seed=jax.random.key(0), sample_shape=(2,)).shape == (2, 4, 3)
    value = jnp.linspace(-3, 3, 12).reshape(4, 3)
    want = jnp.stack([build(loc).log_prob(x) for loc, x in zip(locs, value, strict=True)])
    np.testing.assert_allclose(q.log_prob(value), want, rtol=1e-6)
    inside = jax.jit(jax.vmap(lambda q, x: q.log_prob(x)))(q, value)
    np.testing.assert_allclose(inside, want, rtol=1e-6)
    assert [x.shape for x in jax.tree.leaves(q)] == [(4, 3)] * 3
    slopes = jax.jit(jax.grad(lambda q: q.entropy().sum()))(q)
    np.testing.assert_allclose(slopes.stddev(), 1 / q.stddev(), rtol=1e-6)


def test_double_precision():
    """With float64 arguments all of it is float64, and the entropy is to 1e-12."""
    with jax.enable_x64(True):
        q = batch(jnp.float64)
        draws = q.sample(seed=jax.random.key(0))
        assert {x.dtype for x in (draws, q.log_prob(0.3), q.quantile(0.3))} == {
            jnp.dtype("float64")
        }
        want = [scipy_twin(alpha).entropy() for alpha in ALPHAS]
        np.testing.assert_allclose(q.entropy(), want, rtol=1e-10)


def test_everything_else_works_without_distrax():
    """Only the three names that need it fail, and they say why."""
    code = (
        "import sys; sys.modules['distrax'] = None\n"
        "import jax.numpy as jnp\n"
        "from jaxkit import blr\n"
        "params = jnp.ones(2)\n"
        "state = blr.gblr(0.1, ess=10.0).init(params)\n"
        "assert blr.free_energy(0.0, params, state) > 0\n"
        "for name in ('QGaussian', 'MultivariateQGaussian', 'posterior'):\n"
        "    assert name in dir(blr)\n"
        "    try: getattr(blr, name)\n"
        "    except ImportError: continue\n"
        "    raise AssertionError(name)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    with pytest.raises(AttributeError, match="no attribute 'QGauss'"):
        blr.QGauss  # noqa: B018


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda q: blr.QGaussian(0.0, 0.0, 1.0), ValueError, r"stddev must be in \(0, inf\), got"),
        (lambda q: blr.QGaussian(0.0, 1.0, 1 / 3), ValueError, "alpha must be in .*, got 0.333"),
        (lambda q: blr.QGaussian(0.0, "1", 1.0), TypeError, "stddev must be a number, got '1'"),
        (
            lambda q: blr.QGaussian.from_natural(0.0, -1.0, 1.0),
            ValueError,
            "natural must be in .*-1",
        ),
        (lambda q: blr.QGaussian.from_support(0.0, 1.0, 1.0), ValueError, r"alpha must be in \(1"),
        (lambda q: blr.QGaussian.from_support(0.0, -2.0, 2.0), ValueError, "half_width must .*-2"),
        (
            lambda q: q.natural("haar"),
            ValueError,
            "reference must be one of 'lebesgue', got 'haar'",
        ),
        (lambda q: q.natural(-1.0), ValueError, "reference must be in .*, got -1"),
        (
            lambda q: q.fenchel_young(blr.QGaussian(0.0, 1.0, 1.0)),
            ValueError,
            "other must have the alpha of this one, 2.0, got 1.0",
        ),
        (
            lambda q: q.fenchel_young(distrax.Normal(0.0, 1.0)),
            TypeError,
            "other must be a QGaussian, got Normal",
        ),
        (
            lambda q: blr.QGaussian(0.0, 1.0, 1.0).kl_divergence(q),
            ValueError,
            "kl_divergence must be finite, got a support that reaches beyond",
        ),
        (
            lambda q: q.kl_divergence(blr.QGaussian(0.0, 5.0, 2.0)),
            NotImplementedError,
            "closed form for an other of alpha=1, got 2.0",
        ),
    ],
)
def test_bad_input_is_named(call, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        call(blr.QGaussian(0.0, 1.0, 2.0))


def test_traced_indices_give_nan_in_place_of_errors():
    """Where they differ, and where a divergence is infinite or unknown; else they do not."""

    @jax.jit
    def both(q, p):
        return q.fenchel_young(p), q.kl_divergence(p)

    q = blr.QGaussian(0.0, 1.0, jnp.array([1.0, 2.0, 2.0]))
    p = blr.QGaussian(0.5, 1.0, jnp.array([1.0, 1.0, 2.0]))
    discrepancy, divergence = both(q, p)
    np.testing.assert_array_equal(jnp.isnan(discrepancy), [False, True, False])
    np.testing.assert_array_equal(jnp.isnan(divergence), [False, False, True])
    assert discrepancy[0] == pytest.approx(0.125)
