"""Joint noise: the distribution of its radius, and its covariance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit.blr._joint_noise import joint_noise

N, DRAWS = 3, 20_000
ALPHAS = (0.7, 0.9, 1.0, 1.5, 4.0)


@pytest.fixture(scope="module")
def noise():
    """Returns draws ``[DRAWS, len(ALPHAS), N]``."""
    alphas = jnp.float32(ALPHAS)
    return np.float64(joint_noise(jax.random.key(0), alphas, (DRAWS, len(ALPHAS), N)))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_square_radius_is_beta_or_f_or_chi_square(noise, alpha):
    """Beta(n / 2, k + 1) of the support's, F with 2 k - n degrees, and chi square between."""
    stats = pytest.importorskip("scipy.stats")
    square = np.sum(noise[:, ALPHAS.index(alpha)] ** 2, -1)
    if alpha == 1:
        want = stats.chi2(N)
    elif alpha > 1:
        edge = N + 2 * alpha / (alpha - 1)
        want = stats.beta(N / 2, 1 / (alpha - 1) + 1, scale=edge)
        assert square.max() <= edge * (1 + 1e-6)
    else:
        df = 2 / (1 - alpha) - N
        want = stats.f(N, df, scale=N * (df - 2) / df)
    assert stats.kstest(square, want.cdf).pvalue > 1e-3


@pytest.mark.parametrize("alpha", ALPHAS[1:])
def test_directions_are_uniform_and_the_covariance_is_one(noise, alpha):
    """Means and second moments lie within 4.5 standard errors, estimated from the draws."""
    draws = noise[:, ALPHAS.index(alpha)]
    products = np.einsum("ki,kj->kij", draws, draws).reshape(DRAWS, -1)
    for values, want in ((draws, 0), (products, np.eye(N).ravel())):
        error = values.std(0) / DRAWS**0.5
        assert np.all(abs(values.mean(0) - want) < 4.5 * error)


def test_draws_move_smoothly_with_alpha():
    """Their derivative in alpha is finite, at 1 too."""

    def total(alpha):
        return jnp.sum(jnp.square(joint_noise(jax.random.key(1), alpha, (5, N))))

    slopes = jax.jit(jax.vmap(jax.grad(total)))(jnp.float32([0.8, 1.0, 1.2]))
    assert jnp.isfinite(slopes).all()
