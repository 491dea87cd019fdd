"""Low-rank perturbations at the layers: no perturbed copy of a weight is made."""

import jax
import jax.numpy as jnp

from jaxkit import _numerics
from jaxkit.zo import _tap_layout, _tap_plan, _tap_run


def low_rank_loss(loss_fn, draw, factors):
    """Returns the loss at ``params + scale * u`` as a function that does not form that tree.

    ``factors(key, like)`` returns A ``[..., r]`` and B ``[n, r]`` of a leaf ``[..., n]`` with
    ``u = A B'``, and ``draw(key, leaf_index, like, basis)`` returns u itself, for leaves that
    are used in another way than by dense layers, convolutions and lookups of rows.

    The function is ``(params, scale, key, basis, *args) -> output of loss_fn``; leaf i draws
    with ``fold_in(key, i)``.
    """

    def loss(params, scale, key, basis, *args):
        plan = _tap_plan.plan(loss_fn, params, args)
        leaves, treedef = jax.tree.flatten(params)
        keys = [jax.random.fold_in(key, i) for i in range(len(leaves))]
        added = _adders(plan)
        pairs = {i: factors(keys[i], leaves[i]) for i in range(len(leaves)) if i not in added[None]}

        def perturbed(i, x):
            if i in pairs:
                return x
            u = draw(keys[i], i, x, basis)
            return (x.astype(u.dtype) + jnp.asarray(scale, u.dtype) * u).astype(x.dtype)

        def at_site(step, read, y, index):
            add = added.get(step.site.index)
            if add is None:
                return y, {}
            leaf, data, fun = add
            dtype = _numerics.wide(y.dtype)

            def change(*args):
                return fun(*args).reshape(y.shape).astype(dtype)

            place = jax.typeof(y).sharding
            moved = _tap_run.automatic(change, place, read(data), pairs[leaf], index)
            return (y.astype(dtype) + jnp.asarray(scale, dtype) * moved).astype(y.dtype), {}

        params = treedef.unflatten([perturbed(i, x) for i, x in enumerate(leaves)])
        outs, _ = _tap_run.run(plan, params, args, _tap_run.Visitor(at_site))
        return plan.out_tree.unflatten(outs)

    return loss


def _adders(plan):
    """Returns what changes at each site, and under None the set of the dense leaves.

    A change is ``(leaf, number of the data, function (data, factors, iterations) -> change)``.
    """
    found, dense = {}, set(plan.hidden)
    for site in plan.sites:
        step = site.step
        fun = _RULES.get(site.primitive, lambda *_: None)(plan, site, step)
        if fun is None:
            dense |= site.leaves
        else:
            (leaf,) = site.leaves
            found[site.index] = leaf, step.ins[1] if site.kernel is None else site.reads[1], fun
    used = frozenset().union(*(site.leaves for site in plan.sites))
    dense |= {i for i, t in enumerate(plan.types) if t.ndim < 2 or i not in used}
    return {s: add for s, add in found.items() if add[0] not in dense} | {None: dense}


def _dot(plan, site, step):
    """Returns the rule of a dense layer: one factor after the other."""
    kernel = site.kernel
    if kernel is None:
        return None
    eqn, last = step.eqn, len(plan.types[kernel.leaf].shape) - 1

    def change(x, pair, index):
        x = _tap_layout.dot_rows(kernel, eqn, x).astype(pair[0].dtype)
        x = x.reshape(*_sizes(kernel.stacked), x.shape[1], *_sizes(kernel.contracted))
        left, right = _factors(kernel, pair, last, index)
        x = x, [*kernel.stacked, "row", *kernel.contracted]
        # The factor that shares contracted atoms with the input comes first.
        first, second = left, right
        if any(a in right[1] for a in kernel.contracted):
            first, second = right, left
        out = [*kernel.stacked, "row", *kernel.free]
        if kernel.position == 0:
            out = [*kernel.stacked, *kernel.free, "row"]
        keep = [a for a in dict.fromkeys(x[1] + first[1]) if a in out + second[1]]
        return _einsum(_einsum(x, first, keep), second, out)[0]

    return change


