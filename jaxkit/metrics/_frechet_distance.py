"""The Frechet distance of two Gaussians that are fitted to samples."""

import jax
import jax.numpy as jnp

from jaxkit.metrics import _samples


@jax.jit
def _distance(real, fake):
    means = jnp.mean(real, axis=0), jnp.mean(fake, axis=0)
    factors = [
        (x - mean[None]) / (x.shape[0] - 1) ** 0.5
        for x, mean in zip((real, fake), means, strict=True)
    ]
    traces = sum(jnp.sum(jnp.square(factor)) for factor in factors)
    gap = jnp.sum(jnp.square(means[0] - means[1]))
    # A nuclear norm of NaN has failed quietly on some backends.
    return gap + traces - 2 * _nuclear_norm(*factors) + _samples.poison(real, fake)


def frechet_distance(*, real, fake):
    r"""Returns the squared Frechet distance of the Gaussians of two samples; FID of features.

    :math:`|m_r - m_f|^2 + \mathrm{tr}\, S_r + \mathrm{tr}\, S_f
    - 2\, \mathrm{tr} (S_r^{1/2} S_f S_r^{1/2})^{1/2}` with means and covariances (dividing by
    N - 1). The last trace is the nuclear norm of :math:`R_r R_f^\top` with R of the QR
    factorization of the centered rows, so neither a covariance is squared nor a root of a
    singular matrix taken: rounding stays at some 1e-7 of the traces, also for fewer rows than D.

    Estimated from finite samples the distance is too large, by more for fewer rows: compare equal
    sizes. It sees means and covariances only: a Gaussian cloud with those of the real gets 0.

    Args:
      real: ``[N, D]`` real floating.
      fake: ``[M, D]`` real floating.

    Returns:
      ``[]``, float32 or wider, in squared units of the features; lower is better. Rounding may
      put it below zero.

    Raises:
      TypeError: an array that is not real floating.
      ValueError: other shapes, or fewer than two rows; outside ``jit`` also NaN or inf.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import metrics
      >>> real = jnp.array([[0.0, 0.0], [2.0, 0.0], [0.0, 2.0], [2.0, 2.0]])
      >>> print(metrics.frechet_distance(real=real, fake=real + 3.0).round(3))
      18.0

    Source: arXiv:1706.08500, equation 6. Derived here: the nuclear norm.

    Cost: two QR factorizations, 2 (N + M) D ** 2, and the singular values of a D x D matrix.
    """
    real, fake = _samples.checked(real=real, fake=fake, minimum=2)
    return _distance(real, fake)


@jax.custom_jvp
def _nuclear_norm(first, second):
    """Returns the nuclear norm of ``first @ second.T``."""
    factors = (jnp.linalg.qr(x, mode="r") for x in (first, second))
    return jnp.sum(jnp.linalg.svd(_product(*factors), compute_uv=False))


@_nuclear_norm.defjvp
def _nuclear_norm_jvp(primals, tangents):
    # The derivative of QR fails where rows are dependent; that of the norm needs none.
    (q1, r1), (q2, r2) = (jnp.linalg.qr(x) for x in primals)
    u, s, vt = jnp.linalg.svd(_product(r1, r2), full_matrices=False)
    some = s > jnp.finfo(s.dtype).eps * max(r1.shape[0], r2.shape[0]) * s[0]
    polar = jnp.matmul(jnp.where(some[None], u, 0), vt, precision=jax.lax.Precision.HIGHEST)
    change = _product(q1.T @ tangents[0], r2) + _product(r1, q2.T @ tangents[1])
    return jnp.sum(s), jnp.sum(polar * change)


def _product(x, y):
    return jnp.matmul(x, y.T, precision=jax.lax.Precision.HIGHEST)
