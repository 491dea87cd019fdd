"""Python processes on this machine, joined by ``jax.distributed``, that call a function together.

As a script it is one of them.
"""

import concurrent.futures
import importlib
import json
import os
import pathlib
import socket
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def start(count, function, *args, heartbeat=100):
    """Starts ``count`` processes that call ``"module:function"`` together; returns them.

    Each has one device, and a CPU core of its own if there are as many. Arguments travel as JSON,
    and so does the result, as the last line that a process prints. When one fails or is killed,
    JAX ends all after ``heartbeat`` seconds at the latest.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip()}
    call = json.dumps([address, count, heartbeat, function, args])
    return [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.scale.processes", str(index), call],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(count)
    ]


def results(running, timeout=300):
    """Returns what each process returned; RuntimeError has what those said that failed."""
    try:
        with concurrent.futures.ThreadPoolExecutor(len(running)) as pool:  # no pipe may fill up
            said = list(pool.map(lambda x: x.communicate(timeout=timeout), running))
    finally:
        for process in running:
            process.kill()
    failed = [
        f"process {index} ended with {process.returncode}:\n{errors}"
        for index, (process, (_, errors)) in enumerate(zip(running, said, strict=True))
        if process.returncode
    ]
    if failed:
        raise RuntimeError("\n".join(failed))
    return [json.loads(out.splitlines()[-1]) for out, _ in said]


def _main(index, address, count, heartbeat, function, args):
    if hasattr(os, "sched_setaffinity"):  # before jax counts the cores
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[index % len(cores)]})
    import jax

    jax.distributed.initialize(
        address,
        num_processes=count,
        process_id=index,
        heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=heartbeat,
    )
    module, name = function.split(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(*args)), flush=True)


if __name__ == "__main__":
    _main(int(sys.argv[1]), *json.loads(sys.argv[2]))
