"""The index alpha from the numbers that other conventions use for the same shape."""

from jaxkit import _check

_INF = float("inf")


def alpha_from_df(df, n=1):
    r"""Returns the index of Student's t, :math:`\alpha = 1 - 2 / (df + n)`, which is below 1.

    Args:
      df: degrees of freedom, a number or array above 2, where the covariance exists; may be traced.
      n: dimension of the joint distribution, static.

    Returns:
      alpha, a Python number for a Python number, else an array of the shape of ``df``.

    Raises:
      TypeError: ``df`` is no number, or ``n`` not whole.
      ValueError: a static ``df`` is not above 2, or ``n`` below 1.

    Example:
      >>> from jaxkit import blr
      >>> print(round(blr.alpha_from_df(3.0), 4), round(blr.alpha_from_df(3.0, n=7), 4))
      0.5 0.8

    Source: arXiv:2108.01988.

    Cost: elementwise.
    """
    _check.between("df", df, 2, _INF, closed=False)
    return 1 - 2 / (df + _check.count("n", n))


def alpha_from_q(q):
    r"""Returns the index for Tsallis' q of the physics literature, :math:`\alpha = 2 - q`.

    Args:
      q: a number or array below 5/3, where the variance exists; may be traced. 1 is the Gaussian.

    Returns:
      alpha, a Python number for a Python number, else an array of the shape of ``q``.

    Raises:
      TypeError: ``q`` is no number.
      ValueError: a static ``q`` is not below 5/3.

    Example:
      >>> from jaxkit import blr
      >>> print(blr.alpha_from_q(0.5), blr.alpha_from_q(1))
      1.5 1

    Source: arXiv:2108.01988.

    Cost: elementwise.
    """
    _check.between("q", q, -_INF, 5 / 3)
    return 2 - q


def alpha_from_support(half_width):
    r"""Returns the index of the support ``mean +- half_width * stddev``.

    It is :math:`(r^2 - 1) / (r^2 - 3)`: the uniform distribution is the limit at
    :math:`r = \sqrt 3`, the Gaussian at infinity.

    Args:
      half_width: r, half the support in standard deviations, a number or array above the root of
        3; may be traced.

    Returns:
      alpha, a Python number for a Python number, else an array of the shape of ``half_width``.

    Raises:
      TypeError: ``half_width`` is no number.
      ValueError: a static ``half_width`` is not above the root of 3.

    Example:
      >>> from jaxkit import blr
      >>> print(round(blr.alpha_from_support(2.0), 4))
      3.0

    Source: derived here.

    Cost: elementwise.
    """
    _check.between("half_width", half_width, 3**0.5, _INF, closed=False)
    # Not r * r - 3, which cancels near the root.
    excess = (half_width - 3**0.5) * (half_width + 3**0.5)
    return 1 + 2 / excess
