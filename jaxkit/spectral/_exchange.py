"""Applies a function of whole matrices to many leaves at once, sharded or not.

Same-shaped matrices go through one batched call. Where leaves are sharded, one ``shard_map``
gives each device whole matrices of its share of a bucket (one all-to-all), calls the function
once, and sends the results back the same way. No device computes anything twice.
"""

import functools
import itertools
import math
from collections import defaultdict
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxkit import _numerics, _tree
from jaxkit.spectral._matrix_spec import MatrixSpec, from_matrices, to_matrices
from jaxkit.spectral._placement import placement

_STACK = MatrixSpec(unit=(1,), feature=(2,), batch=(0,))
_CPU_PIECE = 2**18  # elements of a piece: a few of them fit a core's cache


def map_matrices(fun, xs, specs, *, placements=None, distribute=(), in_place=False, squares=False):
    """Applies ``fun`` to every matrix of every leaf.

    ``fun`` maps ``[..., m, n]`` to the same shape, treats leading axes as a batch, and commutes
    with transposition, so that leaves of either orientation share a bucket.

    Args:
      fun: the function of whole matrices; with ``in_place`` it also takes ``axis_names``, over
        which the columns of a wide matrix are then spread.
      xs: list of arrays.
      specs: list of resolved MatrixSpec, one for each array.
      placements: list of Placement; ``None`` reads the types of ``xs``.
      distribute: mesh axes whose devices share the matrices of leaves that are replicated there.
      in_place: whether ``fun`` can work on columns that stay where they are.
      squares: whether the sums of squares of rows and columns are wanted.

    Returns:
      List of arrays like ``xs``, with the same shapes, dtypes and shardings; and for each of them
      ``{axes: sums of squares over these axes}``, in float32 or wider, with these axes as size 1:
      empty unless they are wanted and come cheaply, from a whole bucket of unsharded matrices.
    """
    if placements is None:
        placements = [placement(x) for x in xs]
    specs = [_as_stored(spec) for spec in specs]
    apart = defaultdict(list)  # by mesh, then by whether a shard_map must be opened
    for i, place in enumerate(placements):
        spread = place.mesh is not None and (
            place.used() or set(distribute) & set(place.mesh.axis_names)
        )
        key = None
        if spread:
            used = place.used() | set(distribute) & set(place.mesh.axis_names)
            key = place.mesh, not used <= place.manual
        apart[key].append(i)
    out, sums = [None] * len(xs), [{}] * len(xs)
    for key, indices in apart.items():
        group = [xs[i] for i in indices]
        group_specs = [specs[i] for i in indices]
        places = [placements[i] for i in indices]
        found = [{}] * len(group)
        if key is None:
            done, found = _map_local(fun, group, group_specs, squares)
        else:
            mesh, open_map = key
            done = _map_sharded(
                fun, group, group_specs, places, mesh, open_map, distribute, in_place
            )
        for i, y, square in zip(indices, done, found, strict=True):
            out[i], sums[i] = y, square
    return out, sums


def _as_stored(spec):
    """Returns the spec of the transposed matrices where these lie in memory as they are."""
    if spec.split is None and spec.interleave == 1 and spec.feature < spec.unit:
        return spec._replace(unit=spec.feature, feature=spec.unit)
    return spec


def _map_local(fun, xs, specs, squares=False):
    """Buckets whole leaves by oriented matrix shape and calls ``fun`` once for each bucket.

    Returns what :func:`map_matrices` does.
    """
    parts = [to_matrices(x, spec) for x, spec in zip(xs, specs, strict=True)]
    flat, buckets = [part for leaf in parts for part in leaf], defaultdict(list)
    for i, part in enumerate(flat):
        # A replicated leaf in one stack with a varying one would come back marked as varying.
        buckets[min(part.shape[-2:]), max(part.shape[-2:]), part.dtype, _tree.varying(part)].append(
            i
        )
    done = [None] * len(flat)  # for each part the result, then its sums of squares
    for (rows, cols, *_), indices in buckets.items():
        stacks = [_orient(flat[i]).reshape(-1, rows, cols) for i in indices]
        stack = jnp.concatenate(stacks) if len(stacks) > 1 else stacks[0]
        results = _call(fun, stack, squares)
        ends = list(itertools.accumulate(len(s) for s in stacks))
        pieces = zip(*(jnp.split(result, ends[:-1]) for result in results), strict=True)
        for i, group in zip(indices, pieces, strict=True):
            batch, swapped = flat[i].shape[:-2], flat[i].shape[-2] > flat[i].shape[-1]
            group = [y.reshape(*batch, *y.shape[-2:]) for y in group]
            done[i] = [y.mT for y in (group[0], *group[:0:-1])] if swapped else group
    rest = iter(done)
    out, sums = [], []
    for leaf, spec, x in zip(parts, specs, xs, strict=True):
        first, *others = zip(*(next(rest) for _ in leaf), strict=True)
        out.append(from_matrices(first, spec, x.shape))
        sums.append({})
        if squares and spec.split is None and spec.interleave == 1:
            for axes, y in zip((spec.unit, spec.feature), others, strict=True):
                shape = [1 if i in axes else size for i, size in enumerate(x.shape)]
                sums[-1][axes] = from_matrices(y, spec, shape)
    return out, sums


