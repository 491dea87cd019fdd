"""Directions with the geometry of the inputs: their law, their mean, and their correction."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from zo.tapped import PROBLEMS, normal

from jaxkit import zo
from jaxkit.zo import _activation, _tap_layout

KEY = jax.random.key(0)
ROWS, N, M = 12, 4, 3
X = normal(ROWS, N) * jnp.array([[3.0, 1.0, 0.5, 0.3]]) + jnp.array([[1.0, -2.0, 0.0, 0.3]])
C, W = normal(ROWS, M), normal(N, M)


def loss_fn(w, x):
    return jnp.sum(C * (x @ w))


def contract_case():
    def loss_fn(p, x):
        return jnp.mean(jnp.tanh(x @ p["w"] + p["b"][None]) ** 2)

    run = zo.value_and_zo_grad(loss_fn, direction=zo.activation(-0.25, corrected=True), mu=0.1)
    return run, (KEY, {"w": normal(6, 3), "b": normal(3)}, normal(8, 6))


test_contract = contract.function(
    contract.Case("activation", contract_case, draws=True, dtypes=("float32", "float64")),
)


def covariance(center, keep_mean=False):
    """Returns C with a trace of n, and the mean direction added, in float64."""
    x = np.asarray(X, np.float64)
    mean = x.mean(0)
    c = np.cov(x.T, bias=True) if center else x.T @ x / ROWS
    c = c * N / np.trace(c)
    return c + np.outer(mean, mean) / (mean @ mean) if keep_mean else c


def power(matrix, exponent, floor=1e-3):
    """Returns the power of what is above the floor."""
    values, vectors = np.linalg.eigh(matrix)
    kept = values > floor * values[-1]
    return vectors * np.where(kept, np.where(kept, values, 1) ** exponent, 0) @ vectors.T


def basis_of(direction, loss_fn=loss_fn, params=W, args=(X,)):
    return direction.prepare(loss_fn, params, args)[0]


@pytest.mark.parametrize(
    "options", [{}, {"center": False}, {"center": True, "keep_mean": True}, {"floor": 0.1}]
)
@pytest.mark.parametrize("kappa", [-0.25, 0.0, 0.5, 1])
def test_factors_are_powers_of_the_covariance(kappa, options):
    """P P' is C^(2 kappa) above the floor, with trace n; the factor of the estimate inverts P'."""
    found = basis_of(zo.activation(kappa, corrected=True, **options))
    p, inverse = np.asarray(found.perturb[0]), np.asarray(found.estimate[0])
    floor = options.get("floor", 1e-3)
    c = covariance(options.get("center", kappa > 0), options.get("keep_mean", False))
    want = power(c, 2 * kappa, floor)
    np.testing.assert_allclose(p @ p.T, want * N / np.trace(want), 1e-3, 1e-4)
    np.testing.assert_allclose(inverse @ p.T, power(c, 0, floor), atol=1e-4)
    if floor == 0.1:
        assert np.linalg.matrix_rank(power(c, 0, floor)) < N


def test_half_has_the_law_of_mixed_inputs():
    """kappa = 1/2, not centered, is the law of X' Xi with Xi normal: the same covariance."""
    p = np.asarray(basis_of(zo.activation(0.5, center=False, floor=0)).perturb[0])
    x = np.asarray(X, np.float64)
    np.testing.assert_allclose(p @ p.T, N * x.T @ x / np.sum(x * x), 1e-4, 1e-5)
    np.testing.assert_array_equal(p, np.tril(p))  # no eigenvectors were needed


def test_infinite_power_is_the_leading_eigenvector():
    """All directions lie along the leading eigenvector of C, with a trace of n."""
    p = np.asarray(basis_of(zo.activation(jnp.inf)).perturb[0])
    _, vectors = np.linalg.eigh(covariance(True))
    np.testing.assert_allclose(p, N**0.5 * np.outer(vectors[:, -1], vectors[:, -1]), 1e-3, 1e-3)


