"""Coefficient tables of the quintic Newton-Schulz iteration for the polar factor."""

from typing import NamedTuple

import numpy as np

from jaxkit import _check


class Table(NamedTuple):
    """One list of odd quintics ``a s + b s^3 + c s^5`` and how to use it.

    Attributes:
      rows: ``(a, b, c)`` for each step; a step beyond the list repeats the last row.
      cushion: the input is divided by ``cushion`` times its Frobenius norm.
      safety: every row but the last one applied is used as ``(a/q, b/q^3, c/q^5)``, so that
        rounding cannot push a singular value out of the interval where the list converges.
    """

    rows: tuple[tuple[float, float, float], ...]
    cushion: float = 1.0
    safety: float = 1.0


TABLES = {
    # Keller Jordan, "Muon": does not converge, ends in about [0.68, 1.20].
    "jordan": Table(((3.4445, -4.7750, 2.0315),)),
    # Jiacheng You's five steps, as published with modded-nanogpt.
    "you": Table(
        (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        )
    ),
    # arXiv:2505.16932: the best list for singular values in [1e-3, 1]; converges to the factor.
    "polar_express": Table(
        (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
            (1.875, -1.25, 0.375),
        ),
        cushion=1.01,
        safety=1.01,
    ),
    # The same paper's list for five steps with a cushion, as used by dion and modded-nanogpt.
    "polar_express_5": Table(
        (
            (8.156554524902461, -22.48329292557795, 15.878769915207462),
            (4.042929935166739, -2.808917465908714, 0.5000178451051316),
            (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
            (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
            (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
        ),
        cushion=1.02,
    ),
}


def resolve(coefficients, steps, low_precision):
    """Returns ``(rows, cushion)``: one row for each step, safety applied.

    ``steps=None`` means 5, except for ``"polar_express"`` in float32 or wider: 8, where its list
    has converged. In 16-bit products more than 5 steps only amplify rounding in null directions.
    """
    if isinstance(coefficients, str):
        table = TABLES[_check.choice("coefficients", coefficients, tuple(TABLES))]
    else:
        try:
            rows = np.asarray(coefficients, np.float64)
        except (TypeError, ValueError) as error:  # a traced array is a TypeError here
            raise TypeError(
                f"coefficients must be a name or static numbers of shape [3] or [k, 3], "
                f"got {coefficients!r}."
            ) from error
        if rows.ndim not in (1, 2) or rows.shape[-1] != 3 or rows.size == 0:
            raise ValueError(f"coefficients must have shape [3] or [k, 3], got {rows.shape}.")
        table = Table(tuple(tuple(row) for row in np.atleast_2d(rows).tolist()))
        if steps is None and rows.ndim == 2:
            steps = len(rows)
    if steps is None:
        steps = 8 if coefficients == "polar_express" and not low_precision else 5
    steps = _check.count("steps", steps)
    rows = (table.rows + table.rows[-1:] * steps)[:steps]
    q = table.safety
    return (
        tuple((a / q, b / q**3, c / q**5) for a, b, c in rows[:-1]) + rows[-1:],
        table.cushion,
    )
