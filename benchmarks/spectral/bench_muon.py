"""A language model on Python's help texts: spectral.muon against optax.contrib.muon and AdamW."""

from benchmarks import lm, tuning
from benchmarks.spectral import methods

SIZES = {
    "smoke": lm.Size("help_topics", 16, 32, 1, 2, 8, 4, 10, 5, 8),
    "short": lm.Size("help_topics", 64, 128, 1, 4, 32, 16, 80, 8, 208),
    "full": lm.Size("library_sources", 384, 1024, 6, 6, 128, 32, 2000, 100, 2048),
}
SEEDS = {"smoke": (1, 2), "short": range(1, 6), "full": range(1, 11)}
TUNE_SEEDS = (1001, 1002)  # never reported
GRID = {
    "learning_rate": (0.005, 0.01, 0.02, 0.04),
    "other_learning_rate": (0.01, 0.02, 0.04, 0.08),
}
# As large, and lower: there AdamW has its best rate for matrices.
ADAMW_GRID = {**GRID, "learning_rate": (0.00125, 0.0025, 0.005, 0.01)}
OURS = (methods.MUON,)
ABOUT = {"case": "language model", "unit": "nats per byte"}


def run(context):
    size, seeds, makers = SIZES[context.form], SEEDS[context.form], _makers(context)
    if "rollfast.muon" in makers and "rollfast.muon" not in context.settings["methods"]:
        context.note("rollfast.muon is left out: settings.json has none for it; --tune makes them.")
        del makers["rollfast.muon"]
    rates = {name: tuning.chosen(context, name) for name in makers}
    results = lm.Task(size, context.dtype).race(makers, rates, seeds, context.track)
    yield from lm.losses(OURS, results, **ABOUT, metric="validation loss", size=size, seeds=seeds)
    yield from lm.times(OURS, results, case=ABOUT["case"], size=size)
    yield from lm.curves(results, **ABOUT)


def steps(context):
    makers = _makers(context)
    rates = {name: tuning.chosen(context, name) for name in makers}
    yield from lm.Task(SIZES[context.form], context.dtype).steps(makers, rates)


def tune(context):
    size, makers = SIZES[context.form], _makers(context)
    grids = {**dict.fromkeys(makers, GRID), "optax.adamw": ADAMW_GRID}
    return tuning.entry(
        lm.Task(size).search(makers, grids, TUNE_SEEDS, context.track),
        grids=grids,
        criterion="lowest mean validation loss, nats per byte, after the last step",
        size=str(size),
        seeds=TUNE_SEEDS,
    )


def _makers(context):
    makers = {
        methods.MUON: methods.muon,
        "optax.contrib.muon": methods.optax_muon,
        "optax.adamw": methods.adamw,
    }
    package = methods.rollfast(context.note)
    if package:
        makers["rollfast.muon"] = methods.rollfast_muon(package)
    return makers
