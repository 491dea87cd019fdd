"""Optimizers with a denoiser that ask for their gradients themselves."""

import optax

from jaxkit import _check
from jaxkit.denoise import _combine, _query_points


def denoise_with_grad_fn(inner):
    r"""Returns ``inner`` with an update that asks for the gradient itself, by one call.

    ``inner`` is :func:`denoise`, one of its members, or a whole optimizer that holds one, such as
    ``optax.chain(clip, denoise, adam)``, and may be inside ``optax.inject_hyperparams`` or
    ``apply_if_finite``: its links see the combined gradient. Around it such wrappers would see
    none, which is why what is given as updates must be None. Do not put it into ``MultiSteps``,
    which would call the function of the last slice only, nor into ``masked`` or ``partition``.

    Args:
      inner: optax transformation whose state holds one :class:`DenoiseState`, not of
        :func:`hvp`, whose product takes more than gradients.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with the state of ``inner``; its update is
      ``update(None, state, params, grad_fn=, key=None, **extra)`` with ``grad_fn(point)`` the
      gradient at one point, always of the same batch, ``key`` for ``random_node`` and the rest
      handed on to ``inner``.

    Raises:
      TypeError: ``inner`` is no transformation, or ``grad_fn`` no function.
      ValueError: as :func:`denoise` and :func:`query_points`; or, when called, the updates are
        not None, or ``params`` or ``grad_fn`` is missing.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jaxkit import denoise
      >>> tx = denoise.denoise_with_grad_fn(optax.chain(denoise.denoise(0.3), optax.sgd(0.25)))
      >>> x = jnp.array(1.0)
      >>> state = tx.init(x)
      >>> for _ in range(2):
      ...     updates, state = tx.update(None, state, x, grad_fn=jax.grad(lambda x: x**2))
      ...     x = x + updates
      >>> print(x)
      0.25

    Source: derived here.

    Cost: that of ``inner``, and of ``grad_fn`` at each query point.
    """
    _check.transformation("inner", inner)
    inner = optax.with_extra_args_support(inner)

    def update(updates, state, params=None, *, grad_fn=None, key=None, **extra):
        if updates is not None:
            raise ValueError("updates must be None, since grad_fn gives the gradient, got some.")
        for name, given in (("params", params), ("grad_fn", grad_fn)):
            if given is None:
                raise ValueError(f"{name} must be given to update, got None.")
        points, weights = _query_points.query_points(state, params, key)
        grads = _combine.combine(grad_fn, points, weights)
        return inner.update(grads, state, params, queried=True, **extra)

    return optax.GradientTransformationExtraArgs(inner.init, update)
