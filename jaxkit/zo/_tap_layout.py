"""Views of parameter leaves: which axes of a leaf a dense or convolution site contracts."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Atom(NamedTuple):
    """A part of an axis of a leaf: entries ``(i // stride) % size`` of ``axis``."""

    axis: int
    stride: int
    size: int


class View(NamedTuple):
    """A leaf after transposes and reshapes; each axis is a product of atoms."""

    leaf: int
    dims: tuple[tuple[Atom, ...], ...]
    loops: tuple[tuple[int, Atom], ...] = ()  # depth of a loop, and what it has taken off


class Layout(NamedTuple):
    """A leaf as a stack of matrices: ``leaf.reshape(sizes)``, and the role of each axis then.

    Roles: s stacked, c contracted with the input, f free.
    """

    sizes: tuple[int, ...]
    roles: str

    def shape(self, role):
        """Returns the sizes of the axes of one role."""
        return tuple(n for n, r in zip(self.sizes, self.roles, strict=True) if r == role)

    def size(self, role):
        """Returns the number of entries along the axes of one role."""
        return math.prod(self.shape(role))


class Kernel(NamedTuple):
    """How a site reads a leaf, as a stack of matrices; atoms in the order of the site."""

    leaf: int
    position: int  # of the leaf among the operands; the data are the other one
    loops: tuple[tuple[int, Atom], ...]
    stacked: tuple[Atom, ...]
    contracted: tuple[Atom, ...]
    free: tuple[Atom, ...]

    @property
    def layout(self):
        roles = dict.fromkeys([*(atom for _, atom in self.loops), *self.stacked], "s")
        roles |= dict.fromkeys(self.contracted, "c") | dict.fromkeys(self.free, "f")
        order = in_leaf_order(roles)
        return Layout(tuple(a.size for a in order), "".join(roles[a] for a in order))


def in_leaf_order(atoms):
    """Returns the atoms as they follow each other in the leaf."""
    return sorted(atoms, key=lambda a: (a.axis, -a.stride))


def order(atoms):
    """Returns the permutation that sorts the atoms of a site as they lie in the leaf."""
    atoms = list(atoms)
    return [atoms.index(a) for a in in_leaf_order(atoms)]


def view(leaf, shape):
    """Returns the view of a leaf as it is."""
    return View(leaf, tuple((Atom(i, 1, n),) if n != 1 else () for i, n in enumerate(shape)))


def iterate(seen, depth):
    """Returns what an iteration of a loop over the leading axis sees."""
    if seen is None or len(seen.dims[0]) > 1:
        return None
    return View(seen.leaf, seen.dims[1:], seen.loops + tuple((depth, a) for a in seen.dims[0]))


def follow(seen, eqn):
    """Returns the view after an equation, or None if it does more than move entries."""
    name, params, dims = eqn.primitive.name, eqn.params, seen.dims
    if name == "transpose":
        return seen._replace(dims=tuple(dims[i] for i in params["permutation"]))
    if name in ("reshape", "squeeze", "expand_dims"):
        return _regroup(seen, eqn.outvars[0].aval.shape)
    if name == "broadcast_in_dim":
        out = [()] * len(params["shape"])
        for dim, atoms in zip(params["broadcast_dimensions"], dims, strict=True):
            out[dim] = atoms
        if all(
            math.prod(a.size for a in d) == n for d, n in zip(out, params["shape"], strict=True)
        ):
            return seen._replace(dims=tuple(out))
    return None


def _regroup(seen, shape):
    """Returns the view in a new shape; atoms are cut where the new axes cut them."""
    atoms, out = [a for dim in seen.dims for a in dim][::-1], []
    for size in shape:
        dim = []
        while size > 1:
            if not atoms:
                return None
            axis, stride, n = atoms.pop()
            if size % n and n % size:
                return None
            if n > size:  # the outer part of this atom, the rest belongs to the next axis
                atoms.append(Atom(axis, stride, n // size))
                stride, n = stride * (n // size), size
            dim.append(Atom(axis, stride, n))
            size //= n
        out.append(tuple(dim))
    return seen._replace(dims=tuple(out))


def _join(dims, axes):
    return tuple(a for i in axes for a in dims[i])


def _dot(params, position, seen):
    contract, batch = (dims[position] for dims in params["dimension_numbers"])
    free = [i for i in range(len(seen.dims)) if i not in contract and i not in batch]
    parts = (_join(seen.dims, axes) for axes in (batch, contract, free))
    return Kernel(seen.leaf, position, seen.loops, *parts)


def _conv(params, position, seen):
    if position != 1 or params["batch_group_count"] != 1:
        return None
    out, *contract = params["dimension_numbers"].rhs_spec
    groups = params["feature_group_count"]
    stacked, free = (), seen.dims[out]
    if groups > 1:
        size = math.prod(a.size for a in free)
        split = _regroup(View(seen.leaf, (free,)), (groups, size // groups))
        if split is None:
            return None
        stacked, free = split.dims
    return Kernel(seen.leaf, position, seen.loops, stacked, _join(seen.dims, contract), free)


# Primitive -> how it reads an operand, given its parameters, the position and the view.
KERNELS = {"dot_general": _dot, "conv_general_dilated": _conv}


def to_matrices(leaf, layout):
    """Returns a leaf as ``[s, n, m]``: stacked, contracted and free axes each as one."""
    axes = [i for role in "scf" for i, r in enumerate(layout.roles) if r == role]
    shape = tuple(layout.size(role) for role in "scf")
    return leaf.reshape(layout.sizes).transpose(axes).reshape(shape)


def from_matrices(matrices, layout, shape):
    """Returns the leaf of ``shape`` that ``to_matrices`` takes to ``matrices``."""
    axes = [i for role in "scf" for i, r in enumerate(layout.roles) if r == role]
    inverse = sorted(range(len(axes)), key=axes.__getitem__)
    sizes = [layout.sizes[i] for i in axes]
    return matrices.reshape(sizes).transpose(inverse).reshape(shape)


def rows(kernel, eqn, x):
    """Returns the inputs of a site as ``[s, rows, n]``, stacked and contracted in leaf order."""
    x = dot_rows(kernel, eqn, x) if eqn.primitive.name == "dot_general" else _patches(eqn, x)
    perms = order(kernel.stacked), order(kernel.contracted)
    sizes = [[a.size for a in atoms] for atoms in (kernel.stacked, kernel.contracted)]
    middle = len(perms[0])
    axes = [*perms[0], middle, *(middle + 1 + i for i in perms[1])]
    return x.reshape(*sizes[0], x.shape[1], *sizes[1]).transpose(axes).reshape(x.shape)


def dot_rows(kernel, eqn, x):
    """Returns the inputs of a dense site as ``[s, rows, n]``, in the order of the site."""
    contract, batch = (dims[1 - kernel.position] for dims in eqn.params["dimension_numbers"])
    rest = [i for i in range(x.ndim) if i not in contract and i not in batch]
    shape = [math.prod(x.shape[i] for i in axes) for axes in (batch, rest, contract)]
    return x.transpose(*batch, *rest, *contract).reshape(shape)


def _patches(eqn, x):
    """Returns the patches that a convolution reads, ``[groups, rows, n]``."""
    params, kernel = eqn.params, eqn.invars[1].aval
    numbers, groups = params["dimension_numbers"], params["feature_group_count"]
    patches = jax.lax.conv_general_dilated_patches(
        x,
        [kernel.shape[i] for i in numbers.rhs_spec[2:]],
        params["window_strides"],
        params["padding"],
        lhs_dilation=params["lhs_dilation"],
        rhs_dilation=params["rhs_dilation"],
        dimension_numbers=numbers,
        precision=jax.lax.Precision.HIGHEST,
    )
    patches = jnp.moveaxis(patches, numbers.out_spec[1], -1)
    return jnp.moveaxis(patches.reshape(-1, groups, patches.shape[-1] // groups), 1, 0)
