"""The posterior that an optimizer's state describes, as distributions."""

import jax

from jaxkit import _tree
from jaxkit.blr import _state
from jaxkit.blr._q_gaussian import QGaussian


def posterior(params, state):
    """Returns the posterior as a tree of :class:`QGaussian`, one for each leaf of the parameters.

    Args:
      params: parameters, the means of the posterior.
      state: optimizer state that holds a :class:`GBLRState`, or several on disjoint leaves,
        anywhere inside.

    Returns:
      Tree like ``params`` of :class:`QGaussian`, each a batch in the shape of its leaf, in float32
      or wider; None for leaves that the rule does not own.

    Raises:
      ValueError: ``state`` holds no posterior, or two for a leaf; or ``params`` has other shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import blr
      >>> params = {"w": jnp.array([1.0, 2.0])}
      >>> q = blr.posterior(params, blr.gblr(0.1, ess=1e4, alpha=2.0).init(params))["w"]
      >>> print(q.batch_shape, q.mean(), q.stddev().round(3))
      (2,) [1. 2.] [0.01 0.01]

    Source: derived here.

    Cost: elementwise; three arrays of the size of the parameters.
    """
    marginals = _state.marginals(params, state)
    distributions = [None if marginal is None else _of(marginal) for marginal in marginals]
    return jax.tree.structure(params).unflatten(distributions)


def _of(marginal):
    mean, stddev, alpha = marginal
    # In the shape of the leaf already, so that it is split over devices as the leaf is.
    return QGaussian(mean, stddev, alpha.astype(mean.dtype) + _tree.zeros_like(mean))
