"""Weighted sums of what is evaluated at the points of a query."""

import jax
import jax.numpy as jnp

from jaxkit import _check, _estimator, _numerics


def combine(grad_fn, points, weights):
    r"""Returns :math:`\sum_j weights_j \, grad\_fn(points_j)`, the gradient that update takes.

    Args:
      grad_fn: function of one point, a tree like the parameters, that returns a tree of floating
        arrays; ``jax.grad`` of a loss, or ``jax.value_and_grad`` to combine the losses too.
      points: tree with a leading axis ``[q]`` in every leaf, as of :func:`query_points`.
      weights: ``[q]``, floating.

    Returns:
      The weighted sum, a tree of the shapes and dtypes that ``grad_fn`` returns, summed in float32
      or wider.

    Raises:
      TypeError: ``grad_fn`` is no function, or returns something that is not floating.
      ValueError: ``weights`` is not ``[q]``, or a leaf of ``points`` has another leading axis.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import denoise
      >>> points, weights = jnp.array([5.0, 1.0]), jnp.array([1.5, -0.5])
      >>> print(denoise.combine(jax.grad(lambda x: x**2), points, weights))
      14.0

    Source: derived here.

    Cost: q calls of ``grad_fn`` in a scan, traced once, with the memory of one; a single call is
    made directly.
    """
    _check.function("grad_fn", grad_fn)
    num = _check.shape("weights", weights, "q")["q"]
    if jax.tree.leaves(points) and _check.leading_axis("points", points) != num:
        raise ValueError(f"points must have the leading axis of weights, {num}, in every leaf.")

    def evaluate(point):
        grads = grad_fn(point)
        _check.floats("what grad_fn returns", grads)
        return grads, None

    def point_at(j):
        return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, j, keepdims=False), points)

    return combined(evaluate, point_at, jnp.asarray(weights))[0]


def combined(evaluate, point_at, weights):
    """Returns the weighted sum of the first results of ``evaluate(point_at(j))``, cast back.

    The second result comes back as of the first evaluation.
    """
    # As a jitted function it is traced once, for types and for the scan.
    evaluate = jax.jit(evaluate)

    def add(carry, xs):
        total, first = carry
        j, weight = xs
        linear, other = evaluate(point_at(j))
        total = _estimator.add_scaled(total, weight, linear)
        first = jax.tree.map(lambda x, old: jnp.where(j == 0, x, old), other, first)
        return (total, first), None

    if len(weights) == 1:
        linear, first = evaluate(point_at(0))
        total = jax.tree.map(
            lambda x: (
                weights[0].astype(_numerics.wide(x.dtype)) * x.astype(_numerics.wide(x.dtype))
            ),
            linear,
        )
        return _estimator.cast_like(total, linear), first
    indices = jnp.arange(len(weights), dtype=jnp.int32)
    types, other = jax.eval_shape(lambda: evaluate(point_at(indices[0])))
    start = _estimator.wide_zeros(types), jax.tree.map(_estimator.zeros_of, other)
    (total, first), _ = jax.lax.scan(add, start, (indices, weights))
    return _estimator.cast_like(total, types), first
