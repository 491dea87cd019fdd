"""Known noise in the gradients: the damping, its limits, and how it reaches the matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spectral.directions import SPEC, direction, normal, orthogonal, polar

from jaxkit import spectral
from jaxkit.spectral import MatrixSpec


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


def _stacked(x, damping):
    """Returns the top rows of the polar factor of [X; sqrt(d) I]."""
    n = x.shape[1]
    return polar(np.concatenate([x, np.sqrt(damping) * np.eye(n)]))[: len(x)]


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)])
def test_known_noise_damps_by_its_edge(shape):
    """D = X (X^T X + c v m I)^(-1/2) with the longer side m, as the stacked form gives it."""
    x, v = normal(*shape), 0.2
    tall = x if shape[0] >= shape[1] else x.T
    want = _stacked(tall, 4 * v * 6)
    got = direction("polar", x, noise=v)
    np.testing.assert_allclose(got if got.shape == want.shape else got.T, want, atol=1e-12)
    half = direction("polar", x, noise=2 * v, noise_damping=2.0)
    np.testing.assert_allclose(half, got, atol=1e-12)


def test_no_noise_is_polar_and_much_noise_is_linear():
    """c = 0 or v = 0 gives the polar factor, v to infinity X / sqrt(c v m)."""
    x = normal(6, 4)
    np.testing.assert_allclose(direction("polar", x, noise=0.0), polar(x), atol=1e-9)
    got = direction("polar", x, noise=1.0, noise_damping=0.0)
    np.testing.assert_allclose(got, polar(x), atol=1e-9)
    v = 1e12
    got = direction("polar", x, noise=v)
    np.testing.assert_allclose(got * np.sqrt(4 * v * 6), x, rtol=1e-9)


def test_noise_scales_with_its_matrix_and_turns_with_it():
    """(X, v) and (s X, s^2 v) have one direction; rotations of both sides commute."""
    x, v = normal(6, 4), 0.3
    want = direction("polar", x, noise=v)
    np.testing.assert_allclose(direction("polar", 1e5 * x, noise=1e10 * v), want, atol=1e-10)
    o, q = orthogonal(6), orthogonal(4)
    np.testing.assert_allclose(direction("polar", o @ x @ q, noise=v), o @ want @ q, atol=1e-10)


def test_noise_per_leaf_and_its_size():
    """A tree holds each leaf's own variance; one shape is one call; alpha sees <X, D>."""
    x, y = normal(6, 4), normal(6, 4, seed=1)
    tx = spectral.scale_by_spectral(
        b1=0.0, scale="none", method="eigh", alpha=1.0, overrides={"*": MatrixSpec(0, 1)}
    )
    grads = {"x": jnp.asarray(x), "y": jnp.asarray(y)}
    noise = {"x": 0.1, "y": jnp.asarray(2.0)}
    got, _ = tx.update(grads, tx.init(grads), noise_variance=noise)
    for name, matrix, v in (("x", x, 0.1), ("y", y, 2.0)):
        want = _stacked(matrix, 4 * v * 6)
        np.testing.assert_allclose(got[name], np.sum(matrix * want) * want, rtol=1e-9)


def test_noise_reaches_the_matrices_of_a_whole_optimizer():
    """muon hands the extra argument to its matrices, also as a tree over all leaves."""
    params = {"w": {"kernel": jnp.asarray(normal(4, 6))}, "b": jnp.ones(3)}
    tx = spectral.muon(-1.0, b1=0.0, scale="none", method="eigh", other=optax.sgd(1.0))
    want = direction("polar", normal(4, 6).T, noise=0.5).T
    for noise in (0.5, {"w": {"kernel": 0.5}, "b": 0.0}):
        got, _ = tx.update(params, tx.init(params), noise_variance=noise)
        np.testing.assert_allclose(got["w"]["kernel"], want, atol=1e-12)
    # Roles that the model does not have cannot object.
    tx = spectral.symmetry_compatible(0.1, other=optax.sgd(1.0))
    clean, noisy = (tx.update(params, tx.init(params), noise_variance=v)[0] for v in (None, 0.5))
    assert np.abs(clean["w"]["kernel"] - noisy["w"]["kernel"]).max() > 1e-3


@pytest.mark.parametrize(
    ("noise", "options", "error", "match"),
    [
        (-1.0, {}, ValueError, r"noise_variance of x must be in \[0.0, inf\), got -1.0"),
        ({"y": 1.0}, {}, ValueError, "noise_variance must have an entry for x, got y"),
        (np.ones(3), {}, ValueError, r"noise_variance of x must have shape \[\], got \(3,\)"),
        (1.0, {"rule": "row_norm"}, ValueError, "noise_variance belongs to rules polar"),
    ],
)
def test_bad_noise_is_named(noise, options, error, match):
    """A negative variance, a missing leaf, a shape, and a rule that cannot use it raise."""
    tx = spectral.scale_by_spectral(**options, overrides=SPEC)
    grads = {"x": jnp.ones((3, 4))}
    with pytest.raises(error, match=match):
        tx.update(grads, tx.init(grads), noise_variance=noise)
