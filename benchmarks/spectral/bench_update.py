"""The update of a GPT-like tree of matrices: time, compile time, program size, bytes moved."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks import collectives, harness
from benchmarks.spectral import methods
from jaxkit import spectral

# Width and number of layers; a layer has four square and two 1 : 4 matrices.
SIZES = {"smoke": (16, 1), "short": (256, 8), "full": (1024, 12)}
ROUNDS = {"smoke": (2, 1), "short": (5, 2), "full": (20, 3)}  # of runs, of compilations
DEVICES = 8
DION = "optax.contrib.muon dion"  # optax's scanned preset


def run(context):
    parts = {"time and memory": _time, "traffic": _traffic}
    for name in context.track(list(parts)):
        yield from parts[name](context)


def _time(context):
    """Measures the update on one device."""
    width, layers = SIZES[context.form]
    rounds, compiles = ROUNDS[context.form]
    draw = np.random.default_rng(0).standard_normal
    params = jax.tree.map(lambda x: jnp.asarray(draw(x.shape, x.dtype)), _matrices(width, layers))
    calls = {}
    for name, make in _makers(context.note).items():
        tx = make(None)
        calls[name] = (tx.update, params, tx.init(params), params)
    measured = harness.measure(calls, rounds=rounds, compiles=compiles)
    for metric, unit, seeds, value in (
        ("run time", "ms", range(rounds), lambda m: [1e3 * x for x in m.run_s]),
        ("compile time", "s", range(compiles), lambda m: m.compile_s),
        ("compiled text", "kB", (None,), lambda m: [m.text_bytes / 1e3]),
        ("temporary memory", "MB", (None,), lambda m: [m.temp_bytes / 1e6]),
    ):
        yield from harness.versus(
            methods.OURS,
            {name: value(result) for name, result in measured.items()},
            case=f"update, {6 * layers} matrices",
            size=f"width {width}, {layers} layers",
            metric=metric,
            unit=unit,
            better="down",
            seeds=seeds,
        )


def _traffic(context):
    """Reads what the update moves between devices; the programs are only compiled."""
    width, layers = SIZES[context.form]
    function = "benchmarks.spectral.bench_update:moved_bytes"
    for tree, values in collectives.on_devices(DEVICES, function, width, layers).items():
        yield from harness.versus(
            methods.OURS,
            {name: [sum(kinds.values()) / 1e6] for name, kinds in values.items()},
            case=f"update, {tree}, rows over {DEVICES} devices",
            size=f"width {width}",
            metric="moved between devices",
            unit="MB per device",
            better="down",
        )


def moved_bytes(width, layers):
    """Returns ``{tree: {method: {collective: bytes}}}`` of one update on all devices."""
    mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("rows"))
    wide = [jax.ShapeDtypeStruct((width, 4 * width), "float32")] * 8
    trees = {
        f"8 matrices {width} x {4 * width}": {f"up_{i}": x for i, x in enumerate(wide)},
        f"{6 * layers} matrices": _matrices(width, layers),
    }
    moved = {}
    for tree, shapes in trees.items():
        params = jax.tree.map(lambda x: jax.device_put(jnp.ones(x.shape), rows), shapes)
        moved[tree] = {}
        makers = _makers(lambda text: None)
        del makers[DION]  # moves what the default moves: the same products, in a loop
        for name, make in makers.items():
            tx = make(params)
            compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
            moved[tree][name] = collectives.collective_bytes(compiled)
    return moved


def _makers(note):
    """Returns ``{name: make}``; ``make(sharding)`` is the optimizer, five steps each."""
    makers = {
        methods.OURS: lambda sharding: spectral.muon(1e-3, sharding=sharding),
        "optax.contrib.muon": lambda sharding: optax.contrib.muon(1e-3),
        DION: lambda sharding: optax.contrib.muon(1e-3, ns_coeffs="dion"),
    }
    for name, make in methods.rollfast(note).items():
        makers[name] = lambda sharding, make=make: make(1e-3, 1e-3)
    return makers


def _matrices(width, layers):
    square = jax.ShapeDtypeStruct((width, width), jnp.float32)
    layer = dict.fromkeys(("query", "key", "value", "out"), square)
    layer["up"] = jax.ShapeDtypeStruct((width, 4 * width), jnp.float32)
    layer["down"] = jax.ShapeDtypeStruct((4 * width, width), jnp.float32)
    return {f"layer_{index}": layer for index in range(layers)}