@pytest.mark.parametrize("kappa", [-0.25, 0.25, 0.5, 2.0])
def test_white_inputs_make_all_powers_alike(kappa):
    """Inputs with covariance one: every direction is the isotropic one."""
    x = jnp.concatenate([jnp.eye(N), -jnp.eye(N)])
    found = basis_of(zo.activation(kappa), lambda w, x: jnp.sum(x @ w), W, (x,))
    np.testing.assert_allclose(found.perturb[0], np.eye(N), atol=1e-5)


@pytest.mark.parametrize("kappa", [-0.25, 1.0])
def test_factors_turn_with_the_inputs(kappa):
    """Inputs Q x have the factor Q P Q'."""
    q = np.linalg.qr(np.asarray(normal(N, N)))[0].astype(np.float32)
    p, turned = (
        np.asarray(basis_of(zo.activation(kappa), args=(x,)).perturb[0]) for x in (X, X @ q.T)
    )
    np.testing.assert_allclose(turned, q @ p @ q.T, atol=1e-3)


def estimates(direction, num=20000):
    run = zo.value_and_zo_grad(loss_fn, direction=direction, mu=0.1)
    keys = jax.random.split(KEY, num)
    return np.asarray(jax.jit(jax.vmap(lambda key: run(key, W, X)[1]))(keys), np.float64)


def assert_mean(samples, want):
    error = samples.std(0) / len(samples) ** 0.5
    np.testing.assert_array_less(np.abs(samples.mean(0) - want), 4.5 * error)


GRADIENT = np.asarray(X, np.float64).T @ np.asarray(C, np.float64)


@pytest.mark.parametrize("kappa", [0.5, 1.0])
def test_mean_is_the_gradient_times_the_covariance(kappa):
    """E[s U] = C^(2 kappa) G, with trace n."""
    c = power(covariance(True), 2 * kappa)
    assert_mean(estimates(zo.activation(kappa)), c @ GRADIENT * N / np.trace(c))


@pytest.mark.parametrize("kappa", [-0.25, 0.5])
def test_corrected_estimate_is_unbiased_with_the_known_variance(kappa):
    """The mean is G, and the trace of its covariance m tr(C^-2k) tr(G' C^2k G) + |G|^2."""
    samples = estimates(zo.activation(kappa, corrected=True, center=False))
    assert_mean(samples, GRADIENT)
    c = covariance(False)
    inner = np.trace(GRADIENT.T @ power(c, 2 * kappa) @ GRADIENT)
    square = np.sum(GRADIENT**2)
    trace = M * np.trace(power(c, -2 * kappa)) * inner + square
    assert_mean(np.sum(samples**2, (1, 2)), trace + square)


def test_sum_of_directions_is_made_at_once():
    """The combination of K directions equals the loop over them."""
    direction = zo.activation(0.5)
    basis = direction.prepare(loss_fn, W, (X,))
    keys, coeffs = jax.random.split(KEY, 3), jnp.array([1.0, -2.0, 0.5])
    loop = sum(c * direction.draw(k, 0, W, basis) for c, k in zip(coeffs, keys, strict=True))
    got = direction.combine(keys, coeffs, 0, W, basis)
    np.testing.assert_allclose(got, loop, 1e-4, 1e-5)
    assert direction.combine(keys, coeffs, 1, W, basis) is None


@pytest.mark.parametrize("name", ["linen_scanned", "grouped_conv"])
def test_leaves_of_any_layout_are_shaped(name):
    """Stacks, heads and groups: a direction is the normal one, times P in the leaf's layout."""
    loss_fn, params, *args = PROBLEMS[name]()
    direction = zo.activation(1.0)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        basis = jax.jit(lambda p, *args: direction.prepare(loss_fn, p, args))(params, *args)
    plain, num_shaped = zo.gaussian(), 0
    for i, leaf in enumerate(jax.tree.leaves(params)):
        u, z = direction.draw(KEY, i, leaf, basis), plain.draw(KEY, i, leaf, ())
        if i not in basis:
            np.testing.assert_array_equal(u, z)
            continue
        num_shaped += 1
        found = basis[i]
        u, z = (_tap_layout.to_matrices(x, found.layout) for x in (u, z))
        np.testing.assert_allclose(u, jnp.einsum("sij,sjm->sim", found.perturb, z), 1e-3, 1e-4)
        n = z.shape[1]
        np.testing.assert_allclose(jnp.sum(found.perturb**2, (1, 2)), n, 1e-3)
    assert num_shaped >= 1


