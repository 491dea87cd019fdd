"""A language model on one device and on eight: losses, bytes moved, memory, layout by layout."""

import jax

from benchmarks import collectives, harness
from benchmarks.scale import layouts

SIZES = {
    "smoke": layouts.Size(width=16, layers=1, context=8, batch=16, steps=2),
    "short": layouts.Size(width=64, layers=1, context=32, batch=16, steps=8),
    "full": layouts.Size(width=256, layers=8, context=128, batch=64, steps=16),
}
PARTS = {  # smoke shows that it runs
    "smoke": ((layouts.FULLY,), ("auto",)),
    "short": (layouts.LAYOUTS, tuple(layouts.KINDS)),
    "full": (layouts.LAYOUTS, tuple(layouts.KINDS)),
}
ROUNDS = {"smoke": 1, "short": 10, "full": 20}
DEVICES = 8


def run(context):
    """Uses the devices of this process, or makes eight of its CPU in another one.

    Those share the cores, so that only real ones are timed.
    """
    size, (names, kinds) = layouts.size_in(SIZES, context), PARTS[context.form]
    count, rounds = jax.device_count(), ROUNDS[context.form]
    for _ in context.track(["layouts"]):
        if count > 1:
            runs, refused = layouts.measure(size, names, kinds, rounds)
        else:
            count, function = DEVICES, "benchmarks.scale.layouts:measure"
            runs, refused = collectives.on_devices(count, function, size, names, kinds, 0)
    for name, reason in refused.items():
        context.note(f"{name}, does not run: {reason}")
    ours = [layouts.name_of(layout, kind) for layout in names for kind in kinds]
    yield from _against_one(runs, ours, f"training, {count} devices", str(size))
    for layout in names:
        found = {
            f"{method}, {kind} axes": runs[layouts.name_of(layout, kind, method)]
            for kind in kinds
            for method in layouts.MAKERS
            if layouts.name_of(layout, kind, method) in runs
        }
        yield from _against_muon(found, f"{layout}, {count} devices", size)


def steps(context):
    yield from layouts.steps(layouts.size_in(SIZES, context))


def _against_one(runs, ours, case, size):
    """Yields what differs from one device; what rounding does there shows another order of rows."""
    one = runs[layouts.ONE]["losses"]
    difference = {
        name: [max(abs(a - b) for a, b in zip(runs[name]["losses"], one, strict=True))]
        for name in (*ours, layouts.REVERSED)
    }
    memory = {name: [runs[name]["state"] / 1e6] for name in (*ours, layouts.ONE)}
    for values, metric, unit in (
        (difference, "largest difference of the loss from one device", "nats per byte"),
        (memory, "optimizer state", "MB per device"),
    ):
        yield from harness.versus(
            ours, values, case=case, size=size, metric=metric, unit=unit, better="down"
        )


def _against_muon(found, case, size):
    ours = [name for name in found if name.startswith(layouts.OURS)]
    for part in ("step", "update"):
        moved = {name: x[part] for name, x in found.items() if x[part] is not None}
        kinds = sorted(set().union(*moved.values()))
        for kind in (*kinds, "all"):
            yield from harness.versus(
                [name for name in ours if name in moved],
                {
                    name: [(sum(x.values()) if kind == "all" else x.get(kind, 0)) / 1e6]
                    for name, x in moved.items()
                },
                case=case,
                size=str(size),
                metric=f"moved by the {'step' if part == 'step' else 'optimizer alone'}, {kind}",
                unit="MB per device",
                better="down",
            )
    tokens = size.batch * size.context
    speed = {name: [tokens / x for x in run["seconds"]] for name, run in found.items()}
    rounds = range(len(next(iter(speed.values()))))
    yield from harness.versus(
        ours if rounds else (),
        speed,
        case=case,
        size=str(size),
        metric="speed",
        unit=harness.SPEED,
        better="up",
        seeds=rounds,
    )
