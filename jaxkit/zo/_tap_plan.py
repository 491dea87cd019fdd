"""Static pass over the jaxpr of a loss: what depends on what, and where parameters meet data."""

import jax
import jax.numpy as jnp

from jaxkit import _check, _tree
from jaxkit.zo import _tap_layout
from jaxkit.zo._tap_program import Kind, Level, Param, Plan, Site, Step, is_literal, source_line


def plan(fun, params, args):
    """Traces ``fun(params, *args)`` and returns its ``Plan``."""
    _check.arrays("params", params)
    _check.arrays("args", args)
    closed, out_types = jax.make_jaxpr(fun, return_shape=True)(params, *args)
    paths = [path for path, _ in _tree.leaves_with_paths(params)]
    jaxpr, consts = _open(closed)
    types = [v.aval for v in jaxpr.invars]
    leaves, rest = types[: len(paths)], types[len(paths) :]
    # A batch that the function closes over is data, if no argument can be.
    has_data = any(t.ndim for t in rest)
    kinds = [Kind.PARAMS] * len(leaves)
    kinds += [Kind.CLEAN if t.ndim or _is_key(t) else Kind.CONST for t in rest]
    const_kinds = [
        Kind.CLEAN if v.aval.ndim and not has_data else Kind.CONST for v in jaxpr.constvars
    ]
    views = [Param(frozenset([i]), i, _tap_layout.view(i, t.shape)) for i, t in enumerate(leaves)]
    builder = _Builder(paths)
    level = builder.level(jaxpr, consts, kinds, views, const_kinds)
    hidden = frozenset(builder.hidden).union(*(_leaves(level, [x]) for x in level.outs))
    return Plan(
        level, builder.sites, hidden, paths, leaves, jax.tree.structure(out_types), out_types
    )


def opaque(closed, kinds, around=None):
    """Returns the level of a jaxpr that no params-only value enters."""
    jaxpr, consts = _open(closed)
    return _Builder([]).level(jaxpr, consts, kinds, [], around=around)


def inner(eqn):
    """Returns the jaxpr that a call runs, or None if the equation is no call."""
    return eqn.params[_CALLS[eqn.primitive.name]] if eqn.primitive.name in _CALLS else None


# Primitives that run one jaxpr once: name -> parameter that holds it.
_CALLS = dict.fromkeys(("jit", "pjit", "remat2", "remat", "checkpoint"), "jaxpr") | dict.fromkeys(
    ("custom_jvp_call", "custom_vjp_call", "closed_call", "core_call"), "call_jaxpr"
)
_LOOPS = ("scan", "cond", "while")
_SAME_VIEW = ("convert_element_type", "copy", "optimization_barrier", "reduce_precision")


