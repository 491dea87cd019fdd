"""The matrices that one parameter array holds: named axes, and the way there and back."""

import itertools
import math
import operator
from typing import NamedTuple

import jax.numpy as jnp


class MatrixSpec(NamedTuple):
    """Names the axes of one leaf, so that a matrix rule knows rows, columns and batch.

    The maths speaks of rows and columns; a JAX kernel stores a layer as ``(in, out)``, a
    PyTorch-style weight as ``(out, in)``. The names here are those of the layer: units and
    features. Every axis of the leaf occurs exactly once; negative axes count from the end.

    A fused leaf holds several layers side by side. ``split`` cuts it into consecutive parts,
    ``interleave`` deals its units out in turn; with both, each part is dealt out. The matrices so
    found never share a norm or a singular value.

    Attributes:
      unit: axis or axes of the output units (rows), static. Several count as one long axis, the
        last one running fastest.
      feature: axis or axes of the inputs (columns), static.
      batch: axis or axes along which matrices are independent: layers, experts, heads. Static.
      split: None, or ``(sizes, axis)``: cut along ``axis`` into parts of these sizes, static. For
        a fused query-key-value kernel ``(d, dq + dk + dv)``: ``((dq, dk, dv), 1)``.
      interleave: unit ``i`` belongs to matrix ``i % interleave``, static. 2 for a fused
        gate-and-up leaf whose units come in pairs.
      pair: the parts are not matrices of their own but one: row ``i`` of it is unit ``i`` of every
        part, one after the other, static. For a fused gate-and-up leaf, whose neuron owns both.

    Example:
      >>> from jaxkit import spectral
      >>> spectral.MatrixSpec(unit=2, feature=0, batch=1)  # (d, heads, head_dim), per head
      MatrixSpec(unit=2, feature=0, batch=1, split=None, interleave=1, pair=False)

    Source: derived here.

    Cost: none; the transposes and reshapes it stands for fuse into their neighbors.
    """

    unit: int | tuple[int, ...]
    feature: int | tuple[int, ...]
    batch: int | tuple[int, ...] = ()
    split: tuple[tuple[int, ...], int] | None = None
    interleave: int = 1
    pair: bool = False

    def __str__(self):
        axes = [
            f"{name} {value if isinstance(value, int) else ','.join(map(str, value))}"
            for name, value in zip(("unit", "feature", "batch"), self[:3], strict=True)
            if value != ()
        ]
        if self.split is not None:
            axes.append(f"split {','.join(map(str, self.split[0]))} on {self.split[1]}")
        if self.interleave != 1:
            axes.append(f"interleave {self.interleave}")
        if self.pair:
            axes.append("pair")
        return "; ".join(axes)


def resolve_spec(spec, shape, path):
    """Returns ``spec`` with tuples of non-negative axes, checked against one leaf's shape."""
    shape = tuple(shape)
    where = f"MatrixSpec for {path!r} of shape {shape}"
    if len(shape) < 2:
        raise ValueError(f"{where} needs a leaf of at least 2 axes, got {len(shape)}.")
    owner = {}
    axes = {}
    for name in ("unit", "feature", "batch"):
        value = getattr(spec, name)
        value = value if isinstance(value, tuple | list) else (value,)
        axes[name] = tuple(_axis(where, name, axis, shape) for axis in value)
        if not axes[name] and name != "batch":
            raise ValueError(f"{where} must name at least one {name} axis, got {value!r}.")
        for axis in axes[name]:
            if axis in owner:
                raise ValueError(
                    f"{where} must name every axis once, got axis {axis} as {owner[axis]} "
                    f"and as {name}."
                )
            owner[axis] = name
    missing = [axis for axis in range(len(shape)) if axis not in owner]
    if missing:
        raise ValueError(f"{where} must name every axis once, axes {missing} are left out.")
    if 0 in shape:
        raise ValueError(f"{where} needs axes of size at least 1, axis {shape.index(0)} has 0.")
    interleave = _whole(where, "interleave", spec.interleave)
    if interleave < 1:
        raise ValueError(f"{where} must have an interleave of at least 1, got {interleave}.")
    resolved = MatrixSpec(
        **axes, split=_split(where, spec.split, shape), interleave=interleave, pair=bool(spec.pair)
    )
    if spec.pair:
        _check_pair(where, resolved)
    for part in part_shapes(resolved, shape):
        units = math.prod(part[axis] for axis in resolved.unit)
        if units % interleave:
            raise ValueError(
                f"{where} must have an interleave that divides its {units} units, got {interleave}."
            )
    return resolved


