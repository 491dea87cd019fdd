"""A language model on Python's sources: the whole stack, at equal steps and at equal time."""

import numpy as np

from benchmarks import lm, tuning
from benchmarks.spectral import bench_muon, methods

SIZES = {form: size._replace(corpus="library_sources") for form, size in bench_muon.SIZES.items()}
SEEDS, ROUNDS, TUNE_SEEDS = bench_muon.SEEDS, bench_muon.ROUNDS, bench_muon.TUNE_SEEDS
MAKERS = {
    methods.STACK: methods.stack,
    "optax.contrib.muon": methods.optax_muon,
    "optax.adamw": methods.adamw,
}
GRIDS = {**dict.fromkeys(MAKERS, bench_muon.GRID), "optax.adamw": bench_muon.ADAMW_GRID}
OURS = (methods.STACK,)
ABOUT = {"case": "whole stack", "unit": "nats per byte"}


def run(context):
    size, seeds = SIZES[context.form], SEEDS[context.form]
    rates = {name: tuning.chosen(context, name) for name in MAKERS}
    task = lm.Task(size)
    rounds = context.track([f"timing {i + 1}" for i in range(ROUNDS)])
    seconds = task.step_seconds(MAKERS, rates, rounds)
    results = task.race(MAKERS, rates, seeds, context.track)
    about = {**ABOUT, "size": size, "seeds": seeds}
    yield from lm.losses(OURS, results, **about, metric="validation loss")
    yield from lm.times(OURS, seconds, case=ABOUT["case"], size=size)
    yield from lm.curves(results, **ABOUT)

    steps = equal_time_steps(size, seconds)
    fewer = {name: make for name, make in MAKERS.items() if steps[name] < size.steps}
    timed = {**results, **task.race(fewer, rates, seeds, context.track, steps=steps)}
    yield from lm.losses(OURS, timed, **about, metric="validation loss at equal time")


def equal_time_steps(size, seconds):
    """Returns the steps that each method takes while the quickest takes ``size.steps``.

    The ratio of the step times is taken round by round, and laps are cut off to whole ones; the
    decay of the learning rate is stretched over the own number of steps.
    """
    quickest = min(seconds, key=lambda name: np.median(seconds[name]))
    share = {name: np.median(seconds[quickest] / x) for name, x in seconds.items()}
    laps = {name: max(1, int(x * size.steps / size.lap + 1e-6)) for name, x in share.items()}
    return {name: count * size.lap for name, count in laps.items()}


def tune(context):
    size = SIZES[context.form]
    return tuning.entry(
        lm.Task(size).search(MAKERS, GRIDS, TUNE_SEEDS, context.track),
        grids=GRIDS,
        criterion="lowest mean validation loss, nats per byte, after the last step",
        size=str(size),
        seeds=TUNE_SEEDS,
    )
