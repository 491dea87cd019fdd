"""The joint q-Gaussian in n dimensions, as a distribution of distrax."""

import functools

import distrax
import jax
import jax.numpy as jnp

from jaxkit import _numerics
from jaxkit.blr import _closed_forms, _geometry
from jaxkit.blr._joint_noise import joint_noise
from jaxkit.blr._q_gaussian import QGaussian, check_divergence, check_kind, check_same_alpha

# Accelerators may round factors to fewer bits, and a draw then leaves the support.
_einsum = functools.partial(jnp.einsum, precision=jax.lax.Precision.HIGHEST)


class MultivariateQGaussian(distrax.Distribution):
    r"""The joint q-Gaussian: elliptical, bounded for alpha above 1, Student's t below.

    Its density is a function of :math:`r^2 = (x - loc)^\top V^{-1} (x - loc)` with the covariance
    V. Above alpha = 1 it ends at :math:`r^2 = n + 2\alpha / (\alpha - 1)`, below it has
    :math:`2 / (1 - \alpha) - n` degrees of freedom. Coordinates without correlation are still not
    independent, save at alpha = 1; for these use a batch of :class:`QGaussian`.

    An instance is a tree of three arrays, and nothing about its shape is stored, so it is right
    under ``jit`` and ``vmap`` in both directions. The multivariate normals of distrax draw samples
    of a wrong shape after that. Values that are traced or arrays are not checked: out of range
    they give NaN.

    Args:
      loc: the mean, ``[..., n]`` real floating.
      scale_tril: lower triangular factor of the covariance, ``[..., n, n]``, of positive diagonal.
      alpha: the Tsallis index, above n / (n + 2), a number or ``[...]``.

    Raises:
      TypeError: ``alpha`` is no number and no array.
      ValueError: a shape does not fit, or a static ``alpha`` is out of range.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import blr
      >>> q = blr.MultivariateQGaussian(jnp.zeros(2), jnp.eye(2), 2.0)
      >>> x = q.sample(seed=jax.random.key(0), sample_shape=(1000,))
      >>> print(x.shape, bool(jnp.sum(x**2, -1).max() <= 6), q.prob(jnp.zeros(2)).round(2))
      (1000, 2) True 0.11

    Source: arXiv:2108.01988. Derived here: the forms that hold at alpha = 1.

    Cost: a triangular solve for each value of ``log_prob``; a gamma variable for each draw.
    """

    def __init__(self, loc, scale_tril, alpha):
        super().__init__()
        loc, scale_tril = _geometry.as_float(loc), _geometry.as_float(scale_tril)
        n = _check_shapes(loc, "scale_tril", scale_tril)
        alpha = _geometry.as_float(_geometry.check_alpha("alpha", alpha, n=n))
        batch = jnp.broadcast_shapes(loc.shape[:-1], scale_tril.shape[:-2], alpha.shape)
        dtype = _numerics.wide(loc.dtype, scale_tril.dtype, alpha.dtype)
        # One batch shape for all three: an axis that vmap adds then stays the same axis of each.
        self._loc = jnp.broadcast_to(loc, (*batch, n)).astype(dtype)
        self._scale_tril = jnp.broadcast_to(jnp.tril(scale_tril), (*batch, n, n)).astype(dtype)
        self._alpha = jnp.broadcast_to(alpha, batch).astype(dtype)

    @classmethod
    def from_natural(cls, loc, natural, alpha):
        """Returns the distribution of natural precision S ``[..., n, n]``, see :meth:`natural`."""
        loc, natural = _geometry.as_float(loc), _geometry.as_float(natural)
        n = _check_shapes(loc, "natural", natural)
        alpha = _geometry.as_float(_geometry.check_alpha("alpha", alpha, n=n))
        natural, alpha = (
            x.astype(_numerics.wide(natural.dtype, alpha.dtype)) for x in (natural, alpha)
        )
        # S = U U' with U upper triangular, so U'^-1 is a lower triangular factor of S^-1.
        upper = jnp.linalg.cholesky(natural[..., ::-1, ::-1])[..., ::-1, ::-1]
        log_det = 2 * jnp.sum(jnp.log(_diagonal(upper)), -1)
        batch = jnp.broadcast_shapes(alpha.shape, log_det.shape)
        alpha, log_det = jnp.broadcast_to(alpha, batch), jnp.broadcast_to(log_det, batch)
        peak = _closed_forms.log_peak_of_precision(alpha, log_det, n)
        scale = jnp.sqrt(_closed_forms.scale_of_peak(alpha, peak, n))
        upper = jnp.broadcast_to(upper, (*batch, n, n))
        factor = _solve(jnp.swapaxes(upper, -1, -2), jnp.broadcast_to(_eye(upper), upper.shape))
        return cls(loc, scale[..., None, None] * factor, alpha)

    @property
    def loc(self):
        """The mean."""
        return self._loc

    @property
    def scale_tril(self):
        """The lower triangular factor of the covariance."""
        return self._scale_tril

    @property
    def alpha(self):
        """The Tsallis index."""
        return self._alpha

    @property
    def event_shape(self):
        """The tuple (n,)."""
        return jnp.shape(self._loc)[-1:]

    @property
    def batch_shape(self):
        """The shape that the leading axes of the arguments broadcast to."""
        return jnp.shape(self._alpha)

    def _sample_n(self, key, n):
        noise = joint_noise(key, self._alpha, (n, *jnp.shape(self._loc)))
        return self._loc[None] + _einsum("...ij,s...j->s...i", self._scale_tril, noise)

    def log_prob(self, value):
        """Returns the log density; beyond the edge it is -inf, and its slope in value 0."""
        value = jnp.asarray(value, self._loc.dtype)
        shape = jnp.broadcast_shapes(jnp.shape(value), jnp.shape(self._loc))
        batch = self.batch_shape
        shift = jnp.broadcast_to(value, shape) - jnp.broadcast_to(self._loc, shape)
        # One solve with all values of a distribution as right-hand sides; none copies its factor.
        axes = len(shape) - 1 - len(batch)
        same = shape[axes:-1] == batch
        q = self if same else self._in(shape[axes:-1])
        columns = jnp.moveaxis(shift.reshape(-1, *shape[axes:]), 0, -1)
        squares = jnp.sum(jnp.square(_solve(q._scale_tril, columns)), -2)
        square = jnp.moveaxis(squares, -1, 0).reshape(shape[:-1])
        alpha, peak = (jnp.broadcast_to(x, shape[:-1]) for x in (q._alpha, q._peak()))
        return peak + _closed_forms.log_density(alpha, square, self._n)

    def entropy(self):
        """Returns the Shannon entropy in nats."""
        return _closed_forms.shannon(self._alpha, self._peak(), self._n)

    def tsallis_entropy(self):
        r"""Returns :math:`(1 - \int p^\alpha) / (\alpha (\alpha - 1))`, the entropy of the rule."""
        return -_closed_forms.negentropy(self._alpha, self._peak(), self._n)

    def renyi_entropy(self):
        r"""Returns the entropy of order alpha, :math:`\log \int p^\alpha / (1 - \alpha)`."""
        return _closed_forms.renyi(self._alpha, self._peak(), self._n)

    def mean(self):
        """Returns the mean."""
        return self._loc

    def mode(self):
        """Returns the mode, which is the mean."""
        return self._loc

    def median(self):
        """Returns the medians of the coordinates, which are the means."""
        return self._loc

    def covariance(self):
        """Returns the covariance V, ``[..., n, n]``."""
        return _einsum("...ij,...kj->...ik", self._scale_tril, self._scale_tril)

    def variance(self):
        """Returns the variances of the coordinates."""
        return jnp.sum(jnp.square(self._scale_tril), -1)

    def stddev(self):
        """Returns the standard deviations of the coordinates."""
        return jnp.sqrt(self.variance())

    def marginals(self):
        """Returns the distributions of the coordinates, :class:`QGaussian` of an index nearer to 1.

        The reciprocal of their alpha - 1 is larger by (n - 1) / 2.
        """
        eps = self._alpha - 1
        alpha = 1 + eps / (1 + eps * ((self._n - 1) / 2))
        return QGaussian(self._loc, self.stddev(), alpha[..., None])

    def kurtosis(self):
        """Returns the kurtosis of every coordinate."""
        return self.marginals().kurtosis()

    def support(self):
        """Returns ``(low, high)``, the exact range of every coordinate; infinite for alpha <= 1."""
        return self.marginals().support()

    def natural(self):
        """Returns the natural precision S ``[..., n, n]``, the inverse covariance for alpha = 1."""
        identity = jnp.broadcast_to(_eye(self._scale_tril), self._scale_tril.shape)
        inverse = _solve(self._scale_tril, identity)
        return self._scale()[..., None, None] * _einsum("...ji,...jk->...ik", inverse, inverse)

    def fenchel_young(self, other):
        """Returns the Fenchel-Young discrepancy of this one from ``other``, in closed form.

        It is at least 0, 0 only if both are one, and finite for disjoint supports too. At alpha = 1
        it is the Kullback-Leibler divergence. ``other`` has the same alpha, else ValueError is
        raised, or where alpha is traced the result is NaN.
        """
        q, p = self._beside(other)
        same = check_same_alpha(q.alpha, p.alpha)
        shift, trace, log_det = _compare(q, p)
        got = _closed_forms.discrepancy(p.alpha, shift, trace, log_det, p._scale(), self._n)
        return jnp.where(same, got, jnp.nan)

    def kl_divergence(self, other_dist):
        """Returns the Kullback-Leibler divergence from ``other_dist`` of alpha = 1, in closed form.

        Where it is infinite, since only the support of the other is bounded, ValueError is raised;
        where no closed form is known, NotImplementedError. Where values are traced it is NaN.
        """
        q, p = self._beside(other_dist)
        normal = check_divergence(p.alpha, (p.alpha > 1) & (q.alpha <= 1))
        shift, trace, _ = _compare(q, p)
        return jnp.where(normal, (shift + trace) / 2 - p._peak() - q.entropy(), jnp.nan)

    @property
    def _n(self):
        return jnp.shape(self._loc)[-1]

    def _peak(self):
        log_det = jnp.sum(jnp.log(_diagonal(self._scale_tril)), -1)
        return _closed_forms.log_peak(self._alpha, self._n) - log_det

    def _scale(self):
        return _closed_forms.scale_of_peak(self._alpha, self._peak(), self._n)

    def _in(self, batch):
        """Returns this distribution with the batch shape ``batch``."""
        n = self._n
        parts = (self._loc, (*batch, n)), (self._scale_tril, (*batch, n, n)), (self._alpha, batch)
        return MultivariateQGaussian(*(jnp.broadcast_to(x, shape) for x, shape in parts))

    def _beside(self, other):
        """Returns both distributions with the batch shape of both."""
        check_kind(self, other)
        if other._n != self._n:
            raise ValueError(f"other must have the dimension {self._n}, got {other._n}.")
        batch = jnp.broadcast_shapes(self.batch_shape, other.batch_shape)
        return self._in(batch), other._in(batch)


