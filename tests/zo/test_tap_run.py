"""The interpreter: values, and the gradient put together at the sites."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spectral.models import quick_jit
from zo.tapped import PROBLEMS, backprop_by_sites, normal, plan_of, true_gradient

from jaxkit.zo import _tap_plan, _tap_run


def largest_error(got, want):
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    size = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(want))
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in pairs) / size


@pytest.mark.parametrize("name", PROBLEMS)
def test_sites_together_give_the_gradient(name):
    """The slopes at the outputs of the sites, contracted there, are the gradient of backprop."""
    plan, params, args = plan_of(name)
    value, grads = quick_jit(lambda: backprop_by_sites(plan, params, args))()
    want_value, want = true_gradient(name)
    np.testing.assert_allclose(value, want_value, 1e-5)
    assert largest_error(grads, want) < 3e-6
    assert jax.tree.structure(grads) == jax.tree.structure(params)


def looped(p, x):
    """A while loop that runs three times, with a leaf inside and one in the carry."""

    def body(carry):
        i, h = carry
        return i + 1, jnp.tanh(h @ p["w"] + p["b"][None])

    start = jnp.broadcast_to(p["start"], x.shape) + x
    return jnp.mean(jax.lax.while_loop(lambda c: c[0] < 3, body, (0, start))[1] ** 2)


def test_while_loop_sums_over_its_iterations():
    """With unit cotangents at the sites of a while loop each iteration adds its own product."""
    params, x = {"w": normal(4, 4) / 4, "b": normal(4), "start": normal(4)}, normal(3, 4)
    plan = _tap_plan.plan(looped, params, (x,))

    def at_site(step, read, y, index):
        if not (step.site.group and index):
            return y, {}
        return y, _tap_run.pull_back(step.site, read, jnp.ones_like(y))

    visitor = _tap_run.Visitor(at_site, jnp.add, pull=True)
    (value,), found = jax.jit(lambda: _tap_run.run(plan, params, (x,), visitor))()
    np.testing.assert_allclose(value, looped(params, x), 1e-6)
    want, h = np.zeros((4, 4)), np.asarray(x + params["start"][None])
    for _ in range(3):
        want += np.sum(h, 0)[:, None]
        h = np.tanh(h @ np.asarray(params["w"]) + np.asarray(params["b"]))
    np.testing.assert_allclose(found[2], want, 1e-5)  # leaves in order: b, start, w
    np.testing.assert_allclose(found[0], 9 * np.ones(4), 1e-6)


def test_bfloat16_gradient_is_summed_wide_over_a_scan():
    """The sum over 512 iterations of a shared bfloat16 weight does not stall at 256."""

    def loss_fn(w, x):
        return jax.lax.scan(lambda c, xt: (c + jnp.sum(xt * w), None), jnp.bfloat16(0), x)[0]

    args = jnp.ones((1, 4), jnp.bfloat16), jnp.ones((512, 1, 4), jnp.bfloat16)
    plan = _tap_plan.plan(loss_fn, args[0], args[1:])

    def at_site(step, read, y, index):
        return y, _tap_run.pull_back(step.site, read, jnp.ones_like(y))

    visitor = _tap_run.Visitor(at_site, jnp.add, pull=True)
    _, found = _tap_run.run(plan, args[0], args[1:], visitor)
    assert found[0].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found[0].astype(jnp.float32), 512.0)


def test_evaluation_is_that_of_the_function_with_its_aux():
    """Whatever tree the function returns comes back, integers and constants among it."""

    def fun(p, x):
        return jnp.sum(x @ p), {"p": p, "n": jnp.int32(3), "x": (x, None)}

    p, x = normal(3, 2), normal(4, 3)
    got = _tap_run.evaluate(_tap_plan.plan(fun, p, (x,)), p, (x,))
    jax.tree.map(np.testing.assert_array_equal, got, fun(p, x))
    assert jax.tree.structure(got) == jax.tree.structure(fun(p, x))
