"""What the loop asks of the machine it runs on: signals and a progress bar."""

import contextlib
import signal
import threading
import time

import jax
import numpy as np


@contextlib.contextmanager
def signals():
    """Yields the list of signals caught, if in the main thread; restores the handlers after."""
    caught, old = [], {}

    def note(number, frame):
        caught.append(number)
        if number == signal.SIGINT:  # the second Ctrl-C interrupts as usual
            signal.signal(number, old[number])

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            handler = signal.getsignal(number)
            if handler not in (None, signal.SIG_IGN):  # None: set from C, cannot be put back
                old[number] = handler
                signal.signal(number, note)
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def agreed(caught, due):
    """Returns the signal to stop for, SIGTERM before SIGINT, or 0: the same in all processes."""
    stop = max(caught, default=0)
    return largest(stop) if due or jax.process_count() == 1 else 0


def largest(number):
    """Returns the largest of the whole numbers that the processes call this with."""
    if jax.process_count() == 1:
        return int(number)
    from jax.experimental import multihost_utils

    return int(multihost_utils.process_allgather(np.int32(number)).max())


@contextlib.contextmanager
def company():
    """Says it where a process fails since another one has stopped: ConnectionError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).splitlines()[0]
        if jax.process_count() == 1 or reason.startswith("RESOURCE_EXHAUSTED"):
            raise
        raise ConnectionError(
            f"Process {jax.process_index()} of {jax.process_count()} has lost another one; start "
            f"all of them again to go on from the newest checkpoint ({reason})."
        ) from error


@contextlib.contextmanager
def progress_bar(done, num_steps, progress):
    """Yields ``show(done, loss or None)``; draws only in a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    console = Console(stderr=True)
    # A disabled bar of rich below 14.3 still prints a line, so there is none.
    if not progress or jax.process_index() != 0 or not console.is_terminal:
        yield lambda done, loss: None
        return
    columns = MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), "{task.description}"
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("", total=num_steps, completed=done)
        mark = [done, time.perf_counter()]

        def show(done, loss):
            if loss is None:
                bar.update(task, completed=done)
                return
            now = time.perf_counter()
            rate = (done - mark[0]) / (now - mark[1])
            mark[:] = done, now
            bar.update(task, completed=done, description=f"loss {loss:.4g}, {rate:.3g} steps/s")

        yield show