def test_inputs_that_do_not_vary_leave_the_isotropic_direction():
    """Constant inputs have no covariance, and get normal directions."""
    args = (jnp.ones((5, N)),)
    plain = lambda w, x: jnp.sum(x @ w)  # noqa: E731
    for kappa, floor in (-0.25, 1e-3), (0.5, 0), (1.0, 1e-3):
        found = basis_of(zo.activation(kappa, center=True, floor=floor), plain, W, args)
        np.testing.assert_allclose(found.perturb[0], np.eye(N), atol=1e-5)


def test_what_does_not_vary_is_left_out():
    """Inputs of which one is constant: its row of every direction is zero, finite both ways."""
    x = X.at[:, 1].set(2.0)
    for kappa in (-0.25, 0.5):
        found = basis_of(zo.activation(kappa, center=True, corrected=True, floor=0), args=(x,))
        for factor in found.perturb, found.estimate:
            np.testing.assert_allclose(factor[0, 1], 0, atol=1e-3)
            assert np.isfinite(factor).all()
            assert float(jnp.max(jnp.abs(factor))) > 0.3
    root = basis_of(zo.activation(0.5, floor=0), args=(x,)).perturb
    assert np.isfinite(root).all()


def test_equal_settings_give_equal_directions():
    """Two calls give one object, so that nothing compiles twice."""
    assert zo.activation(0.5) == zo.activation(1 / 2)
    assert zo.activation(0.5) != zo.activation(0.5, center=False)


@pytest.mark.parametrize(
    ("error", "kappa", "options", "message"),
    [
        (TypeError, "half", {}, "kappa must be a Python number, got 'half'"),
        (TypeError, 0.5, {"floor": True}, "floor must be a Python number, got True"),
        (ValueError, -jnp.inf, {}, "kappa must be a number above -inf, got -inf"),
        (ValueError, jnp.nan, {}, "kappa must be a number above -inf, got nan"),
        (ValueError, jnp.inf, {"corrected": True}, "kappa must be finite with corrected=True"),
        (ValueError, 0.5, {"floor": 1.0}, r"floor must be in \[0, 1\), got 1.0"),
        (ValueError, 0.5, {"center": False, "keep_mean": True}, "keep_mean=True needs a centered"),
        (ValueError, -0.25, {"keep_mean": True}, "keep_mean=True needs a centered"),
    ],
)
def test_options_out_of_range_are_refused(error, kappa, options, message):
    """Powers, floors and combinations that mean nothing."""
    with pytest.raises(error, match=message):
        zo.activation(kappa, **options)


def test_powers_of_a_matrix_with_noise_below_zero_are_finite():
    """An eigenvalue that rounding has made negative is left out, and never NaN."""
    matrix = jnp.diag(jnp.array([1.0, -1e-8]))[None]
    for kappa in (-0.25, 0.5):
        for factor in _activation._powers(matrix, kappa, True, 0.0):
            assert np.isfinite(factor).all()


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_eight_devices_give_the_directions_of_one(axis_type):
    """Rows over eight devices: the same factors, whole on each device."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    x = normal(16, N)
    direction = zo.activation(0.5)
    want = basis_of(direction, lambda w, x: jnp.sum(x @ w), W, (x,)).perturb

    @jax.jit
    def perturb(w, x):
        return basis_of(direction, lambda w, x: jnp.mean(jnp.sin(x @ w)), w, (x,)).perturb

    with jax.set_mesh(mesh):
        got = perturb(
            jax.device_put(W, NamedSharding(mesh, P())),
            jax.device_put(x, NamedSharding(mesh, P("data", None))),
        )
    np.testing.assert_allclose(got, want, 1e-3, 1e-4)