class _Builder:
    """Builds levels, and numbers the sites in the order of the equations."""

    def __init__(self, paths):
        self.paths, self.sites, self.hidden, self.loops = paths, [], set(), ()

    def level(self, jaxpr, consts, kinds, params, const_kinds=None, around=None):
        """Returns the level of ``jaxpr``; ``params`` describes its params-only inputs in order."""
        level, params = Level(), iter(params)
        for v, kind in zip(jaxpr.invars, kinds, strict=True):
            number = level.new(v.aval, kind)
            if kind == Kind.PARAMS:
                level.params[number] = next(params)._replace(source=number)
            level.ins.append(number)
        env = dict(zip(jaxpr.invars, level.ins, strict=True))
        level.outs = self.inline(level, jaxpr, consts, env, const_kinds, around)
        _share_noise_with_biases(level)
        return level

    def inline(self, level, jaxpr, consts, env, const_kinds=None, around=None):
        """Appends the equations of ``jaxpr``; returns its outputs."""
        const_kinds = const_kinds or [Kind.CONST] * len(consts)
        for v, value, kind in zip(jaxpr.constvars, consts, const_kinds, strict=True):
            env[v] = level.new(v.aval, kind)
            level.consts[env[v]] = value

        def read(v):
            return v if is_literal(v) else env[v]

        for eqn in jaxpr.eqns:
            ins = [read(v) for v in eqn.invars]
            env.update(zip(eqn.outvars, self.equation(level, eqn, ins, around), strict=True))
        return [read(v) for v in jaxpr.outvars]

    def equation(self, level, eqn, ins, around):
        """Appends one equation, or what it calls; returns the numbers of its outputs."""
        name = eqn.primitive.name
        kinds = {level.kind(x) for x in ins}
        mixed = Kind.PARAMS in kinds and max(kinds) > Kind.PARAMS
        source = source_line(eqn, around)
        # Views are followed through jit; other calls of params alone keep their own derivative.
        if name in _CALLS and (mixed or (Kind.PARAMS in kinds and name in ("jit", "pjit"))):
            jaxpr, consts = _open(inner(eqn))
            env = dict(zip(jaxpr.invars, ins, strict=True))
            return self.inline(level, jaxpr, consts, env, around=source)
        if mixed and name in _LOOPS:
            return self.loop(level, eqn, ins, source)
        types = [v.aval for v in eqn.outvars]
        if not mixed:
            kind = max(kinds, default=Kind.CONST)
            param = _follow(level, eqn, ins) if kind == Kind.PARAMS else None
            outs = [level.new(t, kind, param) for t in types]
            level.steps.append(Step(eqn, ins, outs, kind, source))
            return outs
        return self.site(level, eqn, name, ins, types, source)

    def site(self, level, eqn, name, ins, types, source):
        """Appends an equation that is a site, if noise can be added to its output."""
        leaves = _leaves(level, ins)
        if len(types) != 1 and any(_is_float(t) for t in types):
            names = ", ".join(self.paths[leaf] for leaf in sorted(leaves))
            raise ValueError(
                "params must meet data in a primitive with one output, got "
                f"{name} with {len(types)} for {names} at {source}."
            )
        outs = [level.new(t, Kind.NOISY) for t in types]
        step = Step(eqn, ins, outs, Kind.NOISY, source)
        level.steps.append(step)
        if jnp.issubdtype(types[0].dtype, jnp.complexfloating):
            raise ValueError(f"params must meet data in real numbers, got {name} at {source}.")
        if not _is_float(types[0]):
            self.hidden |= leaves
        else:
            params = (x for x in ins if level.kind(x) == Kind.PARAMS and _is_float(level.type(x)))
            step.site = Site(
                len(self.sites), name, source, self.loops, types[0], leaves, frozenset(params), step
            )
            if level.kind(ins[0]) == Kind.PARAMS and (view := level.params[ins[0]].view):
                is_whole = view.dims == _tap_layout.view(view.leaf, level.type(ins[0]).shape).dims
                step.site.looks_up = is_whole and not view.loops
            step.site.group = (step,)
            self.sites.append(step.site)
            if eqn and name in _tap_layout.KERNELS:
                self.kernel(level, step)
        return outs

    def kernel(self, level, step):
        """Notes the kernel of a dense or convolution site, if it views one leaf as a whole."""
        is_param = [level.kind(x) == Kind.PARAMS for x in step.ins]
        if sum(is_param) != 1 or level.params[step.ins[is_param.index(True)]].view is None:
            return
        position = is_param.index(True)
        view = level.params[step.ins[position]].view
        kernel = _tap_layout.KERNELS[step.name](step.eqn.params, position, view)
        if kernel is not None:
            step.site.kernel = kernel
            source = level.params[step.ins[position]].source
            step.site.reads = source, step.ins[1 - position]

    def identity(self, level, value, source, primitive):
        """Returns ``value`` with noise of its own, where it leaves or enters a loop."""
        if level.kind(value) != Kind.PARAMS:
            return value
        return self.site(level, None, primitive, [value], [level.type(value)], source)[0]

    def loop(self, level, eqn, ins, source):
        """Appends a scan, cond or while that params enter, with the levels of its bodies."""
        name = eqn.primitive.name
        decides = ins[:1] if name == "cond" else ins[: eqn.params.get("cond_nconsts", 0)]
        self.hidden |= _leaves(level, decides)
        if name == "cond":
            bodies, (consts, init, rest) = eqn.params["branches"], (ins[1:], [], [])
        elif name == "while":
            skip, num = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
            bodies, rest = [eqn.params["body_jaxpr"]], []
            consts, init = ins[skip : skip + num], ins[skip + num :]
        else:
            bodies = [eqn.params["jaxpr"]]
            consts, init, rest = split_scan(eqn, ins)
        init = [self.identity(level, x, source, f"{name} carry") for x in init]
        first, outside = len(self.sites), self.loops
        size = f"({eqn.params['length']})" if name == "scan" else ""
        self.loops = (*outside, name + size)
        carry = [level.kind(x) for x in init]
        while True:  # until the kinds of the carry no longer rise
            del self.sites[first:]
            kinds = [level.kind(x) for x in consts] + carry + [level.kind(x) for x in rest]
            params = [level.params[x] for x in consts if level.kind(x) == Kind.PARAMS]
            params += [
                level.params[x]._replace(
                    view=_tap_layout.iterate(level.params[x].view, len(outside))
                )
                for x in rest
                if level.kind(x) == Kind.PARAMS
            ]
            built = [self.body(body, kinds, params, source, name) for body in bodies]
            out_kinds = [
                max(kinds)
                for kinds in zip(*([b.kind(x) for x in b.outs] for b in built), strict=True)
            ]
            risen = [max(a, b) for a, b in zip(carry, out_kinds, strict=False)]
            if risen == carry:
                break
            carry = risen
        self.loops = outside
        if name == "cond":
            out_kinds = [max(kind, level.kind(ins[0]), Kind.CLEAN) for kind in out_kinds]
        elif name == "while":  # how often it runs may depend on anything
            out_kinds = [Kind.NOISY] * len(out_kinds)
        outs = [level.new(v.aval, k) for v, k in zip(eqn.outvars, out_kinds, strict=True)]
        ins = ins[: len(ins) - len(init) - len(rest)] + init + rest
        level.steps.append(Step(eqn, ins, outs, Kind.NOISY, source, bodies=tuple(built)))
        return outs

    def body(self, closed, kinds, params, source, name):
        """Returns the level of a body, whose outputs are never params-only."""
        jaxpr, consts = _open(closed)
        level = self.level(jaxpr, consts, kinds, params, around=source)
        level.outs = [self.identity(level, x, source, f"{name} output") for x in level.outs]
        return level


