"""Muon: the polar factor of the momentum for hidden matrices, another optimizer for the rest."""

import functools
import glob
import math

import jax
import jax.numpy as jnp
import optax

from jaxkit import _check, _numerics, _tree
from jaxkit.spectral._placement import assign_whole, read_shardings
from jaxkit.spectral._roles import HIDDEN_ROLES
from jaxkit.spectral._scale_by_spectral import scale_by_spectral


def muon(
    learning_rate,
    *,
    b1=0.95,
    nesterov: bool = True,
    bias_correction: bool = False,
    weight_decay=0.0,
    scale: str = "rms",
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
      decay, and hands extra arguments on to ``other``.

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
    if other is None:
        rate = learning_rate if other_learning_rate is None else other_learning_rate
        # eps_root gives the square root a derivative at a zero gradient.
        other = _in_float32(optax.nadam(rate, b2=0.95, eps_root=1e-16))
    elif other_learning_rate is not None:
        raise ValueError(
            f"other_learning_rate belongs to the default AdamW, got {other_learning_rate} together "
            "with other."
        )
    _check.transformation("other", other)
    if not callable(weight_decay):
        _check.between("weight_decay", weight_decay, 0.0, math.inf)

    rule = functools.partial(
        scale_by_spectral,
        "polar",
        b1=b1,
        nesterov=nesterov,
        bias_correction=bias_correction,
        scale=scale,
        method=method,
        coefficients=coefficients,
        steps=steps,
        dtype=dtype,
        precision=precision,
        mu_dtype=mu_dtype,
        sharding=sharding,
        distribute=distribute,
    )
    for name, rate in (
        ("learning_rate", learning_rate),
        ("other_learning_rate", 0.0 if other_learning_rate is None else other_learning_rate),
    ):
        if not callable(rate):  # optax takes None for a rate of -1, which ascends
            _check.between(name, rate, -math.inf, math.inf)
    no_decay = isinstance(weight_decay, int | float) and weight_decay == 0
    shardings = read_shardings(sharding)
    rule()  # static arguments are checked here, not at the first init

    def parts(tree):
        # Roles and axes are found on the whole tree, where a leaf's neighbors tell what it is, and
        # handed to the part that sees only the matrices.
        found, _ = assign_whole(tree, shardings, rules=rules, overrides=overrides, strict=strict)
        is_hidden = [item.role in HIDDEN_ROLES for item in found]
        known = {
            glob.escape(item.path): (item.role, item.spec)
            for item, hidden in zip(found, is_hidden, strict=True)
            if hidden
        }
        hidden = optax.chain(
            rule(overrides=known),
            # Without decay, update needs no params; the state looks the same.
            optax.identity() if no_decay else optax.add_decayed_weights(weight_decay),
            optax.scale_by_learning_rate(learning_rate),
        )
        groups = ["hidden" if hidden else "other" for hidden in is_hidden]
        labels = jax.tree.structure(tree).unflatten(groups)
        # As a function: a model that can be called has labels that can be, too.
        return optax.partition({"hidden": hidden, "other": other}, lambda _: labels)

    def init(params):
        return parts(params).init(params)

    def update(updates, state, params=None, **extra):
        new, state = parts(updates).update(updates, state, params, **extra)
        # A rate that is an array would widen 16-bit updates.
        return jax.tree.map(lambda y, g: y.astype(g.dtype), new, updates), state

    return optax.GradientTransformationExtraArgs(init, update)


def _in_float32(inner):
    """Runs ``inner`` in float32 or wider; in 16 bits its moments freeze and its eps is zero.

    Its updates are as wide; muon casts them, as those of the matrices.
    """
    inner = optax.with_extra_args_support(inner)

    def wide(tree):
        for path, leaf in _tree.leaves_with_paths(tree):
            if not jnp.issubdtype(leaf.dtype, jnp.floating):
                raise TypeError(
                    f"{path} must be real floating for the default AdamW, got {leaf.dtype}."
                )
        return jax.tree.map(lambda x: x.astype(_numerics.wide(x.dtype)), tree)

    def init(params):
        return inner.init(wide(params))

    def update(updates, state, params=None, **extra):
        return inner.update(wide(updates), state, None if params is None else wide(params), **extra)

    return optax.GradientTransformationExtraArgs(init, update)