def to_matrices(x, spec):
    """Returns the parts of ``x`` as ``[batch..., units, features]``; ``spec`` is resolved.

    Interleaved matrices get the last batch axis.
    """
    cuts = [] if spec.split is None else list(itertools.accumulate(spec.split[0][:-1]))
    parts = jnp.split(x, cuts, spec.split[1]) if cuts else [x]
    order, k = _order(spec), spec.interleave
    matrices = []
    for part in parts:
        batch, units, features = _sizes(spec, part.shape)
        part = part.transpose(order)
        if k == 1:
            part = part.reshape(*batch, units, features)
        else:
            part = part.reshape(*batch, units // k, k, features).swapaxes(-3, -2)
        matrices.append(part)
    return matrices


def from_matrices(parts, spec, shape):
    """Returns the leaf of ``shape`` whose ``to_matrices`` are ``parts``; the exact inverse."""
    order = _order(spec)
    back = [order.index(axis) for axis in range(len(order))]
    pieces = []
    for part, size in zip(parts, part_shapes(spec, shape), strict=True):
        if spec.interleave != 1:
            part = part.swapaxes(-3, -2)
        pieces.append(part.reshape([size[axis] for axis in order]).transpose(back))
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, spec.split[1])


def unpair(spec, shape):
    """Returns the spec without ``pair`` and the shape in which the fused axis is cut in two."""
    if not spec.pair:
        return spec, tuple(shape)
    (axis,) = spec.unit
    parts = spec.interleave if spec.split is None else len(spec.split[0])
    sizes = [shape[axis] // parts, parts]
    unit, part = axis, axis + 1
    if spec.split is not None:  # the parts lie one after the other: they are the slow axis
        sizes, unit, part = sizes[::-1], part, unit
    feature, batch = (
        tuple(other + (other > axis) for other in axes) for axes in (spec.feature, spec.batch)
    )
    return MatrixSpec((unit,), (part, *feature), batch), (*shape[:axis], *sizes, *shape[axis + 1 :])


def matrix_shape(spec, shape):
    """Returns ``(num_matrices, units, features)`` of every part of a leaf of ``shape``."""
    spec, shape = unpair(spec, shape)
    out = []
    for part in part_shapes(spec, shape):
        batch, units, features = _sizes(spec, part)
        out.append((math.prod(batch) * spec.interleave, units // spec.interleave, features))
    return out


def part_shapes(spec, shape):
    """Returns the shapes of the parts that ``spec.split`` cuts a leaf of ``shape`` into."""
    if spec.split is None:
        return [tuple(shape)]
    sizes, axis = spec.split
    return [(*shape[:axis], size, *shape[axis + 1 :]) for size in sizes]


def _order(spec):
    """Returns the leaf's axes in the order batch, units, features."""
    return (*spec.batch, *spec.unit, *spec.feature)


def _sizes(spec, shape):
    """Returns the batch sizes, the number of units and the number of features of one part."""
    batch, units, features = (
        tuple(shape[axis] for axis in axes) for axes in (spec.batch, spec.unit, spec.feature)
    )
    return batch, math.prod(units), math.prod(features)


def _check_pair(where, spec):
    """Checks that a fused axis can be cut into an axis of parts and one of units."""
    sizes, axis = spec.split or ((), None)
    if (spec.split is None) == (spec.interleave == 1):
        raise ValueError(
            f"{where} needs either split or interleave for pair=True, got split={spec.split} and "
            f"interleave={spec.interleave}."
        )
    if len(spec.unit) > 1 or (axis is not None and axis not in spec.unit) or len(set(sizes)) > 1:
        raise ValueError(
            f"{where} needs one unit axis, cut into parts of one size, for pair=True, got "
            f"unit={spec.unit} and split={spec.split}."
        )


def _whole(where, name, value):
    """Returns a static whole number, or says which field holds something else."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{where} must have whole numbers as {name}, got {value!r}.") from None


def _axis(where, name, value, shape):
    """Returns an axis of the leaf, counted from the front."""
    axis = _whole(where, f"{name} axes", value)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(
            f"{where} must have {name} axes from {-len(shape)} to {len(shape) - 1}, got {axis}."
        )
    return axis % len(shape)


def _split(where, split, shape):
    """Returns a checked ``(sizes, axis)``, or None."""
    if split is None:
        return None
    try:
        sizes, axis = split
        sizes = tuple(sizes)
    except (TypeError, ValueError):
        raise TypeError(f"{where} must have split as (sizes, axis), got {split!r}.") from None
    sizes = tuple(_whole(where, "split sizes", size) for size in sizes)
    axis = _axis(where, "split", axis, shape)
    if min(sizes, default=0) < 1 or sum(sizes) != shape[axis]:
        raise ValueError(
            f"{where} must have split sizes of at least 1 that add up to {shape[axis]}, the size "
            f"of axis {axis}, got {sizes} with sum {sum(sizes)}."
        )
    return sizes, axis
