"""The state of a denoiser: everything an estimator must know to ask where the update expects."""

import dataclasses
import functools
from typing import Any

import jax

PyTree = Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "step",
        "prev_params",
        "estimate",
        "gain",
        "trust_radius",
        "relative_trust_radius",
        "taus",
        "probe_length",
        "noise_variance",
        "auto",
    ],
    meta_fields=["kind", "order"],
)
@dataclasses.dataclass(frozen=True)
class DenoiseState:
    """State of :func:`denoise` and of its members; it describes the next query by itself.

    Numbers are float32, or float64 if a parameter is. What a kind does not use is None.

    Attributes:
      step: number of updates done, ``[]`` int32.
      prev_params: parameters of the last update, a tree like them.
      estimate: of the gradient at ``prev_params``, a tree of their shapes, float32 or wider.
      gain: weight of the next query before a trust radius raises it, ``[]`` in (0, 1]; with
        ``taus`` of the user's the largest of them.
      trust_radius: ``[]``.
      relative_trust_radius: ``[]``, times the norm of the parameters.
      taus: inverse positions of the nodes, ``[q]``, the largest first and scaled to 1.
      probe_length: of kind "disk", in steps of the parameters, ``[]``.
      noise_variance: of the noise in each entry of ``estimate``, ``[]``, as given to the last
        update; 0 if it was given none.
      auto: averages of ``gain="auto"``, one for each leaf.
      kind: "line", "random", "disk", "storm", "hvp" or "auto", static.
      order: 1, 2 or 3, or None with ``taus`` of the user's, static.
    """

    step: jax.Array
    prev_params: PyTree
    estimate: PyTree
    gain: jax.Array | None
    trust_radius: jax.Array | None
    relative_trust_radius: jax.Array | None
    taus: jax.Array | None
    probe_length: jax.Array | None
    noise_variance: jax.Array
    auto: PyTree
    kind: str
    order: int | None
