"""The state: a tree of arrays that says itself where the next query lies."""

import jax
import jax.numpy as jnp
import pytest

from jaxkit import denoise

# kind and order, and the fields that are not None.
ALL = {"step", "noise_variance"}
STATES = {
    "order_1": (denoise.ema(0.3), ("line", 1), {"estimate", "gain"}),
    "order_2": (denoise.igt(0.3), ("line", 2), {"estimate", "gain", "taus", "prev_params"}),
    "radius": (
        denoise.denoise(0.3, order=1, trust_radius=1.0),
        ("line", 1),
        {"estimate", "gain", "trust_radius", "prev_params"},
    ),
    "random": (
        denoise.denoise(0.3, taus=(1.0, -0.4), random_node=True),
        ("random", None),
        {"estimate", "gain", "taus", "prev_params"},
    ),
    "disk": (
        denoise.disk(),
        ("disk", None),
        {"estimate", "gain", "probe_length", "prev_params"},
    ),
    "storm": (denoise.storm(0.3), ("storm", None), {"estimate", "gain", "prev_params"}),
    "hvp": (denoise.hvp(0.3), ("hvp", None), {"estimate", "gain", "prev_params"}),
    "auto": (denoise.denoise("auto", order=1), ("auto", 1), {"auto"}),
}


@pytest.mark.parametrize("name", STATES)
def test_a_state_has_the_fields_of_its_kind(name):
    """Others are None; kind and order are static, numbers are float32, or float64 with params."""
    tx, kind, fields = STATES[name]
    state = tx.init({"w": jnp.ones(3)})
    assert (state.kind, state.order) == kind
    found = {path[0].name for path, _ in jax.tree_util.tree_leaves_with_path(state)}
    assert found == ALL | fields
    assert {x.dtype for x in jax.tree.leaves(state)} == {jnp.dtype("int32"), jnp.dtype("float32")}
    with jax.enable_x64(True):
        wide = tx.init({"w": jnp.ones(3, jnp.float64)})
        assert {x.dtype for x in jax.tree.leaves(wide)} <= {
            jnp.dtype("int32"),
            jnp.dtype("float64"),
        }


def test_kinds_are_different_trees():
    """A state of one kind is not taken for that of another, as when a checkpoint is restored."""
    trees = {jax.tree.structure(tx.init(jnp.ones(2))) for tx, _, _ in STATES.values()}
    assert len(trees) == len(STATES)
