"""Small batches: momentum, transport of order 2, a weight average, and the gain without tuning."""

import concurrent.futures
import functools
from typing import NamedTuple

import jax
import numpy as np
import optax

from benchmarks import harness, lm, tuning
from benchmarks.denoise import training
from jaxkit import denoise, spectral, train


class Size(NamedTuple):
    """Steps of training on each task."""

    steps: dict[str, int]
    batches: tuple[int, ...]

    def about(self, task, batch):
        return f"{MODELS[task]}, batch {batch}, {self.steps[task]} steps"


DIGITS, TEXT = "digits", "text"
MODEL = lm.Size("help_topics", 32, 96, 1, 2, 32, 4, 600, 10, 336)  # its batch goes unused
MODELS = {DIGITS: "MLP 64-32-10", TEXT: "help_topics, 1 x 32, context 32"}
SIZES = {
    "smoke": Size({DIGITS: 4}, (4,)),
    "short": Size({DIGITS: 400}, (4,)),
    "full": Size({DIGITS: 400, TEXT: 400}, (4, 8)),
}
SEEDS = {"smoke": (1, 2), "short": range(1, 9), "full": range(1, 17)}
TUNE_SEEDS = (1001, 1002)  # never reported
SCHEDULES = {"constant rate": 0.0, "decayed rate": 1.0}
MOMENTUM, ORDER_2, AVERAGE = "Muon, momentum", "Muon, denoise order 2", "Muon, weight average"
AUTO = 'Muon, gain="auto"'
OURS = (ORDER_2, AUTO)
SMOKE = (MOMENTUM, ORDER_2)
UNITS = {DIGITS: "nats", TEXT: "nats per byte"}
OTHER_RATES = {DIGITS: 3e-3, TEXT: 1e-2}  # of Adam, for what Muon leaves to it
RATES = {DIGITS: (0.005, 0.015, 0.04, 0.12), TEXT: (0.002, 0.006, 0.02, 0.06)}
SECOND = {
    MOMENTUM: {"gain": (0.05, 0.15, 0.4, 0.8)},
    ORDER_2: {"radius": (0.03, 0.1, 0.3, 1.0)},
    AVERAGE: {"average": (0.002, 0.01, 0.05, 0.25)},
}
# Each lies around the best of its method there.
SECOND_OF_DECAYED_TEXT = {
    MOMENTUM: {"gain": (0.02, 0.05, 0.4, 0.8)},
    ORDER_2: {"radius": (0.01, 0.03, 0.1, 0.3)},
    AVERAGE: {"average": (0.05, 0.25, 0.7, 1.0)},  # 1 is none
}


def _grid(task, schedule, method):
    rates, is_decayed = RATES[task], schedule == "decayed rate"
    if method == AUTO:  # a finer grid of the one setting that is left
        low, high = (0.0125, 0.3) if is_decayed and task == DIGITS else (rates[0], rates[-1])
        return {"learning_rate": tuple(float(x) for x in np.geomspace(low, high, 16).round(4))}
    second = SECOND_OF_DECAYED_TEXT if is_decayed and task == TEXT else SECOND
    return {"learning_rate": rates, **second[method]}


def _plain(loss_fn, settings):
    del settings
    return train.backprop(loss_fn)


def _muon(*links, b1=0.0):
    """Returns what makes Muon behind ``links``, without momentum where these keep the average."""
    return lambda rate, settings: optax.chain(
        *(link(settings) for link in links),
        spectral.muon(
            rate,
            b1=b1(settings) if callable(b1) else b1,
            other_learning_rate=lambda step: (
                settings["other_rate"] * rate(step) / settings["learning_rate"]
            ),
        ),
    )


METHODS = {
    MOMENTUM: training.Method(_plain, _muon(b1=lambda settings: 1 - settings["gain"])),
    ORDER_2: training.Method(
        lambda loss_fn, settings: denoise.gradient_estimator(_plain(loss_fn, settings)),
        _muon(
            lambda settings: denoise.denoise(0.02, relative_trust_radius=settings["radius"]),
        ),
    ),
    AVERAGE: training.Method(_plain, _muon(b1=0.95)),
    AUTO: training.Method(
        lambda loss_fn, settings: denoise.gradient_estimator(_plain(loss_fn, settings)),
        _muon(lambda settings: denoise.denoise("auto", order=1)),
    ),
}


