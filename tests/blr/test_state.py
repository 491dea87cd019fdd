"""The mean of a leaf, and how trees are cut to the leaves that a rule owns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkit import blr
from jaxkit.blr import _state


def test_the_mean_is_the_master_up_to_one_unit_in_the_last_place():
    """Beyond, and without a master, it is the leaf in float32; doubles stay."""
    leaf = jnp.array([1.0, 1.0, -2.0, 0.0], jnp.bfloat16)
    master = jnp.array([1.003, 1.01, -2.01, 0.1])
    got = _state.mean(leaf, master)
    np.testing.assert_allclose(got, [1.003, 1.0, -2.01, 0.0])
    small = jnp.full(1, 1e-9)
    np.testing.assert_array_equal(_state.mean(jnp.zeros(1, jnp.float16), small), small)
    assert _state.mean(leaf, None).dtype == jnp.float32
    with jax.enable_x64(True):
        assert _state.mean(jnp.ones(2, jnp.float64), None).dtype == jnp.float64


def test_marginals_are_one_per_leaf_of_disjoint_states():
    """Each leaf has the alpha and width of its own rule, None where there is none."""
    params = {"a": jnp.ones(2), "b": {"c": jnp.ones(3), "d": jnp.ones(1)}, "n": jnp.arange(2)}
    labels = {"a": "one", "b": "two", "n": "two"}
    rules = {
        "one": blr.gblr(0.1, ess=4.0, alpha=2.0, weight_decay=0.0),
        "two": blr.gblr(0.1, ess=100.0, weight_decay=0.0),
    }
    got = _state.marginals(params, optax.partition(rules, labels).init(params))
    assert [m and float(m.alpha) for m in got] == [2.0, 1.0, 1.0, None]
    for marginal, width in zip(got, (0.5, 0.1, 0.1), strict=False):
        np.testing.assert_allclose(marginal.stddev, width, rtol=1e-6)


def test_trees_are_cut_where_parameters_are_masked():
    """Below a masked node nothing is taken, whatever is there; other structures are refused."""
    params = {"a": 1.0, "b": optax.MaskedNode()}
    assert _state.cut("hess", {"a": 5, "b": {"c": 1, "d": 2}}, params) == [5]
    with pytest.raises(ValueError, match="hess must have the structure .* got PyTreeDef"):
        _state.cut("hess", {"a": 5}, params)


def test_shapes_are_checked_with_their_path():
    """One number for a leaf is allowed only where asked for."""
    params = {"a": jnp.ones(3)}
    _state.check_shapes("reference", [1.0], params, scalars=True)
    with pytest.raises(ValueError, match=r"hess must have .* wanted \(3,\) at a, got \(\)"):
        _state.check_shapes("hess", [1.0], params)


def test_a_double_precision_state_keeps_its_digits():
    """With float64 parameters the numbers of the state are float64 too."""
    with jax.enable_x64(True):
        state = blr.gblr(0.1, ess=3.0, alpha=0.8).init(jnp.ones(2, jnp.float64))
        assert state.alpha.dtype == state.hess.dtype == jnp.float64 and state.alpha == 0.8
        state = blr.gblr(0.1, ess=3.0, alpha=0.8).init(jnp.ones(2, jnp.float32))
        assert state.alpha.dtype == state.reference.dtype == state.hess.dtype == jnp.float32
