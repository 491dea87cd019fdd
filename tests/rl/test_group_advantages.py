"""Group-relative advantages: closed forms, invariance and masks."""

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
        "group_advantages",
        lambda: (lambda r, m: rl.group_advantages(r, mask=m), (REWARDS, MASK)),
        mask={1: (0,)},
    )
)


def test_advantages_are_standard_scores():
    """In float64 by NumPy, with and without outputs left out."""
    r = np.float64(REWARDS)
    for mask in (None, MASK):
        kept = np.ones(8, bool) if mask is None else np.asarray(mask)
        want = np.where(kept, (r - r[kept].mean()) / (r[kept].std() + 0.1), 0)
        got = rl.group_advantages(REWARDS, eps=0.1, mask=mask)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_scale_and_shift_of_the_rewards_change_nothing():
    """With eps zero only the order and the ratios of distances count; mean 0, variance 1."""
    got = rl.group_advantages(REWARDS, eps=0.0)
    np.testing.assert_allclose(rl.group_advantages(5 * REWARDS - 3, eps=0.0), got, atol=1e-5)
    assert jnp.mean(got) == pytest.approx(0, abs=1e-6)
    assert jnp.var(got) == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("eps", [0.0, 1e-6])
def test_equal_rewards_give_zeros_with_a_finite_derivative(dtype, eps):
    """Neither a division by zero nor the slope of the root at zero."""
    for rewards in (jnp.full(4, 3.0, dtype), jnp.ones(1, dtype)):
        np.testing.assert_array_equal(rl.group_advantages(rewards, eps=eps), 0)
        slope = jax.grad(lambda r: rl.group_advantages(r, eps=eps)[0])(rewards)
        assert jnp.isfinite(slope).all()
    none = jnp.zeros(4, bool)
    np.testing.assert_array_equal(rl.group_advantages(jnp.arange(4.0), mask=none), 0)
    assert jnp.isnan(rl.group_advantages(jnp.array([1.0, jnp.nan]))).all()


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((jnp.ones(()),), {}, ValueError, r"rewards must have shape \[n\], got \(\)"),
        ((jnp.ones(3, bool),), {}, TypeError, "rewards must be real floating, got bool"),
        ((jnp.ones(3),), {"eps": -1.0}, ValueError, r"eps must be in \[0, inf\), got -1.0"),
        ((jnp.ones(3),), {"mask": jnp.ones((3, 1), bool)}, ValueError, "mask must have shape"),
    ],
)
def test_bad_input_is_named(args, kwargs, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        rl.group_advantages(*args, **kwargs)
