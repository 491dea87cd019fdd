"""The untrained prior: its certified bound, and parameters as a tree."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import ot_problems
import pytest

from jaxkit import ot

THETA = contract.normal(8, 3)

test_contract = contract.function(
    contract.Case("untrained", lambda: (ot.untrained, (THETA, jnp.float32(0.1))))
)


@pytest.mark.parametrize(("n", "m", "d", "num"), [(9, 7, 3, 9), (8, 8, 2, 6), (6, 5, 4, 4)])
def test_the_prior_is_a_lower_bound_with_no_training(n, m, d, num):
    """Feasible at all atoms, d SW_2^2 in value, and below the exact cost of a linear program."""
    rng = np.random.default_rng(n)
    x, y = rng.normal(size=(n, d)), rng.normal(size=(m, d)) + 0.5
    a, b = rng.dirichlet(np.ones(n)), rng.dirichlet(np.ones(m))
    a[0] += a[1]
    a[1] = 0
    params = ot.untrained(ot.tight_frame(jax.random.key(n), num, d), 0.1)
    phi, psi = jax.jit(ot.sliced_potentials)(*map(jnp.float32, (x, y, a, b)), params.theta)
    f, g = np.float64(phi @ params.weights), np.float64(psi @ params.weights)
    c = np.sum(np.square(x[:, None] - y[None]), axis=2)
    assert np.max(f[:, None] + g[None] - c) <= 1e-5 * c.max()
    theta = np.float64(params.theta)
    slices = [ot_problems.optimum(ot_problems.cost_matrix(x @ t, y @ t), a, b) for t in theta]
    bound = a @ f + b @ g
    assert bound == pytest.approx(d * np.mean(slices), rel=1e-5)
    assert bound <= ot_problems.optimum(c, a, b)


def test_what_it_holds():
    """Weight k / L in the dtype of theta, for g too if asked for; epsilon is an array."""
    params = ot.untrained(THETA.astype(jnp.bfloat16), 0.1, two_sided=True)
    assert params.weights.dtype == params.epsilon.dtype == jnp.bfloat16
    np.testing.assert_array_equal(params.weights, jnp.full(8, 3 / 8, jnp.bfloat16))
    np.testing.assert_array_equal(params.weights_g, params.weights)
    assert ot.untrained(THETA, 0.1).weights_g is None


def test_parameters_are_a_tree_whose_functions_are_static():
    """A second fit with the same functions does not compile its user again."""
    traces = []

    @jax.jit
    def use(params):
        traces.append(params.project)
        return params.weights * params.epsilon

    use(ot.untrained(THETA, 0.1, slice_cost=ot.power(1.5)))
    use(ot.untrained(THETA + 1, 0.2, slice_cost=ot.power(1.5)))
    assert traces == [ot.linear]
    leaves, treedef = jax.tree.flatten(ot.untrained(THETA, 0.1))
    assert len(leaves) == 3
    assert treedef == jax.tree.structure(ot.untrained(THETA, 0.5))


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((THETA[0], 0.1), {}, ValueError, r"theta must have shape \[L, k\], got \(3,\)"),
        ((THETA[:0], 0.1), {}, ValueError, "number of directions in theta must be at least 1"),
        ((jnp.ones((2, 2), int), 0.1), {}, TypeError, "theta must be real floating, got int32"),
        ((THETA, -0.1), {}, ValueError, r"epsilon must be in \[0, inf\), got -0.1"),
        ((THETA, "x"), {}, TypeError, "epsilon must be a number, got 'x'"),
        ((THETA, 0.1), {"project": 3}, TypeError, "project must be a function, got int"),
        ((THETA, 0.1), {"slice_cost": "p"}, TypeError, "slice_cost must be a function, got str"),
    ],
)
def test_bad_input_is_named(args, kwargs, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        ot.untrained(*args, **kwargs)