def _call(fun, stack, squares=False):
    """Applies ``fun`` to ``[n, rows, cols]``: at once, on a CPU in pieces that fit its cache.

    Returns the result, with ``squares`` also the sums of its squares over rows and over columns.
    """

    def at_once(x):
        if len(x) == 1:  # a batch of one is about twice as slow as no batch on a CPU
            return [y[None] for y in each(x[0])]
        return each(x)

    def each(x):
        y = fun(x)
        if not squares:
            return [y]
        square = jnp.square(y.astype(_numerics.wide(y.dtype)))
        return [y, *(jnp.sum(square, axis, keepdims=True) for axis in (-2, -1))]

    piece = max(1, _CPU_PIECE // math.prod(stack.shape[1:]))
    if piece >= len(stack):
        return at_once(stack)
    by_piece = functools.partial(_by_piece, at_once, piece)
    return jax.lax.platform_dependent(stack, cpu=by_piece, default=at_once)


def _by_piece(fun, piece, stack):
    """Applies ``fun`` to ``piece`` matrices at a time, each result in place of its input.

    Unlike ``jax.lax.map`` this needs no second stack.
    """

    def step(start, size, out):
        new = fun(jax.lax.dynamic_slice_in_dim(out[0], start, size))
        pairs = zip(out, new, strict=True)
        return [jax.lax.dynamic_update_slice_in_dim(x, y, start, 0) for x, y in pairs]

    # Every entry is overwritten; but by these the compiler knows where the results lie.
    out = [stack[:, : y.shape[1], : y.shape[2]].astype(y.dtype) for y in jax.eval_shape(fun, stack)]
    whole = len(stack) // piece * piece
    out = jax.lax.fori_loop(0, len(stack) // piece, lambda i, out: step(i * piece, piece, out), out)
    return out if whole == len(stack) else step(whole, len(stack) - whole, out)


def _orient(x):
    """Transposes tall matrices, so that rows <= columns."""
    return x.mT if x.shape[-2] > x.shape[-1] else x


class _Layout(NamedTuple):
    """How the local shards of a leaf make whole matrices; static.

    Attributes:
      order: axes of the leaf as batch, unit, feature.
      batch: local sizes of the batch axes.
      dims: for each unit and feature axis its local size and the mesh axes that split it.
      num_units: how many of ``dims`` are unit axes.
      spec: of the whole matrices in a bucket, ``_STACK`` unless the leaf is a fused one.
      shape: of one whole matrix in a bucket, oriented unless fused.
      swap: whether it was transposed to be oriented.
    """

    order: tuple[int, ...]
    batch: tuple[int, ...]
    dims: tuple[tuple[int, tuple[str, ...]], ...]
    num_units: int
    spec: MatrixSpec
    shape: tuple[int, ...]
    swap: bool


def _layout(shape, spec, place):
    """Returns the :class:`_Layout` of a leaf whose local shard has ``shape``."""
    matrix_axes = spec.unit + spec.feature
    dims = tuple((shape[axis], place.axes[axis]) for axis in matrix_axes)
    batch = tuple(shape[axis] for axis in spec.batch)
    whole = tuple(size * math.prod(place.mesh.shape[n] for n in names) for size, names in dims)
    num_units = len(spec.unit)
    if spec.split is None and spec.interleave == 1:
        unit, feature = math.prod(whole[:num_units]), math.prod(whole[num_units:])
        shape, kind = (min(unit, feature), max(unit, feature)), _STACK
        swap = unit > feature
    else:  # a fused leaf moves whole and is cut where it is whole
        kind = MatrixSpec(
            unit=tuple(range(1, 1 + num_units)),
            feature=tuple(range(1 + num_units, 1 + len(dims))),
            batch=(0,),
            split=spec.split and (spec.split[0], 1 + matrix_axes.index(spec.split[1])),
            interleave=spec.interleave,
        )
        shape, swap = whole, False
    return _Layout(spec.batch + matrix_axes, batch, dims, num_units, kind, shape, swap)


def _to_shards(x, layout):
    """Flattens a local shard to ``[matrices, elements]``."""
    return x.transpose(layout.order).reshape(math.prod(layout.batch), -1)


def _from_shards(shards, layout):
    """Inverse of :func:`_to_shards`."""
    x = shards.reshape(*layout.batch, *(size for size, _ in layout.dims))
    return x.transpose([layout.order.index(axis) for axis in range(x.ndim)])


def _grid(layout, axes, sizes):
    """Returns shapes and the order that turn ``[devices, elements]`` into a whole matrix."""
    split = (*(sizes[name] for name in axes), *(size for size, _ in layout.dims))
    order, whole = [], []
    for i, (size, names) in enumerate(layout.dims):
        order += [axes.index(name) for name in names] + [len(axes) + i]
        whole.append(size * math.prod(sizes[name] for name in names))
    return split, order, whole


def _assemble(shards, layout, axes, sizes):
    """Makes whole matrices ``[slots, *shape]`` of ``[slots, devices, elements]``."""
    split, order, whole = _grid(layout, axes, sizes)
    slots = len(shards)
    x = shards.reshape(slots, *split).transpose(0, *(1 + i for i in order))
    if layout.spec is not _STACK:
        return x.reshape(slots, *whole)
    n = layout.num_units
    x = x.reshape(slots, math.prod(whole[:n]), math.prod(whole[n:]))
    return x.mT if layout.swap else x


def _take_apart(x, layout, axes, sizes):
    """Inverse of :func:`_assemble`."""
    split, order, _ = _grid(layout, axes, sizes)
    slots = len(x)
    x = x.mT if layout.swap else x
    x = x.reshape(slots, *(split[i] for i in order))
    x = x.transpose(0, *(1 + order.index(i) for i in range(len(order))))
    return x.reshape(slots, math.prod(sizes[name] for name in axes), -1)


def _map_sharded(fun, xs, specs, places, mesh, open_map, distribute, in_place):
    """Runs the exchange over leaves on one mesh, in one ``shard_map`` unless inside one."""
    sizes = dict(mesh.shape)

    def body(*xs):
        buckets = defaultdict(list)
        for i, (x, spec, place) in enumerate(zip(xs, specs, places, strict=True)):
            layout = _layout(x.shape, spec, place)
            # Axes in the order of the mesh: this numbers the devices of an exchange.
            split = {name for _, names in layout.dims for name in names}
            axes = tuple(name for name in mesh.axis_names if name in split)
            # Leaves that vary over other axes must not mix: a replicated one would come back
            # marked as varying.
            # In a shard_map within a shard_map jax below 0.10.2 cannot ask for the device's index:
            # there no slot may mix layouts.
            apart = layout if open_map and place.manual else None
            key = layout.shape, layout.spec, x.dtype, place.used(), _tree.varying(x), axes, apart
            buckets[key].append((i, layout))
        out = [None] * len(xs)
        for (_, _, _, used, _, axes, _), members in buckets.items():
            members.sort(key=lambda member: member[1])
            layouts = [layout for _, layout in members]
            leaves = [xs[i] for i, _ in members]
            free = tuple(name for name in distribute if name in sizes and name not in used)
            if in_place and _columns_stay(layouts, axes, sizes):
                done = _in_place(fun, leaves, layouts, axes)
            else:
                done = _exchange(fun, leaves, layouts, axes, free, sizes)
            for (i, _), y in zip(members, done, strict=True):
                out[i] = y
        return tuple(out)

    if not open_map:
        return body(*xs)
    manual = places[0].manual
    inner = tuple(
        PartitionSpec(*(tuple(n for n in names if n not in manual) or None for names in p.axes))
        for p in places
    )
    names = {"axis_names": set(mesh.axis_names) - manual} if manual else {}
    return jax.shard_map(body, mesh=mesh, in_specs=inner, out_specs=inner, **names)(*xs)


def _exchange(fun, xs, layouts, axes, free, sizes):
    """Exchanges shards for whole matrices, applies ``fun``, and exchanges back."""
    num = math.prod(sizes[name] for name in axes)
    counts = [math.prod(layout.batch) for layout in layouts]
    shards = jnp.concatenate([_to_shards(x, lay) for x, lay in zip(xs, layouts, strict=True)])
    slots = -(-len(shards) // num)
    owner = [lay for lay, n in zip(layouts, counts, strict=True) for _ in range(n)]
    owner += owner[-1:] * (slots * num - len(owner))
    # Slot s holds matrices s * num to (s + 1) * num, one for each device. Leaves are sorted by
    # layout, so nearly every slot has one layout for all devices.
    runs = [
        (key, len(list(group)))
        for key, group in itertools.groupby(
            tuple(owner[s * num : (s + 1) * num]) for s in range(slots)
        )
    ]

    def by_run(pieces, convert):
        out = []
        for piece, (key, _) in zip(pieces, runs, strict=True):
            made = [(lay, convert(piece, lay, axes, sizes)) for lay in dict.fromkeys(key)]
            result = made[0][1]
            for lay, other in made[1:]:
                mine = jnp.array([k == lay for k in key])[jax.lax.axis_index(axes)]
                result = jnp.where(mine, other, result)
            out.append(result)
        return jnp.concatenate(out)

    def send(x):
        return jax.lax.all_to_all(x, axes, split_axis=1, concat_axis=1) if axes else x

    def cut(x):
        return jnp.split(x, list(itertools.accumulate(n for _, n in runs))[:-1])

    padded = jnp.pad(shards, ((0, slots * num - len(shards)), (0, 0)))
    whole = by_run(cut(send(padded.reshape(slots, num, -1))), _assemble)
    done = _share(fun, whole, layouts[0].spec, free, sizes)
    back = send(by_run(cut(done), _take_apart)).reshape(slots * num, -1)
    ends = list(itertools.accumulate(counts))
    pieces = jnp.split(back[: ends[-1]], ends[:-1])
    return [_from_shards(y, lay) for y, lay in zip(pieces, layouts, strict=True)]


def _share(fun, whole, spec, free, sizes):
    """Applies ``fun``; the devices along the ``free`` axes each take a part of the matrices."""
    if not free:
        return _map_local(fun, [whole], [spec])[0][0]
    parts = math.prod(sizes[name] for name in free)
    each = -(-len(whole) // parts)
    padding = ((0, each * parts - len(whole)), *((0, 0),) * (whole.ndim - 1))
    start = jax.lax.axis_index(free) * each
    mine = jax.lax.dynamic_slice_in_dim(jnp.pad(whole, padding), start, each)
    (done,), _ = _map_local(fun, [mine], [spec])
    return jax.lax.all_gather(done, free, tiled=True, to="invarying")[: len(whole)]


def _columns_stay(layouts, axes, sizes):
    """Says whether a Gram method should leave the columns where they are (few, long matrices)."""
    num = math.prod(sizes[name] for name in axes)
    if num == 1 or layouts[0].spec is not _STACK:
        return False
    rows, cols = layouts[0].shape
    for layout in layouts:
        short = layout.dims[layout.num_units :] if layout.swap else layout.dims[: layout.num_units]
        if any(names for _, names in short):
            return False
    return cols >= 2 * num * rows and sum(math.prod(lay.batch) for lay in layouts) < num


def _in_place(fun, xs, layouts, axes):
    """Applies ``fun`` to matrices whose columns stay spread over ``axes``."""
    rows = layouts[0].shape[0]
    shards = []
    for x, layout in zip(xs, layouts, strict=True):
        x = _to_shards(x, layout)
        x = x.reshape(len(x), -1, rows).mT if layout.swap else x.reshape(len(x), rows, -1)
        shards.append(x)
    stack = jnp.concatenate(shards)
    (done,) = _call(lambda x: fun(x, axes), stack)
    ends = list(itertools.accumulate(len(x) for x in shards))
    out = []
    for y, layout in zip(jnp.split(done, ends[:-1]), layouts, strict=True):
        y = y.mT if layout.swap else y
        out.append(_from_shards(y.reshape(len(y), -1), layout))
    return out
