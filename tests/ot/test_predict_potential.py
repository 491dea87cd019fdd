"""Predicted potentials: cases known on paper, symmetries, padding."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import ot_problems
import pytest

from jaxkit import ot

X, Y = contract.normal(8, 3, seed=1), contract.normal(8, 3, seed=2)
A = jnp.array([0.1, 0.2, 0.0, 0.3, 0.0, 0.1, 0.2, 0.1])
MASK = jnp.array([True, True, False, True, False, True, True, True])
THETA = jnp.concatenate([jnp.eye(3), jnp.linalg.qr(contract.normal(3, 3))[0]])
PARAMS = ot.untrained(THETA, 0.1)
PREDICT = jax.jit(ot.predict_potential, static_argnames=("side", "chunk"))

test_contract = contract.function(
    contract.Case(
        "predict_potential",
        lambda: (
            lambda params, x, y, a, m: ot.predict_potential(
                params, ot.Pair(x, y, a, None, None, m, m)
            ),
            (PARAMS, X, Y, A, MASK),
        ),
        mask={4: (1, 2, 3)},
    )
)


def _centered(f, a):
    return f - np.asarray(a) @ f


@pytest.mark.parametrize("scale", [1.0, 1.7, 0.4])
@pytest.mark.parametrize("weighted", [False, True])
def test_shifts_and_scalings_are_exact_before_any_training(scale, weighted):
    """y = s x + t has f = (1 - s) |x|^2 - 2 <t, x>, for a tight frame and the prior's weights."""
    rng = np.random.default_rng(0)
    x, t = rng.normal(size=(40, 3)), np.array([1.0, -0.5, 2.0])
    a = rng.dirichlet(np.ones(40)) if weighted else np.full(40, 1 / 40)
    order = rng.permutation(40)
    with jax.enable_x64(True):
        params = ot.untrained(ot.tight_frame(jax.random.key(0), 12, 3), 0.1)
        pair = ot.Pair(x, (scale * x + t)[order], *((a, a[order]) if weighted else ()))
        got = PREDICT(params, pair)
        want = (1 - scale) * np.sum(x**2, axis=1) - 2 * x @ t
        np.testing.assert_allclose(got, _centered(want, a), atol=1e-12)


def test_product_measures_on_a_grid_are_exact():
    """With the axes as directions and weight 1 the pair is the exact one in all dimensions."""
    rng = np.random.default_rng(1)
    points = np.array([(u, v) for u in (0.0, 1.0, 2.5) for v in (-1.0, 0.0, 2.0)])
    a, b = (np.outer(*rng.dirichlet(np.ones(3), 2)).ravel() for _ in range(2))
    with jax.enable_x64(True):
        phi, psi = jax.jit(ot.sliced_potentials)(
            *map(jnp.asarray, (points, points, a, b)), np.eye(2)
        )
        f, g = np.asarray(phi).sum(1), np.asarray(psi).sum(1)
    c = np.sum(np.square(points[:, None] - points[None]), axis=2)
    assert np.max(f[:, None] + g[None] - c) <= 1e-12
    assert a @ f + b @ g == pytest.approx(ot_problems.optimum(c, a, b), abs=1e-12)


def test_one_dimension_is_exact_and_equal_measures_have_none():
    """d = 1 with one direction is duals_1d; mu = nu has f = 0."""
    f, _ = jax.jit(ot.duals_1d)(X[:, 0], Y[:, 0], A)
    got = PREDICT(ot.untrained(jnp.ones((1, 1)), 0.0), ot.Pair(X[:, :1], Y[:, :1], A))
    np.testing.assert_allclose(got, _centered(f, A), atol=1e-5)
    a = jnp.arange(1, 9) / 36
    same = PREDICT(PARAMS, ot.Pair(X, X[::-1], a, a[::-1]))
    np.testing.assert_allclose(same, 0, atol=1e-5)


