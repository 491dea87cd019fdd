"""Views of leaves, against what JAX makes of numbered entries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit.zo import _tap_layout
from jaxkit.zo._tap_layout import Layout

CHAINS = {
    "transposed": ((4, 6), lambda w: w.T),
    "heads_split": ((4, 6), lambda w: w.reshape(4, 2, 3).transpose(1, 0, 2)),
    "heads_merged": ((2, 3, 4), lambda w: w.transpose(2, 0, 1).reshape(4, 6)),
    "merged_out_of_order": ((2, 3, 4), lambda w: w.transpose(1, 0, 2).reshape(6, 4)),
    "cut_twice": ((12, 2), lambda w: w.reshape(3, 4, 2).reshape(3, 2, 2, 2).reshape(6, 4)),
    "size_one_axes": ((1, 4, 6), lambda w: w[0][:, None, :].astype(jnp.bfloat16)),
    "all_in_one": ((2, 6, 2), lambda w: w.reshape(-1).reshape(4, 6)),
}
GONE = {
    "sliced": ((4, 6), lambda w: w[:2]),
    "scaled": ((4, 6), lambda w: 2 * w),
    "repeated": ((4, 6), lambda w: jnp.broadcast_to(w[None], (2, 4, 6))),
    "not_aligned": ((4, 6), lambda w: w.reshape(3, 8)),
}


def view_after(shape, fun):
    """Follows a view through the equations of ``fun``."""
    jaxpr = jax.make_jaxpr(fun)(jnp.zeros(shape)).jaxpr
    view = _tap_layout.view(0, shape)
    for eqn in jaxpr.eqns:
        if eqn.primitive.name != "convert_element_type":
            view = view and _tap_layout.follow(view, eqn)
    return view


@pytest.mark.parametrize("name", CHAINS)
def test_view_says_where_each_entry_goes(name):
    """The atoms of a view, sorted, cut the leaf so that one transpose makes what JAX made."""
    shape, fun = CHAINS[name]
    view = view_after(shape, fun)
    leaf = jnp.arange(float(np.prod(shape))).reshape(shape)
    want = fun(leaf)
    atoms = [a for dim in view.dims for a in dim]
    sizes = [a.size for a in _tap_layout.in_leaf_order(atoms)]
    order = [_tap_layout.in_leaf_order(atoms).index(a) for a in atoms]
    got = leaf.reshape(sizes).transpose(order).reshape(want.shape)
    np.testing.assert_array_equal(got, want.astype(jnp.float32))


@pytest.mark.parametrize("name", GONE)
def test_view_ends_where_entries_are_not_only_moved(name):
    """A slice, a product, a repetition and a reshape across axes leave no view."""
    assert view_after(*GONE[name]) is None


def test_matrices_hold_the_entries_of_a_leaf():
    """A leaf as a stack of matrices and back: entries by their roles, and nothing lost."""
    layout = Layout((2, 3, 4, 5), "fscc")
    leaf = jnp.arange(120.0).reshape(2, 3, 20)
    matrices = _tap_layout.to_matrices(leaf, layout)
    assert matrices.shape == (3, 20, 2)
    assert matrices[1, 7, 1] == leaf[1, 1, 7]
    np.testing.assert_array_equal(_tap_layout.from_matrices(matrices, layout, leaf.shape), leaf)


def test_loop_takes_the_leading_axis_off():
    """An iteration sees the rest of the leaf; an axis of two atoms cannot be counted through."""
    view = _tap_layout.iterate(_tap_layout.view(0, (3, 4, 6)), 2)
    assert [depth for depth, _ in view.loops] == [2]
    assert len(view.dims) == 2
    assert _tap_layout.iterate(view_after((2, 3, 4), lambda w: w.reshape(6, 4)), 0) is None
