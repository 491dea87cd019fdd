"""The static pass: which equations are sites, and whose noise is whose."""

import jax
import jax.numpy as jnp
import pytest
from zo.tapped import PROBLEMS, normal, plan_of

from jaxkit.zo import _tap_plan


def sites_of(loss_fn, params, *args):
    return _tap_plan.plan(loss_fn, params, args).sites


def noisy(sites):
    """Returns the equations of each site that has noise of its own."""
    return [[step.name for step in site.group] for site in sites if site.group]


def test_bias_shares_the_noise_of_its_layer():
    """A bias added to an output that nobody else reads moves the noise behind itself."""

    def loss_fn(p, x):
        y = (x @ p["w"]).reshape(4, 2, 3).astype(jnp.bfloat16).astype(jnp.float32)
        return jnp.sum((y + p["b"][None]) * p["s"][None])

    params = {"w": normal(5, 6), "b": normal(2, 3), "s": normal(2, 3)}
    sites = sites_of(loss_fn, params, normal(4, 5))
    names = ["dot_general", "reshape", "convert_element_type", "convert_element_type", "add"]
    assert noisy(sites) == [names, ["mul"]]
    assert len(sites[1].params) == 2


def test_bias_has_its_own_noise_if_the_output_is_read_twice():
    """An output with another reader keeps its noise, and so does one that is returned."""

    def twice(p, x):
        y = x @ p["w"]
        return jnp.sum((y + p["b"][None]) * y)

    def returned(p, x):
        y = x @ p["w"]
        return jnp.sum(y + p["b"][None]), y

    params = {"w": normal(5, 6), "b": normal(6)}
    for loss_fn in twice, returned:
        assert noisy(sites_of(loss_fn, params, normal(4, 5))) == [["dot_general"], ["add"]]


def test_params_alone_make_no_site():
    """Casts, products with constants, and norms of weights belong to the weights."""

    def loss_fn(w, x, scale):
        w = 2 * scale * w.astype(jnp.float32) * jnp.arange(3.0)
        return jnp.sum(x * (w / jnp.linalg.norm(w)))

    sites = sites_of(loss_fn, normal(3).astype(jnp.bfloat16), normal(3), jnp.float32(0.5))
    assert noisy(sites) == [["mul"]]


def test_output_that_is_no_number_has_no_noise():
    """A comparison of data with weights is no site; its leaf counts as used elsewhere."""
    plan = _tap_plan.plan(lambda w, x: jnp.sum(jnp.where(x > w, x, 0)), normal(3), (normal(3),))
    assert plan.sites == []
    assert plan.hidden == {0}


def test_function_that_runs_twice_has_two_sites():
    """Two calls of one jitted function are two sites."""
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))
    sites = sites_of(lambda w, x: jnp.sum(layer(w, layer(w, x))), normal(3, 3), normal(2, 3))
    assert noisy(sites) == [["dot_general"], ["dot_general"]]


@pytest.mark.parametrize("name", PROBLEMS)
def test_numbers_of_sites_are_unique(name):
    """Sites count up, also where the kinds of a carry took several passes to settle."""
    plan, _, _ = plan_of(name)
    assert [site.index for site in plan.sites] == list(range(len(plan.sites)))


def test_leaf_that_enters_or_leaves_a_loop_is_a_site_there():
    """A learned start, and a leaf that a branch returns as it is, get noise of their own."""
    plan, _, _ = plan_of("recurrent")
    assert "broadcast_in_dim" not in [site.primitive for site in plan.sites]
    assert plan.sites[0].primitive == "scan carry"
    plan, _, _ = plan_of("branches")
    outputs = [site for site in plan.sites if site.primitive == "cond output"]
    assert [plan.names(site) for site in outputs] == [("d",), ("d",)]
    assert outputs[0].loops == ("cond",)


def test_kind_of_a_counter_survives_the_loop():
    """A weight that is looked up by the number of the iteration stays a weight."""

    def loss_fn(w, x):
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x @ w[i]), x)

    sites = sites_of(loss_fn, normal(3, 4, 4), normal(2, 4))
    assert noisy(sites) == [["dot_general"]]


def test_first_site_of_a_leaf_says_how_it_is_read():
    """A leaf that is multiplied as it is and as its transpose has the layout of the first use."""
    plan, _, _ = plan_of("tied")
    assert {plan.paths[i]: layout.roles for i, layout in plan.layouts().items()} == {
        "embed": "fc",
        "w": "cf",
    }


def test_complex_output_is_refused():
    """Noise is real: a weight that meets complex data raises, with the line."""
    with pytest.raises(ValueError, match=r"got complex at test_tap_plan.py:\d+"):
        sites_of(lambda w, x: jnp.abs(jax.lax.complex(w, x)), normal(3), normal(3))