def test_symmetries():
    """Rotation with the directions, scale, shift of both, order of the atoms, exchange."""
    pair = ot.Pair(X, Y, A)
    want = PREDICT(PARAMS, pair)
    rotation = jnp.linalg.qr(contract.normal(3, 3, seed=7))[0]
    turned = ot.untrained(THETA @ rotation, 0.1)
    others = {
        "rotation": PREDICT(turned, ot.Pair(X @ rotation, Y @ rotation, A)),
        "scale": PREDICT(PARAMS, ot.Pair(3 * X, 3 * Y, A)) / 9,
        "shift": PREDICT(PARAMS, ot.Pair(X + 1, Y + 1, A)),
        "order": PREDICT(PARAMS, ot.Pair(X[::-1], Y[::-1], A[::-1]))[::-1],
        "exchange": PREDICT(
            ot.untrained(THETA, 0.1, two_sided=True), ot.Pair(Y, X, None, A), side="y"
        ),
    }
    for name, got in others.items():
        np.testing.assert_allclose(got, want, atol=2e-5, err_msg=name)


def test_it_is_centered_and_padding_changes_nothing():
    """The a-weighted mean is 0; pairs of other sizes share one program after padding."""
    pair = ot.Pair(X, Y, A)
    f = PREDICT(PARAMS, pair)
    assert float(A @ f) == pytest.approx(0, abs=1e-5)
    grown = ot.Pair(
        jnp.concatenate([X, jnp.full((2, 3), jnp.nan)]),
        jnp.concatenate([Y, jnp.full((1, 3), 50.0)]),
        jnp.concatenate([A, jnp.ones(2)]),
        mask_x=jnp.arange(10) < 8,
        mask_y=jnp.arange(9) < 8,
    )
    padded = PREDICT(PARAMS, grown)
    np.testing.assert_allclose(padded[:8], f, atol=1e-5)
    np.testing.assert_array_equal(padded[8:], 0)


def test_chunks_change_nothing_and_the_other_side_has_weights_of_its_own():
    """g is the sum of the other side's features with weights_g, centered with b."""
    params = ot.untrained(THETA, 0.1, two_sided=True)
    pair = ot.Pair(X, Y, A)
    np.testing.assert_allclose(PREDICT(params, pair, chunk=4), PREDICT(params, pair), atol=1e-6)
    _, psi = jax.jit(ot.sliced_potentials)(X, Y, A, None, THETA)
    g = psi @ params.weights_g
    np.testing.assert_allclose(PREDICT(params, pair, side="y"), g - jnp.mean(g), atol=1e-5)


def test_bad_weights_give_nan():
    """On each side, whichever weights are wrong."""
    params = ot.untrained(THETA, 0.1, two_sided=True)
    for pair in (ot.Pair(X, Y, 2 * A), ot.Pair(X, Y, None, A / 2), ot.Pair(X, Y, -A)):
        for side in ("x", "y"):
            assert jnp.isnan(PREDICT(params, pair, side=side)).all()


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((THETA, ot.Pair(X, Y)), {}, TypeError, "params must be SlicedParams, got ArrayImpl"),
        ((PARAMS, (X, Y)), {}, TypeError, "pair must be a Pair, got tuple"),
        ((PARAMS, ot.Pair(X, Y)), {"side": "z"}, ValueError, "side must be one of 'x', 'y'"),
        ((PARAMS, ot.Pair(X, Y)), {"side": "y"}, ValueError, "side must be .* without weights_g"),
        ((PARAMS, ot.Pair(X, Y[:, :2])), {}, ValueError, r"y must have shape \[m, d\] with d=3"),
        ((PARAMS, ot.Pair(X[:, :2], Y[:, :2])), {}, ValueError, r"theta must have shape \[L, d\]"),
        ((PARAMS, ot.Pair(X[None], Y[None])), {}, ValueError, r"x must have shape \[n, d\]"),
    ],
)
def test_bad_input_is_named(args, kwargs, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        ot.predict_potential(*args, **kwargs)
