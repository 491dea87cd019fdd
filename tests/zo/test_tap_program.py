"""The words in which a program is told: places and names."""

import jax
import jax.numpy as jnp
from zo.tapped import normal

from jaxkit.zo import _tap_plan
from jaxkit.zo._tap_program import Kind, source_line


def test_place_of_a_site_is_primitive_leaves_and_line():
    """The words for messages name all leaves of the equation, by their paths."""

    def loss_fn(p, x):
        return jnp.sum(jnp.where(x > 0, p["a"]["up"], p["b"]))

    plan = _tap_plan.plan(loss_fn, {"a": {"up": normal(3)}, "b": normal(3)}, (normal(3),))
    (site,) = plan.sites
    assert plan.where(site).startswith("select_n with a/up, b at test_tap_program.py:")


def test_line_is_that_of_the_caller_where_jax_keeps_none():
    """An equation that a library has traced before, without the user's line, has its caller's."""
    jnp.sort(normal(4))  # traced here, so that the next use finds it in the cache of jit
    jaxpr = jax.make_jaxpr(lambda x: jnp.sort(x))(normal(4)).jaxpr
    inner = jaxpr.eqns[0].params["jaxpr"].jaxpr.eqns[0]
    assert source_line(inner, "here.py:1") in ("here.py:1", source_line(inner))
    assert source_line(jaxpr.eqns[0]).startswith("test_tap_program.py:")


def test_kinds_rise_with_what_a_value_depends_on():
    """Constants, parameters, data and both: each equation has the highest kind of its inputs."""

    def loss_fn(w, x):
        first = jnp.arange(3.0) * 2
        second = w * first
        third = x + first
        return jnp.sum(second * third)

    plan = _tap_plan.plan(loss_fn, normal(3), (normal(3),))
    kinds = {step.name: step.kind for step in plan.level.steps if step.name != "mul"}
    assert kinds == {"iota": Kind.CONST, "add": Kind.CLEAN, "reduce_sum": Kind.NOISY}
    assert [s.kind for s in plan.level.steps if s.name == "mul"] == [
        Kind.CONST,
        Kind.PARAMS,
        Kind.NOISY,
    ]
