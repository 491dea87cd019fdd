"""Known denoisers, in the same link: averaging, transport, and their relatives."""

from jaxkit import _check
from jaxkit.denoise import _denoise, _link


def ema(gain, *, accumulator_dtype=None):
    r"""Returns exponential averaging of the gradients, :math:`g \gets (1 - a) g + a y`.

    It starts from the first gradient, so that no bias must be corrected. The same as
    :func:`denoise` of order 1.

    Args:
      gain: :math:`a` in (0, 1], a number, a ``[]`` array, a schedule or "auto".
      accumulator_dtype: of the estimate, static; None for float32 or wider.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with a :class:`DenoiseState`.

    Raises:
      TypeError, ValueError: as :func:`denoise`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import denoise
      >>> tx, x = denoise.ema(0.25), jnp.zeros([])
      >>> state = tx.init(x)
      >>> for y in (8.0, 0.0):
      ...     g, state = tx.update(jnp.array(y), state, x)
      >>> print(g)
      6.0

    Source: the known technique.

    Cost: elementwise; one copy of the parameters.
    """
    return _denoise.denoise(gain, order=1, accumulator_dtype=accumulator_dtype)


def igt(gain, *, accumulator_dtype=None):
    r"""Returns implicit gradient transport, which asks ahead of the parameters.

    With d the last step of the parameters,
    :math:`g \gets (1 - a) g + a \, y(x + \tfrac{1 - a}{a} d)`, which carries the gradient of a
    quadratic loss along without error. The same as :func:`denoise` of order 2.

    Args:
      gain: :math:`a` in (0, 1], a number, a ``[]`` array or a schedule.
      accumulator_dtype: of the estimate, static; None for float32 or wider.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with a :class:`DenoiseState`.

    Raises:
      TypeError, ValueError: as :func:`denoise`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import denoise
      >>> tx = denoise.igt(0.25)
      >>> state = tx.init(jnp.array(1.0))
      >>> for x in (jnp.array(1.0), jnp.array(2.0)):
      ...     points, weights = denoise.query_points(state, x)
      ...     g, state = tx.update(3 * points[0], state, x, queried=True)  # of 3 x^2 / 2
      >>> print(points, g)
      [5.] 6.0

    Source: arXiv:1906.03532; arXiv:2002.03305.

    Cost: one gradient a step; two copies of the parameters.
    """
    return _denoise.denoise(gain, order=2, accumulator_dtype=accumulator_dtype)


def disk(kappa=0.7, *, gamma=0.5, accumulator_dtype=None):
    r"""Returns DiSK, a simplified Kalman filter with a finite difference for the Hessian.

    With d the last step and :math:`c = (1 - \kappa) / (\kappa \gamma)`,
    :math:`g \gets (1 - \kappa) g + \kappa [c \, y(x + \gamma d) + (1 - c) \, y(x)]`. At
    :math:`\gamma = (1 - \kappa) / \kappa` it is :func:`igt`, which asks once.

    Both gradients must have the same noise, as with one privacy noise on their combination. With
    noise of their own the error does not fall with ``kappa``.

    Args:
      kappa: weight of the new gradient in (0, 1], a number, a ``[]`` array or a schedule.
      gamma: length of the probe in steps, positive, a number or traced.
      accumulator_dtype: of the estimate, static; None for float32 or wider.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with a :class:`DenoiseState`.

    Raises:
      TypeError, ValueError: as :func:`denoise`, of ``kappa`` and ``gamma``.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import denoise
      >>> tx = denoise.disk(0.5)
      >>> state = tx.init(jnp.array(1.0))
      >>> _, state = tx.update(jnp.array(1.0), state, jnp.array(1.0), queried=True)
      >>> print(*denoise.query_points(state, jnp.array(3.0)))
      [3. 4.] [-1.  2.]

    Source: arXiv:2410.03883.

    Cost: two gradients a step; two copies of the parameters.
    """
    _check.between("gamma", gamma, 0, float("inf"), closed=False)
    return _link.link(
        "disk",
        kappa,
        gain_name="kappa",
        probe_length=gamma,
        accumulator_dtype=accumulator_dtype,
    )


def storm(gain, *, accumulator_dtype=None):
    r"""Returns STORM, which corrects the average by the change of the gradient of one sample.

    :math:`g \gets y(x_t) + (1 - a) (g - y(x_{t-1}))` with the same sample in both. With noise of
    their own its variance is about :math:`1 / a` of that of a gradient, larger than doing nothing.

    Args:
      gain: :math:`a` in (0, 1], a number, a ``[]`` array or a schedule.
      accumulator_dtype: of the estimate, static; None for float32 or wider.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with a :class:`DenoiseState`.

    Raises:
      TypeError, ValueError: as :func:`denoise`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import denoise
      >>> tx = denoise.storm(0.25)
      >>> state = tx.init(jnp.array(1.0))
      >>> _, state = tx.update(jnp.array(1.0), state, jnp.array(1.0), queried=True)
      >>> print(*denoise.query_points(state, jnp.array(3.0)))
      [3. 1.] [ 4. -3.]

    Source: arXiv:1905.10018.

    Cost: two gradients a step; two copies of the parameters.
    """
    return _link.link("storm", gain, accumulator_dtype=accumulator_dtype)


def hvp(gain, *, accumulator_dtype=None):
    r"""Returns averaging that carries the estimate along by a Hessian-vector product.

    With d the last step and H the Hessian in its middle,
    :math:`g \gets (1 - a) (g + H d) + a \, y(x)`, without error on cubic losses. Its update takes
    ``hvp``, the product :math:`H d`, a tree like the parameters; :func:`gradient_estimator` makes
    it, of an estimator that can be differentiated.

    Args:
      gain: :math:`a` in (0, 1], a number, a ``[]`` array or a schedule.
      accumulator_dtype: of the estimate, static; None for float32 or wider.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with a :class:`DenoiseState`.

    Raises:
      TypeError, ValueError: as :func:`denoise`; and ValueError from update if ``hvp`` is missing
        or not like the parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import denoise
      >>> tx = denoise.hvp(0.25)
      >>> state = tx.init(jnp.array(1.0))
      >>> _, state = tx.update(jnp.array(3.0), state, jnp.array(1.0), hvp=jnp.array(0.0))
      >>> g, _ = tx.update(jnp.array(6.0), state, jnp.array(2.0), hvp=jnp.array(3.0))
      >>> print(g)
      6.0

    Source: arXiv:2103.03265, with the product in the middle of the step.

    Cost: one gradient and one Hessian-vector product a step, together the work of three to four
    gradients; two copies of the parameters.
    """
    return _link.link("hvp", gain, accumulator_dtype=accumulator_dtype)
