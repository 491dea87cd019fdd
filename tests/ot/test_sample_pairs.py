"""Pairs drawn from a plan: their frequencies, and what has no mass."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import ot

PLAN = jnp.abs(contract.normal(8, 5))
PLAN = jnp.where(PLAN < 0.3, 0, PLAN)
NO_SLOPE = {"grad_is_finite": "whole numbers have no derivative"}

test_contract = contract.function(
    contract.Case(
        "one_of_each_row",
        lambda: (ot.sample_pairs, (jax.random.key(0), PLAN)),
        public="sample_pairs",
        draws=True,
        skip=NO_SLOPE,
    ),
    contract.Case(
        "independent_pairs",
        lambda: (
            lambda key, plan: ot.sample_pairs(key, plan, num_samples=16),
            (jax.random.key(0), PLAN),
        ),
        public="sample_pairs",
        draws=True,
        skip=NO_SLOPE,
    ),
)


def _counts(i, j):
    counts = np.zeros(PLAN.shape)
    np.add.at(counts, (np.asarray(i), np.asarray(j)), 1)
    return counts


def test_independent_pairs_have_the_frequencies_of_the_plan():
    """Within 4.5 standard errors in all 40 cells, and none where the plan is 0; of any sum."""
    n = 40_000
    counts = _counts(*ot.sample_pairs(jax.random.key(1), 7 * PLAN, num_samples=n))
    p = np.asarray(PLAN / PLAN.sum())
    np.testing.assert_array_less(np.abs(counts - n * p), 4.5 * np.sqrt(n * p * (1 - p)) + 1e-9)


def test_one_pair_of_each_row_has_the_frequencies_of_that_row():
    """Every source is used once, in order; partners within 4.5 standard errors; of any mass."""
    n = 8_000
    keys = jax.random.split(jax.random.key(2), n)
    plan = PLAN * 1e-3 ** jnp.arange(8.0)[:, None]
    i, j = jax.jit(jax.vmap(ot.sample_pairs, (0, None)))(keys, plan)
    np.testing.assert_array_equal(i, np.broadcast_to(np.arange(8), (n, 8)))
    p = np.asarray(PLAN / PLAN.sum(1, keepdims=True))
    excess = np.abs(_counts(i, j) - n * p) - 4.5 * np.sqrt(n * p * (1 - p))
    np.testing.assert_array_less(excess, 1e-9)


def test_a_permutation_is_drawn_exactly():
    """The plan of a shift with small epsilon couples each x with its image, in both ways."""
    order = np.random.default_rng(0).permutation(64)
    x = contract.normal(64, 2)

    @jax.jit
    def plan_of(x, y):
        f = ot.predict_potential(ot.untrained(jnp.eye(2), 0.0), ot.Pair(x, y))
        return ot.plan_from_f(f, x, y, None, None, 1e-5)

    plan = plan_of(x, x[order] + 3)
    i, j = ot.sample_pairs(jax.random.key(2), plan)
    np.testing.assert_array_equal(order[j], i)
    i, j = ot.sample_pairs(jax.random.key(3), plan, num_samples=1000)
    np.testing.assert_array_equal(order[j], i)


def test_rows_without_mass_have_no_partner():
    """Zero and NaN rows give -1 in both forms, and the other rows stay as they are."""
    plan = PLAN.at[2].set(0).at[5].set(jnp.nan)
    i, j = ot.sample_pairs(jax.random.key(0), plan)
    np.testing.assert_array_equal(np.asarray(j) < 0, (i == 2) | (i == 5))
    i, j = ot.sample_pairs(jax.random.key(0), PLAN.at[2].set(0), num_samples=5000)
    assert not np.any(np.asarray(i) == 2) and np.all(np.asarray(j) >= 0)
    i, j = ot.sample_pairs(jax.random.key(0), plan, num_samples=9)
    np.testing.assert_array_equal(jnp.stack([i, j]), -1)


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_the_ends_of_the_uniform_numbers_meet_entries_with_mass(u, monkeypatch):
    """The smallest and the largest number drawn hit no 0 at either end of a row."""
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: jnp.full(shape, u, dtype))
    plan = jnp.array([[0.0, 0.1, 0.3, 0.3, 0.0], [0.0, 0.0, 1e-7, 0.0, 0.0]])
    _, j = ot.sample_pairs(jax.random.key(0), plan)
    np.testing.assert_array_equal(j, [1, 2] if u == 0 else [3, 2])


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda key: ot.sample_pairs(key, PLAN[0]), ValueError, r"plan must have shape \[n, m\]"),
        (lambda key: ot.sample_pairs(key, PLAN > 0), TypeError, "plan must be real floating, got"),
        (lambda key: ot.sample_pairs(key, PLAN, num_samples=0), ValueError, "num_samples must be"),
        (lambda key: ot.sample_pairs(key, PLAN, num_samples=2.0), TypeError, "num_samples must be"),
    ],
)
def test_bad_input_is_named(call, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        call(jax.random.key(0))
