"""Muon: the polar factor of the momentum for hidden matrices, another optimizer for the rest."""

import optax

from jaxkit.spectral import _by_role


def muon(
    learning_rate,
    *,
    b1=0.95,
    nesterov: bool = True,
    bias_correction: bool = False,
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
    r"""Returns Muon for a whole model: matrices are orthogonalized, the rest goes to ``other``.

    Hidden matrices (dense, attention, MLP and convolution kernels) move by
    :math:`-\eta \, (s \, \mathrm{polar}(\beta M + (1 - \beta) G) + \lambda W)`. Embeddings,
    output heads, routers, biases and norms go to ``other``. :func:`~jaxkit.spectral.describe`
    prints which leaf goes where.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule. With ``scale="rms"`` start from the
        rate that suits AdamW, with ``scale="muon"`` from 0.02.
      b1: momentum decay :math:`\beta` in [0, 1).
      nesterov: static; whether the rule looks one gradient ahead of the momentum.
      bias_correction: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      noise_damping: as in :func:`~jaxkit.spectral.scale_by_spectral`.
      weight_decay: :math:`\lambda`, decoupled, of the hidden matrices only; a number or a schedule.
      scale: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      method: static; as in :func:`~jaxkit.spectral.polar`.
      coefficients: static; as in :func:`~jaxkit.spectral.polar`.
      steps: static; as in :func:`~jaxkit.spectral.polar`.
      dtype: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      precision: static; as in :func:`~jaxkit.spectral.polar`.
      mu_dtype: static; dtype of the momentum. ``None``: float32 or wider.
      other: transformation for all other leaves, with its own learning rate. ``None``: AdamW with
        Nesterov momentum as in ``optax.contrib.muon``, b1=0.9, b2=0.95, eps=1e-8, no weight
        decay (``optax.nadam``), its state in float32 or wider.
      other_learning_rate: learning rate of that AdamW; ``None``: ``learning_rate``.
      rules: static; as in :func:`~jaxkit.spectral.label_params`.
      overrides: static; as in :func:`~jaxkit.spectral.label_params`.
      strict: static; whether a leaf of two or more axes whose role cannot be told is an error.
      sharding: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      distribute: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``; ``update`` needs ``params`` if there is weight
      decay, hands extra arguments on to ``other``, and takes
      ``noise_variance`` for the matrices as :func:`~jaxkit.spectral.scale_by_spectral` does.

    Raises:
      ValueError: as in :func:`~jaxkit.spectral.scale_by_spectral`; ``other_learning_rate``
        together with ``other``.
      TypeError: a rate is neither a number nor a schedule, ``other`` no transformation, or a hidden
        matrix, or a leaf for the default AdamW, not real floating.

    Example:
      >>> import jax.numpy as jnp
      >>> import optax
      >>> from jaxkit import spectral
      >>> params = {"dense": {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)}}
      >>> tx = spectral.muon(1.0, scale="none", method="eigh", other=optax.sgd(1.0))
      >>> grads = {"dense": {"kernel": jnp.diag(jnp.array([4.0, 0.5])), "bias": jnp.ones(2)}}
      >>> updates, _ = tx.update(grads, tx.init(params), params)
      >>> print(updates["dense"]["bias"], updates["dense"]["kernel"].round(3).diagonal())
      [-1. -1.] [-1. -1.]

    Source: Muon (Keller Jordan, 2024), arXiv:2502.16982 (decay and scale). Differs: five Polar
    Express steps instead of one repeated quintic; per attention head; roles by name.

    Cost: see :func:`~jaxkit.spectral.scale_by_spectral` for the matrices; nothing else crosses
    the network.
    """
    options = {
        "b1": b1,
        "nesterov": nesterov,
        "bias_correction": bias_correction,
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
