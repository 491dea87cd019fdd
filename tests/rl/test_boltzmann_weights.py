"""Boltzmann weights: closed forms, limits and masks."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import rl

REWARDS = contract.normal(8)
MASK = jnp.array([True, True, False, True, True, False, True, True])

test_contract = contract.function(
    contract.Case(
        "boltzmann_weights",
        lambda: (lambda r, m: rl.boltzmann_weights(r, 0.7, mask=m), (REWARDS, MASK)),
        mask={1: (0,)},
    )
)


def test_weights_are_exponentials_over_their_mean():
    """In float64 by NumPy, with and without outputs left out."""
    r = np.float64(REWARDS)
    for mask in (None, MASK):
        kept = np.ones(8, bool) if mask is None else np.asarray(mask)
        want = np.where(kept, np.exp(r / 0.7) / np.mean(np.exp(r[kept] / 0.7)), 0)
        np.testing.assert_allclose(rl.boltzmann_weights(REWARDS, 0.7, mask=mask), want, rtol=1e-5)


@pytest.mark.parametrize(
    ("rewards", "beta", "want"),
    [
        ([1.0, 2.0, 4.0, 4.0], 1e-3, [0, 0, 2, 2]),
        ([1.0, 2.0, 4.0, 4.0], 1e9, [1, 1, 1, 1]),
        ([3.0, 3.0, 3.0], 0.1, [1, 1, 1]),
        ([1e30, -1e30, 0.0], 1.0, [3, 0, 0]),
        ([1000.0, 1000.0 + np.log(3)], 1.0, [0.5, 1.5]),
        ([0.0, 1e-4], 1e-30, [0, 2]),
        ([1e30, 1e30, 0.0], 1e-9, [1.5, 1.5, 0]),
        ([7.0], 0.5, [1]),
    ],
)
def test_limits(rewards, beta, want):
    """Cold: uniform over the best. Hot or equal: ones. Large rewards do not overflow."""
    np.testing.assert_allclose(rl.boltzmann_weights(jnp.array(rewards), beta), want, atol=1e-4)


def test_a_shift_of_the_rewards_changes_nothing_and_the_mean_is_one():
    """Only differences of rewards count."""
    w = rl.boltzmann_weights(REWARDS, 0.5)
    np.testing.assert_allclose(rl.boltzmann_weights(REWARDS + 3, 0.5), w, rtol=1e-4)
    assert jnp.mean(w) == pytest.approx(1, rel=1e-6)


def test_the_gradient_of_the_weighted_likelihood_is_the_tilted_policy():
    """On all outcomes, weighted by the reference, its optimum is ref exp(r / beta) / Z."""
    ref, r = np.array([0.5, 0.25, 0.25]), np.array([0.0, 1.0, 2.0])
    outcomes = np.array([0, 0, 1, 2])  # the reference itself, as four samples
    w = rl.boltzmann_weights(jnp.float32(r[outcomes]), 0.8)
    target = ref * np.exp(r / 0.8)
    target /= target.sum()

    def loss_fn(logits):
        return -jnp.mean(w * jax.nn.log_softmax(logits)[outcomes])

    grads = jax.grad(loss_fn)(jnp.float32(np.log(target)))
    np.testing.assert_allclose(grads, 0, atol=1e-6)


def test_masked_groups_and_nan():
    """No output left gives zeros; a NaN that counts shows everywhere; -inf counts as weight 0."""
    none = jnp.zeros(3, bool)
    np.testing.assert_array_equal(rl.boltzmann_weights(jnp.ones(3), 1.0, mask=none), 0)
    assert jnp.isnan(rl.boltzmann_weights(jnp.array([1.0, jnp.nan]), 1.0)).all()
    got = rl.boltzmann_weights(jnp.array([1.0, -jnp.inf]), 1.0)
    np.testing.assert_array_equal(got, [2, 0])


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((jnp.ones((2, 3)), 1.0), {}, ValueError, r"rewards must have shape \[n\], got \(2, 3\)"),
        ((jnp.arange(3), 1.0), {}, TypeError, "rewards must be real floating, got int32"),
        ((jnp.ones(3), 0.0), {}, ValueError, r"beta must be in \(0, inf\), got 0.0"),
        ((jnp.ones(3), "hot"), {}, TypeError, "beta must be a number"),
        ((jnp.ones(3), 1.0), {"mask": jnp.ones(3)}, TypeError, "mask must be bool, got float32"),
        (
            (jnp.ones(3), 1.0),
            {"mask": jnp.ones(2, bool)},
            ValueError,
            r"mask must have shape \[n\] with n=3, got \(2,\)",
        ),
    ],
)
def test_bad_input_is_named(args, kwargs, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        rl.boltzmann_weights(*args, **kwargs)