def run(context):
    size, seeds = SIZES[context.form], list(SEEDS[context.form])
    methods = SMOKE if context.form == "smoke" else METHODS
    cases = [(task, batch) for task in size.steps for batch in size.batches]
    labels = context.track([f"{task}, batch {batch}" for task, batch in cases])
    for (task, batch), _ in zip(cases, labels, strict=True):
        settings = {
            method: [
                {**tuning.chosen(context, _label(task, batch, schedule, method)), "decay": decay}
                for schedule, decay in SCHEDULES.items()
                for _ in seeds
            ]
            for method in methods
        }

        def race(method, task=task, batch=batch, settings=settings):
            all_seeds = seeds * len(SCHEDULES)
            return _race(size, task, batch, method, settings[method], all_seeds, context.dtype)

        with concurrent.futures.ThreadPoolExecutor(2) as pool:  # compiling takes one core
            found = dict(zip(methods, pool.map(race, methods), strict=True))
        for index, schedule in enumerate(SCHEDULES):
            part = slice(index * len(seeds), (index + 1) * len(seeds))
            about = {"case": f"{task}, batch {batch}, {schedule}", "seeds": seeds}
            yield from harness.versus(
                [method for method in OURS if method in found],
                {method: result["loss"][part] for method, result in found.items()},
                **about,
                size=size.about(task, batch),
                metric="test loss",
                unit=UNITS[task],
                better="down",
            )


def steps(context):
    """Yields the steps on digits with the smallest batch, at a constant rate."""
    kind, batch, schedule = DIGITS, SIZES[context.form].batches[0], "constant rate"
    known, other = _task(kind, batch, context.dtype), {"other_rate": OTHER_RATES[kind]}
    for name in (ORDER_2, MOMENTUM, AVERAGE, AUTO):
        settings = tuning.chosen(context, _label(kind, batch, schedule, name)) | other
        yield training.step_of(name, known, METHODS[name], settings, batch)


def tune(context):
    """Searches the settings of every method, by the loss on the validation rows."""
    size = SIZES["full"]
    cases = {
        _label(task, batch, schedule, method): (task, batch, schedule, method)
        for task in size.steps
        for batch in size.batches
        for schedule in SCHEDULES
        for method in METHODS
    }
    labels = iter(context.track(list(cases)))

    def race(label, settings, seeds):
        next(labels)
        task, batch, schedule, method = cases[label]
        settings = [{**one, "decay": SCHEDULES[schedule]} for one in settings]
        return _race(size, task, batch, method, settings, seeds)["validation"]

    return tuning.search(
        race,
        {label: _grid(task, *rest) for label, (task, _, *rest) in cases.items()},
        TUNE_SEEDS,
        criterion="lowest mean validation loss, nats, after the last step",
        size=", ".join(f"{task}: {steps} steps" for task, steps in size.steps.items()),
    )


def _label(task, batch, schedule, method):
    return f"{task}, batch {batch}, {schedule}: {method}"


def _race(size, task, batch, method, settings, seeds, dtype=None):
    """Returns ``{metric: [runs]}`` as NumPy arrays; run i has its own settings and seed."""
    settings = [{**one, "other_rate": OTHER_RATES[task]} for one in settings]
    program = _program(task, batch, size.steps[task], method, dtype)
    return jax.tree.map(np.asarray, program(*training.arrays(seeds, settings)))


@functools.cache
def _program(task, batch, steps, method, dtype):
    return training.run(_task(task, batch, dtype), METHODS[method], steps)


@functools.cache
def _task(task, batch, dtype):
    if task == DIGITS:
        parts, draw = training.digits_rows(), training.uniform(batch)
        return training.images(parts, (32, 10), draw, dtype=dtype)
    return training.help_text(MODEL, batch, dtype)
