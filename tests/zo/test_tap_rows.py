"""Labels of rows, against the derivatives of small functions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from zo.tapped import normal

from jaxkit.zo import _tap_plan, _tap_rows
from jaxkit.zo._tap_rows import Mixed, Rows

B, T, D = 3, 4, 6
SMALL = normal(D, 2)


def attend(x):
    q = x.reshape(B, T, 2, 3)
    return jax.nn.dot_product_attention(q, q, q).reshape(B, T, D)


def over_time(step):
    return lambda x: jax.lax.scan(step, jnp.zeros((B, D)), jnp.swapaxes(x, 0, 1))[1]


def conv(x):
    return jax.lax.conv_general_dilated(
        x, normal(D, D, 2), (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")
    )


def pool(x):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 1), (1, 2, 1), "VALID")


def while_(x):
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.sin(c[1])), (0, x))[1]


def updated(x):
    return jax.lax.dynamic_update_slice(x, 2 * x[:, :1], (0, 2, 0))


def inner_call(x):
    return jax.jit(lambda x: jax.checkpoint(jax.nn.relu)(x) * jax.nn.logsumexp(x, -1)[..., None])(x)


PICKS = jnp.array([[[1], [0], [3], [2]]] * B)
KEPT = {
    "elementwise": lambda x: jnp.where(x > 0, jnp.sin(x), 2 * x) + x**2,
    "normalized": lambda x: (
        (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var((1, 2)))[:, None, None]
    ),
    "merged": lambda x: jnp.tanh(x.reshape(B * T, D)),
    "merged_time_first": lambda x: jnp.tanh(jnp.swapaxes(x, 0, 1).reshape(T * B, D)),
    "merged_and_split": lambda x: jnp.swapaxes(x, 0, 1).reshape(T * B, D).reshape(2, 2, B, 3, 2),
    "merged_all": lambda x: x.reshape(-1),
    "merged_inside": lambda x: jnp.transpose(x, (1, 0, 2)).reshape(T, B * D),
    "product": lambda x: jnp.tanh(x @ SMALL),
    "product_left": lambda x: jnp.einsum("de,btd->ebt", SMALL, x),
    "batched_product_left": lambda x: jax.lax.dot_general(
        normal(T, D, 2), x, (((1,), (2,)), ((0,), (1,)))
    ),
    "batched_product": lambda x: jnp.einsum("btd,bsd->tsb", x, x),
    "attention": attend,
    "convolution": conv,
    "pooling": pool,
    "cumulated": lambda x: jnp.cumsum(x, 1),
    "sorted": lambda x: jnp.sort(x, 1),
    "top": lambda x: jax.lax.top_k(x, 2)[0],
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 0), (0, 2))),
    "sliced": lambda x: x[:, 1:, ::2],
    "sliced_by_a_number": lambda x: jax.lax.dynamic_slice_in_dim(x, jnp.argmax(SMALL[:, 0]), 2, 1),
    "updated": updated,
    "reversed": lambda x: x[:, ::-1],
    "joined": lambda x: jnp.concatenate([x, 2 * x[:, :1]], 1),
    "joined_on_the_axis_of_rows": lambda x: jnp.concatenate([x, jnp.sin(x)], 0),
    "cut_from_there": lambda x: jnp.concatenate([x, jnp.sin(x)], 0)[B:],
    "stacked": lambda x: jnp.stack([x, -x]),
    "unpacked": lambda x: sum(jnp.sin(row) for row in jnp.moveaxis(x, 1, 0)),
    "split": lambda x: jnp.split(x, 2, 1)[0],
    "repeated": lambda x: jnp.broadcast_to(x[None], (2, B, T, D)),
    "picked_along_an_axis": lambda x: jnp.take_along_axis(x, PICKS, 1),
    "picked_by_all": lambda x: x[:, jnp.array([2, 0])],
    "scan": over_time(lambda h, xt: (jnp.tanh(h + xt), h * xt)),
    "scan_of_constants": lambda x: jax.lax.scan(lambda h, s: (h * s, h), x, jnp.ones(3))[1],
    "cond": lambda x: jax.lax.cond(SMALL[0, 0] > 0, jnp.sin, lambda x: 2 * x, x),
    "while": while_,
    "calls": inner_call,
    "vmap": jax.vmap(lambda x: jnp.dot(x[0], x[1]) * x),
}


def other_order(x):
    return x.reshape(B * T, D) + jnp.swapaxes(x, 0, 1).reshape(B * T, D)


def over_examples(x):
    return jax.lax.scan(lambda h, row: (h + row, h), 0 * SMALL[:T, :1] + jnp.zeros((T, D)), x)[1]


MIXING = {
    "batch_norm": (lambda x: x - x.mean(0, keepdims=True), "reduce_sum"),
    "contrastive": (lambda x: jnp.einsum("btd,cud->bc", x, x), "dot_general"),
    "rolled": (lambda x: jnp.roll(x, 1, 0), "slice"),
    "reversed": (lambda x: x[::-1], "rev"),
    "first_row_for_all": (lambda x: x * x[:1], "mul"),
    "shuffled": (lambda x: x[jnp.array([1, 2, 0])], "gather"),
    "indexed": (lambda x: x[jnp.arange(B), jnp.arange(B)], "gather.*use jnp.take_along_axis"),
    "cut": (lambda x: x[1:], "slice"),
    "regrouped": (lambda x: x.reshape(T, B, D), "reshape"),
    "summed": (lambda x: x.sum(0), "reduce_sum"),
    "other_order": (other_order, "add"),
    "sorted": (lambda x: jnp.sort(x, 0), "sort"),
    "scan_over_examples": (over_examples, "scan over the examples"),
    "cond_on_examples": (lambda x: jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x), "reduce_sum"),
    "while_on_examples": (
        lambda x: jax.lax.while_loop(lambda x: x.max() < 9, lambda x: 2 * x, x),
        "reduce_max",
    ),
    "without_a_rule": (
        lambda x: jnp.linalg.cholesky(jnp.einsum("btd,btc->bdc", x, x)),
        "cholesky",
    ),
}


def label_of(fun):
    """Returns the label of ``fun`` of a site with owners."""
    plan = _tap_plan.plan(lambda p, x: fun(x * p), jnp.ones((1, 1, 1)), (normal(B, T, D),))
    return _tap_rows.owners(plan, B)[1]


def owners(rows, shape):
    index = np.indices(shape)[rows.axis]
    return (index // rows.inner) % B


@pytest.mark.parametrize("name", KEPT)
def test_entries_depend_on_their_owner_only(name):
    """No entry of the output moves with an entry of the input that has another owner."""
    rows = label_of(KEPT[name])
    assert isinstance(rows, Rows), rows
    x = normal(B, T, D)
    moves = np.asarray(jax.jacfwd(KEPT[name])(x))
    out = owners(rows, moves.shape[: moves.ndim - 3])
    other = out[..., None, None, None] != owners(Rows(0, 1), x.shape)
    assert not np.any(moves[other])
    assert np.any(moves)


@pytest.mark.parametrize("name", MIXING)
def test_mixing_of_rows_is_found(name):
    """What mixes examples, or cannot be proved not to, is called mixed, with primitive and line."""
    fun, reason = MIXING[name]
    label = label_of(fun)
    assert isinstance(label, Mixed), label
    assert re.search(f"({reason})", label.reason), label.reason
    assert "test_tap_rows.py:" in label.reason


def test_data_may_be_mixed_before_any_parameter():
    """What no noise reaches is free: features that are rolled and centered over the batch."""

    def loss_fn(w, x):
        x = jnp.roll(x - x.mean(0, keepdims=True), 1, 0)
        return jnp.sum(x @ w, 1)

    plan = _tap_plan.plan(loss_fn, normal(D, 2), (normal(B, D),))
    found, loss = _tap_rows.owners(plan, B)
    assert found == {0: Rows(0, 1)}
    assert loss == Rows(0, 1)


def test_label_of_data_gives_way_to_that_of_noise():
    """A mask over times, as many as examples, is taken for rows at first, and does no harm."""

    def loss_fn(w, x, mask):
        y = jnp.swapaxes(x, 0, 1) @ w
        return jnp.sum(jnp.where(mask[:, None, None], y, 0), (0, 2))

    args = normal(B, B, D), jnp.array([True, False, True])
    plan = _tap_plan.plan(loss_fn, normal(D, 2), args)
    found, loss = _tap_rows.owners(plan, B)
    assert found == {0: Rows(1, 1)}
    assert loss == Rows(0, 1)


def test_what_all_examples_share_has_no_owner():
    """A table of positions that is scaled by data of its own belongs to no example."""

    def loss_fn(w, x, scale):
        return jnp.sum(x * (w * scale)[None], (1, 2))

    plan = _tap_plan.plan(loss_fn, normal(T, D), (normal(B, T, D), normal(T, 1)))
    found, loss = _tap_rows.owners(plan, B)
    assert found == {0: None}
    assert loss == Rows(0, 1)


def test_label_of_a_site_in_a_loop_is_that_of_all_iterations():
    """A carry that starts without an owner gets one once the loop has mixed data into it."""

    def loss_fn(w, x):
        def step(h, xt):
            return jnp.tanh(h * w[None] + xt), None

        h, _ = jax.lax.scan(step, jnp.zeros((B, D)), jnp.swapaxes(x, 0, 1))
        return jnp.sum(h, 1)

    plan = _tap_plan.plan(loss_fn, normal(D), (normal(B, T, D),))
    found, loss = _tap_rows.owners(plan, B)
    assert found == {0: Rows(0, 1)}
    assert loss == Rows(0, 1)
