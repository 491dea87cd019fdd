"""Norms of the gradients of single examples in a dense layer, from its inputs and cotangents."""

import jax.numpy as jnp

from jaxkit import _check, _numerics
from jaxkit.denoise._clipping import EXACT


def dense_norms(inputs, cotangents, weights=None, *, bias=True):
    r"""Returns the squared norm of each example's gradient in a dense layer, which is not formed.

    The layer computes ``x @ kernel + bias``. For example :math:`i` with inputs :math:`x_{jl}` and
    cotangents :math:`\delta_{jl}` (the derivative of its own loss in the layer's output) at query
    point :math:`j` and position :math:`l`, the gradient combined over the points is
    :math:`\sum_{jl} w_j x_{jl} \delta_{jl}^\top`. Its squared norm comes from the products of
    inputs and of cotangents, :math:`\sum_{rs} \langle x_r, x_s\rangle \langle \delta_r,
    \delta_s\rangle` over pairs of rows :math:`r = (j, l)`, where that takes less memory than the
    matrix, and from the matrix otherwise. Both are exact; a large weight against another one of
    the other sign loses no digits, since rows of other points enter as differences.

    The sum over all layers of a model is what ``norms_fn`` of :func:`private_gradient_estimator`
    returns. Positions are where an example uses the layer more than once: the tokens of a
    sequence, the places of a convolution (inputs are patches then), or two uses of shared weights.

    Args:
      inputs: ``[q, B, n]``, or ``[q, B, L, n]`` with positions; floating.
      cotangents: ``[q, B, m]``, or ``[q, B, L, m]``.
      weights: of the query points, ``[q]``; None: all 1.
      bias: whether the layer has a bias, static.

    Returns:
      ``[B]`` float32 or wider, whatever the dtype of the inputs.

    Raises:
      ValueError: the shapes do not fit.
      TypeError: an array is not floating.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import denoise
      >>> kernels = jnp.ones((3, 4)), jnp.ones((4, 2))
      >>> def losses(taps, x):
      ...     hidden = jnp.tanh(x @ kernels[0] + taps[0])
      ...     return jnp.sum((hidden @ kernels[1] + taps[1]) ** 2) / 2, (x, hidden)
      >>> taps, x = (jnp.zeros((5, 4)), jnp.zeros((5, 2))), jnp.eye(5, 3)
      >>> deltas, inputs = jax.grad(losses, has_aux=True)(taps, x)
      >>> print(sum(denoise.dense_norms(x[None], d[None]) for x, d in zip(inputs, deltas)).round(1))
      [114. 114. 114.   0.   0.]

    Source: arXiv:1510.01799; arXiv:2205.10683, section 3 for positions and the choice by size.
    Derived here: several query points, and the differences.

    Cost: with ``r = q L`` rows, ``B r^2 (n + m)`` operations and ``2 B r^2`` numbers if
    ``2 r^2 <= n m``, else ``B r n m`` and ``B n m``.
    """
    inputs, cotangents = jnp.asarray(inputs), jnp.asarray(cotangents)
    spec = "q B L" if inputs.ndim == 4 else "q B"
    sizes = _check.shape("inputs", inputs, f"{spec} n")
    sizes.pop("n")
    _check.shape("cotangents", cotangents, f"{spec} m", **sizes)
    for name, x in (("inputs", inputs), ("cotangents", cotangents)):
        _check.floating(name, x.dtype)
    dtype = _numerics.wide(inputs.dtype, cotangents.dtype)
    x, d = (
        (y if y.ndim == 4 else jnp.expand_dims(y, 2)).astype(dtype) for y in (inputs, cotangents)
    )
    weights = jnp.ones(sizes["q"], dtype) if weights is None else jnp.asarray(weights, dtype)
    _check.shape("weights", weights, "q", q=sizes["q"])
    weighted = d * weights[:, None, None, None]
    combined = jnp.sum(weighted, 0)
    # sum_j w_j x_j d_j = x_0 (sum_j w_j d_j) + sum_j w_j (x_j - x_0) d_j, without large terms.
    x = jnp.concatenate([x[:1], x[1:] - x[:1]])
    d = jnp.concatenate([combined[None], weighted[1:]])
    x, d = (y.transpose(1, 0, 2, 3).reshape(y.shape[1], -1, y.shape[3]) for y in (x, d))
    (_, rows, n), m = x.shape, d.shape[2]
    if 2 * rows**2 <= n * m:
        products = [jnp.einsum("bri,bsi->brs", y, y, precision=EXACT) for y in (x, d)]
        squared = jnp.sum(products[0] * products[1], (1, 2))
    else:
        squared = jnp.sum(jnp.square(jnp.einsum("bri,brj->bij", x, d, precision=EXACT)), (1, 2))
    if bias:
        squared += jnp.sum(jnp.square(jnp.sum(combined, 1)), 1)
    return jnp.maximum(squared, 0)
