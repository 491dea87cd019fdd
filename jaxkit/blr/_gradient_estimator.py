"""Gradient and curvature at samples of the posterior, as an estimator."""

import jax
import jax.numpy as jnp

from jaxkit import _estimator
from jaxkit.blr import _monte_carlo


def gradient_estimator(
    inner, *, num_samples=1, mode="scan", hessian="reparam", batch_size=None, axis_name=None
):
    """Returns the estimator that asks ``inner`` at samples of the posterior of :func:`gblr`.

    It hands the curvature on to the optimizer as ``extras["hess"]``. The options are those of
    :func:`gblr_value_and_grad`, which explains them. Leaves of the parameters without a posterior
    get no noise and curvature 0.

    Args:
      inner: estimator ``(key, params, opt_state, batch) -> Estimate`` of a loss, such as
        ``train.backprop(loss_fn)`` or ``zo.gradient_estimator(loss_fn)``, possibly inside
        ``train.accumulate``.
      num_samples: number of samples, static; even for "antithetic".
      mode: "scan" or "vmap", static.
      hessian: "reparam", "antithetic" or "gradsq", static.
      batch_size: examples behind a gradient, needed for "gradsq" and given for nothing else.
      axis_name: axes of devices inside ``jax.shard_map``, or None; each draws its own samples.

    Returns:
      Estimator ``(key, params, opt_state, batch) -> Estimate``. It splits ``key`` into one for its
      draws and one for ``inner``, and folds the index of the sample into both; the two of an
      antithetic pair share theirs. ``value``, gradient and extras are means over samples, ``aux``
      is that of the first.

    Raises:
      TypeError: ``inner`` is no function.
      ValueError: ``inner`` is private, or an option out of range; or, when called, ``opt_state``
        holds no :class:`GBLRState`, an outer estimator uses it already, or ``inner`` gives
        ``hess`` too.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import blr, train
      >>> inner = train.backprop(lambda params, batch, key: jnp.sum(3 * params**2) / 2)
      >>> estimator = blr.gradient_estimator(inner, num_samples=2, hessian="antithetic")
      >>> params = jnp.array(1.0)
      >>> estimate = estimator(jax.random.key(0), params, blr.gblr(0.1, ess=9).init(params), ())
      >>> print(estimate.grads.round(2), estimate.extras.keys())
      3.0 dict_keys(['hess'])

    Source: arXiv:2402.17641.

    Cost: ``num_samples`` calls of ``inner``, traced once, and as many draws of noise.
    """
    _estimator.check_inner("blr.gradient_estimator", inner)
    options = _monte_carlo.check(
        _monte_carlo.Options(num_samples, mode, hessian, batch_size, axis_name),
        ("reparam", "antithetic", "gradsq"),
    )

    def estimator(key, params, opt_state, batch):
        key = _monte_carlo.device_key(key, axis_name)
        own_key, inner_key = jax.random.split(key)
        hidden = _estimator.hide(opt_state)

        def evaluate(index, theta):
            value, grads, aux, extras = inner(
                jax.random.fold_in(inner_key, index), theta, hidden, batch
            )
            if "hess" in extras:
                raise ValueError("inner must leave the extra 'hess' to this estimator, got one.")
            return grads, (value, extras), aux

        grads, hess, (value, extras), aux = _monte_carlo.estimate(
            evaluate, options, own_key, params, opt_state
        )
        value = jnp.asarray(value, jnp.float32)
        return _estimator.Estimate(value, grads, aux, {**extras, "hess": hess})

    return estimator
