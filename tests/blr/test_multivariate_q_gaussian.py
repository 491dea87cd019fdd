"""MultivariateQGaussian against distrax at alpha = 1, formulas in NumPy, and its marginals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import blr

distrax = pytest.importorskip("distrax")
stats = pytest.importorskip("scipy.stats")

LOC = np.array([0.5, -1.0, 2.0])
TRIL = np.array([[1.2, 0, 0], [0.3, 0.8, 0], [-0.5, 0.2, 1.5]])
OTHER = np.array([[0.9, 0, 0], [-0.2, 1.1, 0], [0.1, 0.4, 0.7]])
VALUES = np.random.default_rng(0).normal(size=(5, 2, 3))
ALPHAS = (0.7, 1.0, 2.0)


def build(alpha, loc=LOC, tril=TRIL):
    return blr.MultivariateQGaussian(jnp.float32(loc), jnp.float32(tril), alpha)


@pytest.fixture(scope="module")
def normals():
    """Returns two normals of distrax, whose code promotes ranks and dtypes."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield tuple(
            distrax.MultivariateNormalTri(jnp.float32(loc), jnp.float32(tril))
            for loc, tril in ((LOC, TRIL), (LOC / 2, OTHER))
        )


def test_alpha_one_is_the_normal_of_distrax(normals):
    """Density, entropy, and both divergences."""
    q, p = build(1.0), build(1.0, LOC / 2, OTHER)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        log_probs = normals[0].log_prob(jnp.float32(VALUES))
        want = [float(normals[0].entropy())] * 3 + [float(normals[0].kl_divergence(normals[1]))] * 2
    np.testing.assert_allclose(q.log_prob(VALUES), log_probs, rtol=1e-5)
    entropies = q.entropy(), q.renyi_entropy(), q.tsallis_entropy()
    got = [*entropies, q.kl_divergence(p), q.fenchel_young(p)]
    np.testing.assert_allclose(got, want, rtol=1e-5)
    np.testing.assert_allclose(q.natural(), np.linalg.inv(TRIL @ TRIL.T), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("alpha", [0.7, 2.0])
def test_density_is_that_of_the_textbook(alpha):
    """Student's t of scipy below 1; above, the power of the distance, over its integral."""
    covariance = TRIL @ TRIL.T
    got = np.float64(build(alpha).log_prob(VALUES))
    if alpha < 1:
        df = 2 / (1 - alpha) - 3
        want = stats.multivariate_t(LOC, covariance * (df - 2) / df, df).logpdf(VALUES)
    else:
        square = np.einsum(
            "...i,ij,...j->...", VALUES - LOC, np.linalg.inv(covariance), VALUES - LOC
        )
        # In the ball of radius R the integral of 1 - r^2 / R^2 is 2/5 of the volume.
        radius2 = 3 + 2 * alpha / (alpha - 1)
        volume = 4 / 3 * np.pi * radius2**1.5 * np.prod(np.diag(TRIL))
        inside = np.maximum(1 - square / radius2, 0)
        with np.errstate(divide="ignore"):
            want = np.log(inside / (0.4 * volume))
        assert np.isinf(want).any()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_samples_have_the_covariance_and_the_marginals(alpha):
    """Each coordinate is a QGaussian of an index nearer to 1; the support holds every draw."""
    q = build(alpha)
    draws = q.sample(seed=jax.random.key(3), sample_shape=(10_000,))
    marginals, low, high = q.marginals(), *q.support()
    assert jnp.all((draws >= low[None]) & (draws <= high[None]))
    for i in range(3):
        one = blr.QGaussian(marginals.loc[i], marginals.stddev()[i], marginals.alpha[i])
        cdf = np.asarray(one.cdf(jnp.sort(draws[:, i])))
        assert stats.kstest(cdf, "uniform").pvalue > 1e-3
    shifts = np.float64(draws) - LOC
    products = np.einsum("ki,kj->kij", shifts, shifts)
    error = products.std(0) / 100
    assert np.all(abs(products.mean(0) - TRIL @ TRIL.T) < 4.5 * error)
    np.testing.assert_allclose(q.covariance(), TRIL @ TRIL.T, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(q.stddev() ** 2, np.diag(TRIL @ TRIL.T), rtol=1e-5)
    for values in (q.mean(), q.mode(), q.median()):
        np.testing.assert_array_equal(values, jnp.float32(LOC))


def test_marginal_support_and_kurtosis_are_exact():
    """r^2 = n + 2 alpha / (alpha - 1); the kurtosis is 3 (n + 2k + 2) / (n + 2k + 4)."""
    q = build(2.0)
    r = np.sqrt(3 + 4)
    np.testing.assert_allclose(q.support()[1] - LOC, r * q.stddev(), rtol=1e-6)
    np.testing.assert_allclose(q.kurtosis(), 3 * 7 / 9, rtol=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_natural_precision_goes_there_and_back(alpha):
    """And is proportional to the inverse covariance, by the factor of its determinant."""
    q = build(alpha)
    back = blr.MultivariateQGaussian.from_natural(q.loc, q.natural(), alpha)
    np.testing.assert_allclose(back.scale_tril, TRIL, rtol=1e-4, atol=1e-5)
    ratio = q.natural() @ q.covariance()
    np.testing.assert_allclose(ratio, ratio[0, 0] * np.eye(3), atol=1e-5)
    wide = blr.MultivariateQGaussian(q.loc, 2 * q.scale_tril, alpha)
    # V = c / S with log V ~ -log S / (1 + n (alpha - 1) / 2).
    growth = np.log(np.float64(q.natural()[0, 0] / wide.natural()[0, 0])) / np.log(4)
    assert growth == pytest.approx(1 + 3 * (alpha - 1) / 2, rel=1e-5)


@pytest.mark.parametrize("alpha", [0.7, 2.0])
def test_discrepancy_is_that_of_the_textbook(alpha):
    """(mu - mu0)' S0 (mu - mu0) / 2 + tr(S0 V) / 2 + (a R2 - (n + a) R2_0) / (2 (n + a + 2))."""
    q, p = build(alpha), build(alpha, LOC / 2, OTHER)
    a, n = 2 / (alpha - 1), 3
    natural, prior = np.float64(q.natural()), np.float64(p.natural())
    covariances = TRIL @ TRIL.T, OTHER @ OTHER.T
    # V = R2 / (n + a + 2) / S
    pairs = zip((natural, prior), covariances, strict=True)
    r2, prior_r2 = ((s @ v)[0, 0] * (n + a + 2) for s, v in pairs)
    want = (LOC / 2) @ prior @ (LOC / 2) / 2 + np.trace(prior @ covariances[0]) / 2
    want += (a * r2 - (n + a) * prior_r2) / (2 * (n + a + 2))
    assert float(q.fenchel_young(p)) == pytest.approx(want, rel=1e-4)
    assert float(q.fenchel_young(q)) == pytest.approx(0, abs=1e-6)


def test_log_prob_has_no_nan_at_and_beyond_the_edge():
    """There it is -inf with slope 0, and the derivatives in the parameters are finite."""
    edge = np.float32(np.sqrt(6))
    x = jnp.array([[edge, 0], [0, np.nextafter(edge, np.float32(0))], [2, 2], [1e30, 0], [0, 0]])

    def log_prob(x, loc, tril, alpha):
        return blr.MultivariateQGaussian(loc, tril, alpha).log_prob(x)

    differentiate = jax.vmap(jax.value_and_grad(log_prob, (0, 1, 2, 3)), (0, None, None, None))
    values, slopes = jax.jit(differentiate)(x, jnp.zeros(2), jnp.eye(2), jnp.float32(2))
    assert all(jnp.isfinite(s).all() for s in slopes)
    np.testing.assert_array_equal(jnp.isinf(values)[jnp.array([0, 2, 3])], True)
    np.testing.assert_array_equal(slopes[0][jnp.array([0, 2, 3])], 0)
    assert not jnp.isnan(values).any()


def test_right_after_vmap_where_distrax_is_silently_wrong(normals):
    """Of four normals in one dimension built inside vmap distrax draws a matrix, with no error."""
    del normals  # its fixture lets ranks promote
    locs = 10 * jnp.arange(4.0)
    theirs = jax.vmap(lambda x: distrax.MultivariateNormalDiag(x[None], jnp.ones(1)))(locs)
    assert theirs.sample(seed=jax.random.key(0)).shape == (4, 4)
    ours = jax.vmap(lambda x: blr.MultivariateQGaussian(x[None], jnp.eye(1), 1.0))(locs)
    assert (ours.batch_shape, ours.event_shape) == ((4,), (1,))
    draws = ours.sample(seed=jax.random.key(0), sample_shape=(2,))
    assert draws.shape == (2, 4, 1)
    np.testing.assert_allclose(draws, jnp.broadcast_to(locs[:, None], (2, 4, 1)), atol=5)
    np.testing.assert_array_equal(ours.loc[:, 0], locs)


def test_a_batch_equals_a_loop_under_jit_and_vmap():
    """Log densities, entropies and discrepancies of distributions that differ in every part."""
    locs, trils = jnp.float32([LOC, LOC / 2]), jnp.float32([TRIL, OTHER])
    alphas, x = jnp.float32([0.8, 1.7]), jnp.float32(VALUES)

    @jax.jit
    def everything(q, x):
        return q.log_prob(x), q.entropy(), q.fenchel_young(q), q.natural(), q.covariance()

    q = jax.jit(jax.vmap(blr.MultivariateQGaussian))(locs, trils, alphas)
    parts = [blr.MultivariateQGaussian(*args) for args in zip(locs, trils, alphas, strict=True)]
    loop = [everything(part, x[:, i]) for i, part in enumerate(parts)]
    want = [
        jnp.stack(values, axis)
        for axis, values in zip((1, 0, 0, 0, 0), zip(*loop, strict=True), strict=True)
    ]
    axes = (1, 0, 0, 0, 0)
    for got in (everything(q, x), jax.vmap(everything, (0, 1), axes)(q, x)):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), list(got), want
        )
    # One value for both, and both values for one.
    np.testing.assert_allclose(q.log_prob(x[0, 0])[1], parts[1].log_prob(x[0, 0]), rtol=1e-5)
    np.testing.assert_allclose(parts[0].log_prob(x)[:, 0], want[0][:, 0], rtol=1e-4)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: build(0.6), ValueError, r"alpha must be in \(0.6, inf\), got 0.6"),
        (lambda: build("1"), TypeError, "alpha must be a number, got '1'"),
        (lambda: build(1.0, 0.0), ValueError, r"loc must have shape \[..., n\], got \(\)"),
        (
            lambda: build(1.0, LOC, np.eye(2)),
            ValueError,
            r"scale_tril must have shape \[..., n, n\] with n=3, got \(2, 2\)",
        ),
        (
            lambda: blr.MultivariateQGaussian.from_natural(jnp.zeros(2), jnp.eye(3), 1.0),
            ValueError,
            "natural must have shape .* with n=2",
        ),
        (
            lambda: build(1.0).fenchel_young(
                blr.MultivariateQGaussian(jnp.zeros(2), jnp.eye(2), 1.0)
            ),
            ValueError,
            "other must have the dimension 3, got 2",
        ),
        (lambda: build(1.0).fenchel_young(build(2.0)), ValueError, "other must have the alpha"),
        (
            lambda: build(1.0).kl_divergence(blr.QGaussian(0.0, 1.0, 1.0)),
            TypeError,
            "other must be a MultivariateQGaussian, got QGaussian",
        ),
        (lambda: build(1.0).kl_divergence(build(2.0)), ValueError, "kl_divergence must be finite"),
        (lambda: build(2.0).kl_divergence(build(2.0)), NotImplementedError, "closed form"),
    ],
)
def test_bad_input_is_named(call, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        call()
