"""The table of what an optimizer does with each leaf of a model."""

from typing import NamedTuple

from jaxkit import _check
from jaxkit.spectral._labels import assign
from jaxkit.spectral._matrix_spec import MatrixSpec, matrix_shape
from jaxkit.spectral._roles import HIDDEN_ROLES
from jaxkit.spectral._symmetry_compatible import resolve_roles

_HIDDEN_RULES = {
    "muon": "polar",
    "polargrad": "polar",
    "normuon": "normuon",
    "row_norm": "row_norm",
    "hybrid": "row_then_polar",
}


class Row(NamedTuple):
    """One line of the table that :func:`describe` returns.

    Attributes:
      path: where the leaf is, such as ``mlp/up/kernel``.
      shape: its shape.
      role: what :func:`label_params` calls it.
      spec: its resolved :class:`MatrixSpec`, or None for a leaf that is no matrix.
      rule: what the optimizer does with its role.
      num_matrices: how many matrices it holds, 0 without a spec.
    """

    path: str
    shape: tuple[int, ...]
    role: str
    spec: MatrixSpec | None
    rule: str
    num_matrices: int


class Table(tuple):
    """A tuple of :class:`Row` that prints as aligned text."""

    __slots__ = ()

    def __str__(self):
        cells = [Row._fields, *(["-" if x is None else str(x) for x in row] for row in self)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in cells
        )


def describe(params, *, optimizer="symmetry_compatible", roles=None, rules=None, overrides=None):
    """Returns the table of all leaves: path, shape, role, axes, rule and number of matrices.

    The role says why a leaf gets its rule; :func:`label_params` lists what makes a role.

    Args:
      params: any tree of arrays or ``jax.ShapeDtypeStruct``.
      optimizer: name of the optimizer whose rules are shown, static: ``"symmetry_compatible"``,
        or with its default norms or order ``"scion"``, ``"muon"``, ``"polargrad"``, ``"normuon"``,
        ``"row_norm"`` or ``"hybrid"``.
      roles: as in :func:`symmetry_compatible`, only for it, static.
      rules: as in :func:`label_params`, static.
      overrides: as in :func:`label_params`, static.

    Returns:
      Tuple of rows ``(path, shape, role, spec, rule, num_matrices)`` in leaf order, which prints
      as aligned text. The rule ``other`` is the elementwise optimizer.

    Raises:
      ValueError: as :func:`label_params`, an unknown ``optimizer``, an unknown role or option, or
        ``roles`` for another optimizer.
      TypeError: as :func:`label_params`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import spectral
      >>> params = {"query": {"kernel": jnp.ones((8, 2, 4)), "bias": jnp.ones((2, 4))}}
      >>> print(spectral.describe(params))
      path          shape      role          spec                        rule   num_matrices
      query/bias    (2, 4)     other         -                           other  0
      query/kernel  (8, 2, 4)  attention_in  unit 2; feature 0; batch 1  polar  2

    Source: derived here.

    Cost: host time linear in the number of leaves; no array is read.
    """
    _check.choice("optimizer", optimizer, ("symmetry_compatible", "scion", *_HIDDEN_RULES))
    if optimizer == "symmetry_compatible":
        rule = {role: _text(options) for role, options in resolve_roles(roles).items()}
    elif roles is not None:
        raise ValueError(f"roles belongs to symmetry_compatible, got {roles} for {optimizer!r}.")
    elif optimizer == "scion":
        rule = dict.fromkeys((*HIDDEN_ROLES, "router"), "spectral")
        rule |= {"embedding": "col_norm", "lm_head": "sign", "other": "unit rms"}
    else:
        rule = dict.fromkeys(HIDDEN_ROLES, _HIDDEN_RULES[optimizer])
    rows = []
    for path, shape, _, role, spec in assign(params, rules=rules, overrides=overrides):
        num = sum(num for num, _, _ in matrix_shape(spec, shape)) if spec else 0
        rows.append(Row(path, shape, role, spec, rule.get(role, "other"), num))
    return Table(rows)


def _text(options):
    """Returns the text of a role's rule."""
    if options == "other":
        return options
    words = [options.get("rule", "polar")]
    words += ["centered"] * bool(options.get("centered"))
    words += ["by feature"] * (options.get("rows") == "feature")
    return ", ".join(words)
