"""The polar factor of a matrix: Newton-Schulz, its Gram form, QDWH and eigh."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import _check, _numerics
from jaxkit.spectral import _coefficients, _exchange
from jaxkit.spectral._matrix_spec import MatrixSpec

METHODS = ("auto", "newton_schulz", "gram", "qdwh", "eigh")
_EXACT = ("qdwh", "eigh")
# Operations of 5 steps on r x qr: 20q + 10 (plain) and 8q + 28 (Gram), in units of r^3.
_GRAM_ASPECT = 1.5
_HIGHEST = jax.lax.Precision.HIGHEST


def polar(
    x: jax.Array,
    method: str = "auto",
    coefficients="polar_express_5",
    steps: int | None = None,
    *,
    dtype=None,
    precision=None,
) -> jax.Array:
    r"""Returns the orthogonal polar factor of a matrix, the sign function of its singular values.

    For the thin singular value decomposition :math:`X = U \Sigma V^\top` this is
    :math:`U V^\top`, over the nonzero singular values only: a zero matrix gives zero. It is the
    steepest-ascent direction in the spectral norm, the step of Muon. The result does not change
    when ``x`` is multiplied by a positive number, as long as the entries that count are normal
    numbers (1.2e-38 to 3.4e38 in float32); a NaN or an infinity anywhere in a matrix makes its
    whole factor NaN.

    The iterative methods map every singular value by the same odd polynomials and so return an
    approximation, :math:`U p(\Sigma) V^\top`. With the default coefficients :math:`p` lies within
    0.2 of one for singular values above a thousandth of the Frobenius norm. Tiny singular values
    stay small.

    Args:
      x: matrices of shape ``[..., m, n]``, real floating; leading axes are a batch.
      method: static; ``"newton_schulz"`` iterates on the matrix, ``"gram"`` on its small Gram
        matrix (the same polynomial, cheaper from an aspect ratio of 1.5), ``"auto"`` takes the
        cheaper of these two by shape. ``"qdwh"`` and ``"eigh"`` are exact to rounding: QDWH for
        condition numbers up to about 1e6 in float32, but it fills the null space of a
        rank-deficient matrix with arbitrary directions; eigh of the Gram matrix drops the null
        space, and is accurate for condition numbers up to about 1e3 in float32.
      coefficients: static; for the iterative methods ``"polar_express_5"``,
        ``"polar_express"``, ``"you"``, ``"jordan"``, or numbers of shape ``[3]`` or ``[k, 3]``
        (:math:`a, b, c` of :math:`a s + b s^3 + c s^5` for each step).
      steps: static; number of iterations. More than the list is long repeats its last row, fewer
        take its first rows. ``None``: 5, the length of a given ``[k, 3]`` list, or 8 for
        ``"polar_express"`` where products are in float32 or wider.
      dtype: static; floating dtype of the products with ``x`` in the iterative methods.
        ``None``: bfloat16 for bfloat16, float32 for float16, else the dtype of ``x``. Sums are
        in float32 or wider, as is everything of the small size in the Gram form.
      precision: static; ``jax.lax.Precision`` of the products with ``x`` in the iterative
        methods. On TPU and GPU the default for float32 is not full float32. The small products
        of the Gram form and the exact methods always use the highest.

    Returns:
      Array of the shape and dtype of ``x``. In an Explicit mesh it has the sharding of ``x``.

    Raises:
      ValueError: ``x`` has fewer than two axes or an empty matrix axis; an unknown method or
        table; ``steps`` below 1; coefficients of another shape; coefficients, steps, dtype or
        precision given to an exact method, which work in float32 or wider.
      TypeError: ``x`` or ``dtype`` is not real floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import spectral
      >>> x = jnp.array([[3.0, 0.0], [0.0, -1e-3], [0.0, 0.0]])
      >>> print(spectral.polar(x, "qdwh").round(3) + 0.0)
      [[ 1.  0.]
       [ 0. -1.]
       [ 0.  0.]]

    Source: Newton-Schulz with the coefficients of arXiv:2505.16932 (Polar Express), and of the
    Muon and modded-nanogpt repositories; the Gram form of the Dao-AILab/gram-newton-schulz
    repository, with one restart before the third step. Differs: the small products stay in
    float32 at the highest precision, since in 16 bits the Gram form diverges, and the input is
    divided by its largest entry before its norm is taken. Derived here: the derivative of the
    exact methods.

    Cost: for :math:`r = \min(m, n)`, :math:`q = \max(m, n) / r` and 5 steps
    :math:`(20 q + 10) r^3` operations plain and :math:`(8 q + 28) r^3` in the Gram form; two
    more arrays like ``x`` in memory. QDWH costs about 3 to 10 times as much. On a CPU, jax 0.10.2
    was seen to hang in a ``vmap`` over training runs with QDWH inside a ``scan``. jax 0.12
    does not hang, nor does 0.10.2 with
    ``XLA_FLAGS=--xla_cpu_enable_concurrency_optimized_scheduler=false``.
    """
    settings = make_settings(method, coefficients, steps, dtype, precision)
    x = check_matrix("x", x)
    *batch, unit, feature = range(x.ndim)
    spec = MatrixSpec((unit,), (feature,), tuple(batch))
    (factor,), _ = _exchange.map_matrices(functools.partial(apply, settings), [x], [spec])
    return factor


class Settings(NamedTuple):
    """Static choices of :func:`polar`, checked."""

    method: str
    coefficients: object
    steps: int | None
    dtype: object
    precision: object

    def product_dtype(self, dtype):
        """Returns the dtype in which products with an ``x`` of ``dtype`` are made."""
        if self.dtype is not None:
            return jnp.dtype(self.dtype)
        return dtype if dtype == jnp.bfloat16 else _numerics.wide(dtype)


def make_settings(method, coefficients, steps, dtype, precision):
    """Checks the static arguments of :func:`polar`."""
    _check.choice("method", method, METHODS)
    is_default = isinstance(coefficients, str) and coefficients == "polar_express_5"
    given = {"steps": steps, "dtype": dtype, "precision": precision}
    given = {name: value for name, value in given.items() if value is not None}
    given |= {} if is_default else {"coefficients": coefficients}
    if method in _EXACT and given:
        got = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ValueError(
            "coefficients, steps, dtype and precision belong to the iterative methods, got "
            f"{got} with method={method!r}."
        )
    _check.floating("dtype", dtype)
    _coefficients.resolve(coefficients, steps, low_precision=False)
    if not isinstance(coefficients, str):  # hashable, so that the settings stay static
        rows = np.asarray(coefficients, np.float64)
        coefficients = tuple(map(tuple, rows.tolist())) if rows.ndim == 2 else tuple(rows.tolist())
    return Settings(method, coefficients, steps, dtype, precision)


def check_matrix(name, x):
    """Returns ``x`` as an array, or raises an error that names it."""
    x = jnp.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"{name} must be real floating, got {x.dtype}.")
    if x.ndim < 2 or 0 in x.shape[-2:]:
        raise ValueError(f"{name} must have shape [..., m, n] with m, n >= 1, got {x.shape}.")
    return x


class Damping(NamedTuple):
    r"""What is added to the squares of the singular values: :math:`s / \sqrt{s^2 + d}`.

    Attributes:
      value: a number or ``[]``, at least 0.
      relative: static; whether it is multiplied by the Frobenius norm of the Gram matrix.
    """

    value: object
    relative: bool


def apply(settings, x, axis_names=(), damping=None, in_range=False):
    """Returns the polar factor of local whole matrices ``[..., m, n]``, damped or not.

    With ``axis_names`` the columns of ``x`` (its long side) are spread over these mesh axes, and
    only the Gram form's small matrix is summed over them. ``in_range`` says that no sum of squares
    over- or underflows.
    """
    if x.shape[-2] > x.shape[-1]:
        return apply(settings, x.mT, axis_names, damping, in_range).mT
    out_dtype, method, cols = x.dtype, settings.method, x.shape[-1]
    # Damping makes the matrix longer: see _lengthen.
    length = cols + (x.shape[-2] if damping else 0)
    if axis_names or (method == "auto" and length >= _GRAM_ASPECT * x.shape[-2]):
        method = "gram"
    if method in _EXACT:
        rows, cushion, dtype = None, 1, _numerics.wide(x.dtype)
    else:
        dtype = settings.product_dtype(x.dtype)
        rows, cushion = _coefficients.resolve(
            settings.coefficients, settings.steps, jnp.finfo(dtype).bits < 32
        )
    x, size = x.astype(_numerics.wide(x.dtype)), 1
    if rows is None or not in_range:
        x, size = _divide_by_largest(x, axis_names)
    if rows is not None or damping:
        x, damp = _normalize(x, size, cushion, axis_names, damping)
    x = x.astype(dtype)
    if damping and damping.relative:
        damp = damp * _gram_norm(x, settings.precision, axis_names)
    if method == "gram":
        damp = damp if damping else None
        return _gram(x, rows, settings.precision, axis_names, damp).astype(out_dtype)
    if damping:
        x = _lengthen(x, damp)
    factor = _exact(x, method) if rows is None else _newton_schulz(x, rows, settings.precision)
    return factor[..., :cols].astype(out_dtype)


def _normalize(x, size, cushion, axis_names, damping):
    """Divides by ``cushion`` times the Frobenius norm, that of the lengthened matrix if damped.

    Returns the quotient and the damping in its units, if relative still to be multiplied.
    """
    # Not the trace of the Gram matrix: XLA on a CPU sums it in another order inside a loop.
    square = jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)
    if axis_names:
        square = jax.lax.psum(square, axis_names)
    square = jnp.where(square == 0, 1, square)
    if damping is None:
        return x / (cushion * jnp.sqrt(square)), None
    value = jnp.asarray(damping.value).astype(x.dtype)
    if damping.relative:
        return x / (cushion * jnp.sqrt(square * (1 + value))), value
    # In two steps, and bounded: far below the damping the factor is zero in any case.
    value = jnp.minimum(value / size / size, 2.0 ** (jnp.finfo(x.dtype).maxexp * 3 // 4))
    square = square + value
    return x / (cushion * jnp.sqrt(square)), value / (cushion**2 * square)


def _gram_norm(x, precision, axis_names):
    """Returns the Frobenius norm of the Gram matrix of ``x``, ``[..., 1, 1]``."""
    gram = _dot(x, x.mT, precision)  # merged by the compiler with that of the Gram form
    if axis_names:
        gram = jax.lax.psum(gram, axis_names)
    square = jnp.sum(jnp.square(gram), axis=(-2, -1), keepdims=True)
    return jnp.sqrt(jnp.where(square == 0, 1, square))


def _lengthen(x, damp):
    r"""Returns :math:`[X, \sqrt{d} I]`; the first columns of its polar factor are damped."""
    root = jnp.where(damp == 0, 0, jnp.sqrt(jnp.where(damp == 0, 1, damp)))
    return jnp.concatenate([x, (root * _eye(x)).astype(x.dtype)], axis=-1)


def _divide_by_largest(x, axis_names=()):
    """Divides each matrix by its largest entry, so that no square over- or underflows.

    Everything behind it is scale-free: the derivative with respect to the divisor is zero.
    Returns the quotient and the divisor.
    """
    largest = jnp.max(jnp.abs(jax.lax.stop_gradient(x)), axis=(-2, -1), keepdims=True)
    if axis_names:
        largest = jax.lax.pmax(largest, axis_names)
    # The compiler multiplies by the reciprocal of the divisor, which must not be subnormal.
    size = jnp.minimum(largest, 2.0 ** (jnp.finfo(x.dtype).maxexp * 3 // 4))
    divisor = jnp.where(largest == 0, 1, jnp.where(jnp.isinf(largest), jnp.nan, size))
    return x / divisor, divisor


def _dot(a, b, precision=None):
    """Product with a sum in float32 or wider."""
    wide = _numerics.wide(a.dtype)
    return jnp.matmul(a, b, precision=precision, preferred_element_type=wide)


def _newton_schulz(x, rows, precision):
    """Iterates ``x <- (a I + b A + c A A) x`` with ``A = x x^T``, for rows <= columns."""
    eye = _eye(x)
    for a, b, c in rows:
        gram = _dot(x, x.mT, precision)
        narrow = gram.astype(x.dtype)
        poly = a * eye + b * gram + c * _dot(narrow, narrow, precision)
        x = _dot(poly.astype(x.dtype), x, precision).astype(x.dtype)
    return x


def _eye(x):
    """Returns identities of the small size, one for each matrix, in float32 or wider."""
    eye = jnp.eye(x.shape[-2], dtype=_numerics.wide(x.dtype))
    return jnp.broadcast_to(eye, (*x.shape[:-1], x.shape[-2]))


def _gram(x, rows, precision, axis_names, damp=None):
    """Runs the same polynomials on the Gram matrix; all its powers commute.

    That of the lengthened matrix is ``damp`` larger. The restart before the third step multiplies
    the first two polynomials into ``x``: without it rounding makes the Gram matrix of a badly
    conditioned ``x`` indefinite.
    """
    dot = functools.partial(_dot, precision=_HIGHEST)
    eye, product = _eye(x), None
    for i, (a, b, c) in enumerate(rows):
        if i in (0, 2):
            if product is not None:
                x = _dot(product.astype(x.dtype), x, precision).astype(x.dtype)
            gram = _dot(x, x.mT, precision)
            if axis_names:
                gram = jax.lax.psum(gram, axis_names)
            if damp is not None:
                gram = gram + damp * (eye if product is None else dot(product, product))
            product = None
        factor = b * gram + c * dot(gram, gram) + a * eye
        product = factor if product is None else dot(factor, product)
        if i != 1 and i + 1 < len(rows):  # not needed before the restart and at the end
            gram = dot(dot(factor, gram), factor)
    # Rounded like the plain form's last step. XLA's CPU backend also cannot run a transposed
    # 16-bit product with a float32 result.
    return _dot(product.astype(x.dtype), x, precision).astype(x.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _exact(x, method):
    """Returns the polar factor of ``[..., r, c]``, r <= c, entries of size one, by LAPACK."""
    if method == "eigh":
        # A null direction that rounding lifts over this floor adds about sqrt(eps), since its
        # part of x is rounding too. A higher floor would drop real directions, an error of one.
        values, vectors, keep = _eigh(jnp.matmul(x, x.mT, precision=_HIGHEST), 0.25)
        inverse = jnp.where(keep, jax.lax.rsqrt(jnp.where(keep, values, 1)), 0)
        root = jnp.matmul(vectors * inverse[..., None, :], vectors.mT, precision=_HIGHEST)
        return jnp.matmul(root, x, precision=_HIGHEST)
    return _qdwh(x)


def _qdwh(x):
    """Returns the polar factor by the dynamically weighted Halley iteration.

    The weights follow from the lower bound of the singular values alone. Fixed at the rounding
    level of the dtype it makes them constants, so that no loop depends on data (a ``while_loop``
    would have no reverse derivative, nor a place inside ``shard_map``).
    """
    eye = _eye(x)
    x = x / jnp.sqrt(jnp.maximum(1, jnp.sum(jnp.square(x), axis=(-2, -1), keepdims=True)))
    dot = functools.partial(jnp.matmul, precision=_HIGHEST)
    for a, b, c in _halley_weights(float(jnp.finfo(x.dtype).eps)):
        if c > 100:  # badly conditioned: by QR
            q, _ = jnp.linalg.qr(jnp.concatenate([math.sqrt(c) * x.mT, eye], axis=-2))
            cols = x.shape[-1]
            inverse = dot(q[..., cols:, :], q[..., :cols, :].mT) / math.sqrt(c)
        else:
            root = jax.lax.linalg.cholesky(eye + c * dot(x, x.mT))
            solve = functools.partial(jax.lax.linalg.triangular_solve, root, left_side=True)
            inverse = solve(solve(x, lower=True), lower=True, transpose_a=True)
        x = (b / c) * x + (a - b / c) * inverse
    return x


@functools.cache
def _halley_weights(low):
    """Returns ``(a, b, c)`` of each step that takes singular values in [low, 1] to 1."""
    weights = []
    tolerance = low
    while 1 - low > tolerance:
        square = low * low
        d = (4 * (1 - square) / square**2) ** (1 / 3)
        root = math.sqrt(1 + d)
        a = root + math.sqrt(8 - 4 * d + 8 * (2 - square) / (square * root)) / 2
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        weights.append((a, b, c))
        low = min(1.0, low * (a + b * square) / (1 + c * square))
    return tuple(weights)


@_exact.defjvp
def _exact_jvp(method, primals, tangents):
    r"""Derivative of :math:`X = H O`, in the eigenbasis of :math:`H` (derived here).

    :math:`dO = -W O + H^{-1} (dX - dX O^T O)` where :math:`H W + W H = O\,dX^T - dX\,O^T`.
    Directions that ``eigh`` drops do not move.
    """
    (x,), (dx,) = primals, tangents
    factor = _exact(x, method)
    dot = functools.partial(jnp.matmul, precision=_HIGHEST)
    outer = dot(x, factor.mT)
    values, vectors, keep = _eigh((outer + outer.mT) / 2, 4)
    values = jnp.where(keep, values, jnp.inf)
    mixed = dot(factor, dx.mT)
    inner = dot(dot(vectors.mT, mixed - mixed.mT), vectors)
    turn = dot(dot(vectors, inner / (values[..., :, None] + values[..., None, :])), vectors.mT)
    across = dot(vectors.mT, dx - dot(mixed.mT, factor)) / values[..., :, None]
    return factor, dot(vectors, across) - dot(turn, factor)


def _eigh(matrix, floor):
    """Returns eigenvalues, eigenvectors, and which values exceed ``floor`` eps of the largest."""
    values, vectors = jnp.linalg.eigh(matrix)
    return values, vectors, values > floor * jnp.finfo(matrix.dtype).eps * values[..., -1:]
