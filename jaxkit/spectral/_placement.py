"""Where a leaf lives: its mesh, and the mesh axes that split each of its axes."""

import itertools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxkit import _tree
from jaxkit.spectral._labels import assign
from jaxkit.spectral._roles import leaves_with_parts


class Placement(NamedTuple):
    """Where a leaf lives: static, read from its type or from a given sharding.

    Attributes:
      mesh: mesh of the leaf, or ``None`` when nothing is known.
      axes: for each axis of the leaf, the mesh axes over which it is split.
      manual: mesh axes that are Manual here; the leaf's shape is already local along these.
    """

    mesh: object
    axes: tuple[tuple[str, ...], ...]
    manual: frozenset[str]

    def used(self):
        """Returns all mesh axes that split the leaf."""
        return frozenset(itertools.chain(*self.axes))

    def global_shape(self, shape):
        """Returns the whole leaf's shape, given its shape here."""
        sizes = self.mesh.shape if self.mesh is not None else {}
        return tuple(
            size * math.prod(sizes[name] for name in names if name in self.manual)
            for size, names in zip(shape, self.axes, strict=True)
        )


def placement(x, given=None, name="x"):
    """Returns the :class:`Placement` of ``x``; ``given`` is a NamedSharding, a spec or ``None``.

    Explicit axes come from the type of ``x``, Auto and Manual ones from ``given``. A given axis
    that does not divide the size of ``x`` is left out: that costs bytes, not correctness.
    """
    kind = jax.typeof(x)
    mesh, typed = kind.sharding.mesh, kind.sharding.spec
    if mesh.empty:
        mesh = getattr(given, "mesh", None)
    if mesh is None or mesh.empty:
        return Placement(None, ((),) * kind.ndim, frozenset())
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {name for name in kinds if kinds[name] == AxisType.Explicit}
    manual = frozenset(name for name in kinds if kinds[name] == AxisType.Manual)
    wishes, axes = _names(getattr(given, "spec", given), kind, name), []
    flat = list(itertools.chain(*wishes))
    if len(set(flat)) < len(flat) or not set(flat) <= kinds.keys():
        raise ValueError(
            f"sharding must name axes of the mesh, each once, got {given} for {name} and a mesh "
            f"with {mesh.axis_names}."
        )
    for size, own, wished in zip(kind.shape, _names(typed, kind, name), wishes, strict=True):
        if tuple(name for name in wished if name in explicit) != own:
            # The type wins. What a surrounding shard_map has split is split outermost.
            free = [name for name in wished if name not in explicit]
            wished = (*filter(manual.__contains__, free), *own)
            wished += tuple(name for name in free if name not in manual)
        inner = math.prod(mesh.shape[name] for name in wished if name not in manual)
        if size % inner:
            wished = tuple(name for name in wished if name in manual or name in own)
        axes.append(wished)
    return Placement(mesh, tuple(axes), manual)


def _names(spec, x, name):
    """Returns a partition spec as one tuple of mesh axes for each array axis."""
    entries = tuple(spec or ())
    if len(entries) > x.ndim:
        raise ValueError(
            f"sharding must have at most {x.ndim} entries for {name} of shape {x.shape}, "
            f"got {spec}."
        )
    names = (
        (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, tuple) else ()
        for entry in entries
    )
    return (*names, *((),) * (x.ndim - len(entries)))


def read_shardings(sharding):
    """Returns ``{path: NamedSharding or PartitionSpec}``, or ``None`` if nothing was given."""
    if sharding is None:
        return None
    kinds = NamedSharding | PartitionSpec
    found = {}
    for parts, leaf in leaves_with_parts(sharding):
        leaf = leaf if isinstance(leaf, kinds) else getattr(leaf, "sharding", leaf)
        path = "/".join(parts) or "<root>"
        if not isinstance(leaf, kinds | jax.sharding.Sharding):
            raise TypeError(
                f"sharding at {path} must be a NamedSharding, a PartitionSpec or an array, "
                f"got {type(leaf).__name__}."
            )
        # Any other kind, such as one device, splits nothing.
        found[path] = leaf if isinstance(leaf, kinds) else None
    return found


def assign_whole(tree, shardings, distribute=(), **labels):
    """Returns roles and axes by the shapes of whole leaves, and the placement of each leaf.

    Inside a surrounding ``shard_map`` the leaves of ``tree`` have local shapes.
    """
    leaves, treedef = jax.tree.flatten(tree)
    paths = ["/".join(parts) or "<root>" for parts, _ in leaves_with_parts(tree)]
    places = []
    for x, path in zip(leaves, paths, strict=True):
        if shardings is not None and path not in shardings:
            raise ValueError(f"sharding must have an entry for {path}, got {', '.join(shardings)}.")
        place = placement(x, shardings[path] if shardings else None, path)
        known = place.mesh.axis_names if place.mesh is not None else ()
        lost = [name for name in distribute if name not in known]
        if lost or (distribute and shardings is None and _has_auto(place.mesh, distribute)):
            raise ValueError(
                f"distribute={distribute} needs a mesh with these axes at {path}, and "
                f"sharding= where they are not Explicit, got axes {known}."
            )
        mixed = sorted(_tree.varying(x) & set(distribute) - place.used())
        if mixed:
            raise ValueError(
                f"distribute={distribute} needs leaves that are the same along these axes, got "
                f"{path}, which varies over {mixed}; take its mean by jax.lax.pmean, or name "
                "these axes in sharding=."
            )
        places.append(place)
    whole = [
        jax.ShapeDtypeStruct(place.global_shape(jnp.shape(x)), jnp.result_type(x))
        for x, place in zip(leaves, places, strict=True)
    ]
    return assign(treedef.unflatten(whole), **labels), places


def _has_auto(mesh, names):
    """Says whether one of the named mesh axes is an Auto one."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return any(kinds[name] == AxisType.Auto for name in names)
