"""One optimizer for a whole model, in which each role gets a rule that its symmetry allows."""

import collections
import functools
import math

import optax

from jaxkit import _check
from jaxkit.spectral import _by_role
from jaxkit.spectral._roles import HIDDEN_ROLES
from jaxkit.spectral._scale_by_spectral import scale_by_spectral

_HIDDEN = {"rule": "polar", "nesterov": True}
# Chosen by the validation loss of short language models: with b1=0.95 and without the look-ahead
# both right_spectral and row_then_polar end 0.03 to 0.06 nats higher.
_TOKENS = {"rule": "right_spectral", "b1": 0.9, "nesterov": True}
DEFAULTS = {
    "hidden": _HIDDEN,
    "attention_in": _HIDDEN,
    "attention_out": _HIDDEN,
    "mlp_gate_up": _HIDDEN,
    "mlp_down": _HIDDEN,
    "conv": _HIDDEN,
    "embedding": _TOKENS,
    "lm_head": {**_TOKENS, "centered": True},
    "router": {"rule": "row_norm", "centered": True},
}
_OPTIONS = (
    "rule b1 nesterov bias_correction alpha eps eps_mode row_floor rows centered polar_first b2 "
    "noise_damping scale multiplier weight_decay"
).split()


def symmetry_compatible(
    learning_rate,
    *,
    roles=None,
    weight_decay=0.0,
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
    r"""Returns the optimizer that gives each role of a model's leaves a rule of its symmetry.

    A layer does the same when its hidden units are rotated; an embedding when its tokens are
    renumbered; a head when the same row is added to all. The update of each should follow: the
    polar factor for hidden, attention, MLP and convolution kernels (Muon), a right-spectral rule
    for the embedding, the same and centered for the output head, centered row norms for a router,
    and AdamW for vectors, norms and positions. :func:`~jaxkit.spectral.describe` prints which
    leaf gets what. With the scale ``"rms"`` of all rules one learning rate serves all roles.

    Args:
      learning_rate: :math:`\eta`, a number or a schedule; start from that of AdamW.
      roles: mapping from a role to its options, each in place of the default ones; static but for
        its numbers. Options are ``"multiplier"`` of the learning rate, ``"weight_decay"``, and
        those of :func:`~jaxkit.spectral.scale_by_spectral`: ``"rule"``, ``"b1"``, ``"nesterov"``,
        ``"bias_correction"``, ``"alpha"``, ``"eps"``, ``"eps_mode"``, ``"row_floor"``, ``"rows"``,
        ``"centered"``, ``"polar_first"``, ``"b2"``, ``"noise_damping"``, ``"scale"``. A new
        ``"rule"`` begins from the options of that function, else the default ones are kept. The
        string ``"other"`` sends the role to ``other``.
      weight_decay: decoupled, of the hidden, attention, MLP and convolution kernels; a number or
        a schedule.
      method: static; as in :func:`~jaxkit.spectral.polar`.
      coefficients: static; as in :func:`~jaxkit.spectral.polar`.
      steps: static; as in :func:`~jaxkit.spectral.polar`.
      dtype: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      precision: static; as in :func:`~jaxkit.spectral.polar`.
      mu_dtype: static; dtype of the momentum. ``None``: float32 or wider.
      other: as in :func:`~jaxkit.spectral.muon`.
      other_learning_rate: as in :func:`~jaxkit.spectral.muon`.
      rules: static; as in :func:`~jaxkit.spectral.label_params`.
      overrides: static; as in :func:`~jaxkit.spectral.label_params`. Tied embeddings, for one, are
        ``{"embed/embedding": "lm_head"}``.
      strict: static; as in :func:`~jaxkit.spectral.muon`.
      sharding: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.
      distribute: static; as in :func:`~jaxkit.spectral.scale_by_spectral`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``; ``update`` needs ``params`` if there is weight
      decay, hands extra arguments on to ``other``, and takes ``noise_variance`` if all rules do.

    Raises:
      ValueError: an unknown role or option; and as in :func:`~jaxkit.spectral.muon`.
      TypeError: ``roles`` or the options of a role are no mapping; and as in
        :func:`~jaxkit.spectral.muon`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jaxkit import spectral
      >>> params = {"embed": jnp.ones((9, 4)), "lm_head": {"kernel": jnp.ones((4, 9))}}
      >>> roles = {"embedding": {"multiplier": 0.5}}
      >>> tx = spectral.symmetry_compatible(0.01, roles=roles, other=optax.sgd(1.0))
      >>> updates, state = tx.update(params, tx.init(params))
      >>> print(updates["lm_head"]["kernel"].sum().round(4) + 0.0)  # a shift of all units
      0.0

    Source: arXiv:2605.18106. Differs: all but the router look one gradient ahead, embedding and
    head with b1=0.9, and damping and floors are relative. Derived here: the common scale.

    Cost: as :func:`~jaxkit.spectral.muon` with the embedding and the head as two more matrices, in
    the Gram form.
    """
    common = {
        "method": method,
        "coefficients": coefficients,
        "steps": steps,
        "dtype": dtype,
        "precision": precision,
        "mu_dtype": mu_dtype,
        "sharding": sharding,
        "distribute": distribute,
    }
    groups = []
    for role, options in resolve_roles(roles).items():
        if options == "other":
            continue
        options.setdefault("weight_decay", weight_decay if role in HIDDEN_ROLES else 0.0)
        # Roles with the same options share a group, and so their buckets.
        mates = [members for known, members in groups if _same(known, options)]
        if mates:
            mates[0].append(role)
        else:
            groups.append((options, [role]))
    other = _by_role.other_or_adamw(other, learning_rate, other_learning_rate)
    groups = {
        members[0]: _group(members, learning_rate, common, **options) for options, members in groups
    }
    return _by_role.by_role(
        groups, other, rules=rules, overrides=overrides, strict=strict, sharding=sharding
    )


def resolve_roles(given):
    """Returns the options of each role, or ``"other"``: the given ones and the defaults."""
    given = _check.mapping("roles", given)
    for role, options in given.items():
        _check.choice("roles", role, tuple(DEFAULTS))
        if options != "other":
            if not isinstance(options, collections.abc.Mapping):
                raise TypeError(f"roles[{role!r}] must be a mapping or 'other', got {options!r}.")
            for name in options:
                _check.choice(f"option of roles[{role!r}]", name, _OPTIONS)
    out = {}
    for role, default in DEFAULTS.items():
        options = given.get(role, {})
        if options != "other":
            options = {**({} if "rule" in options else default), **options}
        out[role] = options
    return out


def _same(one, other):
    """Says whether two tables of options are known to be the same; arrays never are."""
    return one.keys() == other.keys() and all(
        isinstance(value, str | int | float | None) and value == other[name]
        for name, value in one.items()
    )


def _group(members, learning_rate, common, *, weight_decay, multiplier=1.0, **options):
    _by_role.check_rate("learning_rate", learning_rate)
    _check.between("multiplier", multiplier, -math.inf, math.inf)
    if callable(learning_rate):
        rate = lambda step: multiplier * learning_rate(step)  # noqa: E731
    else:
        rate = multiplier * learning_rate
    make = functools.partial(scale_by_spectral, **options, **common)
    return _by_role.Group(tuple(members), lambda known: make(overrides=known), rate, weight_decay)
