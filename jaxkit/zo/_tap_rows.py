"""Proof, at trace time, that the loss of an example depends on its own rows only.

A value has a label: None if no single example owns it, or ``Rows``, or ``Mixed``. The claim
of a label is about noise alone: an entry with an owner depends on no noise of other owners. So
a value that no noise reaches may have any label, and gets the one that looks natural.
"""

import math
from typing import NamedTuple

from jaxkit.zo import _tap_plan
from jaxkit.zo._tap_program import Kind, is_literal


class Rows(NamedTuple):
    """The owner of an entry is ``(index // inner) % num_rows``, with the index along ``axis``."""

    axis: int
    inner: int


class Mixed(NamedTuple):
    """Examples meet; ``reason`` says in which equation."""

    reason: str


def owners(plan, num_rows):
    """Returns the label of each site by its number, and that of the first output."""
    walk = _Walk(num_rows)
    level = plan.level
    labels = [walk.guess(level.types[x]) if level.kinds[x] == Kind.CLEAN else None
              for x in level.ins]  # fmt: skip
    return walk.found, walk.level(level, labels)[0]


class _Walk:
    def __init__(self, num_rows):
        self.num_rows, self.found = num_rows, {}

    def guess(self, aval):
        return Rows(0, 1) if aval.ndim and aval.shape[0] == self.num_rows else None

    def level(self, level, labels):
        """Returns the labels of the outputs of a level from those of its inputs."""
        env = dict(zip(level.ins, labels, strict=True))
        for x in level.consts:
            env[x] = self.guess(level.types[x]) if level.kinds[x] == Kind.CLEAN else None

        def read(x):
            return None if is_literal(x) else env[x]

        for step in level.steps:
            env.update(zip(step.outs, self.step(level, step, read), strict=True))
            if step.site is not None:
                self.found[step.site.index] = env[step.outs[0]]
        return [read(x) for x in level.outs]

    def step(self, level, step, read):
        """Returns the labels of the outputs of one step."""
        if step.kind <= Kind.PARAMS:
            return [None] * len(step.outs)
        labels = [read(x) for x in step.ins]
        types = [level.type(x) for x in step.ins], [level.types[x] for x in step.outs]
        kinds = [level.kind(x) for x in step.ins]
        out = self.outputs(step, labels, types, kinds)
        if step.kind == Kind.CLEAN:
            pairs = zip(out, types[1], strict=True)
            return [self.guess(t) if isinstance(x, Mixed) else x for x, t in pairs]
        if any(isinstance(x, Mixed) for x in out):
            # No noise reaches clean operands, so they may also be said to have no owner.
            labels = [
                x if kind == Kind.NOISY else None for x, kind in zip(labels, kinds, strict=True)
            ]
            out = self.outputs(step, labels, types, kinds)
        return out

    def outputs(self, step, labels, types, kinds):
        """Returns the labels of the outputs by the rule of the primitive."""
        mixed = next((x for x in labels if isinstance(x, Mixed)), None)
        if mixed is not None or not any(labels):
            return [mixed] * len(step.outs)
        if step.eqn is None:
            return labels
        if step.name in _LOOPS:
            return _LOOPS[step.name](self, step, labels, kinds)
        jaxpr = _tap_plan.inner(step.eqn)
        if jaxpr is not None:
            return self.level(_tap_plan.opaque(jaxpr, kinds, step.source), labels)
        if step.name == "optimization_barrier":
            return labels
        rule = _RULES.get(step.name)
        out = rule and rule(step.eqn.params, labels, *types, self.num_rows)
        if not out:
            hint = "; use jnp.take_along_axis" if step.name == "gather" else ""
            out = Mixed(f"{step.name} at {step.source}{hint}")
        return [out] * len(step.outs)

    def bodies(self, step, jaxprs, kinds):
        """Returns the levels of the bodies of a loop, whether params enter it or not."""
        return step.bodies or [_tap_plan.opaque(x, kinds, step.source) for x in jaxprs]

    def fixed_point(self, step, body, before, carry, after):
        """Returns the labels of the outputs of a body once those of the carry are stable."""
        while True:
            out = self.level(body, [*before, *carry, *after])
            joined = [_join(a, b, step) for a, b in zip(carry, out, strict=False)]
            if joined == carry:
                return out
            carry = joined

    def scan(self, step, labels, kinds):
        consts, carry, xs = _tap_plan.split_scan(step.eqn, labels)
        if any(x and x.axis == 0 for x in xs):
            return [Mixed(f"scan over the examples at {step.source}")] * len(step.outs)
        # What a carry depends on may grow from one iteration to the next.
        split = _tap_plan.split_scan(step.eqn, kinds)
        kinds = [*split[0], *[max(kinds)] * len(carry), *split[2]]
        (body,) = self.bodies(step, [step.eqn.params["jaxpr"]], kinds)
        xs = [x and x._replace(axis=x.axis - 1) for x in xs]
        out = self.fixed_point(step, body, consts, carry, xs)
        stacked = [x._replace(axis=x.axis + 1) if isinstance(x, Rows) else x for x in out]
        return out[: len(carry)] + stacked[len(carry) :]

    def cond(self, step, labels, kinds):
        # A predicate is a scalar: no example owns it, and a mixed one does not come here.
        bodies = self.bodies(step, step.eqn.params["branches"], kinds[1:])
        first, *others = [self.level(body, labels[1:]) for body in bodies]
        for other in others:
            first = [_join(a, b, step) for a, b in zip(first, other, strict=True)]
        return first

    def while_(self, step, labels, kinds):
        params = step.eqn.params
        skip, num = params["cond_nconsts"], params["body_nconsts"]
        split = skip + num
        carried = [max(kinds)] * (len(kinds) - split)
        (body,) = self.bodies(step, [params["body_jaxpr"]], [*kinds[skip:split], *carried])
        out = self.fixed_point(step, body, labels[skip:split], labels[split:], [])
        predicate = _tap_plan.opaque(params["cond_jaxpr"], [*kinds[:skip], *carried], step.source)
        (is_on,) = self.level(predicate, [*labels[:skip], *out])
        return [is_on] * len(out) if isinstance(is_on, Mixed) else out


