"""The q-Gaussian in one dimension, as a distribution of distrax."""

import distrax
import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import _check, _numerics
from jaxkit.blr import _closed_forms, _geometry, _tail
from jaxkit.blr._q_gaussian_noise import q_gaussian_noise


class QGaussian(distrax.Distribution):
    r"""The q-Gaussian: bounded support, the normal distribution, or heavy tails.

    Its density is :math:`p(x) \propto [1 - \epsilon z^2 / (3\alpha - 1)]_+^{1/\epsilon}` with
    :math:`\epsilon = \alpha - 1` and :math:`z = (x - loc) / stddev`. 1 is the normal distribution.
    Above 1 the support ends :math:`\sqrt{(3\alpha - 1)/\epsilon}` standard deviations from the
    mean; below 1 it is Student's t with :math:`(1 + \alpha) / (1 - \alpha)` degrees of freedom,
    rescaled to this standard deviation. All methods have derivatives in ``alpha``, at 1 too.

    The event has no axes; the batch has the shape that the arguments broadcast to. An instance is
    a tree of three arrays of that shape, right under ``jit`` and ``vmap`` in both directions.
    Values that are traced or arrays are not checked: out of range they give NaN.

    Args:
      loc: the mean, real floating.
      stddev: the standard deviation, positive.
      alpha: the Tsallis index, above 1/3.

    Raises:
      TypeError: an argument is no number and no array.
      ValueError: a static ``stddev`` or ``alpha`` is out of range.

    Example:
      >>> from jaxkit import blr
      >>> q = blr.QGaussian(0.0, 1.0, 2.0)
      >>> print(f"{q.prob(0.0):.4f} {q.cdf(2.0):.4f} {q.quantile(1.0):.4f}")
      0.3354 0.9919 2.2361

    Source: arXiv:2108.01988. Derived here: the forms that hold at alpha = 1.

    Cost: elementwise; 32 terms for ``cdf``, and six times that for ``quantile``.
    """

    def __init__(self, loc, stddev, alpha):
        super().__init__()
        _check.between("stddev", stddev, 0, float("inf"), closed=False)
        _geometry.check_alpha("alpha", alpha)
        # One shape for all three: a batch axis that vmap adds then stays the same axis of each.
        self._loc, self._stddev, self._alpha = _same_shape(loc, stddev, alpha)

    @classmethod
    def from_natural(cls, loc, natural, alpha, reference="lebesgue"):
        """Returns the distribution of natural precision S, see :meth:`natural`."""
        _check.between("natural", natural, 0, float("inf"), closed=False)
        _geometry.check_alpha("alpha", alpha)
        loc, natural, alpha = _same_shape(loc, natural, alpha)
        reference = _reference(reference, alpha)
        return cls(loc, _geometry.stddev(natural, _geometry.gamma(alpha), reference), alpha)

    @classmethod
    def from_support(cls, loc, half_width, alpha):
        """Returns the distribution on ``loc +- half_width``, for alpha above 1."""
        _check.between("half_width", half_width, 0, float("inf"), closed=False)
        _check.between("alpha", alpha, 1, float("inf"), closed=False)
        loc, half_width, alpha = _same_shape(loc, half_width, alpha)
        return cls(loc, half_width / _geometry.half_width(alpha), alpha)

    @property
    def loc(self):
        """The mean."""
        return self._loc

    @property
    def alpha(self):
        """The Tsallis index."""
        return self._alpha

    @property
    def event_shape(self):
        """The empty tuple."""
        return ()

    @property
    def batch_shape(self):
        """The shape that the arguments broadcast to."""
        return jnp.shape(self._loc)

    def _sample_n(self, key, n):
        shape = (n, *self.batch_shape)
        noise = q_gaussian_noise(key, shape, self._alpha, self._loc.dtype)
        return self._loc[None] + self._stddev[None] * noise

    def log_prob(self, value):
        """Returns the log density; beyond the edge it is -inf, and its slope in value 0."""
        z, stddev, alpha = self._standardized(value)
        peak = _closed_forms.log_peak(alpha) - jnp.log(stddev)
        return peak + _closed_forms.log_density(alpha, jnp.square(z))

    def cdf(self, value):
        """Returns P(X <= value), with all its digits where it is small."""
        z, _, alpha = self._standardized(value)
        left = z < 0
        outer = _tail.tail(alpha, jnp.where(left, -z, z))
        return jnp.where(left, outer, 1 - outer)

    def log_cdf(self, value):
        """Returns log P(X <= value)."""
        return jnp.log(self.cdf(value))

    def survival_function(self, value):
        """Returns P(X > value), with all its digits where it is small."""
        return self._mirrored().cdf(-jnp.asarray(value))

    def log_survival_function(self, value):
        """Returns log P(X > value)."""
        return jnp.log(self.survival_function(value))

    def quantile(self, value):
        """Returns x with P(X <= x) = value; the ends of the support at 0 and 1."""
        p, loc, stddev, alpha = self._with_batch(value)
        # The zeros split a lone probability over devices as the batch is.
        p = p + jnp.zeros_like(alpha)
        z = _tail.inverse_tail(alpha, jnp.minimum(p, 1 - p))
        return loc + stddev * jnp.sign(p - 0.5) * z

    def entropy(self):
        """Returns the Shannon entropy in nats."""
        return _closed_forms.shannon(self._alpha, self._peak())

    def tsallis_entropy(self):
        r"""Returns :math:`(1 - \int p^\alpha) / (\alpha (\alpha - 1))`, the entropy of the rule."""
        return -_closed_forms.negentropy(self._alpha, self._peak())

    def renyi_entropy(self):
        r"""Returns the entropy of order alpha, :math:`\log \int p^\alpha / (1 - \alpha)`."""
        return _closed_forms.renyi(self._alpha, self._peak())

    def mean(self):
        """Returns the mean."""
        return self._loc

    def mode(self):
        """Returns the mode, which is the mean."""
        return self._loc

    def median(self):
        """Returns the median, which is the mean."""
        return self._loc

    def stddev(self):
        """Returns the standard deviation."""
        return self._stddev

    def variance(self):
        """Returns the variance."""
        return jnp.square(self._stddev)

    def kurtosis(self):
        """Returns the fourth moment of z, 3 for alpha = 1, inf for alpha <= 3/5."""
        return _geometry.kurtosis(self._alpha)

    def support(self):
        """Returns ``(low, high)``, infinite for alpha <= 1."""
        half = _geometry.half_width(self._alpha) * self._stddev
        return self._loc - half, self._loc + half

    def natural(self, reference="lebesgue"):
        r"""Returns the natural precision S, 1 / variance for alpha = 1.

        Tsallis' entropy depends on the unit of x. The default ``reference`` is Lebesgue measure; a
        positive number or array is the precision at which S is 1 / variance for every alpha.
        """
        exponent = _geometry.gamma(self._alpha)
        return _geometry.precision(self._stddev, exponent, _reference(reference, self._alpha))

    def fenchel_young(self, other, reference="lebesgue"):
        """Returns the Fenchel-Young discrepancy of this one from ``other``, in closed form.

        It is at least 0, 0 only if both are one, and finite for disjoint supports too. At alpha = 1
        it is the Kullback-Leibler divergence. ``other`` has the same alpha, else ValueError is
        raised, or where alpha is traced the result is NaN. ``reference`` is that of
        :meth:`natural`.
        """
        check_kind(self, other)
        q, p = self._beside(other), other._beside(self)
        same = check_same_alpha(q.alpha, p.alpha)
        shift, ratio = (q.loc - p.loc) / p.stddev(), q.stddev() / p.stddev()
        got = _closed_forms.discrepancy(
            p.alpha,
            jnp.square(shift),
            jnp.square(ratio),
            2 * jnp.log(ratio),
            p.natural(reference) * p.variance(),
        )
        return jnp.where(same, got, jnp.nan)

    def kl_divergence(self, other_dist):
        """Returns the Kullback-Leibler divergence from ``other_dist`` of alpha = 1, in closed form.

        Where it is infinite, since this support reaches beyond the other, ValueError is raised;
        where no closed form is known, NotImplementedError. Where values are traced it is NaN.
        """
        check_kind(self, other_dist)
        q, p = self._beside(other_dist), other_dist._beside(self)
        (low, high), (other_low, other_high) = q.support(), p.support()
        normal = check_divergence(p.alpha, (low < other_low) | (high > other_high))
        square = (jnp.square(q.loc - p.loc) + q.variance()) / p.variance()
        cross = (jnp.log(2 * jnp.pi * p.variance()) + square) / 2
        return jnp.where(normal, cross - q.entropy(), jnp.nan)

    def _peak(self):
        return _closed_forms.log_peak(self._alpha) - jnp.log(self._stddev)

    def _mirrored(self):
        return QGaussian(-self._loc, self._stddev, self._alpha)

    def _beside(self, other):
        """Returns this distribution with the batch shape of both."""
        shape = jnp.broadcast_shapes(self.batch_shape, other.batch_shape)
        return jax.tree.map(lambda x: jnp.broadcast_to(x, shape), self)

    def _with_batch(self, value):
        value = jnp.asarray(value, self._loc.dtype)
        shape = jnp.broadcast_shapes(jnp.shape(value), self.batch_shape)
        parts = value, self._loc, self._stddev, self._alpha
        return [jnp.broadcast_to(x, shape) for x in parts]

    def _standardized(self, value):
        value, loc, stddev, alpha = self._with_batch(value)
        return (value - loc) / stddev, stddev, alpha


