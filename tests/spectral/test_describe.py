"""The table of what each leaf gets, and that the optimizers do what it says."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_close
from spectral.directions import polar, rows
from spectral.models import Transformer, by_path, normal_like, params_of, quick_jit

from jaxkit import spectral
from jaxkit.spectral import MatrixSpec

# Every role, in few sizes of matrices.
SHAPES = {
    "embed/embedding": (12, 8),
    "mix/kernel": (8, 12),
    "mix/bias": (12,),
    "attention/query/kernel": (12, 2, 8),
    "attention/out/kernel": (2, 8, 12),
    "moe/gate/kernel": (8, 6),
    "moe/experts/up/kernel": (3, 8, 12),
    "moe/experts/down/kernel": (3, 12, 8),
    "conv/kernel": (1, 3, 4, 8),
    "depthwise/kernel": (2, 2, 1, 8),
    "lm_head/kernel": (8, 12),
}
PARAMS = {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in SHAPES.items()}
HIDDEN = "hidden attention_in attention_out mlp_gate_up mlp_down conv".split()
POLAR = dict.fromkeys(HIDDEN, "polar")
STACK = {
    **POLAR,
    "embedding": "right_spectral",
    "lm_head": "right_spectral, centered",
    "router": "row_norm, centered",
}
ROLES = {
    "embedding": {"rule": "row_then_polar"},
    "lm_head": {"rule": "row_then_polar", "centered": True},
    "router": {"rule": "left_spectral", "centered": True},
    "hidden": {"rule": "polar_then_row", "centered": True},
    "mlp_gate_up": {"rule": "row_norm"},
    "mlp_down": {"rule": "row_then_polar", "rows": "feature", "centered": True},
    "attention_out": {"rule": "polar_then_row", "rows": "feature"},
    "conv": "other",
}
WITH_ROLES = {
    **STACK,
    "embedding": "row_then_polar",
    "lm_head": "row_then_polar, centered",
    "router": "left_spectral, centered",
    "hidden": "polar_then_row, centered",
    "mlp_gate_up": "row_norm",
    "mlp_down": "row_then_polar, centered, by feature",
    "attention_out": "polar_then_row, by feature",
    "conv": "other",
}
SCION = {
    **dict.fromkeys((*HIDDEN, "router"), "spectral"),
    "embedding": "col_norm",
    "lm_head": "sign",
    "other": "unit rms",
}
# Those of one rule show it on few leaves.
FEW = ("mix/kernel", "mix/bias", "attention/query/kernel", "embed/embedding")
CASES = [
    ("symmetry_compatible", None, STACK, SHAPES),
    ("symmetry_compatible", ROLES, WITH_ROLES, SHAPES),
    ("scion", None, SCION, SHAPES),
    ("muon", None, POLAR, FEW),
    ("polargrad", None, POLAR, FEW),
    ("normuon", None, dict.fromkeys(HIDDEN, "normuon"), FEW),
    ("row_norm", None, dict.fromkeys(HIDDEN, "row_norm"), FEW),
    ("hybrid", None, dict.fromkeys(HIDDEN, "row_then_polar"), FEW),
]
DIRECTIONS = {
    "polar": polar,
    "spectral": polar,
    "right_spectral": polar,
    "left_spectral": polar,
    "row_norm": lambda x: rows(x, 0.1),
    "col_norm": rows,
    "row_then_polar": lambda x: polar(rows(x, 0.1)),
    "polar_then_row": lambda x: rows(polar(x), 0.1),
    "normuon": lambda x: rows(polar(x)),  # in the first step, whose rows are their own average
    "sign": np.sign,
}


def direction(text, x):
    """Returns what a rule of the table makes of one matrix of ``[units, features]``."""
    name, *words = text.split(", ")
    x = x.T if "by feature" in words else x
    if "centered" not in words:
        x = DIRECTIONS[name](x)
    elif name == "row_then_polar":  # the mean that the normalization brings back is taken out too
        x = centered(polar(centered(rows(centered(x), 0.1))))
    else:
        x = centered(DIRECTIONS[name](centered(x)))
    return x.T if "by feature" in words else x


def centered(x):
    """Subtracts the mean of the rows."""
    return x - x.mean(axis=0)


def matrices(x, spec):
    """Returns the matrices ``[units, features]`` of a leaf, one after the other."""
    x = np.float64(x).transpose(spec.batch + spec.unit + spec.feature)
    units = int(np.prod(x.shape[len(spec.batch) : len(spec.batch) + len(spec.unit)]))
    batch = int(np.prod(x.shape[: len(spec.batch)]))
    return x.reshape(batch, units, -1)


def unit(x):
    return x / np.linalg.norm(x)


@pytest.mark.parametrize(("optimizer", "roles", "rules", "paths"), CASES)
def test_optimizer_does_what_the_table_says(optimizer, roles, rules, paths):
    """Each matrix of a leaf moves along its rule's direction in float64, other leaves as other."""
    table = spectral.describe(PARAMS, optimizer=optimizer, roles=roles)
    assert len(table) == len(PARAMS)
    for row in table:
        assert row.rule == rules.get(row.role, "other"), row.path
    table = [row for row in table if row.path in paths]
    grads = normal_like({row.path: PARAMS[row.path] for row in table})
    options = {} if roles is None else {"roles": roles}
    options |= {"constrained": False} if optimizer == "scion" else {"other": optax.sgd(0.5)}
    options |= {} if optimizer == "row_norm" else {"method": "eigh"}
    tx = getattr(spectral, optimizer)(0.5, **options)
    updates, _ = quick_jit(tx.update)(grads, tx.init(grads))
    for row in table:
        grad, update = grads[row.path], updates[row.path]
        if row.rule == "other":
            assert_close(update, -0.5 * grad, 1e-6)
        elif row.rule == "unit rms":
            assert_close(unit(update), -unit(grad), 1e-6)
        else:
            pairs = list(zip(matrices(update, row.spec), matrices(grad, row.spec), strict=True))
            assert len(pairs) == row.num_matrices
            for got, x in pairs:
                assert_close(unit(got), -unit(direction(row.rule, x)), 1e-3)


