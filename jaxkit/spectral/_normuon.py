"""NorMuon: the polar factor, each row divided by its root mean square over the steps."""

import optax

from jaxkit.spectral import _by_role


def normuon(
    learning_rate,
    *,
    b1=0.95,
    b2=0.95,
    nesterov: bool = True,
    eps=1e-8,
    noise_damping=None,
    weight_decay=0.0,
    scale="rms",
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
    r"""Returns NorMuon for a whole model: Muon whose rows are brought to one size over the steps.

    Hidden matrices move by :math:`-\eta \, (s \, O' + \lambda W)`: each row of the factor
    :math:`O` is divided by the root of its second moment
    :math:`v_i \leftarrow \beta_2 v_i + (1 - \beta_2) \, \mathrm{mean}_j O_{ij}^2`, and the whole is
    scaled back to the Frobenius norm of :math:`O`. All other leaves go to ``other``.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule.
      b1: momentum decay :math:`\beta` in [0, 1).
      b2: decay :math:`\beta_2` of the row averages in [0, 1).
      nesterov: static; whether the rule looks one gradient ahead of the momentum.
      eps: added to the root of :math:`v_i`.
      noise_damping: as in :func:`~jaxkit.spectral.scale_by_spectral`.
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
      >>> tx = spectral.normuon(1.0, b1=0.0, scale="none", method="eigh", other=optax.sgd(1.0))
      >>> grads = {"kernel": jnp.diag(jnp.array([4.0, -0.5]))}
      >>> updates, _ = tx.update(grads, tx.init(grads))
      >>> print(updates["kernel"].round(3) + 0.0)
      [[-1.  0.]
       [ 0.  1.]]

    Source: arXiv:2510.05491, algorithm 1. Differs: roles by name, norms per matrix of a stack.

    Cost: as :func:`~jaxkit.spectral.muon`, and one number a row of state.
    """
    options = {
        "rule": "normuon",
        "b1": b1,
        "b2": b2,
        "nesterov": nesterov,
        "eps": eps,
        "noise_damping": noise_damping,
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
