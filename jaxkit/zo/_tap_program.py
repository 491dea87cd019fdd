"""The program of a tapped loss function: levels, steps, and the sites among them."""

import contextlib
import dataclasses
import enum
import os
from typing import Any, NamedTuple

from jaxkit.zo import _tap_layout


class Kind(enum.IntEnum):
    """What a value depends on."""

    CONST = 0  # nothing that varies
    PARAMS = 1  # parameters (and constants) only
    CLEAN = 2  # data, but no parameter, so that no noise can reach it
    NOISY = 3  # data and parameters


class Param(NamedTuple):
    """What is known of a params-only value: its leaves, and how it views one of them."""

    leaves: frozenset[int]
    source: int = -1  # the input of the level that ``view`` starts from
    view: _tap_layout.View | None = None


@dataclasses.dataclass(eq=False)
class Site:
    """An equation in which a params-only value meets data; see ``zo.Site`` for the public form."""

    index: int
    primitive: str
    source: str
    loops: tuple[str, ...]
    type: Any
    leaves: frozenset[int]
    params: frozenset[int]  # the params-only values, floating, that enter the group
    step: Any
    kernel: _tap_layout.Kernel | None = None
    looks_up: bool = False  # whether its first operand is a leaf as it is
    reads: tuple[int, ...] = ()  # with a kernel: the input of the level that is its leaf; the data
    group: tuple["Step", ...] = ()  # the equations whose last output gets noise; () gets none


@dataclasses.dataclass(eq=False)
class Step:
    """One equation, by the numbers of its values in its level; no equation is the identity."""

    eqn: Any
    ins: list
    outs: list[int]
    kind: Kind
    source: str
    site: Site | None = None
    bodies: tuple["Level", ...] = ()

    @property
    def name(self):
        return self.eqn.primitive.name if self.eqn else self.site.primitive


@dataclasses.dataclass(eq=False)
class Level:
    """A jaxpr with its calls inlined. Values have numbers; literals stand for themselves."""

    ins: list[int] = dataclasses.field(default_factory=list)
    outs: list = dataclasses.field(default_factory=list)
    steps: list[Step] = dataclasses.field(default_factory=list)
    kinds: list[Kind] = dataclasses.field(default_factory=list)
    types: list = dataclasses.field(default_factory=list)
    params: dict[int, Param] = dataclasses.field(default_factory=dict)
    consts: dict[int, Any] = dataclasses.field(default_factory=dict)

    def kind(self, atom):
        return Kind.CONST if is_literal(atom) else self.kinds[atom]

    def type(self, atom):
        return atom.aval if is_literal(atom) else self.types[atom]

    def new(self, aval, kind, param=None):
        self.kinds.append(kind)
        self.types.append(aval)
        number = len(self.kinds) - 1
        if kind == Kind.PARAMS:
            self.params[number] = param
        return number


@dataclasses.dataclass(eq=False)
class Plan:
    """The walk of one loss function for given types of arguments."""

    level: Level
    sites: list[Site]
    hidden: frozenset[int]  # leaves that are also used where no site shows it
    paths: list[str]
    types: list
    out_tree: Any
    out_types: Any

    def layouts(self):
        """Returns the layout of each leaf that has a dense or convolution site, by its number."""
        return {leaf: kernel.layout for leaf, kernel in self.kernels().items()}

    def kernels(self):
        """Returns the kernel of the first dense or convolution site of each leaf."""
        found = {}
        for site in self.sites:
            if site.kernel:
                found.setdefault(site.kernel.leaf, site.kernel)
        return found

    def where(self, site):
        """Says where a site is, for messages."""
        return f"{site.primitive} with {', '.join(self.names(site))} at {site.source}"

    def names(self, site):
        """Returns the paths of the leaves that enter the equation of a site."""
        return tuple(self.paths[leaf] for leaf in sorted(site.leaves))


def is_literal(atom):
    """Says whether an operand is a literal, which stands for itself and has no number.

    Not by its class, for that is public in ``jax.extend`` alone, which loads all of Pallas.
    """
    return hasattr(atom, "val")


def source_line(eqn, around=None):
    """Returns ``file.py:12``, the innermost line that is not of jax or flax, else ``around``."""
    traceback = getattr(eqn.source_info, "traceback", None)
    # A function of jax may be wrapped in a context manager.
    inside = [f"{os.sep}{name}{os.sep}" for name in ("jax", "jaxlib", "flax")]
    inside.append(contextlib.__file__)
    for frame in traceback.frames if traceback else ():
        if not any(part in frame.file_name for part in inside):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return around or "an unknown line"