_LOOPS = {"scan": _Walk.scan, "cond": _Walk.cond, "while": _Walk.while_}


def _join(a, b, step):
    """Returns the label of a value that is one of two."""
    if isinstance(a, Mixed) or b is None or a == b:
        return a
    if isinstance(b, Mixed) or a is None:
        return b
    return Mixed(f"{step.name} at {step.source}")


# Rules, by primitive: (params, labels, types of inputs, types of outputs, number of rows) -> label
# of every output, or None (Mixed) if examples meet. At least one label is not None.


def _same(labels):
    """Returns the one label that is given, if no two differ."""
    rows = {x for x in labels if x is not None}
    return rows.pop() if len(rows) == 1 else None


def _elementwise(params, labels, ins, outs, num_rows):
    rows = _same(labels)
    if rows is None:
        return None
    # Some primitives repeat an operand of size one by themselves.
    owned = [t.shape[rows.axis] for t, x in zip(ins, labels, strict=True) if x]
    return rows if set(owned) == {outs[0].shape[rows.axis]} else None


def _along(*names):
    """Returns the rule of what works along axes, and keeps the others."""

    def rule(params, labels, ins, outs, num_rows):
        rows = _same(labels)
        axes = next((params[name] for name in names if name in params), ins[0].ndim - 1)
        axes = (axes,) if isinstance(axes, int) else axes
        return rows if rows and rows.axis not in axes else None

    return rule


def _reduce(params, labels, ins, outs, num_rows):
    rows, axes = _same(labels), params.get("axes", params.get("dimensions"))
    if not rows or rows.axis in axes:
        return None
    return rows._replace(axis=rows.axis - sum(a < rows.axis for a in axes))


def _transpose(params, labels, ins, outs, num_rows):
    return labels[0]._replace(axis=params["permutation"].index(labels[0].axis))


def _broadcast(params, labels, ins, outs, num_rows):
    axis = labels[0].axis
    out = params["broadcast_dimensions"][axis]
    fits = ins[0].shape[axis] == outs[0].shape[out]
    return labels[0]._replace(axis=out) if fits else None


