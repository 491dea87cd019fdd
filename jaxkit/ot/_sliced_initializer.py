"""Starts of ott-jax's Sinkhorn solver from sliced potentials; the one file here that needs ott."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
from ott.geometry import pointcloud
from ott.initializers.linear import initializers

from jaxkit.ot._bridge import to_ott
from jaxkit.ot._pair import Pair
from jaxkit.ot._predict_potential import predict_potential


@jax.tree_util.register_pytree_node_class
class SlicedInitializer(initializers.SinkhornInitializer):
    """Initializer of ott-jax that starts Sinkhorn from the predicted potential of each problem.

    It takes point clouds of any two sizes and any weights, under ``jit`` and ``vmap`` too. A start
    changes the number of iterations, never the plan that they converge to. Problems that are not
    balanced raise NotImplementedError, other geometries TypeError; an entropic strength that is
    not that of ``params`` warns, if both are known.

    Args:
      params: :class:`SlicedParams`, fitted or :func:`untrained`.
      chunk: number of directions at a time, static; None for all at once.

    Example:
      >>> from jaxkit import ot
      >>> from ott.solvers.linear.sinkhorn import Sinkhorn
      >>> params = ot.untrained(ot.equispaced_frame(8), 0.1)
      >>> solver = Sinkhorn(initializer=ot.SlicedInitializer(params))  # then solver(problem)
      >>> print(solver.initializer.params.theta.shape)
      (8, 2)

    Source: arXiv:2604.15114; arXiv:2206.07630.

    Cost: that of :func:`predict_potential`.
    """

    def __init__(self, params, *, chunk=None):
        super().__init__()
        self.params, self.chunk = params, chunk

    def init_fu(self, ot_prob, lse_mode, rng=None):
        """Returns the predicted potential of x, or with ``lse_mode=False`` its scaling."""
        del rng
        _check_problem(ot_prob)
        pair = Pair(ot_prob.geom.x, ot_prob.geom.y, ot_prob.a, ot_prob.b)
        f = predict_potential(self.params, pair, chunk=self.chunk)
        _compare_epsilon(ot_prob, self.params)
        fu = to_ott(f, ot_prob.a, ot_prob.epsilon)
        return fu if lse_mode else ot_prob.geom.scaling_from_potential(fu)

    def init_gv(self, ot_prob, lse_mode, rng=None):
        """Returns zeros, or ones: the solver computes g first, from f."""
        del rng
        return jnp.zeros_like(ot_prob.b) if lse_mode else jnp.ones_like(ot_prob.b)

    def tree_flatten(self):
        """Returns the parameters as the one child, and the options."""
        return [self.params], {"chunk": self.chunk}


def _check_problem(problem):
    if not problem.is_balanced:
        taus = f"tau_a={problem.tau_a}, tau_b={problem.tau_b}"
        raise NotImplementedError(f"ot_prob must be balanced, got {taus}.")
    if not isinstance(problem.geom, pointcloud.PointCloud):
        kind = type(problem.geom).__name__
        raise TypeError(f"ot_prob must have the geometry of a PointCloud, got {kind}.")


def _compare_epsilon(problem, params):
    try:
        wanted, got = (np.asarray(e, np.float64) for e in (params.epsilon, problem.epsilon))
    except jax.errors.TracerArrayConversionError:
        return
    if not np.allclose(wanted, got, rtol=0.01, atol=0):
        warnings.warn(
            f"epsilon of ot_prob should be that of params, {wanted:.4g}, got {got:.4g}.",
            stacklevel=3,
        )
