"""What a benchmark is told, what it hands back, and how time and memory are measured."""

import concurrent.futures
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SPEED, SHARE = "tokens per second", "of the limit"
BY_CLOCK = ("s", "ms", SPEED, SHARE)  # units of what another busy process disturbs


class Context(NamedTuple):
    """What a benchmark is told."""

    form: str  # "smoke", "short" or "full"
    settings: dict[str, Any]  # its entry in settings.json
    data: pathlib.Path | None  # folder of real data sets
    track: Callable[[Sequence[str]], Iterator[str]]  # iterates over stages, shown as progress
    note: Callable[[str], None]  # prints a line
    dtype: Any = jnp.float32  # of the computation of models; their parameters are float32


class Row(NamedTuple):
    """One value of ``method`` in the comparison with ``rival``; the rival's rows name it twice."""

    case: str
    method: str
    rival: str
    size: str
    metric: str
    unit: str
    better: str  # "up" or "down"
    seed: int | None  # of the training run, or the round of a timing; values of one seed are paired
    value: float


class Curve(NamedTuple):
    """A line of the figure: ``values`` is ``[seeds, points]``, drawn as mean and range.

    ``scale`` is that of both axes, "linear" or "log".
    """

    case: str
    method: str
    x_label: str
    y_label: str
    x: np.ndarray
    values: np.ndarray
    scale: str = "linear"


class Measured(NamedTuple):
    """What :func:`measure` found out about one function; the lists are paired across functions."""

    compile_s: list[float]
    run_s: list[float]
    temp_bytes: int
    text_bytes: int


def versus(ours, values, *, case, size, metric, unit, better, seeds=(None,)):
    """Yields the rows that compare the methods in ``ours`` with each other one, seed by seed."""
    for rival in values:
        for method in (*ours, rival) if rival not in ours else ():
            for seed, value in zip(seeds, values[method], strict=True):
                yield Row(case, method, rival, size, metric, unit, better, seed, float(value))


def alone(method, values, *, case, size, metric, unit, better):
    """Yields the rows of a method that is compared with none: of one value, or of rounds."""
    for seed, value in zip(range(len(values)) if len(values) > 1 else [None], values, strict=True):
        yield Row(case, method, method, size, metric, unit, better, seed, float(value))


def loss_curve(case, method, losses, unit):
    """Returns the training losses ``[seeds, steps]`` as a line of at most 30 means."""
    losses = np.asarray(losses)
    pieces = np.array_split(losses, min(30, losses.shape[1]), axis=1)
    ends = np.cumsum([piece.shape[1] for piece in pieces])
    means = np.stack([piece.mean(1) for piece in pieces], axis=1)
    return Curve(case, method, "step", f"training loss, {unit}", ends, means)


def alternate(calls, rounds):
    """Returns the seconds that each call takes in each of ``rounds``, an iterable.

    All calls run once a round, so that a busy neighbor meets them all; the order turns around
    every other round, so that none always follows the same one.
    """
    seconds = {name: [] for name in calls}
    for index, _ in enumerate(rounds):
        for name in list(calls)[:: 1 if index % 2 == 0 else -1]:
            start = time.perf_counter()
            jax.block_until_ready(calls[name]())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def in_pairs(calls, track):
    """Returns ``{name: call()}``; two run at once, as compiling takes one core."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        waiting = {name: pool.submit(call) for name, call in calls.items()}
        return {
            name: jax.block_until_ready(waiting[name].result()) for name in track(list(waiting))
        }


def measure(calls, *, rounds, compiles):
    """Measures ``{name: (fun, *args)}`` side by side; returns ``{name: Measured}``.

    Each is compiled ``compiles`` times, alone; at 0 once, two at a time, which is not timed.
    """
    compiled = {}

    def build(name, fun, *args):
        # A new function each time, or jax would hand back what it compiled before.
        lowered = jax.jit(lambda *args: fun(*args)).lower(*args)
        compiled[name] = lowered.compile()
        return ()

    def bind(call, *args):
        return lambda: call(*args)

    builds = {name: bind(build, name, *calls[name]) for name in calls}
    compile_s = alternate(builds, range(compiles)) if compiles else in_pairs(builds, iter)
    ready = {name: bind(compiled[name], *args) for name, (_, *args) in calls.items()}
    alternate(ready, range(1))  # warm up
    run_s = alternate(ready, range(rounds))
    return {
        name: Measured(
            list(compile_s[name]),
            run_s[name],
            compiled[name].memory_analysis().temp_size_in_bytes,
            len(compiled[name].as_text()),
        )
        for name in calls
    }
