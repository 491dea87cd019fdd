"""A language model on Python's sources: the whole stack, at equal steps and at equal time."""

import numpy as np

from benchmarks import lm, tuning
from benchmarks.spectral import bench_muon, methods

SIZES = {form: size._replace(corpus="library_sources") for form, size in bench_muon.SIZES.items()}
SEEDS, TUNE_SEEDS = bench_muon.SEEDS, bench_muon.TUNE_SEEDS
MAKERS = {
    methods.STACK: methods.stack,
    "optax.contrib.muon": methods.optax_muon,
    "optax.adamw": methods.adamw,
}
GRIDS = {
    methods.STACK: {**bench_muon.GRID, "other_learning_rate": (0.02, 0.04, 0.08, 0.16)},
    "optax.contrib.muon": bench_muon.GRID,
    "optax.adamw": bench_muon.ADAMW_GRID,
}
OURS = (methods.STACK,)
ABOUT = {"case": "whole stack", "unit": "nats per byte"}


def run(context):
    size, seeds = SIZES[context.form], SEEDS[context.form]
    rates = {name: tuning.chosen(context, name) for name in MAKERS}
    task, about = lm.Task(size, context.dtype), {**ABOUT, "size": size, "seeds": seeds}
    results = task.race(MAKERS, rates, seeds, context.track)
    yield from lm.losses(OURS, results, **about, metric="validation loss")
    yield from lm.times(OURS, results, case=ABOUT["case"], size=size)
    yield from lm.curves(results, **ABOUT)

    horizons = equal_time_steps(results)
    fewer = {name: make for name, make in MAKERS.items() if horizons[name] < size.steps}
    timed = task.race(fewer, rates, seeds, context.track, horizons=horizons)
    metric = "validation loss at equal time"
    yield from lm.losses(OURS, {**results, **timed}, **about, metric=metric)


def steps(context):
    rates = {name: tuning.chosen(context, name) for name in MAKERS}
    yield from lm.Task(SIZES[context.form], context.dtype).steps(MAKERS, rates)


def equal_time_steps(results):
    """Returns the steps that each method takes while the quickest takes all of its own.

    The ratio of the step times is taken lap by lap. The decay of the learning rate is stretched
    over the own number of steps.
    """
    seconds = {name: result.step_seconds for name, result in results.items()}
    quickest = min(seconds, key=lambda name: np.median(seconds[name]))
    steps = results[quickest].train_loss.shape[1]
    return {name: round(steps * np.median(seconds[quickest] / x)) for name, x in seconds.items()}


def tune(context):
    size = SIZES[context.form]
    return tuning.entry(
        lm.Task(size).search(MAKERS, GRIDS, TUNE_SEEDS, context.track),
        grids=GRIDS,
        criterion="lowest mean validation loss, nats per byte, after the last step",
        size=str(size),
        seeds=TUNE_SEEDS,
    )