def _conv(plan, site, step):
    """Returns the rule of a convolution: one with r features a group, then a mixing of them."""
    kernel = site.kernel
    if kernel is None:
        return None
    eqn, last = step.eqn, len(plan.types[kernel.leaf].shape) - 1
    groups = eqn.params["feature_group_count"]
    is_last = [a.axis == last for a in (*kernel.stacked, *kernel.free)]
    is_lead = [a.axis != last for a in (*kernel.contracted, *(a for _, a in kernel.loops))]
    if not all(is_last + is_lead):
        return None
    numbers = eqn.params["dimension_numbers"]
    window = [eqn.invars[1].aval.shape[i] for i in numbers.rhs_spec[1:]]

    def change(x, pair, index):
        left, right = _factors(kernel, pair, last, index)
        weights, rank = _einsum(left, None, ["rank", *kernel.contracted])[0], pair[0].shape[-1]
        weights = jnp.tile(weights.reshape(rank, *window), (groups, *[1] * len(window)))
        weights = jnp.moveaxis(weights, range(weights.ndim), numbers.rhs_spec)
        params = dict(eqn.params, preferred_element_type=None)
        y = jax.lax.conv_general_dilated(x.astype(weights.dtype), weights, **{
            name: params[name] for name in _CONV_PARAMS})  # fmt: skip
        feature = numbers.out_spec[1]
        y = jnp.moveaxis(y, feature, -1)
        mixer = _einsum(right, None, ["rank", *kernel.stacked, *kernel.free])[0]
        mixer = mixer.reshape(rank, groups, -1)
        y = jnp.einsum("...gr,rgo->...go", y.reshape(*y.shape[:-1], groups, rank), mixer)
        return jnp.moveaxis(y.reshape(*y.shape[:-2], -1), -1, feature)

    return change


_CONV_PARAMS = (
    "window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers",
    "feature_group_count", "batch_group_count", "precision", "preferred_element_type",
)  # fmt: skip


def _rows(plan, site, step):
    """Returns the rule of a lookup of rows in a matrix, as of an embedding."""
    params, numbers = step.eqn.params, step.eqn.params["dimension_numbers"]
    (leaf, *others) = site.leaves
    shape, y = plan.types[leaf].shape, site.type
    plain = (
        not others and site.looks_up and len(shape) == 2
        and numbers.collapsed_slice_dims == (0,) and numbers.start_index_map == (0,)
        and numbers.offset_dims == (y.ndim - 1,) and params["slice_sizes"] == (1, shape[1])
    )  # fmt: skip
    if not plain:
        return None

    def change(x, pair, index):
        del index
        left, right = pair
        names = "unique_indices", "indices_are_sorted", "mode", "fill_value"
        rows = jax.lax.gather(left, x, numbers, (1, left.shape[1]), **{k: params[k] for k in names})
        return jnp.einsum("...r,nr->...n", rows, right)

    return change


_RULES = {"dot_general": _dot, "conv_general_dilated": _conv, "gather": _rows}


def _sizes(atoms):
    return [a.size for a in atoms]


def _factors(kernel, pair, last, index):
    """Returns the factors as (array, names of its axes), at this iteration of the loops around."""
    loops = dict((atom, depth) for depth, atom in kernel.loops)
    atoms = _tap_layout.in_leaf_order([*loops, *kernel.stacked, *kernel.contracted, *kernel.free])
    out = []
    for factor, is_right in zip(pair, (False, True), strict=True):
        names = [a for a in atoms if (a.axis == last) == is_right]
        factor = factor.reshape(*_sizes(names), -1)
        for atom in [a for a in names if a in loops]:
            axis = names.index(atom)
            names.remove(atom)
            factor = jax.lax.dynamic_index_in_dim(factor, index[loops[atom]], axis, False)
        out.append((factor, [*names, "rank"]))
    return out


def _einsum(a, b, names):
    """Returns the product of two named arrays, with the axes ``names``."""
    operands = [a] if b is None else [a, b]
    ids = {name: i for i, name in enumerate(dict.fromkeys(n for x in operands for n in x[1]))}
    flat = [y for x, labels in operands for y in (x, [ids[n] for n in labels])]
    return jnp.einsum(*flat, [ids[n] for n in names]), names