def split_scan(eqn, ins):
    """Returns the constants, the carry and the scanned inputs of a scan."""
    # The newest jax has no counts; an input that is scanned has one axis more than in the body.
    jaxpr, _ = _open(eqn.params["jaxpr"])
    scanned = [v.aval.ndim != x.aval.ndim for v, x in zip(eqn.invars, jaxpr.invars, strict=True)]
    num_scanned = sum(scanned)
    stacked = [v.aval.ndim != x.aval.ndim for v, x in zip(eqn.outvars, jaxpr.outvars, strict=True)]
    num_carry = len(stacked) - sum(stacked)
    num_consts = len(ins) - num_scanned - num_carry
    cut = num_consts + num_carry
    return ins[:num_consts], ins[num_consts:cut], ins[cut:]


def _open(closed):
    """Returns the jaxpr and its constants; some versions of jax have one class for both."""
    return getattr(closed, "jaxpr", closed), getattr(closed, "consts", ())


def _is_float(aval):
    return jnp.issubdtype(aval.dtype, jnp.floating)


def _is_key(aval):
    return jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


def _leaves(level, ins):
    found = [level.params[x].leaves for x in ins if level.kind(x) == Kind.PARAMS]
    return frozenset().union(*found)


def _follow(level, eqn, ins):
    """Returns what is known of a value that is computed from params alone."""
    leaves = _leaves(level, ins)
    first = level.params.get(ins[0]) if not is_literal(ins[0]) else None
    if first is None or first.view is None or len(eqn.outvars) != 1:
        return Param(leaves)
    if eqn.primitive.name in _SAME_VIEW:
        return first
    view = _tap_layout.follow(first.view, eqn)
    return Param(leaves) if view is None else first._replace(view=view)


def _share_noise_with_biases(level):
    """Moves the noise of a site to the bias that is added to its output and used by nobody else."""
    uses = {}
    for reader in [*level.steps, level]:
        for x in reader.ins if reader is not level else level.outs:
            if not is_literal(x):
                uses.setdefault(x, []).append(reader)
    for step in level.steps:
        if step.site is None or not step.eqn:
            continue
        chain, last = [step], step
        while len(uses.get(last.outs[0], ())) == 1:
            last = uses[last.outs[0]][0]
            if last is level or last.bodies:
                break
            chain.append(last)
            if last.site is not None:
                # A sum of two params-only values cannot be here, so the other one is the bias.
                if last.name == "add" and len(last.ins) == 2:
                    last.site.group = step.site.group + tuple(chain[1:])
                    last.site.params |= step.site.params
                    step.site.group = ()
                break
            if last.name not in ("reshape", "squeeze", "transpose", "convert_element_type"):
                break