def check_kind(distribution, other):
    """Checks that ``other`` is a distribution of the same class."""
    kind = type(distribution)
    if not isinstance(other, kind):
        raise TypeError(f"other must be a {kind.__name__}, got {type(other).__name__}.")


def check_same_alpha(alpha, other):
    """Returns where two indices are equal; raises where it is known that they are not."""
    same = alpha == other
    if not _all(same):
        raise ValueError(f"other must have the alpha of this one, {alpha}, got {other}.")
    return same


def check_divergence(alpha, infinite):
    """Returns where ``alpha`` is 1; raises where the divergence is infinite or unknown."""
    if not _all(~infinite):
        raise ValueError(
            "kl_divergence must be finite, got a support that reaches beyond that of other; "
            "fenchel_young is finite there."
        )
    if not _all(alpha == 1):
        raise NotImplementedError(
            f"kl_divergence has a closed form for an other of alpha=1, got {alpha}; "
            "fenchel_young has one for every alpha."
        )
    return alpha == 1


def _all(condition):
    """Says whether all are true; traced values pass."""
    try:
        return bool(np.asarray(condition).all())
    except jax.errors.TracerArrayConversionError:
        return True


def _same_shape(*arrays):
    """Returns ``arrays`` in one shape and dtype, at least float32."""
    arrays = [_geometry.as_float(x) for x in arrays]
    shape = jnp.broadcast_shapes(*(x.shape for x in arrays))
    dtype = _numerics.wide(*(x.dtype for x in arrays))
    return [jnp.broadcast_to(x, shape).astype(dtype) for x in arrays]


def _reference(reference, alpha):
    """Returns the reference precision in the shape of ``alpha``."""
    if isinstance(reference, str):
        _check.choice("reference", reference, ("lebesgue",))
        return _geometry.lebesgue(alpha)
    _check.between("reference", reference, 0, float("inf"), closed=False)
    return jnp.broadcast_to(jnp.asarray(reference, alpha.dtype), alpha.shape)
