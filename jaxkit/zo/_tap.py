"""Where the parameters of a loss function meet data, and what the inputs there look like."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from jaxkit import _check, _numerics
from jaxkit.zo import _tap_layout, _tap_plan, _tap_run


class Site(NamedTuple):
    """An equation in which parameters meet data.

    Attributes:
      leaves: paths of the leaves of ``params`` that enter it.
      primitive: name of the primitive of JAX, such as "dot_general".
      shape: of its output.
      num_inputs: for a dense layer or a convolution that reads a leaf as a whole, the length n of
        the vectors that the leaf is multiplied with, else None.
      loops: the loops around it, outside in, such as "scan(4)".
      source: file and line.
    """

    leaves: tuple[str, ...]
    primitive: str
    shape: tuple[int, ...]
    num_inputs: int | None
    loops: tuple[str, ...]
    source: str


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Sites:
    """All sites of a loss function, static; prints as a table.

    Attributes:
      sites: tuple of :class:`Site`, in the order in which they run.
      uncovered: paths of the leaves whose inputs no dense or convolution site shows.
    """

    sites: tuple[Site, ...]
    uncovered: tuple[str, ...]

    def __str__(self):
        head = ["leaves", "primitive", "output", "inputs", "loops", "source"]
        rows = [
            [", ".join(s.leaves), s.primitive, str(list(s.shape)), str(s.num_inputs or ""),
             " ".join(s.loops), s.source]
            for s in self.sites
        ]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in [head, *rows]
        ]
        return "\n".join([*lines, f"uncovered: {', '.join(self.uncovered) or 'none'}"])


class Moments(NamedTuple):
    """Mean and covariance of the vectors that a leaf is multiplied with.

    Attributes:
      num_rows: how many vectors there were, ``[*stack]`` float32 or wider; ``stack`` are the axes
        of the leaf that no product mixes, such as that of scanned layers.
      mean: ``[*stack, n]`` float32 or wider; entries follow the axes of the leaf.
      covariance: ``[*stack, n, n]``, about the mean, divided by ``num_rows``.
    """

    num_rows: jax.Array
    mean: jax.Array
    covariance: jax.Array


class Tap(NamedTuple):
    """What :func:`tap` found.

    Attributes:
      output: what ``loss_fn`` returned.
      moments: path of a leaf -> :class:`Moments` of its inputs.
      sites: :class:`Sites`, static.
    """

    output: Any
    moments: dict[str, Moments]
    sites: Sites


def tap(loss_fn, *, strict=False):
    """Returns the function that evaluates a loss and looks at the inputs of its layers.

    The loss function is any function of JAX: of flax, or of arrays alone; jitted, checkpointed, or
    with layers inside ``lax.scan``. No layer has to be marked. A leaf is covered if some dense
    layer or convolution multiplies with it as a whole; casts, transposes and reshapes on the way
    are followed. If several do, all uses count that read it as the first one does.

    Args:
      loss_fn: function ``(params, *args)`` of trees of arrays. An array among ``args`` with at
        least one axis, and a random key, are data; if there is none, then all arrays that
        ``loss_fn`` closes over are.
      strict: whether a leaf that is not covered raises, static.

    Returns:
      Function ``(params, *args) -> Tap``. Under ``jax.eval_shape`` it computes nothing, and still
      knows the sites.

    Raises:
      TypeError: ``loss_fn`` is no function, or a leaf of ``params`` or ``args`` is no array.
      ValueError: when called, if a dense or convolution site is inside ``cond`` or ``while``; if
        params enter a primitive that returns several arrays; or if leaves are not covered
        and ``strict`` is set. The message has the paths and the line.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> def loss_fn(params, x):
      ...     return jnp.mean(jnp.tanh(x @ params["w"] + params["b"]) ** 2)
      >>> params = {"w": jnp.ones((2, 3)), "b": jnp.zeros((1, 3))}
      >>> found = zo.tap(loss_fn)(params, jnp.array([[1.0, 2.0], [3.0, 6.0]]))
      >>> print([s.primitive for s in found.sites.sites], found.sites.uncovered)
      ['dot_general', 'add'] ('b',)
      >>> print(found.moments["w"].mean, found.moments["w"].covariance)
      [2. 4.] [[1. 2.]
       [2. 4.]]

    Source: derived here.

    Cost: one call of ``loss_fn``, and for each use of a covered leaf n² products per row; a
    convolution forms its patches.
    """
    _check.function("loss_fn", loss_fn)

    def tapped(params, *args):
        plan = _tap_plan.plan(loss_fn, params, args)
        outs, moments = capture(plan, params, args)
        layouts = plan.layouts()
        uncovered = tuple(path for i, path in enumerate(plan.paths) if i not in layouts)
        if strict and uncovered:
            raise ValueError(
                "strict=True needs a dense or convolution site of every leaf of params, got none "
                f"of {', '.join(uncovered)}."
            )

        def public(site):
            n = layouts[site.kernel.leaf].size("c") if site.kernel else None
            names = plan.names(site)
            return Site(names, site.primitive, site.type.shape, n, site.loops, site.source)

        sites = Sites(tuple(map(public, plan.sites)), uncovered)
        by_path = {}
        for leaf, found in moments.items():
            stack = layouts[leaf].shape("s")
            by_path[plan.paths[leaf]] = Moments(*(x.reshape(*stack, *x.shape[1:]) for x in found))
        return Tap(plan.out_tree.unflatten(outs), by_path, sites)

    return tapped


def capture(plan, params, args):
    """Returns the output, flat, and leaf -> ``Moments`` with one leading axis for the stack."""
    kernels = plan.kernels()
    for site in plan.sites:
        if site.kernel and any(not loop.startswith("scan") for loop in site.loops):
            raise ValueError(
                f"the inputs of a layer cannot be kept in {' in '.join(site.loops)}, got "
                f"{plan.where(site)}."
            )

    def at_site(step, read, y, index):
        del index
        kernel = step.site.kernel
        if kernel is None or not _reads_alike(kernel, kernels[kernel.leaf]):
            return y, {}
        source, data = step.site.reads

        def moments(x):
            x = _tap_layout.rows(kernel, step.eqn, x)
            x = x.astype(_numerics.wide(x.dtype))
            mean = jnp.mean(x, 1)
            x -= mean[:, None]
            squares = jnp.einsum("sri,srj->sij", x, x, precision=jax.lax.Precision.HIGHEST)
            return Moments(jnp.full(len(x), x.shape[1], x.dtype), mean, squares)

        whole = Moments(P(), P(), P())
        return y, {source: _tap_run.automatic(moments, whole, read(data))}

    outs, found = _tap_run.run(plan, params, args, _tap_run.Visitor(at_site, _merge))
    return outs, {leaf: _in_leaf_order(kernels[leaf], sums) for leaf, sums in found.items()}


def _reads_alike(kernel, first):
    """Says whether two sites of a leaf see it as the same stack of matrices."""
    return (kernel.loops, kernel.layout) == (first.loops, first.layout)


def _merge(a, b):
    """Joins two sets of rows; the covariances are sums of squares here."""
    num = a.num_rows + b.num_rows
    share = b.num_rows / jnp.maximum(num, 1)
    step = b.mean - a.mean
    between = jnp.einsum("s,si,sj->sij", a.num_rows * share, step, step)
    mean = a.mean + share[:, None] * step
    return Moments(num, mean, a.covariance + b.covariance + between)


def _in_leaf_order(kernel, sums):
    """Returns the moments with the stack as it lies in the leaf, as one leading axis."""
    atoms = [*(atom for _, atom in kernel.loops), *kernel.stacked]
    sizes, axes = [a.size for a in atoms], _tap_layout.order(atoms)
    num_last = [0, 1, 2]

    def sort(x, last):
        shape = x.shape[x.ndim - last :]
        x = x.reshape(*sizes, *shape)
        return x.transpose(*axes, *range(len(axes), x.ndim)).reshape(-1, *shape)

    num, mean, squares = map(sort, sums, num_last)
    return Moments(num, mean, squares / num[:, None, None])
