"""Features of a pair: a column is a 1-D problem; chunks, padding and projections."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import ot

X, Y = contract.normal(8, 3, seed=1), contract.normal(8, 3, seed=2)
A = jnp.array([0.1, 0.2, 0.0, 0.3, 0.0, 0.1, 0.2, 0.1])
MASK = jnp.array([True, True, False, True, False, True, True, True])
THETA = contract.normal(5, 3, seed=3)
FEATURES = jax.jit(ot.sliced_potentials, static_argnames=("cost", "project", "chunk"))

test_contract = contract.function(
    contract.Case(
        "sliced_potentials",
        lambda: (
            lambda x, y, a, theta, m: ot.sliced_potentials(
                x, y, a, None, theta, mask_x=m, mask_y=m
            ),
            (X, Y, A, THETA, MASK),
        ),
        mask={4: (0, 1, 2)},
    )
)


def test_a_column_is_the_pair_of_one_direction():
    """With the same weights; columns are stacked, not averaged."""
    phi, psi = FEATURES(X, Y, A, None, THETA, cost=ot.power(1.5))
    assert (phi.shape, psi.shape) == ((8, 5), (8, 5))
    one = jax.jit(lambda x, y: ot.duals_1d(x, y, A, cost=ot.power(1.5)))
    for k, theta in enumerate(THETA):
        f, g = one(X @ theta, Y @ theta)
        np.testing.assert_allclose(phi[:, k], f, atol=1e-5)
        np.testing.assert_allclose(psi[:, k], g, atol=1e-5)


@pytest.mark.parametrize("chunk", [1, 2, 5, 9])
def test_chunks_change_nothing(chunk):
    """Any number of directions at a time, also one that does not divide theirs."""
    for got, want in zip(
        FEATURES(X, Y, A, None, THETA, chunk=chunk), FEATURES(X, Y, A, None, THETA), strict=True
    ):
        np.testing.assert_allclose(got, want, atol=1e-6)


def test_chunks_bound_the_memory():
    """With 64 directions of 512 points, 4 at a time need less than half of the room."""
    x = jax.ShapeDtypeStruct((512, 2), jnp.float32)
    theta = jax.ShapeDtypeStruct((64, 2), jnp.float32)

    def room(chunk):
        lowered = FEATURES.lower(x, x, None, None, theta, chunk=chunk)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    assert room(4) < room(None) / 2


def test_points_that_are_masked_never_reach_a_projection_that_would_not_bear_them():
    """A projection that is NaN at 0 and at NaN has finite derivatives."""

    def unit(points, theta):
        return ot.linear(points / jnp.linalg.norm(points, axis=1, keepdims=True), theta)

    @jax.jit
    def total(x):
        phi, psi = ot.sliced_potentials(x, Y, None, None, THETA, project=unit, mask_x=MASK)
        return jnp.sum(phi) + jnp.sum(psi)

    slope = jax.grad(total)(X.at[2].set(jnp.nan))
    assert jnp.isfinite(slope).all() and jnp.any(slope != 0)
    np.testing.assert_array_equal(slope[~MASK], 0)


def test_one_bad_side_makes_every_column_nan():
    """Weights that do not sum to 1, under jit."""
    phi, psi = FEATURES(X, Y, 2 * A, None, THETA)
    assert jnp.isnan(phi).all() and jnp.isnan(psi).all()


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((X, Y, None, None, THETA[:, :2]), {}, ValueError, r"theta must have shape \[L, d\] with"),
        ((X, Y, None, None, THETA[:0]), {}, ValueError, "number of directions in theta must be"),
        ((X, Y[:, :2], None, None, THETA), {}, ValueError, r"y must have shape \[m, d\] with d=3"),
        ((X, Y, None, A[1:], THETA), {}, ValueError, r"b must have shape \[n\] with n=8"),
        ((X, Y, None, None, THETA), {"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ((X, Y, None, None, THETA), {"project": 1}, TypeError, "project must be a function"),
        ((X, Y, None, None, THETA), {"cost": 1}, TypeError, "cost must be a function"),
        (
            (X, Y, None, None, THETA),
            {"project": lambda p, t: p},
            ValueError,
            r"project\(x, theta\) must have shape \[n, L\] with n=8, L=5, got \(8, 3\)",
        ),
    ],
)
def test_bad_input_is_named(args, kwargs, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        ot.sliced_potentials(*args, **kwargs)
