"""The potential of a new pair, from fitted weights of its slices."""

import jax
import jax.numpy as jnp

from jaxkit import _check
from jaxkit.ot import _pair
from jaxkit.ot._sliced_params import SlicedParams
from jaxkit.ot._sliced_potentials import features


def predict_potential(params, pair, *, side="x", chunk=None):
    r"""Returns the predicted dual potential of a pair, at the points of one side.

    For the source it is :math:`f = \Phi w` with the columns of :func:`sliced_potentials`, in the
    convention :math:`P_{ij} = a_i b_j e^{(f_i + g_j - c_{ij}) / \epsilon}`, centered:
    :math:`\sum_i a_i f_i = 0`. The best g for it is a soft c-transform, which
    :func:`plan_from_f` makes. It runs under ``vmap`` over stacked pairs.

    Args:
      params: :class:`SlicedParams`, fitted or :func:`untrained`.
      pair: one :class:`Pair`; its ``f`` is not read.
      side: "x" for f at the source; "y" for :math:`g = \Psi w_g` at the target, centered with b,
        which needs ``params.weights_g``; static.
      chunk: number of directions at a time, static; None for all at once.

    Returns:
      ``[n]`` in the dtype of ``pair.x`` (or ``[m]``, of ``pair.y``), computed in float32 or wider;
      0 at masked atoms. NaN as a whole if weights or points are not valid.

    Raises:
      TypeError: ``params`` is no SlicedParams, ``pair`` no Pair, or as :func:`sliced_potentials`.
      ValueError: ``side`` is unknown, ``side="y"`` without weights for it, or a shape is not as
        in :class:`Pair`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> x = jnp.array([[0.0, 0.0], [2.0, 0.0], [1.0, 3.0]])
      >>> params = ot.untrained(ot.equispaced_frame(8), 0.0)
      >>> f = ot.predict_potential(params, ot.Pair(x, x + jnp.array([[1.0, 0.0]])))
      >>> print(f.round(3) + 0.0)  # a shift by t has the potential -2 <t, x>, here centered
      [ 2. -2.  0.]

    Source: arXiv:2604.15114.

    Cost: :func:`sliced_potentials` and L (n + m) products.
    """
    if not isinstance(params, SlicedParams):
        raise TypeError(f"params must be SlicedParams, got {type(params).__name__}.")
    _pair.check("pair", pair)
    _check.choice("side", side, ("x", "y"))
    on_x = side == "x"
    weights = params.weights if on_x else params.weights_g
    if weights is None:
        raise ValueError('side must be "x" for params without weights_g, got "y".')
    dtype = jnp.result_type(pair.x if on_x else pair.y)
    (x, y), masks = _pair.points(pair.x, pair.y, pair.mask_x, pair.mask_y)
    both = features(
        x, y, pair.a, pair.b, *masks, params.theta, params.slice_cost, params.project, chunk
    )
    rows, mask, own = (both[0], masks[0], pair.a) if on_x else (both[1], masks[1], pair.b)
    f = jnp.matmul(weights.astype(x.dtype), rows, precision=jax.lax.Precision.HIGHEST)
    mean = jnp.vdot(_pair.weights("a" if on_x else "b", own, mask, x if on_x else y), f)
    return _pair.masked(f - mean, mask).astype(dtype)
