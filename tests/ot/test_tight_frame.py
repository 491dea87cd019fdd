"""Frames of directions: tightness, sizes, and that they are uniform."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import ot

test_contract = contract.function(
    contract.Case(
        "tight_frame",
        lambda: (lambda key, x: x + ot.tight_frame(key, 8, 2).astype(x.dtype), _args()),
        draws=True,
    ),
    contract.Case(
        "equispaced_frame",
        lambda: (lambda x: x + ot.equispaced_frame(8).astype(x.dtype), _args()[1:]),
    ),
)


def _args():
    return jax.random.key(0), contract.normal(8, 2)


@pytest.mark.parametrize(
    ("wanted", "dim", "got"), [(12, 3, 12), (10, 3, 12), (3, 3, 3), (5, 1, 5), (4, 2, 4)]
)
def test_a_tight_frame_adds_up_to_the_identity(wanted, dim, got):
    """theta^T theta = (L / d) I with L rounded up to a multiple of d, and rows of norm 1."""
    theta = ot.tight_frame(jax.random.key(1), wanted, dim)
    assert theta.shape == (got, dim)
    np.testing.assert_allclose(theta.T @ theta, got / dim * np.eye(dim), atol=1e-5)
    np.testing.assert_allclose(jnp.linalg.norm(theta, axis=1), 1, atol=1e-6)


def test_fewer_directions_than_dimensions_are_orthonormal():
    """Nothing is rounded up then."""
    theta = ot.tight_frame(jax.random.key(1), 3, 7)
    np.testing.assert_allclose(theta @ theta.T, np.eye(3), atol=1e-6)


def test_directions_are_uniform_on_the_sphere():
    """First and second moments, and the share in an octant, within 4.5 standard errors."""
    theta = np.float64(ot.tight_frame(jax.random.key(2), 30000, 3))
    assert np.abs(theta.mean(0)).max() < 4.5 / np.sqrt(3 * 10000)
    octant = np.mean((theta > 0).all(1))
    assert abs(octant - 1 / 8) < 4.5 * np.sqrt(1 / 8 * 7 / 8 / 10000)


@pytest.mark.parametrize("num", [1, 2, 3, 7])
def test_equal_angles_are_a_tight_frame_of_the_plane(num):
    """From two directions on; they lie pi / L apart and start half a step from the axis."""
    theta = ot.equispaced_frame(num)
    np.testing.assert_allclose(jnp.arctan2(theta[0, 1], theta[0, 0]), np.pi / 2 / num, atol=1e-6)
    np.testing.assert_allclose(
        jnp.sum(theta[1:] * theta[:-1], axis=1), np.cos(np.pi / num), atol=1e-6
    )
    if num > 1:
        np.testing.assert_allclose(theta.T @ theta, num / 2 * np.eye(2), atol=1e-6)


def test_float64_is_followed():
    """With JAX's wide default the directions are exact to that."""
    with jax.enable_x64(True):
        for theta in (ot.tight_frame(jax.random.key(0), 6, 3), ot.equispaced_frame(6)):
            d = theta.shape[1]
            np.testing.assert_allclose(theta.T @ theta, 6 / d * np.eye(d), atol=1e-14)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda key: ot.tight_frame(key, 0, 3), ValueError, "num_directions must be at least 1"),
        (lambda key: ot.tight_frame(key, 4, 0), ValueError, "dim must be at least 1, got 0"),
        (lambda key: ot.tight_frame(key, 4.0, 2), TypeError, "num_directions must be a static"),
        (lambda key: ot.equispaced_frame(0), ValueError, "num_directions must be at least 1"),
    ],
)
def test_bad_input_is_named(call, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        call(jax.random.key(0))
