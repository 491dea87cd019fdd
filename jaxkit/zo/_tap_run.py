"""Interpreter of a plan: evaluates the loss, and lets a visitor act at every site."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jaxkit import _estimator, _numerics
from jaxkit.zo import _tap_plan
from jaxkit.zo._tap_program import Kind, is_literal


class Visitor(NamedTuple):
    """What happens at a site.

    ``at_site(step, read, y, index) -> (y, {value number: contribution})``: ``read`` takes the
    number of a value of the level, ``index`` is the tuple of the numbers of the iterations around.
    Contributions to an input of a level are joined by ``add``, for which zeros are neutral; over
    the iterations of a loop they are joined if the input is the same in all, stacked if it is
    scanned. With ``pull`` they are cotangents of params-only values, and are pulled back; without,
    they go to the input that the value is a view of.
    A visitor without ``add`` contributes nothing.
    """

    at_site: Callable
    add: Callable | None = None
    pull: bool = False


def run(plan, params, args, visitor):
    """Returns the output of the traced function, flat, and the contribution to each leaf."""
    flat = [*jax.tree.leaves(params), *jax.tree.leaves(args)]
    return _level(plan.level, flat, visitor, ())


def evaluate(plan, params, args):
    """Returns the output of the traced function."""
    outs, _ = run(plan, params, args, Visitor(lambda step, read, y, index: (y, {})))
    return plan.out_tree.unflatten(outs)


def automatic(fun, out_shardings, *args):
    """Returns ``fun(*args)``; in an Explicit mesh the compiler places what is inside."""
    if all(kind != AxisType.Explicit for kind in jax.sharding.get_abstract_mesh().axis_types):
        return fun(*args)
    return jax.sharding.auto_axes(fun, out_sharding=out_shardings)(*args)


def pull_back(site, read, cotangent):
    """Returns the cotangents of the params-only values that enter the equations of a site."""

    def apply(values):
        env = dict(values)
        for s in site.group:
            ins = [env[x] if not is_literal(x) and x in env else read(x) for x in s.ins]
            env.update(zip(s.outs, _bind(s.eqn, ins), strict=True))
        return env[site.group[-1].outs[0]]

    _, pull = jax.vjp(apply, {x: read(x) for x in site.params})
    return pull(cotangent)[0]


def _level(level, ins, visitor, index):
    """Evaluates a level; returns its outputs, and the contributions to its inputs by position."""
    env = dict(zip(level.ins, ins, strict=True)) | level.consts

    def read(x):
        return x.val if is_literal(x) else env[x]

    def bind(steps):
        for step in steps:
            env.update(zip(step.outs, _bind(step.eqn, map(read, step.ins)), strict=True))

    bind(s for s in level.steps if s.kind == Kind.CONST)
    of_params = [s for s in level.steps if s.kind == Kind.PARAMS]
    leaves = {x: env[x] for x in level.ins if level.kinds[x] == Kind.PARAMS}
    cotangents, pull = {}, None
    if visitor.pull:

        def before(values):
            env.update(values)
            bind(of_params)
            known = {x: env[x] for x in level.params}
            floats = {x: v for x, v in known.items() if jnp.issubdtype(v.dtype, jnp.floating)}
            return floats, {x: v for x, v in known.items() if x not in floats}

        floats, pull, rest = jax.vjp(before, leaves, has_aux=True)
        env.update(floats)
        env.update(rest)
        cotangents = {x: jnp.zeros_like(v, _numerics.wide(v.dtype)) for x, v in floats.items()}
    else:
        bind(of_params)

    def add(contributions):
        for x, value in contributions.items():
            if visitor.pull:
                value = value.astype(cotangents[x].dtype)
            else:
                x = level.params[x].source
            cotangents[x] = visitor.add(cotangents[x], value) if x in cotangents else value

    for step in level.steps:
        if step.kind <= Kind.PARAMS:
            continue
        ins = [read(x) for x in step.ins]
        if step.bodies:
            outs, contributions = _LOOPS[step.name](step, ins, visitor, index)
            add({step.ins[i]: value for i, value in contributions.items()})
        else:
            outs = _bind(step.eqn, ins)
            if step.site is not None:
                outs[0], contributions = visitor.at_site(step, read, outs[0], index)
                add(contributions)
        env.update(zip(step.outs, outs, strict=True))
    if visitor.pull:
        (cotangents,) = pull({x: cotangents[x].astype(floats[x].dtype) for x in floats})
    found = {i: cotangents[x] for i, x in enumerate(level.ins) if x in cotangents}
    return [read(x) for x in level.outs], found


def _bind(eqn, ins):
    """Returns the list of outputs of one equation; no equation is the identity."""
    if eqn is None:
        return list(ins)
    with eqn.ctx.manager:
        outs = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
    return list(outs) if eqn.primitive.multiple_results else [outs]


def _scan(step, ins, visitor, index):
    consts, init, xs = _tap_plan.split_scan(step.eqn, ins)
    num_shared, num_carry = len(consts), len(init)
    (body,), params = step.bodies, step.eqn.params

    def iterate(carry, x):
        (values, totals), (i, xs) = carry, x
        outs, found = _level(body, [*consts, *values, *xs], visitor, (*index, i))
        shared = {p: found.pop(p) for p in list(found) if p < num_shared}
        return (outs[:num_carry], _total(visitor, totals, shared)), (outs[num_carry:], found)

    def shared(init, xs):
        values, (i, xs) = init, jax.tree.map(lambda x: x[0], xs)
        _, found = _level(body, [*consts, *values, *xs], visitor, (*index, i))
        return {p: value for p, value in found.items() if p < num_shared}

    xs = jnp.arange(params["length"]), xs
    carry = init, _zeros(visitor, shared, init, xs)
    (values, totals), (ys, found) = jax.lax.scan(
        iterate, carry, xs, params["length"], params["reverse"], params["unroll"]
    )
    return [*values, *ys], found | totals


def _cond(step, ins, visitor, index):
    which, *ins = ins

    def branch(body):
        return lambda *ins: _level(body, ins, visitor, index)

    outs, found = jax.lax.switch(which, [branch(body) for body in step.bodies], *ins)
    return outs, {i + 1: value for i, value in found.items()}


def _while(step, ins, visitor, index):
    (body,), params = step.bodies, step.eqn.params
    skip, num = params["cond_nconsts"], params["body_nconsts"]
    cond_consts, consts, init = ins[:skip], ins[skip : skip + num], ins[skip + num :]
    cond = _tap_plan.opaque(params["cond_jaxpr"], [Kind.CLEAN] * (skip + len(init)))

    def is_on(carry):
        return _level(cond, [*cond_consts, *carry[1]], visitor, ())[0][0]

    def found_in(i, values):
        return _level(body, [*consts, *values], visitor, (*index, i))

    def iterate(carry):
        i, values, totals = carry
        outs, found = found_in(i, values)
        return i + 1, outs, _total(visitor, totals, found)

    start = jnp.zeros([], jnp.int32)
    totals = _zeros(visitor, lambda i, values: found_in(i, values)[1], start, init)
    _, values, totals = jax.lax.while_loop(is_on, iterate, (start, init, totals))
    return values, {i + skip: value for i, value in totals.items()}


_LOOPS = {"scan": _scan, "cond": _cond, "while": _while}


def _zeros(visitor, fun, *args):
    """Returns zeros, in float32 or wider, for the contributions that ``fun`` returns."""
    if visitor.add is None:
        return {}
    return jax.tree.map(
        lambda t: _estimator.zeros_of(t, _numerics.wide(t.dtype)), jax.eval_shape(fun, *args)
    )


def _total(visitor, totals, found):
    """Returns ``totals`` with what one iteration found."""
    if visitor.pull:
        found = {i: found[i].astype(totals[i].dtype) for i in totals}
    return {i: visitor.add(totals[i], found[i]) for i in totals}
