"""Log-probabilities of the mean prediction over the posterior."""

import math

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics
from jaxkit.blr._sample_posterior import sample_posterior


def predictive_log_probs(apply_fn, key, params, state, x, num_samples=32):
    r"""Returns :math:`\log \frac1K \sum_k p(y | x, \theta_k)` over samples of the posterior.

    The mean is taken of probabilities, in the logarithm, so small ones do not vanish.

    Args:
      apply_fn: function ``(params, x)`` that returns logits or log-probabilities ``[..., C]`` of C
        classes.
      key: typed random key, ``[]``; sample k is drawn with ``fold_in(key, k)``.
      params: parameters, the means of the posterior.
      state: optimizer state that holds a :class:`GBLRState`.
      x: inputs, a tree of arrays.
      num_samples: number of samples, static.

    Returns:
      Log-probabilities ``[..., C]`` in float32 or wider.

    Raises:
      TypeError: ``apply_fn`` is no function.
      ValueError: ``num_samples`` is below 1, ``state`` holds no posterior, or ``apply_fn`` returns
        a number without an axis of classes.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import blr
      >>> params = jnp.eye(2)
      >>> state = blr.gblr(0.1, ess=1e6).init(params)
      >>> x = jnp.array([[0.0, 0.0], [2.0, 0.0]])
      >>> apply_fn = lambda params, x: x @ params
      >>> log_probs = blr.predictive_log_probs(apply_fn, jax.random.key(0), params, state, x)
      >>> print(jnp.exp(log_probs).round(2))
      [[0.5  0.5 ]
       [0.88 0.12]]

    Source: Bayesian model averaging, the known technique.

    Cost: ``num_samples`` draws and forward passes, one after the other; their outputs in memory.
    """
    _check.function("apply_fn", apply_fn)
    num_samples = _check.count("num_samples", num_samples)

    def sample(index):
        theta, _ = sample_posterior(jax.random.fold_in(key, index), params, state)
        logits = jnp.asarray(apply_fn(theta, x))
        if logits.ndim == 0:
            raise ValueError("apply_fn must return logits [..., C], got shape ().")
        return jax.nn.log_softmax(logits.astype(_numerics.wide(logits.dtype)), axis=-1)

    log_probs = jax.lax.map(sample, jnp.arange(num_samples, dtype=jnp.int32))
    return jax.nn.logsumexp(log_probs, axis=0) - math.log(num_samples)
