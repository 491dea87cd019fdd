"""The potential between and beyond its points, against the c-transform of its partner."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import ot_problems
import pytest

from jaxkit import ot
from jaxkit.ot import _staircase

Q, X, Y = (contract.normal(8, seed=seed) for seed in (1, 2, 3))
A = jnp.array([0.1, 0.2, 0.0, 0.3, 0.0, 0.1, 0.2, 0.1])
MASK = jnp.array([True, True, False, True, False, True, True, True])
EXTEND = jax.jit(ot.extend_1d)

test_contract = contract.function(
    contract.Case(
        "extend_1d",
        lambda: (
            lambda q, x, y, a, m: ot.extend_1d(q, x, y, a, mask_x=m, mask_y=m),
            (Q, X, Y, A, MASK),
        ),
        mask={4: (1, 2, 3)},
    )
)


@pytest.mark.parametrize(("n", "m", "num"), [(7, 5, 40), (1, 4, 8), (4, 1, 8)])
def test_it_is_the_mean_of_the_c_transforms_of_both_tie_rules(n, m, num):
    """At any numbers, between, beyond and at the points, for costs |.|^p."""
    *problems, p = ot_problems.hard(n, m, num)
    q = np.r_[-9.0, -0.25, 0.5, 1.3, 9.0, 0.0, 1.0]

    def one(x, y, a, b, p):
        def cost(x, y):
            return jnp.abs(x - y) ** p

        stair = _staircase.staircase(x, y, a, b, None, None, None)
        rules = [
            _staircase.potentials(stair._replace(paths=(path,)), cost)[1] for path in stair.paths
        ]
        return stair.y, rules, ot.extend_1d(jnp.asarray(q), x, y, a, b, cost=cost)

    with jax.enable_x64(True):
        out = jax.jit(jax.vmap(one))(*map(jnp.asarray, (*problems, p)))
        out = jax.tree.map(np.asarray, out)
    for k, power in enumerate(p):
        y, rules, got = jax.tree.map(lambda z, k=k: z[k], out)
        c = ot_problems.cost_matrix(q, y, power)
        want = np.mean([np.min(c - g, axis=1) for g in rules], axis=0)
        np.testing.assert_allclose(got, want, atol=1e-12)


def test_at_its_points_it_is_the_potential():
    """Also at atoms of weight zero, at duplicates, and where padding lies at the last point."""
    f, _ = ot.duals_1d(X, Y, A)
    np.testing.assert_allclose(EXTEND(X, X, Y, A), f, atol=1e-6)
    x = X.at[3].set(X[0])
    f, _ = ot.duals_1d(x, Y, mask_x=MASK)
    got = EXTEND(x, x, Y, mask_x=MASK)
    np.testing.assert_allclose(got[MASK], f[MASK], atol=1e-6)


def test_of_a_shift_it_is_linear_within_and_quadratic_beyond():
    """For y = x + t: f(q) = -2 t q between the ends; beyond them the last partner counts."""
    x, t = jnp.linspace(0, 1, 400), 3.0
    q = jnp.array([0.1234, 0.5, 0.77])
    np.testing.assert_allclose(EXTEND(q, x, x + t), -2 * t * q, atol=1e-4)
    ends = EXTEND(jnp.array([-2.0, 6.0]), x, x + t)
    np.testing.assert_allclose(ends, [25.0 - 9.0, -6.0 + 4.0 - 9.0], atol=1e-4)


def test_numbers_that_are_nan_stay_nan_and_bad_weights_show():
    """A NaN query answers for itself; weights that do not sum to 1 answer for all."""
    got = EXTEND(Q.at[2].set(jnp.nan), X, Y)
    np.testing.assert_array_equal(jnp.isnan(got), np.arange(8) == 2)
    assert jnp.isnan(EXTEND(Q, X, Y, 2 * A)).all()


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((Q[None], X, Y), {}, ValueError, r"q must have shape \[k\], got \(1, 8\)"),
        ((jnp.arange(3), X, Y), {}, TypeError, "q must be real floating, got int32"),
        ((Q, X, Y), {"tol": -1.0}, ValueError, r"tol must be in \[0, inf\)"),
        ((Q, X, Y), {"cost": 2}, TypeError, "cost must be a function, got int"),
    ],
)
def test_bad_input_is_named(args, kwargs, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        ot.extend_1d(*args, **kwargs)