def test_table_has_a_row_for_every_leaf_and_prints_aligned():
    """Rows are tuples in leaf order; the text has one line each and equal columns."""
    params = params_of(Transformer(layers=3))
    table = spectral.describe(
        params,
        overrides={
            "block/mlp/up/kernel": MatrixSpec(2, 1, 0, interleave=2),
            "block/mlp/gate/kernel": MatrixSpec(2, 1, 0, split=((4, 4, 4), 2)),
            "embed/embedding": "lm_head",
        },
    )
    found = {row.path: row for row in table}
    assert list(found) == list(by_path(params)) and isinstance(table, tuple)
    query = found["block/MultiHeadDotProductAttention_0/query/kernel"]
    assert query.shape == (3, 8, 2, 4) and query.num_matrices == 6 and query.rule == "polar"
    assert found["block/mlp/up/kernel"].num_matrices == 6
    assert found["block/mlp/gate/kernel"].num_matrices == 9
    assert found["embed/embedding"].rule == found["lm_head/kernel"].rule == STACK["lm_head"]
    assert found["pos_embed"][2:] == ("other", None, "other", 0)
    lines = str(table).split("\n")
    assert len(lines) == len(table) + 1
    assert {
        line.index(row.rule, lines[0].index("rule"))
        for line, row in zip(lines[1:], table, strict=True)
    } == {lines[0].index("rule")}
    assert str(spectral.describe({})).split() == list(table[0]._fields)
    named = spectral.describe(params, rules={"up": "hidden", "gate": "other"})
    roles = {row.path: row.role for row in named}
    assert roles["block/mlp/up/kernel"] == "hidden" and roles["block/mlp/gate/kernel"] == "other"


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"optimizer": "adam"}, ValueError, "optimizer must be one of 'symmetry_compatible', 'sc"),
        ({"optimizer": "muon", "roles": {}}, ValueError, "roles belongs to symmetry_compatible,"),
        ({"optimizer": "scion", "roles": {"conv": "other"}}, ValueError, "for 'scion'"),
        ({"roles": {"head": {}}}, ValueError, "roles must be one of 'hidden', 'attention_in', 'a"),
        ({"roles": {"conv": {"rate": 1}}}, ValueError, "option of roles['conv'] must be one of"),
        ({"overrides": {"y": "hidden"}}, ValueError, "got 'y', which matches none"),
        ({"rules": ["x"]}, TypeError, "rules must be a mapping, got ['x']"),
    ],
)
def test_bad_options_name_what_is_wrong(options, error, message):
    """Unknown names list the valid ones; roles are refused where there are none."""
    with pytest.raises(error, match=re.escape(message)):
        spectral.describe({"x": jnp.ones((2, 3))}, **options)
