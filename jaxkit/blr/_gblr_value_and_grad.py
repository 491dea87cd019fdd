"""Gradient and curvature of a loss at samples of the posterior, for loops of one's own."""

import jax
import jax.numpy as jnp

from jaxkit import _check, _estimator, _tree
from jaxkit.blr import _monte_carlo, _state


def gblr_value_and_grad(
    loss_fn,
    *,
    num_samples=1,
    mode="scan",
    has_aux=False,
    hessian="reparam",
    batch_size=None,
    axis_name=None,
):
    r"""Returns the function that asks for gradient and curvature at samples of the posterior.

    With samples :math:`\theta = \mu + \sigma z`, the gradient is the mean of
    :math:`g = \nabla \ell(\theta)`, and the diagonal curvature the mean of

    - "reparam": :math:`g z / \sigma`, for the price of the gradient;
    - "antithetic": :math:`z (g_+ - g_-) / (2 \sigma)` over pairs :math:`\mu \pm \sigma z`, which
      takes out the noise of the mean gradient and leaves that of the curvature;
    - "hutchinson": :math:`w \, u \, (H u)` with random signs u and weights w of mean 1, which are
      all 1 for ``alpha`` 1: one more pass forward and back;
    - "gradsq": ``batch_size`` times :math:`g^2`, which is biased.

    The first three are unbiased for the learning rule of any ``alpha``. The variance of "reparam"
    is infinite for ``alpha`` up to 0.6.

    Args:
      loss_fn: function ``(params, *args)`` that returns the mean loss, ``[]`` real floating, with
        ``has_aux`` the tuple ``(loss, aux)``.
      num_samples: number of samples, static; even for "antithetic".
      mode: "scan" for one sample in memory at a time, "vmap" for all at once; static. The numbers
        are the same up to rounding.
      has_aux: whether ``loss_fn`` returns ``aux`` too, static.
      hessian: "reparam", "antithetic", "hutchinson" or "gradsq", static.
      batch_size: examples behind the loss, needed for "gradsq" and given for nothing else.
      axis_name: axes of devices inside ``jax.shard_map``, or None. Each device draws its own
        samples, with ``fold_in(key, index of the device)``, and all are averaged.

    Returns:
      Function ``(key, params, state, *args)`` that returns ``(value, grads, hess)``, with
      ``has_aux`` ``((value, aux), grads, hess)``: the mean loss ``[]`` in float32 or wider, the
      gradient like ``params``, the curvature in float32 or wider. ``aux`` is that of the first
      sample, and of the device. Leaves that are not floating have gradient 0. Where a curvature is
      not finite the gradient is NaN.

    Raises:
      TypeError: ``loss_fn`` is no function; or, when called, the loss is not real floating.
      ValueError: an option is out of range; or, when called, ``state`` holds no posterior.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import blr
      >>> params = jnp.array([1.0, 2.0])
      >>> state = blr.gblr(0.1, ess=100).init(params)
      >>> run = blr.gblr_value_and_grad(lambda p: jnp.sum(3 * p**2) / 2, hessian="hutchinson")
      >>> value, grads, hess = run(jax.random.key(0), params, state)
      >>> print(hess)
      [3. 3.]

    Source: arXiv:2402.17641. Derived here: the weights of "hutchinson".

    Cost: ``num_samples`` gradients and draws of noise; "hutchinson" about two gradients for each.
    """
    _check.function("loss_fn", loss_fn)
    options = _monte_carlo.check(
        _monte_carlo.Options(num_samples, mode, hessian, batch_size, axis_name)
    )

    def run(key, params, state, *args):
        key = _monte_carlo.device_key(key, axis_name)
        params = jax.tree.map(jnp.asarray, params)

        def evaluate(index, theta):
            del index
            leaves, treedef = jax.tree.flatten(theta)
            floats = {i: x for i, x in enumerate(leaves) if _state.has_posterior(x)}

            def loss(floats):
                whole = treedef.unflatten(floats.get(i, x) for i, x in enumerate(leaves))
                return _estimator.split_loss(loss_fn(whole, *args), has_aux=has_aux)

            (value, aux), slopes = jax.value_and_grad(loss, has_aux=True)(floats)
            grads = [slopes.get(i, _tree.zeros_like(x, jnp.float32)) for i, x in enumerate(leaves)]
            return treedef.unflatten(grads), value, aux

        grads, hess, value, aux = _monte_carlo.estimate(evaluate, options, key, params, state)
        return ((value, aux) if has_aux else value), grads, hess

    return run
