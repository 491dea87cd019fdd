"""Weights and masks of a pair: what None stands for, and what makes them NaN."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import ot
from jaxkit.ot import _pair

X, Y = contract.normal(4, 2), contract.normal(3, 2)
MASK = jnp.array([False, True, False, True])


def test_none_stands_for_equal_weights_of_the_atoms_that_count():
    """Without a mask 1/n; with one the share of those that count, and 0 elsewhere."""
    full = _pair.fill(ot.Pair(X, Y, mask_x=MASK))
    np.testing.assert_array_equal(full.a, [0, 0.5, 0, 0.5])
    np.testing.assert_allclose(full.b, 1 / 3, rtol=1e-6)
    np.testing.assert_array_equal(full.mask_y, True)
    assert full.f is None


def test_masked_entries_are_replaced_and_rounding_is_divided_out():
    """Points lie at the first atom that counts; weights sum to 1 exactly as far as they can."""
    x = X.at[0].set(jnp.nan)
    a = jnp.array([jnp.nan, 0.4, 7.0, 0.60004])
    full = _pair.fill(ot.Pair(x, Y, a, f=jnp.full(4, jnp.inf).at[1].set(2.0), mask_x=MASK))
    np.testing.assert_array_equal(full.x, X[jnp.array([1, 1, 1, 3])])
    np.testing.assert_allclose(full.a, [0, 0.4 / 1.00004, 0, 0.60004 / 1.00004], rtol=1e-6)
    np.testing.assert_array_equal(full.f, [0, 2, 0, jnp.inf])


@pytest.mark.parametrize(
    "a",
    [
        [0.5, 0.5, 0.001, 0.0],
        [0.5, 0.4, 0.0, 0.0],
        [0.5, 0.5, -0.1, 0.1],
        [0.5, 0.5, jnp.nan, 0.0],
        [0.0, 0.0, 0.0, 0.0],
        [jnp.inf, 0.0, 0.0, 0.0],
    ],
)
def test_bad_weights_are_nan_as_a_whole(a):
    """One wrong weight leaves none of the others plausible."""
    assert jnp.isnan(_pair.fill(ot.Pair(X, Y, jnp.array(a))).a).all()


def test_dtypes_are_widened_together():
    """Both sides come in one dtype of at least 32 bits; a pair is a tree and stacks."""
    full = _pair.fill(ot.Pair(X.astype(jnp.bfloat16), Y, jnp.full(4, 0.25, jnp.float16)))
    assert {z.dtype for z in full if z is not None} == {jnp.dtype("float32"), jnp.dtype(bool)}
    pair = ot.Pair(X, Y)
    stacked = jax.tree.map(lambda *z: jnp.stack(z), pair, pair)
    both = jax.vmap(_pair.fill)(stacked)
    np.testing.assert_array_equal(both.a[1], _pair.fill(pair).a)


@pytest.mark.parametrize(
    ("pair", "error", "match"),
    [
        (ot.Pair(X, Y[:, :1]), ValueError, r"y must have shape \[m, d\] with d=2, got \(3, 1\)"),
        (ot.Pair(X, Y, jnp.ones(3)), ValueError, r"a must have shape \[n\] with n=4, got \(3,\)"),
        (ot.Pair(X, Y, b=jnp.ones(4)), ValueError, r"b must have shape \[n\] with n=3, got \(4,\)"),
        (ot.Pair(X, Y, f=jnp.ones(3)), ValueError, r"f must have shape \[n\] with n=4"),
        (ot.Pair(X, Y, f=jnp.arange(4)), TypeError, "f must be real floating, got int32"),
        (ot.Pair(X, Y, mask_y=MASK), ValueError, r"mask_y must have shape \[n\] with n=3"),
        (ot.Pair(X, Y, mask_x=X[:, 0]), TypeError, "mask_x must be bool, got float32"),
        (ot.Pair(X[:0], Y), ValueError, r"x must hold at least one point, got \(0, 2\)"),
        (ot.Pair(X[0], Y), ValueError, r"x must have shape \[n, d\], got \(2,\)"),
        (ot.Pair(X, jnp.ones((3, 2), int)), TypeError, "y must be real floating, got int32"),
    ],
)
def test_bad_input_is_named(pair, error, match):
    """Each message names the field and what it got."""
    with pytest.raises(error, match=match):
        _pair.fill(pair)
