"""PolarGrad: the polar factor of the momentum times its nuclear norm."""

import optax

from jaxkit.spectral import _by_role


def polargrad(
    learning_rate,
    *,
    b1=0.95,
    nesterov: bool = False,
    polar_first: bool = False,
    weight_decay=0.0,
    scale="none",
    method: str = "auto",
    coefficients="polar_express_5",
    steps: int | None = None,
    dtype=None,
    precision=None,
    mu_dtype=None,
    other: optax.GradientTransformation | None = None,
    other_learning_rate=None,
    rules=None,
    overrides=None,
    strict: bool = False,
    sharding=None,
    distribute: tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Returns PolarGrad for a whole model: the polar factor times the size of the gradient.

    Hidden matrices move by :math:`-\eta \, (s \, \nu \, \mathrm{polar}(M) + \lambda W)` with the
    nuclear norm :math:`\nu = \langle M, \mathrm{polar}(M) \rangle` of the momentum: the step
    vanishes with the gradient, so that a constant rate converges where Muon's needs a schedule.
    All other leaves go to ``other``.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      b1: momentum decay :math:`\beta` in [0, 1).
      nesterov: static; whether the rule looks one gradient ahead of the momentum.
      polar_first: static; the momentum averages the polar factors of the gradients, and is
        multiplied by the size of the newest gradient.
      weight_decay: :math:`\lambda`, decoupled, of the hidden matrices only; a number or a schedule.
      scale: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      method: static; as in :func:`~jaxkit.spectral.polar`.
      coefficients: static; as in :func:`~jaxkit.spectral.polar`.
      steps: static; as in :func:`~jaxkit.spectral.polar`.
      dtype: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      precision: static; as in :func:`~jaxkit.spectral.polar`.
      mu_dtype: static; dtype of the momentum. ``None``: float32 or wider.
      other: as in :func:`~jaxkit.spectral.muon`.
      other_learning_rate: as in :func:`~jaxkit.spectral.muon`.
      rules: static; as in :func:`~jaxkit.spectral.label_params`.
      overrides: static; as in :func:`~jaxkit.spectral.label_params`.
      strict: static; as in :func:`~jaxkit.spectral.muon`.
      sharding: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      distribute: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``; ``update`` needs ``params`` if there is weight
      decay, and hands extra arguments on to ``other``.

    Raises:
      ValueError: as in :func:`~jaxkit.spectral.muon`.
      TypeError: as in :func:`~jaxkit.spectral.muon`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxkit import spectral
      >>> tx = spectral.polargrad(1.0, b1=0.0, method="eigh", other=optax.sgd(1.0))
      >>> grads = {"kernel": jnp.diag(jnp.array([4.0, -0.5]))}
      >>> updates, _ = tx.update(grads, tx.init(grads))
      >>> print(updates["kernel"].round(3) + 0.0)  # the nuclear norm is 4.5
      [[-4.5  0. ]
       [ 0.   4.5]]

    Source: arXiv:2505.21799, algorithms 1 and 2. Differs: the size is per matrix, never over a
    stack; roles by name.

    Cost: as :func:`~jaxkit.spectral.muon`.
    """
    options = {
        "alpha": 1.0,
        "b1": b1,
        "nesterov": nesterov,
        "polar_first": polar_first,
        "scale": scale,
        "method": method,
        "coefficients": coefficients,
        "steps": steps,
        "dtype": dtype,
        "precision": precision,
        "mu_dtype": mu_dtype,
        "distribute": distribute,
    }
    return _by_role.hidden(
        learning_rate,
        options,
        weight_decay=weight_decay,
        other=other,
        other_learning_rate=other_learning_rate,
        rules=rules,
        overrides=overrides,
        strict=strict,
        sharding=sharding,
    )
