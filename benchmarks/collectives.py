"""Bytes that move between devices, read from a compiled program, without owning the devices."""

import functools
import importlib
import importlib.metadata
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np

_COLLECTIVE = re.compile(
    r"= ([^\"]*?) (all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|"
    r"ragged-all-to-all|reduce-scatter)(-done)?\((.*?)\)"
)
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.\-]+)"
)
_CALLED_LIST = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


def collective_bytes(compiled):
    """Returns ``{kind: bytes}`` that one device moves in one run of a compiled function.

    A collective counts with the larger of what one device puts in and what it gets out, a loop
    body once per trip, and a conditional with all its branches. Raises ValueError if a loop moves
    data and its text does not say how often it turns.
    """
    text = re.sub(r"/\*.*?\*/", "", compiled.as_text())
    shapes = dict(re.findall(r"(%[\w.\-]+) = (\([^=]*?\)|\S+) [\w\-]+\(", text))
    bodies, entry = {}, None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head:
            body = bodies[head[2]] = []
            entry = head[2] if head[1] else entry
        elif line.startswith("  "):
            body.append(line)

    @functools.cache
    def total(name):
        moved = {}
        for line in bodies[name]:
            found = _COLLECTIVE.search(line)
            if found:
                # An asynchronous pair counts at its end, where the result stands alone.
                result, kind, is_done, operands = found.groups()
                names = [] if is_done else re.findall(r"%[\w.\-]+", operands)
                taken = sum(_shape_bytes(shapes.get(operand, "")) for operand in names)
                moved[kind] = moved.get(kind, 0) + max(_shape_bytes(result), taken)
            called = _CALLED.findall(line)
            for names in _CALLED_LIST.findall(line):
                called += re.findall(r"[\w.\-]+", names)
            trips = _TRIPS.search(line)
            for callee in called:
                for kind, size in total(callee).items():
                    if " while(" in line and not trips:
                        raise ValueError(
                            f"the trip count of loop {callee} must be known, got none."
                        )
                    moved[kind] = moved.get(kind, 0) + size * (int(trips[1]) if trips else 1)
        return moved

    return total(entry)


def on_devices(count, function, *args):
    """Calls ``"module:function"`` in a new process that has ``count`` CPU devices.

    XLA reads the number once, at its start. Arguments and result travel as JSON. For programs
    whose speed does not matter, such as those that are compiled and read, not run.
    """
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={count}"
    if importlib.metadata.version("jaxlib").startswith("0.10."):  # others abort, not knowing it
        flags += " --xla_cpu_use_fusion_emitters=false"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.collectives", function, json.dumps(args)],
        cwd=pathlib.Path(__file__).resolve().parent.parent,
        # Machine code is not read, so none is optimized; the collectives are the same.
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": flags.strip(),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        },
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{function} failed on {count} devices:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _shape_bytes(text):
    """Returns the bytes of all arrays that the text of a shape names."""
    total = 0
    for kind, dims in re.findall(r"\b(pred|[a-z]+\d\w*)\[([\d,]*)\]", text):
        bits = 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])
        total += bits * int(np.prod([int(dim) for dim in dims.split(",") if dim], dtype=int)) // 8
    return total


if __name__ == "__main__":
    module, name = sys.argv[1].split(":")
    print(json.dumps(getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))))
