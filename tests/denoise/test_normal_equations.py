"""Pseudo-inverse and symmetric solution: NumPy's values, derivatives where the rank is short."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from jaxkit.denoise import _normal_equations as equations

Y = np.float64(contract.normal(9, 6, seed=1))


def points(rank):
    """Returns nine points in ``rank`` of six directions, as two factors."""
    rng = np.random.default_rng(rank)
    return rng.normal(size=(9, rank)), rng.normal(size=(rank, 6))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rank", [0, 1, 3, 6])
def test_the_pseudo_inverse_is_that_of_numpy(rank, dtype):
    """With and without a ridge; what is not inverted is the projector on the rest."""
    left, right = points(rank)
    scatter = right.T @ left.T @ left @ right
    tol = 2e-4 if dtype == np.float32 else 1e-11
    with jax.enable_x64(True):
        out = equations.pseudo_inverse(jnp.asarray(scatter, dtype), dtype(0.5))
    plain = np.linalg.pinv(scatter, hermitian=True, rcond=1e-9)
    unseen = np.eye(6) - plain @ scatter
    ridged = np.linalg.inv(scatter + np.eye(6) / 2) @ (np.eye(6) - unseen)
    for got, want in zip(out, (ridged, plain, unseen), strict=True):
        np.testing.assert_allclose(got, want, atol=tol * max(1, np.abs(want).max()))
        assert got.dtype == dtype


@pytest.mark.parametrize("rank", [3, 6])
@pytest.mark.parametrize("ridge", [0.0, 0.5])
def test_the_symmetric_solution_solves_its_equation(rank, ridge):
    """The residual is rounding, the solution symmetric, and zero between unseen directions."""
    left, right = points(rank)
    x = left @ right
    scatter, cross = x.T @ x, Y.T @ x
    with jax.enable_x64(True):
        a = np.asarray(equations.symmetric_solution(*map(jnp.asarray, (scatter, cross, ridge))))
    residual = a @ scatter + scatter @ a + 2 * ridge * a - cross - cross.T
    np.testing.assert_allclose(residual, 0, atol=1e-10)
    np.testing.assert_allclose(a, a.T, atol=1e-12)
    unseen = np.eye(6) - np.linalg.pinv(x) @ x
    np.testing.assert_allclose(unseen @ a @ unseen, 0, atol=1e-10)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("with_prior", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 0.7])
def test_the_hessian_minimizes_the_penalized_squares(symmetric, with_prior, ridge):
    """The slope of the objective at it is zero, in all matrices or in the symmetric ones."""
    left, right = points(3)
    prior = Y[:6] + Y[:6].T if with_prior else None
    center = 0 if prior is None else prior

    def slope(a, x):
        all_entries = 2 * (a @ x.T - Y.T) @ x + 2 * ridge * (a - center)
        return all_entries + all_entries.T if symmetric else all_entries

    with jax.enable_x64(True):
        x = left @ right
        args = (x.T @ x, Y.T @ x, prior, ridge)
        args = (None if z is None else jnp.asarray(z) for z in args)
        a = np.asarray(equations.hessian(*args, symmetric))
    np.testing.assert_allclose(slope(a, x), 0, atol=1e-9)
    if not symmetric and ridge == 0:
        unseen = np.eye(6) - np.linalg.pinv(x) @ x
        np.testing.assert_allclose((a - center) @ unseen, 0, atol=1e-9)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("ridge", [0.0, 0.7])
def test_derivatives_are_those_of_differences(symmetric, ridge):
    """First and second, forward and reverse, where the points turn but keep their rank."""
    left, right = points(3)

    @jax.jit
    def fitted(left, right, ridge):
        x = left @ right
        cross = jnp.asarray(Y).T @ x
        return equations.hessian(x.T @ x, cross, None, ridge, symmetric)

    with jax.enable_x64(True):
        if ridge:
            check_grads(fitted, (left, right, ridge), 2, rtol=1e-4, atol=1e-4)
        else:
            check_grads(lambda *args: fitted(*args, 0.0), (left, right), 2, rtol=1e-4, atol=1e-4)


def test_a_zero_matrix_and_an_infinite_ridge_have_finite_derivatives():
    """Both say that nothing is to be learned: the solution is zero."""
    zero, cross = jnp.zeros((4, 4)), jnp.zeros((4, 4))

    def total(scatter, cross, ridge):
        inverse, _, unseen = equations.pseudo_inverse(scatter, ridge)
        solution = equations.symmetric_solution(scatter, cross, ridge)
        return jnp.sum(inverse) + jnp.sum(unseen) + jnp.sum(solution)

    value_and_slopes = jax.jit(jax.value_and_grad(total, (0, 1, 2)))
    for scatter, ridge, want in ((zero, 0.0, 4.0), (jnp.eye(4), np.inf, 0.0)):
        value, slopes = value_and_slopes(scatter, cross, jnp.float32(ridge))
        assert value == want
        for slope in slopes:
            np.testing.assert_array_equal(slope, 0)
