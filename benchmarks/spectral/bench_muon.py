"""A language model on Python's own text: spectral.muon against optax.contrib.muon and AdamW."""

import numpy as np

from benchmarks import harness, lm, tuning
from benchmarks.spectral import methods

SIZES = {
    "smoke": lm.Size("help_topics", 16, 1, 2, 8, 4, 10, 2, 8),
    "short": lm.Size("help_topics", 64, 1, 4, 32, 16, 150, 5, 400),
    "full": lm.Size("library_sources", 384, 6, 6, 128, 32, 2000, 10, 2048),
}
SEEDS = {"smoke": (1, 2), "short": range(1, 6), "full": range(1, 11)}
TUNE_SEEDS = (1001, 1002)  # never reported
# With the scale "rms" a matrix moves as far as with AdamW, so one grid serves all methods.
GRID = {
    "learning_rate": (0.00125, 0.0025, 0.005, 0.01, 0.02),
    "other_learning_rate": (0.005, 0.01, 0.02, 0.04, 0.08),
}


def run(context):
    size, seeds, makers = SIZES[context.form], SEEDS[context.form], _makers(context)
    rates = {name: tuning.chosen(context, name) for name in makers}
    results = lm.race(size, makers, rates, seeds, context.track)
    case = "language model"
    yield from harness.versus(
        methods.OURS,
        {name: result.validation_loss for name, result in results.items()},
        case=case,
        size=str(size),
        metric="validation loss",
        unit="nats per byte",
        better="down",
        seeds=seeds,
    )
    yield from harness.versus(
        methods.OURS,
        {name: 1e3 * result.step_seconds for name, result in results.items()},
        case=case,
        size=str(size),
        metric=f"time per step of {len(seeds)} seeds",
        unit="ms",
        better="down",
        seeds=range(size.laps),
    )
    for name, result in results.items():
        pieces = np.array_split(result.train_loss, min(30, size.steps), axis=1)
        ends = np.cumsum([piece.shape[1] for piece in pieces])
        means = np.stack([piece.mean(1) for piece in pieces], axis=1)
        yield harness.Curve(case, name, "step", "training loss, nats per byte", ends, means)


def tune(context):
    size, makers = SIZES[context.form], _makers(context)
    tables = {
        name: lm.search(size, makers[name], GRID, TUNE_SEEDS)
        for name in context.track(list(makers))
    }
    return tuning.entry(
        tables,
        grids=dict.fromkeys(makers, GRID),
        criterion="lowest mean validation loss, nats per byte, after the last step",
        size=str(size),
        seeds=TUNE_SEEDS,
    )


def _makers(context):
    return {
        methods.OURS: methods.ours,
        "optax.contrib.muon": methods.optax_muon,
        "optax.adamw": methods.adamw,
        **methods.rollfast(context.note),
    }
