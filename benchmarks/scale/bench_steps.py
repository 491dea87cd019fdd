"""The training step of every benchmark: compile and run time, memory, and share of the device."""

import itertools

import jax.numpy as jnp

from benchmarks import catalog, costs, harness

ON_REQUEST = True

# The full form has all; the short one the largest models of a topic, ours and a rival. A test
# exports the steps of all.
FEW = {"smoke": 1, "short": 2, "full": None}
NAMES = {
    "smoke": ("zo.bandit",),
    "short": ("blr.step", "denoise.step", "spectral.stack", "zo.digits", "zo.step"),
}
ROUNDS = {"smoke": 1, "short": 5, "full": 20}
HASTE = {"smoke": {"seconds": 1e-3}}  # how large the products and copies of the limits get


def run(context):
    dtype = jnp.dtype(context.dtype).name
    names = NAMES.get(context.form) or benchmarks()
    labels = iter(context.track(["limits", *names]))
    next(labels)
    peak, bandwidth = costs.limits(context.dtype, **HASTE.get(context.form, {}))
    about = {"case": "limits of the device", "size": dtype, "better": "up"}
    for metric, unit, value in (
        ("square matrix product", "TFLOP per second", peak / 1e12),
        ("copy, read and written", "GB per second", bandwidth / 1e9),
    ):
        yield from harness.alone("measured", [value], **about, metric=metric, unit=unit)
    for name, _ in zip(names, labels, strict=True):
        steps = itertools.islice(steps_of(name, context), FEW[context.form])
        yield from costs.rows(
            f"a training step of {name}",
            steps,
            size=f"{context.form} form, {dtype}",
            peak=peak,
            bandwidth=bandwidth,
            rounds=ROUNDS[context.form],
        )


def benchmarks():
    """Returns the names of the benchmarks that train, but for this one."""
    names = (name for name in catalog.discover() if name != "scale.steps")
    return [name for name in names if hasattr(catalog.load(name), "steps")]


def steps(context):
    """Yields the steps of all benchmarks, by the name of the benchmark and the method."""
    for name in benchmarks():
        for step in steps_of(name, context):
            yield step._replace(method=f"{name}: {step.method}")


def steps_of(name, context):
    """Returns the steps of a benchmark, with its own settings."""
    topic, method = name.split(".")
    settings = catalog.settings(topic).get(method, {})
    return catalog.load(name).steps(context._replace(settings=settings))
