"""The box of the posterior, and what it certifies."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkit import blr

KEY = jax.random.key(0)


def _case():
    params = {"a": contract.normal(8, 16), "b": contract.normal(8)}
    return blr.support_box, (params, blr.gblr(0.1, ess=50.0, alpha=1.5).init(params))


test_contract = contract.function(
    contract.Case(
        "support_box",
        _case,
        vary=lambda args: (contract.vary(args[0]), args[1]),
        dtypes=("float32",),
    ),
    contract.Case(
        "linear_range",
        lambda: (
            blr.linear_range,
            (contract.normal(8), contract.normal(8, seed=1) - 1, contract.normal(8, seed=1) + 1),
        ),
        dtypes=("float32",),
    ),
)


@pytest.mark.parametrize("alpha", [1.2, 2.0, 5.0])
def test_half_the_box_is_r_sigma(alpha):
    """With sigma 1 / sqrt(ess (h + delta)) at the start, whatever alpha."""
    params = contract.normal(4)
    state = blr.gblr(0.1, ess=9.0, alpha=alpha, hess_init=2.0, weight_decay=2.0).init(params)
    low, high = blr.support_box(params, state)
    half = np.sqrt((3 * alpha - 1) / (alpha - 1)) / 6
    np.testing.assert_allclose((high - low) / 2, half, rtol=1e-5)
    np.testing.assert_allclose((high + low) / 2, params, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_draw_lies_outside(dtype):
    """Of a million draws not one breaks its bounds, by rounding neither, and some come near."""
    wide = np.concatenate([100 * np.asarray(contract.normal(100)), np.full(100, 3e4)])
    params = {"w": jnp.asarray(wide, dtype)}
    state = blr.gblr(0.1, ess=4e3, alpha=9.0).init(params)
    low, high = blr.support_box(params, state)

    @jax.jit
    def worst():
        theta, noise = blr.sample_posterior(KEY, params, state, (5000,))
        inside = (theta["w"] >= low["w"][None]) & (theta["w"] <= high["w"][None])
        return jnp.all(inside), jnp.max(noise["w"])

    inside, top = worst()
    assert inside
    # At alpha 9 the density at the edge falls as the eighth root: the edge is reached.
    assert top > 0.999 * (26 / 8) ** 0.5
    assert low["w"].dtype == dtype


def test_there_is_no_box_without_bounds_and_none_for_leaves_of_others():
    """Infinite at alpha 1 and below; the parameters themselves where the rule owns no leaf."""
    params = {"a": jnp.ones(2), "b": jnp.ones(3)}
    tx = optax.masked(blr.gblr(0.1, ess=1.0), {"a": True, "b": False})
    low, high = blr.support_box(params, tx.init(params))
    np.testing.assert_array_equal(low["a"], -jnp.inf)
    np.testing.assert_array_equal(high["a"], jnp.inf)
    assert low["b"] is params["b"] and high["b"] is params["b"]
    assert blr.support_box({}, blr.gblr(0.1, ess=1.0, alpha=2.0).init({})) == ({}, {})


def test_the_range_of_a_linear_map_is_that_of_the_corners():
    """By all corners of a box in five dimensions over two leaves; the extremes are attained."""
    c = {"a": contract.normal(3), "b": contract.normal(2)}
    low = {"a": contract.normal(3, seed=1), "b": contract.normal(2, seed=1)}
    high = jax.tree.map(lambda x, y: x + jnp.abs(y), low, c)
    flat = [np.concatenate([np.float64(t["a"]), np.float64(t["b"])]) for t in (c, low, high)]
    corners = np.stack(np.meshgrid(*zip(*flat[1:], strict=True), indexing="ij"), -1)
    values = corners.reshape(-1, 5) @ flat[0]
    np.testing.assert_allclose(blr.linear_range(c, low, high), (values.min(), values.max()), 1e-5)


def test_a_coefficient_of_zero_meets_an_infinite_bound():
    """It counts as zero; any other makes the range infinite."""
    box = jnp.array([-jnp.inf, 1.0]), jnp.array([jnp.inf, 2.0])
    assert blr.linear_range(jnp.array([0.0, 3.0]), *box) == (3.0, 6.0)
    assert blr.linear_range(jnp.array([1.0, 3.0]), *box) == (-jnp.inf, jnp.inf)


def test_certified_points_never_change_their_class():
    """A linear classifier: where the range of the logit has one sign, 4,000 draws agree."""
    x = contract.normal(60, 6)
    params = {"w": contract.normal(6), "b": jnp.float32(0.1)}
    state = blr.gblr(0.1, ess=300.0, alpha=5.0).init(params)
    low, high = blr.support_box(params, state)
    c = {"w": x, "b": jnp.ones(60)}
    least, largest = jax.jit(jax.vmap(blr.linear_range, (0, None, None)))(c, low, high)
    certified = (least > 0) | (largest < 0)
    assert 10 < certified.sum() < 60
    theta, _ = jax.jit(lambda: blr.sample_posterior(KEY, params, state, (4000,)))()
    logits = np.asarray(theta["w"]) @ np.asarray(x).T + np.asarray(theta["b"])[:, None]
    margin = 1e-5
    assert (logits >= np.asarray(least)[None] - margin).all()
    assert (logits <= np.asarray(largest)[None] + margin).all()
    flips = (logits > 0).any(0) & (logits < 0).any(0)
    assert not (flips & np.asarray(certified)).any() and flips.any()


def test_bad_boxes_are_named():
    """Bounds must look like the coefficients."""
    c = {"a": jnp.ones(2)}
    for low, high, match in (
        ({"b": jnp.ones(2)}, c, "low must have the structure"),
        (c, {"a": jnp.ones(3)}, r"high must have .* wanted \(2,\) at a, got \(3,\)"),
    ):
        with pytest.raises(ValueError, match=match):
            blr.linear_range(c, low, high)
