"""A language model on two processes that share each batch: losses, and speed of each process."""

import os
import time

import jax
from jax.experimental import multihost_utils

from benchmarks import harness
from benchmarks.scale import layouts, processes

SIZES = {
    "smoke": layouts.Size(width=16, layers=1, context=8, batch=8, steps=2),
    "short": layouts.Size(width=128, layers=1, context=128, batch=32, steps=3),
    "full": layouts.Size(width=256, layers=4, context=128, batch=32, steps=16),
}
ROUNDS = {"smoke": 1, "short": 4, "full": 12}
COUNT = 2
JOINED, ALONE = f"{COUNT} processes", "one process"


def run(context):
    size = layouts.size_in(SIZES, context)
    about = {"case": f"data parallel, {COUNT} processes of a core each", "size": str(size)}
    for _ in context.track(["processes"]):
        running = processes.start(
            COUNT, "benchmarks.scale.bench_processes:work", size, ROUNDS[context.form]
        )
        with jax.default_device(jax.devices("cpu")[0]):
            one, reversed_one = layouts.references(size)
        found = processes.results(running)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if cores < COUNT:
        context.note(f"scale.processes: {COUNT} processes share {cores} core, so speed means less.")
    yield from harness.versus(
        (JOINED,),
        {JOINED: [_apart(found[0]["losses"], one)], layouts.REVERSED: [_apart(reversed_one, one)]},
        **about,
        metric="largest difference of the loss from one device",
        unit="nats per byte",
        better="down",
    )
    tokens = size.batch // COUNT * size.context * size.steps
    # A step together takes as long as that of the slower one, so alone its time counts as well.
    seconds = {
        name: [max(times) for times in zip(*(x["seconds"][name] for x in found), strict=True)]
        for name in (JOINED, ALONE)
    }
    yield from harness.versus(
        (JOINED,),
        {name: [tokens / x for x in times] for name, times in seconds.items()},
        **about,
        metric="speed of a process",
        unit=harness.SPEED,
        better="up",
        seeds=range(ROUNDS[context.form]),
    )


def steps(context):
    yield from layouts.steps(layouts.size_in(SIZES, context))


def work(size, rounds):
    """Trains with the other processes, and in turns alone on a share of each batch.

    All do the same at the same time, so each has the same machine in both.
    """
    size = layouts.Size(*size)
    joined = layouts.on_mesh(size, layouts.DATA, "auto")
    alone = layouts.on_one_device(size._replace(batch=size.batch // jax.process_count()))
    calls, found = {}, {}
    for name, run in ((JOINED, joined), (ALONE, alone)):
        step = layouts.compile_step(run)
        state, found[name] = layouts.losses(run, step)
        calls[name] = _lap(step, state, run.windows)
    seconds = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            # Else the time of one would begin before the other is ready.
            multihost_utils.sync_global_devices(name)
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return {"losses": found[JOINED], "seconds": seconds}


def _lap(step, state, windows):
    """Returns a function that goes once more through all windows at each call."""
    states = [state]

    def call():
        for batch in windows:
            states[0], metrics = step(states[0], batch)
        return metrics

    return call


def _apart(losses, others):
    return max(abs(a - b) for a, b in zip(losses, others, strict=True))
