"""Potentials to and from ott, and starts of its solver: one plan, whatever the start."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import ot

F, X, Y = contract.normal(16), contract.normal(16, 2), contract.normal(8, 2)
A, B = jnp.abs(contract.normal(16, seed=1)), jnp.abs(contract.normal(8, seed=1))
A, B = A / A.sum(), B / B.sum()
NONE = jnp.where(jnp.arange(16) == 3, 0, A)
NONE = NONE / NONE.sum()

test_contract = contract.function(
    contract.Case("to_ott", lambda: (ot.to_ott, (F, A, jnp.float32(0.3)))),
    contract.Case("from_ott", lambda: (ot.from_ott, (F, A, jnp.float32(0.3)))),
    contract.Case(
        "warm_start",
        lambda: (lambda f, a, e, b: ot.warm_start(f, a, e, b=b), (F, A, jnp.float32(0.3), B)),
    ),
)


@pytest.mark.parametrize("weights", [None, A, NONE], ids=["equal", "positive", "zero"])
@pytest.mark.parametrize("epsilon", [0.0, 0.01, 3.0])
def test_round_trip(weights, epsilon):
    """There and back is the same potential, and 0 at weight zero, where ott has -inf."""
    there = ot.to_ott(F, weights, epsilon)
    some = np.ones(16, bool) if weights is None else np.asarray(weights) > 0
    log = np.log(np.full(16, 1 / 16) if weights is None else np.asarray(weights)[some])
    np.testing.assert_allclose(there[some], np.asarray(F)[some] + epsilon * log, rtol=1e-5)
    np.testing.assert_array_equal(there[~some], -jnp.inf)
    back = ot.from_ott(there, weights, epsilon)
    np.testing.assert_allclose(back, np.where(some, F, 0), atol=1e-5)


def test_both_conventions_give_one_plan():
    """a b exp((f + g - C) / eps) here is exp((f + g - C) / eps) there."""
    g, epsilon = contract.normal(8), 0.7
    costs = np.sum((np.float64(X)[:, None] - np.float64(Y)) ** 2, -1)
    fu, gv = ot.warm_start(F, NONE, epsilon, b=B, g=g)
    want = np.exp((np.float64(fu)[:, None] + np.float64(gv) - costs) / epsilon)
    got = ot.plan_from_f(F, X, Y, NONE, B, epsilon, half_steps=0, g=g)
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_derivatives_are_finite_at_weight_zero():
    """The logarithm of 0 is not differentiated."""
    for fun in (ot.to_ott, ot.from_ott):

        def total(f, a, epsilon, fun=fun):
            out = fun(f, a, epsilon)
            return jnp.sum(jnp.where(jnp.isfinite(out), out, 0))

        for slope in jax.grad(total, argnums=(0, 1, 2))(F, NONE, 0.3):
            assert jnp.isfinite(slope).all()


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: ot.to_ott(jnp.arange(3), None, 0.1), TypeError, "f must be real floating, got"),
        (lambda: ot.to_ott(F, jnp.arange(16), 0.1), TypeError, "a must be real floating, got int"),
        (lambda: ot.to_ott(X, None, 0.1), ValueError, r"f must have shape \[n\], got \(16, 2\)"),
        (lambda: ot.from_ott(F, B, 0.1), ValueError, r"a must have shape \[n\] with n=16, got"),
        (lambda: ot.from_ott(F, A, -1.0), ValueError, r"epsilon must be in \[0, inf\), got -1.0"),
        (lambda: ot.warm_start(F, A, "0", b=B), TypeError, "epsilon must be a number, got '0'"),
        (lambda: ot.warm_start(F, A, 0.1, b=B, g=F), ValueError, r"g must have shape \[m\] with m"),
        (lambda: ot.warm_start(F, A, 0.1, b=X), ValueError, r"b must have shape \[m\], got"),
    ],
)
def test_bad_input_is_named(call, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        call()


def test_bad_values_give_nan():
    """A negative weight, and a traced negative strength."""
    assert jnp.isnan(ot.to_ott(F, A.at[2].set(-0.1), 0.1)[2])
    assert jnp.isnan(ot.to_ott(F, A, jnp.float32(-0.1))).all()