def _reshape(params, labels, ins, outs, num_rows):
    # The owner is a digit of the flat index: (flat // stride) % num_rows.
    rows, shape = labels[0], ins[0].shape
    stride = rows.inner * math.prod(shape[rows.axis + 1 :])
    for axis, size in enumerate(outs[0].shape):
        after = math.prod(outs[0].shape[axis + 1 :])
        if stride % after == 0 and (after * size) % (stride * num_rows) == 0:
            return Rows(axis, stride // after)
    return None


def _slice(params, labels, ins, outs, num_rows):
    rows, strides = labels[0], params["strides"]
    period = rows.inner * num_rows
    if strides is not None and strides[rows.axis] != 1:
        return None
    return rows if params["start_indices"][rows.axis] % period == 0 else None


def _dynamic_slice(params, labels, ins, outs, num_rows):
    rows = labels[0]
    if rows is None or any(labels[1:]):
        return None
    return rows if ins[0].shape[rows.axis] == outs[0].shape[rows.axis] else None


def _dynamic_update_slice(params, labels, ins, outs, num_rows):
    rows = _same(labels[:2])
    if rows is None or any(labels[2:]):
        return None
    return rows if ins[0].shape[rows.axis] == ins[1].shape[rows.axis] else None


def _concatenate(params, labels, ins, outs, num_rows):
    rows = _same(labels)
    if rows and rows.axis == params["dimension"]:
        whole = all(t.shape[rows.axis] % (rows.inner * num_rows) == 0 for t in ins)
        return rows if whole else None
    return rows


def _stack(params, labels, ins, outs, num_rows):
    rows = _same(labels)
    return rows and rows._replace(axis=rows.axis + (params["axis"] <= rows.axis))


def _unstack(params, labels, ins, outs, num_rows):
    rows = labels[0]
    if rows.axis == params["axis"]:
        return None
    return rows._replace(axis=rows.axis - (params["axis"] < rows.axis))


def _pad(params, labels, ins, outs, num_rows):
    rows = _same(labels)
    return rows if rows and not any(params["padding_config"][rows.axis]) else None


def _window(params, labels, ins, outs, num_rows):
    rows = _same(labels)
    if rows is None:
        return None
    names = "window_dimensions", "window_strides", "base_dilation", "window_dilation"
    sizes = {params[name][rows.axis] for name in names if name in params}
    return rows if sizes == {1} and not any(params["padding"][rows.axis]) else None


def _dot(params, labels, ins, outs, num_rows):
    contract, batch = params["dimension_numbers"]
    found = []
    for i, rows in enumerate(labels):
        if rows is None:
            continue
        if rows.axis in batch[i]:
            found.append(rows._replace(axis=batch[i].index(rows.axis)))
        elif rows.axis in contract[i] or labels[1 - i] is not None:
            return None
        else:
            inside = [*batch[i], *contract[i]]
            axis = len(batch[i]) + rows.axis - sum(a < rows.axis for a in inside)
            if i:  # behind the free axes of the other operand
                axis += ins[0].ndim - len(batch[0]) - len(contract[0])
            found.append(rows._replace(axis=axis))
    return _same(found)


def _conv(params, labels, ins, outs, num_rows):
    rows, numbers = labels[0], params["dimension_numbers"]
    if rows is None or labels[1] is not None or params["batch_group_count"] != 1:
        return None
    return rows._replace(axis=numbers.out_spec[0]) if rows.axis == numbers.lhs_spec[0] else None


def _gather(params, labels, ins, outs, num_rows):
    numbers, (data, indices) = params["dimension_numbers"], labels
    batch_out = [i for i in range(outs[0].ndim) if i not in numbers.offset_dims]
    found = []
    if indices:
        if indices.axis == ins[1].ndim - 1:
            return None
        found.append(indices._replace(axis=batch_out[indices.axis]))
    if data:
        batched, gone = numbers.operand_batching_dims, numbers.collapsed_slice_dims
        if data.axis in batched:
            axis = numbers.start_indices_batching_dims[batched.index(data.axis)]
            found.append(data._replace(axis=batch_out[axis]))
        elif data.axis not in gone and params["slice_sizes"][data.axis] == ins[0].shape[data.axis]:
            kept = [i for i in range(ins[0].ndim) if i not in gone and i not in batched]
            found.append(data._replace(axis=numbers.offset_dims[kept.index(data.axis)]))
        else:
            return None
    return _same(found)


_ELEMENTWISE = (
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e "
    "bitcast_convert_type cbrt ceil clamp convert_element_type copy cos cosh digamma div eq "
    "erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac imag integer_pow is_finite le "
    "lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma population_count "
    "pow real reduce_precision regularized_incomplete_beta rem round rsqrt select_n "
    "shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square "
    "stop_gradient sub tan tanh xor"
)
_RULES = (
    dict.fromkeys(_ELEMENTWISE.split(), _elementwise)
    | dict.fromkeys(
        "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or reduce_xor argmax "
        "argmin squeeze".split(),
        _reduce,
    )
    | dict.fromkeys("cumsum cumprod cummax cummin cumlogsumexp split top_k".split(), _along("axis"))
    | dict.fromkeys(
        "reduce_window reduce_window_sum reduce_window_max reduce_window_min".split(), _window
    )
    | {
        "broadcast_in_dim": _broadcast,
        "concatenate": _concatenate,
        "conv_general_dilated": _conv,
        "dot_general": _dot,
        "dynamic_slice": _dynamic_slice,
        "dynamic_update_slice": _dynamic_update_slice,
        "gather": _gather,
        "pad": _pad,
        "reshape": _reshape,
        "rev": _along("dimensions"),
        "slice": _slice,
        "sort": _along("dimension"),
        "stack": _stack,
        "transpose": _transpose,
        "unstack": _unstack,
    }
)
