"""Projections: the inner product and the stereographic map."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import ot

POINTS = contract.normal(8, 3)
SPHERE = POINTS / jnp.linalg.norm(POINTS, axis=1, keepdims=True)

test_contract = contract.function(
    contract.Case("linear", lambda: (ot.linear, (POINTS, contract.normal(8, 3, seed=1)))),
    contract.Case("stereographic", lambda: (ot.stereographic, (SPHERE, contract.normal(8, 2)))),
)


def test_inner_products_are_at_the_highest_precision():
    """Sorting decides by their last bits."""
    theta = contract.normal(5, 3, seed=1)
    np.testing.assert_allclose(ot.linear(POINTS, theta), POINTS @ theta.T, rtol=1e-5)
    assert "HIGHEST" in jax.jit(ot.linear).lower(POINTS, theta).as_text()


def test_the_stereographic_map_is_undone_by_its_inverse():
    """Plane points p = 2 (x1, x2) / (1 - x3) lie under (4 p, |p|^2 - 4) / (|p|^2 + 4)."""
    p = np.float64(ot.stereographic(SPHERE, jnp.eye(2)))
    sq = np.sum(p**2, axis=1, keepdims=True)
    np.testing.assert_allclose(np.hstack([4 * p, sq - 4]) / (sq + 4), SPHERE, atol=1e-5)


def test_the_pole_is_held_away():
    """It maps to a finite point with a finite derivative."""
    pole = jnp.array([[0.0, 0.0, 1.0], [1e-4, 0.0, 1.0]])
    np.testing.assert_allclose(ot.stereographic(pole, jnp.eye(2)), [[0, 0], [200, 0]], rtol=1e-5)
    slope = jax.grad(lambda x: jnp.sum(ot.stereographic(x, jnp.eye(2))))(pole)
    assert jnp.isfinite(slope).all()


@pytest.mark.parametrize(
    ("fun", "points", "theta", "match"),
    [
        (ot.linear, POINTS, jnp.eye(2), r"theta must have shape \[L, d\] with d=3, got \(2, 2\)"),
        (ot.linear, POINTS[0], jnp.eye(3), r"points must have shape \[n, d\], got \(3,\)"),
        (ot.stereographic, POINTS[:, :2], jnp.eye(2), r"points must have shape \[n, 3\]"),
        (ot.stereographic, POINTS, jnp.eye(3), r"theta must have shape \[L, 2\], got \(3, 3\)"),
    ],
)
def test_bad_shapes_are_named(fun, points, theta, match):
    """Each message names the argument and what it got."""
    with pytest.raises(ValueError, match=match):
        fun(points, theta)
