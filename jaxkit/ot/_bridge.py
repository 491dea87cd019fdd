"""Potentials in the convention of ott-jax, and starts for its Sinkhorn solver; needs no ott."""

import jax.numpy as jnp

from jaxkit import _check, _numerics
from jaxkit.ot import _pair


def to_ott(f, a, epsilon):
    r"""Returns a potential in the convention of ott-jax, :math:`f + \epsilon \log a`.

    There a plan is :math:`\exp((f_i + g_j - C_{ij}) / \epsilon)`, here it has the factor
    :math:`a_i b_j` in front. The potential g goes the same way, with ``b``.

    Args:
      f: ``[n]`` real floating, a potential in the product convention.
      a: ``[n]`` weights of its atoms, not negative; None for equal ones.
      epsilon: entropic strength, not negative; may be traced.

    Returns:
      The potential ``[n]`` in the dtype of ``f``, ``-inf`` where ``a`` is 0.

    Raises:
      TypeError: an array is not real floating.
      ValueError: ``f`` is not ``[n]``, ``a`` of another shape, or ``epsilon`` negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> print(ot.to_ott(jnp.array([1.0, 2.0]), jnp.array([1.0, 0.0]), 0.5))
      [  1. -inf]

    Source: derived here.

    Cost: elementwise.
    """
    return _to_ott("f", f, "a", a, epsilon)


def from_ott(f, a, epsilon):
    r"""Returns a potential of ott-jax in the product convention, :math:`f - \epsilon \log a`.

    Args:
      f: ``[n]`` real floating, a potential in the convention of ott, such as ``output.f``.
      a: ``[n]`` weights of its atoms, not negative; None for equal ones.
      epsilon: entropic strength, not negative; may be traced.

    Returns:
      The potential ``[n]`` in the dtype of ``f``, 0 where ``a`` is 0: ott keeps no value there.
      :func:`soft_f` has one.

    Raises:
      TypeError: an array is not real floating.
      ValueError: ``f`` is not ``[n]``, ``a`` of another shape, or ``epsilon`` negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> print(ot.from_ott(jnp.array([1.0, -jnp.inf]), jnp.array([1.0, 0.0]), 0.5))
      [1. 0.]

    Source: derived here.

    Cost: elementwise.
    """
    values, a, epsilon = _checked("f", f, "a", a, epsilon)
    some = a != 0
    shifted = jnp.where(some, values, 0) - epsilon * jnp.log(jnp.where(some, a, 1))
    return jnp.where(some, shifted, 0).astype(jnp.result_type(f))


def warm_start(f, a, epsilon, *, b, g=None):
    """Returns ``(fu, gv)``, with which the Sinkhorn solver of ott-jax starts from f.

    Pass it as ``Sinkhorn()(problem, init=...)``, for balanced problems: with ``tau_a`` or ``tau_b``
    below 1 the potentials mean something else. With ott's defaults only ``fu`` matters, since g is
    computed first. A start changes the number of iterations, never the plan they converge to.

    Args:
      f: ``[n]`` real floating, the potential at x, product convention.
      a: ``[n]`` weights, not negative; None for equal ones.
      epsilon: entropic strength, not negative; may be traced.
      b: ``[m]`` weights of y, not negative.
      g: ``[m]`` potential at y; None for zeros. It matters only with momentum or parallel updates.

    Returns:
      The potentials ``[n]`` and ``[m]`` in the convention of ott, in the dtype of ``f``.

    Raises:
      TypeError: an array is not real floating.
      ValueError: a shape does not fit, or ``epsilon`` is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> fu, gv = ot.warm_start(jnp.array([1.0, 2.0]), None, 1.0, b=jnp.array([1.0, 0.0]))
      >>> print(fu.round(3), gv)
      [0.307 1.307] [  0. -inf]

    Source: arXiv:2604.15114; arXiv:2206.07630.

    Cost: elementwise.
    """
    sizes = _check.shape("b", b, "m")
    g = jnp.zeros(sizes["m"], jnp.result_type(f)) if g is None else g
    _check.shape("g", g, "m", **sizes)
    gv = _to_ott("g", g, "b", b, epsilon)
    return to_ott(f, a, epsilon), gv.astype(jnp.result_type(f))


def _to_ott(name, f, weights_name, a, epsilon):
    values, a, epsilon = _checked(name, f, weights_name, a, epsilon)
    # The logarithm of 1 in place of 0 keeps the derivative finite.
    shifted = values + epsilon * jnp.log(jnp.where(a == 0, 1, a))
    return jnp.where(a == 0, -jnp.inf, shifted).astype(jnp.result_type(f))


def _checked(name, f, weights_name, a, epsilon):
    """Returns all three in float32 or wider, with weights for None; NaN for a bad strength."""
    f = _pair.real(name, f)
    sizes = _check.shape(name, f, "n" if name == "f" else "m")
    _check.between("epsilon", epsilon, 0, float("inf"))
    dtype = _numerics.wide(f.dtype)
    (size,) = sizes.values()
    a = jnp.full(size, 1 / size, dtype) if a is None else _pair.real(weights_name, a)
    _check.shape(weights_name, a, *sizes, **sizes)
    epsilon = jnp.asarray(epsilon, dtype)
    return f.astype(dtype), a.astype(dtype), jnp.where(epsilon >= 0, epsilon, jnp.nan)