def _check_shapes(loc, name, matrix):
    """Checks the shapes of ``loc`` and of a matrix beside it; returns n."""
    if loc.ndim < 1:
        raise ValueError(f"loc must have shape [..., n], got {loc.shape}.")
    n = loc.shape[-1]
    if matrix.shape[-2:] != (n, n):
        raise ValueError(f"{name} must have shape [..., n, n] with n={n}, got {matrix.shape}.")
    return n


def _solve(lower, columns):
    """Returns the inverse of a lower triangular factor times ``columns``."""
    return jax.lax.linalg.triangular_solve(lower, columns, left_side=True, lower=True)


def _diagonal(matrix):
    return jnp.diagonal(matrix, axis1=-2, axis2=-1)


def _eye(like):
    return jnp.eye(like.shape[-1], dtype=like.dtype)


def _compare(q, p):
    """Returns shift' V_p^-1 shift, tr V_p^-1 V_q and log(det V_q / det V_p)."""
    columns = jnp.concatenate([q._scale_tril, (q._loc - p._loc)[..., None]], -1)
    squares = jnp.sum(jnp.square(_solve(p._scale_tril, columns)), -2)
    ratio = jnp.log(_diagonal(q._scale_tril)) - jnp.log(_diagonal(p._scale_tril))
    return squares[..., -1], jnp.sum(squares[..., :-1], -1), 2 * jnp.sum(ratio, -1)
