"""Costs: values, derivatives where they are hard, and what is refused."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import ot

X, Y = contract.normal(8, seed=1), contract.normal(8, seed=2)
UNIT = tuple(z / jnp.linalg.norm(z) for z in (X, Y))

test_contract = contract.function(
    contract.Case("squared", lambda: (ot.squared, (X, Y))),
    contract.Case("power", lambda: (ot.power(1.5), (X, Y))),
    contract.Case("sqeuclidean", lambda: (ot.sqeuclidean, (X, Y))),
    contract.Case("geodesic", lambda: (ot.geodesic, UNIT)),
)


def test_the_geodesic_distance_is_arccos_in_float64():
    """To float32 rounding at every angle, where arccos in float32 is wrong by 3e-4."""
    for angle in (0.0, 1e-6, 1e-3, 0.5, 1.5, 3.0, np.pi - 1e-3, np.pi - 1e-6):
        x = jnp.array([1.0, 0.0, 0.0])
        y = jnp.float32([np.cos(angle), np.sin(angle), 0.0])
        assert ot.geodesic(x, y) == pytest.approx(angle, rel=1e-5, abs=2e-7)


def test_its_derivative_is_finite_everywhere():
    """It is 0 at equal and opposite points, and -1/sin of the angle times y elsewhere."""
    x = jnp.array([0.6, 0.8])
    for y in (x, -x):
        np.testing.assert_array_equal(jnp.stack(jax.grad(ot.geodesic, (0, 1))(x, y)), 0)
    y = jnp.array([1.0, 0.0])
    tangent = jnp.array([-0.8, 0.6])
    assert jax.grad(ot.geodesic)(x, y) @ tangent == pytest.approx(0.8 / np.sin(np.arccos(0.6)))


def test_powers():
    """|x - y|^p with a finite derivative where x = y; the same p is the same function."""
    for p in (1, 1.5, 2, 3.0):
        np.testing.assert_allclose(ot.power(p)(X, Y), np.abs(X - Y) ** p, rtol=1e-6)
        assert jax.grad(ot.power(p))(1.0, 1.0) == 0
        assert ot.power(p) is ot.power(p)
    np.testing.assert_allclose(ot.power(2)(X, Y), ot.squared(X, Y), rtol=1e-6)
    assert ot.sqeuclidean(X, Y) == pytest.approx(float(np.sum(np.square(X - Y))), rel=1e-6)


@pytest.mark.parametrize(
    ("p", "error", "match"),
    [
        (0.5, ValueError, r"p must be in \[1, inf\), got 0.5"),
        (float("inf"), ValueError, r"p must be in \[1, inf\), got inf"),
        ("2", TypeError, "p must be a static number, got '2'"),
    ],
)
def test_bad_powers_are_named(p, error, match):
    """A cost that is not convex has other plans."""
    with pytest.raises(error, match=match):
        ot.power(p)
