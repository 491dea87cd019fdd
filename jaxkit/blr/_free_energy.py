"""The objective of the learning rule: the expected loss and the discrepancy from the prior."""

import jax
import jax.numpy as jnp

from jaxkit import _estimator
from jaxkit.blr import _closed_forms, _geometry, _state


def free_energy(loss, params, state, *, prior_mean=None):
    r"""Returns :math:`ess \, E_q[loss] + D(q \| prior)`, what the learning rule makes small.

    D is the Fenchel-Young discrepancy in closed form, summed over the parameters. At ``alpha`` 1
    it is the Kullback-Leibler divergence, and the result the negative evidence lower bound, if
    ``loss`` is the mean negative log likelihood and ``ess`` the number of examples. D is finite
    for supports of any kind. With geometry "logdet" it is the Kullback-Leibler divergence of the
    Gaussians with these means and variances. The prior is of the family of the posterior, with
    natural precision ``ess * weight_decay``; without decay it is improper, and the result NaN.

    Args:
      loss: the mean loss over posterior samples, ``[]``: what :func:`gradient_estimator` and
        :func:`gblr_value_and_grad` return as value. 0 gives D alone.
      params: parameters, the means of the posterior.
      state: optimizer state that holds a :class:`GBLRState`, or several on disjoint leaves,
        anywhere inside. Of several, each D counts in proportion to the ``ess`` of the first.
      prior_mean: mean of the prior, a tree like the parameters; None for zero. It is what
        :func:`gblr` got.

    Returns:
      The free energy in nats, ``[]`` float32 or wider.

    Raises:
      ValueError: ``state`` holds no posterior, or two for a leaf; or a tree has other shapes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import blr
      >>> params = jnp.array([0.5, -1.0])
      >>> state = blr.gblr(0.1, ess=100, hess_init=0.99, weight_decay=0.01, alpha=2.0).init(params)
      >>> print(blr.free_energy(0.3, params, state).round(2))
      31.99

    Source: arXiv:2502.10295. Derived here: the closed form for every alpha and reference.

    Cost: elementwise.
    """
    leaves = jax.tree.leaves(params)
    priors = [None] * len(leaves)
    if prior_mean is not None:
        priors = _state.cut("prior_mean", prior_mean, params)
        _state.check_shapes("prior_mean", priors, params)
    total, ess = 0.0, None
    for own in _estimator.find_states(state, _state.GBLRState):
        ess = own.ess if ess is None else ess
        references = iter(jax.tree.leaves(_state.spread(own.reference, own.hess)))
        for marginal, prior in zip(_state.marginals(params, own), priors, strict=True):
            if marginal is not None:
                parts = _discrepancies(marginal, own, next(references), prior)
                total += jnp.sum(parts) * (ess / own.ess).astype(parts.dtype)
    return ess * jnp.asarray(loss, ess.dtype) + total


def _discrepancies(marginal, state, reference, prior):
    """Returns D of each entry of a leaf."""
    mean, width, _ = marginal
    dtype = mean.dtype
    natural = (state.ess * state.weight_decay).astype(dtype)
    prior_width = _geometry.stddev(natural, state.exponent, reference)
    shift = mean if prior is None else mean - jnp.asarray(prior, dtype)
    ratio = width / prior_width
    # That of the exponent: with "logdet" the geometry is Gaussian whatever the noise.
    alpha = (2 / state.exponent - 1).astype(dtype)
    return _closed_forms.discrepancy(
        alpha,
        jnp.square(shift / prior_width),
        jnp.square(ratio),
        2 * jnp.log(ratio),
        natural * jnp.square(prior_width),
    )
