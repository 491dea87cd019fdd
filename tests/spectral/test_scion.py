"""Scion against its norms: each step is the extreme point of a ball."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_close
from spectral.models import first_update, small_model

from jaxkit import spectral

test_contract = contract.transformation(
    contract.Case("scion", lambda: spectral.scion(0.1), promotion="standard"),
)


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def _norms(w):
    """Returns the norms of arXiv:2502.07529 in which each leaf's step has the size 1."""
    spectral_norm = lambda x: np.linalg.norm(x, 2)  # noqa: E731
    units, features = w["up"]["kernel"].shape[::-1]
    return {
        "up": spectral_norm(w["up"]["kernel"]) * np.sqrt(features / units),
        "bias": np.sqrt(np.mean(w["up"]["bias"] ** 2)),
        "embed": np.sqrt(np.mean(w["embed"]["embedding"] ** 2, axis=1)).max(),
        "head": 4 * np.abs(w["lm_head"]["kernel"]).max(),
    }


def test_steps_of_scion_are_the_ends_of_their_balls():
    """Each lmo has norm 1 and meets the dual norm: <G, lmo> is the largest over the ball."""
    grads = small_model(1)
    tx = spectral.scion(1.0, radius=1.0, head_radius=1.0, constrained=False, b1=0.0, method="qdwh")
    lmo = jax.tree.map(lambda x: -x, first_update(tx, small_model(), grads))
    for name, norm in _norms(lmo).items():
        np.testing.assert_allclose(norm, 1.0, rtol=1e-5, err_msg=name)
    inner = lambda *path: sum(  # noqa: E731
        np.sum(a * b) for a, b in [(grads[path[0]][path[1]], lmo[path[0]][path[1]])]
    )
    nuclear = np.linalg.norm(grads["up"]["kernel"], "nuc")
    np.testing.assert_allclose(inner("up", "kernel"), np.sqrt(2) * nuclear, rtol=1e-5)
    rows = np.linalg.norm(grads["embed"]["embedding"], axis=1)
    np.testing.assert_allclose(inner("embed", "embedding"), np.sqrt(4) * rows.sum(), rtol=1e-5)
    size = np.abs(grads["lm_head"]["kernel"]).sum() / 4
    np.testing.assert_allclose(inner("lm_head", "kernel"), size, rtol=1e-5)
    bias = np.sqrt(8) * np.linalg.norm(grads["up"]["bias"])
    np.testing.assert_allclose(inner("up", "bias"), bias, rtol=1e-5)


def test_constrained_scion_never_leaves_its_ball():
    """From inside, each step is a convex combination with a point of the ball."""
    tx = spectral.scion(0.3, radius=2.0, head_radius=5.0, method="qdwh")
    params = jax.tree.map(lambda x: 0.0 * x, small_model())
    state = tx.init(params)
    radii = {"up": 2.0, "bias": 2.0, "embed": 5.0, "head": 5.0}
    update = jax.jit(tx.update)
    for seed in range(12):
        updates, state = update(small_model(seed % 2), state, params)
        params = optax.apply_updates(params, updates)
        for name, norm in _norms(params).items():
            assert norm <= radii[name] * (1 + 1e-5), name
    assert _norms(params)["up"] > 1.0


def test_scion_divides_a_convolution_by_its_window_and_keeps_momentum():
    """sqrt(out / in) / k^2 polar of (out, in k k); M <- (1 - a) M + a G for vectors."""
    kernel = _normal(3, 3, 4, 8)
    tx = spectral.scion(-1.0, radius=1.0, constrained=False, b1=0.0, method="qdwh")
    got = first_update(tx, {"kernel": kernel}, {"kernel": kernel})["kernel"]
    u, _, vt = np.linalg.svd(np.asarray(kernel).reshape(36, 8), full_matrices=False)
    assert_close(got.reshape(36, 8), (u @ vt) * np.sqrt(8 / 4) / 9, 1e-5)
    weight = kernel.transpose(3, 2, 0, 1)  # as PyTorch and Equinox keep it
    got_weight = first_update(tx, {"weight": weight}, {"weight": weight})["weight"]
    assert_close(got_weight.transpose(2, 3, 1, 0), got, 1e-5)
    tx = spectral.scion(-1.0, radius=2.0, constrained=False)
    grads = [_normal(5, seed=seed) for seed in (1, 2)]
    state = tx.init(grads[0])
    for g in grads:
        got, state = tx.update(g, state)
    m = 0.1 * 0.9 * grads[0] + 0.1 * grads[1]
    assert_close(got, 2 * m / np.sqrt(np.mean(m**2)), 1e-5)


@pytest.mark.parametrize(
    ("norm", "want"),
    [
        ("sign", lambda g: np.sign(g) / 4),
        ("col_norm", lambda g: 2 * g / np.linalg.norm(g, axis=1, keepdims=True)),
        ("row_norm", lambda g: g / np.linalg.norm(g, axis=1, keepdims=True) / 2),
        ("spectral", lambda g: np.sqrt(11 / 4) * (lambda u, s, v: u @ v)(*np.linalg.svd(g, False))),
    ],
)
def test_norms_of_scion_for_embeddings_and_heads(norm, want):
    """The table of the paper, for an embedding and a head of 11 tokens and width 4."""
    tx = spectral.scion(
        -1.0, head_radius=1.0, constrained=False, b1=0.0, embedding=norm, head=norm, method="eigh"
    )
    grads = small_model(1)
    got = first_update(tx, small_model(), grads)
    assert_close(got["embed"]["embedding"], want(np.asarray(grads["embed"]["embedding"])), 1e-5)
    assert_close(got["lm_head"]["kernel"].T, want(np.asarray(grads["lm_head"]["kernel"].T)), 1e-5)


def test_bad_radii_and_norms_are_named():
    """Out of range, unknown, and injected radii."""
    with pytest.raises(ValueError, match=r"radius must be in \[0.0, inf\), got -1.0"):
        spectral.scion(0.1, radius=-1.0)
    with pytest.raises(ValueError, match="head must be one of 'sign', 'col_norm'.*got 'max'"):
        spectral.scion(0.1, head="max")
    injected = optax.inject_hyperparams(spectral.scion)(learning_rate=0.1, radius=3.0)
    params, grads = small_model(), small_model(1)
    want = first_update(spectral.scion(0.1, radius=3.0), params, grads)
    # An injected number is an array: XLA folds it less, so roundings of the factor differ.
    assert_close(first_update(injected, params, grads), want, 1e-5)
