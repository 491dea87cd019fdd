"""Sums within each matrix of a leaf, whatever its axes, parts and sharding."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import _numerics
from jaxkit.spectral._matrix_spec import matrix_shape, part_shapes


class View(NamedTuple):
    """Where the matrices of a leaf are; static.

    Attributes:
      rows: axes of the leaf that number the rows of its matrices.
      columns: axes that number the columns.
      spec: its resolved MatrixSpec.
      shape: of the whole leaf.
      place: its Placement.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    spec: object
    shape: tuple[int, ...]
    place: object

    def reduce(self, fun, x, axes):
        """Reduces ``x`` over ``axes`` within each matrix and keeps these axes, as size 1.

        ``fun`` is ``jnp.sum`` or ``jnp.max`` (of what is not negative). Where parts of a fused
        leaf lie along these axes, each entry gets the result of its own part.
        """

        def whole(x, axes):
            out = fun(x, axis=axes, keepdims=True)
            names = [name for axis in axes for name in self.place.axes[axis]]
            names = tuple(name for name in names if name in self.place.manual)
            if not names:
                return out
            return (jax.lax.psum if fun is jnp.sum else jax.lax.pmax)(out, names)

        owner = self._owner()
        free = tuple(axis for axis in axes if owner.shape[axis] == 1)
        out = whole(x, free)
        if free == axes:
            return out
        # Each entry lies in one part, so that nothing is left of what out begins as; but by it the
        # compiler lets the result lie where x lies.
        mine = self._local(owner)
        for part in range(int(owner.max()) + 1):
            here = mine == part
            out = jnp.where(here, whole(jnp.where(here, x, 0), axes), out)
        return out

    def by_part(self, values, dtype):
        """Returns the value of the part that each entry lies in: a number if all agree."""
        if len(set(values)) == 1:
            return values[0]
        part = self._owner() // self.spec.interleave
        return self._local(np.asarray(values)[part]).astype(dtype)

    def count(self, axes, dtype):
        """Returns how many rows or columns the matrix of each entry has."""
        place = 1 if axes == self.spec.unit else 2
        return self.by_part([sizes[place] for sizes in self.sizes()], dtype)

    def sizes(self):
        """Returns ``(num_matrices, units, features)`` of every part."""
        return matrix_shape(self.spec, self.shape)

    def local_shape(self):
        """Returns the shape of the leaf on this device."""
        out = []
        for size, names in zip(self.shape, self.place.axes, strict=True):
            local = [name for name in names if name in self.place.manual]
            out.append(size // math.prod(self.place.mesh.shape[name] for name in local))
        return tuple(out)

    def _owner(self):
        """Returns the number of the matrix of a fused leaf in which each entry lies.

        Axes along which it does not change have size 1.
        """
        spec, rank = self.spec, len(self.shape)
        parts = []
        for index, shape in enumerate(part_shapes(spec, self.shape)):
            numbers = np.zeros([1] * rank, np.int32)
            if spec.interleave > 1:
                sizes = [shape[axis] for axis in spec.unit]
                turns = np.arange(math.prod(sizes)).reshape(sizes) % spec.interleave
                order = np.argsort(spec.unit)
                free = tuple(axis for axis in range(rank) if axis not in spec.unit)
                numbers = np.expand_dims(turns.transpose(order), free)
            numbers = numbers + index * spec.interleave
            if spec.split is not None and numbers.shape[spec.split[1]] == 1:
                numbers = np.repeat(numbers, shape[spec.split[1]], spec.split[1])
            parts.append(numbers)
        return parts[0] if len(parts) == 1 else np.concatenate(parts, spec.split[1])

    def _local(self, whole):
        """Returns the part of a static array of the whole leaf that lies on this device."""
        out = jnp.asarray(whole)
        for axis, names in enumerate(self.place.axes):
            local = tuple(name for name in names if name in self.place.manual)
            if local and out.shape[axis] > 1:
                size = out.shape[axis] // math.prod(self.place.mesh.shape[n] for n in local)
                start = jax.lax.axis_index(local) * size
                out = jax.lax.dynamic_slice_in_dim(out, start, size, axis)
        return out


def view_of(item, place, rows):
    """Returns the :class:`View` of a leaf whose rows are its ``"unit"`` or ``"feature"`` axes."""
    unit, feature = item.spec.unit, item.spec.feature
    axes = (unit, feature) if rows == "unit" else (feature, unit)
    return View(*axes, item.spec, item.shape, place)


def total(x, view, axes):
    """Returns the sum of ``x`` over ``axes`` within each matrix."""
    return view.reduce(jnp.sum, x, axes)


def center(x, view):
    """Subtracts from each matrix the mean of its rows."""
    return x - total(x, view, view.rows) / view.count(view.rows, x.dtype)


def row_norm(x, view, floor, relative):
    r"""Divides each row by its norm plus a floor.

    The floor is ``floor``, with ``relative`` times the root mean square of the matrix's row
    norms. A row of zeros stays.
    """
    largest = view.reduce(jnp.max, jnp.abs(jax.lax.stop_gradient(x)), view.columns)
    empty = largest == 0
    # Each row is divided by its largest entry, so that no square over- or underflows. Numbers of
    # which the reciprocal is subnormal, and so zero, count as infinite.
    limit = 1 / jnp.finfo(x.dtype).tiny
    size = jnp.where(empty, 1, jnp.where(largest > limit, jnp.nan, largest))
    norm = safe_norm(x / size, view, view.columns)
    if relative:
        top = view.reduce(jnp.max, jax.lax.stop_gradient(largest), view.rows)
        share = jnp.where(empty, 0, norm * (size / jnp.where(top == 0, 1, top)))
        mean = total(jnp.square(share), view, view.rows)
        floor = floor * _sqrt(mean / view.count(view.rows, x.dtype)) * top
    whole = jnp.where(empty, 1, size * norm + floor)
    # One factor for each row: to divide twice would keep another array like x.
    return x * jnp.where(whole > limit, jnp.nan, 1 / whole)


def factor_row_norm(x, square, view, floor, relative):
    """Does the same to a polar factor, given the sum of squares of each row.

    The squares cannot overflow; rows whose squares underflow are left as they are.
    """
    if relative:
        mean = total(square, view, view.rows) / view.count(view.rows, x.dtype)
        floor = floor * _sqrt(mean)
    return x * (1 / jnp.where(square == 0, 1, _sqrt(square) + floor))


def safe_norm(x, view, axes):
    """Returns the norm over ``axes`` within each matrix, with derivative 0 where it is 0."""
    return _sqrt(total(jnp.square(x), view, axes))


def _sqrt(square):
    zero = square == 0
    return jnp.where(zero, 0, jnp.sqrt(jnp.where(zero, 1, square)))


def equalize_rows(x, square, nu, view, b2, eps):
    """Divides each row by its root mean square over the steps, at the norm of the whole matrix.

    Given the sum of squares of each row, returns the result and ``nu``, the moving average of
    their means.
    """
    mean = square / view.count(view.columns, x.dtype)
    nu = b2 * nu + (1 - b2) * mean.astype(nu.dtype)
    root = _sqrt(nu.astype(x.dtype)) + eps
    root = jnp.where(root == 0, 1, root)
    # The norms of the matrix before and after follow from those of its rows.
    old = total(square, view, view.rows)
    new = total(jnp.square(_sqrt(square) / root), view, view.rows)
    return x * (_sqrt(old) / _sqrt(jnp.where(new == 0, 1, new)) / root), nu


def opened(x, view):
    """Returns ``x`` in float32 or wider, the fused axis of a paired leaf cut as in ``view``."""
    x = x.astype(_numerics.wide(x.dtype))
    if x.ndim == len(view.shape):
        return x
    return x.reshape(view.local_shape())


def over_noise(xs, views, variances, factor):
    """Returns each leaf in units of its noise, and these units, one for each matrix.

    In these units the damping is 1 for all, so that they share buckets. Noise below rounding
    counts as rounding.
    """
    out = []
    for x, view, variance in zip(xs, views, variances, strict=True):
        both = view.rows + view.columns
        sides = view.by_part([float(max(sizes[1:])) for sizes in view.sizes()], x.dtype)
        value = jnp.asarray(factor, x.dtype) * jnp.asarray(variance).astype(x.dtype) * sides
        top = view.reduce(jnp.max, jnp.abs(jax.lax.stop_gradient(x)), both)
        top = jnp.where(top == 0, 1, jnp.where(jnp.isinf(top), jnp.nan, top))
        norm = safe_norm(x / top, view, both)
        norm = jnp.where(norm == 0, 1, norm)
        ratio = jnp.maximum(_sqrt(value) / top / norm, 4 * jnp.finfo(x.dtype).eps)
        out.append((x / top / norm / ratio, top * norm * ratio))
    return map(list, zip(*out, strict=True)) if out else ([], [])
