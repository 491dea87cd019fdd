"""Plans: the definition, exact marginals, limits, masks."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from jaxkit import ot

X, Y, F = contract.normal(16, 3), contract.normal(8, 3), contract.normal(16)
KEEP_X = jnp.arange(16) % 5 != 3
KEEP_Y = jnp.arange(8) != 2
A = jnp.where(KEEP_X, jnp.abs(contract.normal(16, seed=1)), 0)
B = jnp.where(KEEP_Y, jnp.abs(contract.normal(8, seed=1)), 0)
A, B = A / A.sum(), B / B.sum()
COSTS = np.sum((np.float64(X)[:, None] - np.float64(Y)) ** 2, -1)
PLAN = jax.jit(ot.plan_from_f, static_argnames="half_steps")


def _case(half_steps):
    def fun(f, x, y, a, b, epsilon, mask_x, mask_y, g=None):
        return ot.plan_from_f(
            f, x, y, a, b, epsilon, half_steps=half_steps, g=g, mask_x=mask_x, mask_y=mask_y
        )

    args = F, X, Y, A, B, jnp.float32(0.5), KEEP_X, KEEP_Y
    other = () if half_steps else (contract.normal(8, seed=2),)
    return contract.Case(
        f"{half_steps}_half_steps",
        lambda: (fun, (*args, *other)),
        public="plan_from_f",
        mask={6: (0, 1, 3), 7: (2, 4) if half_steps else (2, 4, 8)},
    )


test_contract = contract.function(*map(_case, (0, 1, 2)))


def _plan(f, g, epsilon):
    """Returns the plan by its definition, in float64."""
    power = (np.float64(f)[:, None] + np.float64(g) - COSTS) / epsilon
    return np.float64(A)[:, None] * np.float64(B) * np.exp(power)


def _half(f, a, costs, epsilon):
    return -epsilon * logsumexp((f[:, None] - costs) / epsilon, axis=0, b=np.float64(a)[:, None])


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 5.0])
def test_plans_are_exponentials_of_potentials(epsilon):
    """With none, one and two half steps, against the definition in float64."""
    g = _half(np.float64(F), A, COSTS, epsilon)
    f = _half(g, B, COSTS.T, epsilon)
    for half_steps, potentials in ((1, (F, g)), (2, (f, g))):
        got = PLAN(F, X, Y, A, B, epsilon, half_steps=half_steps)
        np.testing.assert_allclose(got, _plan(*potentials, epsilon), rtol=1e-4, atol=1e-9)
    h = 0.3 * contract.normal(8, seed=2) - 2  # of no half step
    got = PLAN(F, X, Y, A, B, epsilon, half_steps=0, g=h)
    np.testing.assert_allclose(got, _plan(F, h, epsilon), rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("epsilon", [1e-6, 1e-3, 1.0, 1e6])
def test_one_half_step_makes_columns_exact_and_two_make_rows_exact(epsilon):
    """To rounding in float32, for any f and at strengths where f / eps has no digits left."""
    columns = PLAN(F, X, Y, A, B, epsilon, half_steps=1).sum(0)
    np.testing.assert_allclose(columns, B, rtol=1e-6)
    rows = PLAN(F, X, Y, A, B, epsilon, half_steps=2).sum(1)
    np.testing.assert_allclose(rows, A, rtol=1e-6)


@pytest.mark.parametrize("half_steps", [1, 2])
def test_large_epsilon_gives_the_product_of_the_weights(half_steps):
    """P -> a b^T, whatever f is."""
    got = PLAN(F, X, Y, A, B, 1e7, half_steps=half_steps)
    np.testing.assert_allclose(got, A[:, None] * B[None], rtol=1e-5)


def test_half_steps_repeated_converge_to_one_plan():
    """From two starts to one plan, of both marginals; there half steps change nothing."""

    def solve(f):
        def step(f, _):
            g = ot.soft_g(f, X, Y, A, 0.5)
            return ot.soft_f(g, X, Y, B, 0.5), None

        return jax.lax.scan(step, f, length=300)[0]

    f = jax.jit(jax.vmap(solve))(jnp.stack([jnp.zeros(16), 3 * F]))
    one, other = (PLAN(row, X, Y, A, B, 0.5, half_steps=1) for row in f)
    np.testing.assert_allclose(one, other, atol=1e-6)
    np.testing.assert_allclose(one.sum(1), A, atol=1e-6)
    np.testing.assert_allclose(PLAN(f[0], X, Y, A, B, 0.5, half_steps=2), one, atol=1e-6)


def test_padded_pairs_under_vmap_are_the_pairs():
    """Two pairs of different sizes in one batch, padded with NaN."""
    sizes = [(16, 8), (11, 5)]
    want, stacked = [], []
    for n, m in sizes:
        want.append(PLAN(F[:n], X[:n], Y[:m], None, None, 0.5))
        mask_x, mask_y = jnp.arange(16) < n, jnp.arange(8) < m
        x = jnp.where(mask_x[:, None], X, jnp.nan)
        stacked.append((F, x, jnp.where(mask_y[:, None], Y, jnp.nan), mask_x, mask_y))

    def one(f, x, y, mask_x, mask_y):
        return ot.plan_from_f(f, x, y, None, None, 0.5, mask_x=mask_x, mask_y=mask_y)

    got = jax.jit(jax.vmap(one))(*(jnp.stack(z) for z in zip(*stacked, strict=True)))
    for (n, m), plan, padded in zip(sizes, want, got, strict=True):
        np.testing.assert_allclose(padded[:n, :m], plan, rtol=1e-5)
        np.testing.assert_array_equal(padded[n:], 0)
        np.testing.assert_array_equal(padded[:, m:], 0)


def test_weight_zero_has_no_mass_and_finite_derivatives():
    """Without weight a power that overflows is no NaN."""
    f, g = F.at[3].set(1e4), jnp.zeros(8)

    def total(f, a, b):
        return ot.plan_from_f(f, X, Y, a, b, 0.01, half_steps=0, g=g - 50).sum()

    plan = PLAN(f, X, Y, A, B, 0.01, half_steps=0, g=g - 50)
    np.testing.assert_array_equal(plan[3], 0)
    for slope in jax.jit(jax.grad(total, argnums=(0, 1, 2)))(f, A, B):
        assert jnp.isfinite(slope).all()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"half_steps": 3}, ValueError, "half_steps must be one of 0, 1, 2, got 3"),
        ({"half_steps": 0}, ValueError, "g must go with half_steps=0 only, got None with 0"),
        ({"g": Y[:, 0]}, ValueError, "g must go with half_steps=0 only, got a potential with 1"),
        (
            {"g": X[:, 0], "half_steps": 0},
            ValueError,
            r"g must have shape \[m\] with m=8, got \(16,\)",
        ),
        ({"epsilon": 0.0}, ValueError, r"epsilon must be in \(0, inf\), got 0.0"),
        ({"b": A}, ValueError, r"b must have shape \[n\] with n=8, got \(16,\)"),
        ({"mask_x": A}, TypeError, "mask_x must be bool, got float32"),
        ({"cost": None}, TypeError, "cost must be a function, got NoneType"),
    ],
)
def test_bad_input_is_named(change, error, match):
    """Each message names the argument and what it got."""
    args = {"f": F, "x": X, "y": Y, "a": A, "b": B, "epsilon": 0.1, **change}
    with pytest.raises(error, match=match):
        ot.plan_from_f(**args)


def test_traced_bad_values_give_nan():
    """A strength of 0, and weights that do not sum to 1, of either side."""
    for args in ((A, B, 0.0), (2 * A, B, 0.5), (A, 2 * B, 0.5)):
        assert jnp.isnan(PLAN(F, X, Y, *args)).all()
