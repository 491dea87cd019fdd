"""Sums within the matrices of fused leaves: split, interleaved and paired."""

import numpy as np
import pytest
from spectral.directions import direction, normal

from jaxkit.spectral import MatrixSpec

POLAR = ("polar", "right_spectral", "left_spectral")
RULES = (*POLAR, "row_then_polar", "polar_then_row", "normuon", "row_norm")
every_rule = pytest.mark.parametrize("rule", RULES)


@every_rule
@pytest.mark.parametrize("kind", ["split", "interleave", "both", "split features"])
def test_fused_leaf_is_its_parts(rule, kind):
    """Every norm, mean and size is of one part alone, whichever axis is cut."""
    a, b = normal(4, 3, seed=1), 7 * normal(4 if kind != "split" else 6, 3, seed=2)
    sized = rule in (*POLAR, "row_then_polar")
    options = {"centered": True, "scale": "muon", "alpha": 1.0 if sized else None}
    if kind == "split":
        x, spec = np.concatenate([a, b]), MatrixSpec(0, 1, split=((4, 6), 0))
        parts = lambda y: (y[:4], y[4:])  # noqa: E731
    elif kind == "split features":
        x, spec = np.concatenate([a, b], axis=1), MatrixSpec(0, 1, split=((3, 3), 1))
        parts = lambda y: (y[:, :3], y[:, 3:])  # noqa: E731
    elif kind == "interleave":
        x, spec = np.stack([a, b], axis=1).reshape(8, 3), MatrixSpec(0, 1, interleave=2)
        parts = lambda y: (y[::2], y[1::2])  # noqa: E731
    else:
        x, spec = np.concatenate([a, b, a]), MatrixSpec(0, 1, split=((4, 8), 0), interleave=2)
        parts = lambda y: (y[:4:2], y[1:4:2], y[4::2], y[5::2])  # noqa: E731
    got = direction(rule, x, spec={"x": spec}, **options)
    for part, y in zip(parts(x), parts(got), strict=True):
        np.testing.assert_allclose(y, direction(rule, part, **options), atol=1e-10)


@pytest.mark.parametrize("rule", ["row_norm", "row_then_polar"])
def test_paired_leaf_is_one_matrix_whose_rows_join(rule):
    """Gate and up of a neuron are one row of twice the length, interleaved or in two blocks."""
    gate, up = normal(5, 3, seed=1), 7 * normal(5, 3, seed=2)
    want = direction(rule, np.concatenate([gate, up], axis=1))
    for x, spec in (
        (np.stack([gate, up], axis=1).reshape(10, 3), MatrixSpec(0, 1, interleave=2, pair=True)),
        (np.concatenate([gate, up]), MatrixSpec(0, 1, split=((5, 5), 0), pair=True)),
    ):
        got = direction(rule, x, spec={"x": spec})
        back = np.concatenate(
            [got[::2], got[1::2]] if spec.split is None else [got[:5], got[5:]], 1
        )
        np.testing.assert_allclose(back, want, atol=1e-12)
        transposed = direction(
            rule,
            x.T,
            spec={"x": spec._replace(unit=1, feature=0, split=spec.split and ((5, 5), 1))},
        )
        np.testing.assert_allclose(transposed, got.T, atol=1e-12)
