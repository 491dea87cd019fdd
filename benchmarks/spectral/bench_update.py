"""The update of a GPT-like tree: time, compile time, program size, bytes moved, rule by rule."""

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
ROUNDS = {"smoke": (2, 1), "short": (4, 2), "full": (20, 3)}  # of runs, of compilations
RULE_ROUNDS = {"smoke": 2, "short": 12, "full": 20}
SHORT = ("the whole tree", "the rules", "traffic")  # the parts of the short form
VOCABULARY = 32  # times the width
DEVICES = 8
DION = "optax.contrib.muon dion"  # optax's scanned preset
RULES = (
    "polar",
    "right_spectral",
    "left_spectral",
    "row_norm",
    "row_then_polar",
    "polar_then_row",
    "normuon",
    "sign",
)


def run(context):
    parts = {
        "the whole tree": _whole,
        "the whole tree with embedding and head": _with_embedding,
        "the rules": _rules,
        "traffic": _traffic,
    }
    for name in context.track([x for x in parts if context.form != "short" or x in SHORT]):
        yield from parts[name](context)


def _whole(context):
    """Measures the update of the matrices on one device."""
    width, layers = SIZES[context.form]
    yield from _time(
        context, _makers(context.note), _matrices(width, layers), f"{6 * layers} matrices"
    )


def _with_embedding(context):
    """The same with two matrices that optax orthogonalizes like all others of two axes."""
    width, layers = SIZES[context.form]
    shapes = _matrices(width, layers)
    shapes["embed"] = {"embedding": jax.ShapeDtypeStruct((VOCABULARY * width, width), "float32")}
    shapes["head"] = {"kernel": jax.ShapeDtypeStruct((width, VOCABULARY * width), "float32")}
    makers = _makers(None)
    del makers[DION]
    yield from _time(context, makers, shapes, f"{6 * layers} matrices, embedding and head")


def _time(context, makers, shapes, tree):
    width, layers = SIZES[context.form]
    rounds, compiles = ROUNDS[context.form]
    measured = _measure(makers, shapes, rounds, compiles)
    for metric, unit, seeds, value in (
        ("run time", "ms", range(rounds), lambda m: [1e3 * x for x in m.run_s]),
        ("compile time", "s", range(compiles), lambda m: m.compile_s),
        ("compiled text", "kB", (None,), lambda m: [m.text_bytes / 1e3]),
        ("temporary memory", "MB", (None,), lambda m: [m.temp_bytes / 1e6]),
    ):
        yield from harness.versus(
            (methods.STACK,),
            {name: value(result) for name, result in measured.items()},
            case=f"update, {tree}",
            size=f"width {width}, {layers} layers",
            metric=metric,
            unit=unit,
            better="down",
            seeds=seeds,
        )


def _rules(context):
    """Measures each rule against polar and, if it is there, against rollfast's, on one layer."""
    width, _ = SIZES[context.form]
    rounds = RULE_ROUNDS[context.form]
    makers = {
        rule: lambda _, rule=rule: optax.chain(
            spectral.scale_by_spectral(rule, nesterov=True), optax.scale_by_learning_rate(1e-3)
        )
        for rule in RULES
    }
    rivals = {"polar": [rule for rule in RULES if rule != "polar"]}
    package = methods.rollfast(None)
    if package:
        for rule, method in (("polar", "muon"), ("normuon", "normuon"), ("row_norm", "rmnp")):
            makers[f"rollfast.{method}"] = lambda _, method=method: getattr(package, method)(1e-3)
            rivals[f"rollfast.{method}"] = [rule]
    measured = _measure(makers, _matrices(width, 1), rounds, 1)
    for rival, rules in rivals.items():
        yield from harness.versus(
            rules,
            {name: [1e3 * x for x in measured[name].run_s] for name in (*rules, rival)},
            case="update by rule, 6 matrices",
            size=f"width {width}, 1 layer",
            metric="run time",
            unit="ms",
            better="down",
            seeds=range(rounds),
        )


def _measure(makers, shapes, rounds, compiles):
    draw = np.random.default_rng(0).standard_normal
    params = jax.tree.map(lambda x: jnp.asarray(draw(x.shape, x.dtype)), shapes)
    calls = {}
    for name, make in makers.items():
        tx = make(None)
        calls[name] = (tx.update, params, tx.init(params), params)
    return harness.measure(calls, rounds=rounds, compiles=compiles)


def _traffic(context):
    """Reads what the update moves between devices; the programs are only compiled."""
    width, layers = SIZES[context.form]
    layers = 0 if context.form == "short" else layers  # the whole tree takes long to compile
    function = "benchmarks.spectral.bench_update:moved_bytes"
    for tree, values in collectives.on_devices(DEVICES, function, width, layers).items():
        yield from harness.versus(
            (methods.STACK,),
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
    trees = {f"8 matrices {width} x {4 * width}": {f"up_{i}": x for i, x in enumerate(wide)}}
    if layers:
        trees[f"{6 * layers} matrices"] = _matrices(width, layers)
    moved = {}
    for tree, shapes in trees.items():
        params = jax.tree.map(lambda x: jax.device_put(jnp.ones(x.shape), rows), shapes)
        moved[tree] = {}
        makers = _makers(None)
        del makers[DION]  # moves what the default moves: the same products, in a loop
        for name, make in makers.items():
            tx = make(params)
            compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
            moved[tree][name] = collectives.collective_bytes(compiled)
    return moved


def _makers(note):
    """Returns ``{name: make}``; ``make(sharding)`` is the optimizer, five steps each."""
    makers = {
        methods.STACK: lambda sharding: spectral.symmetry_compatible(1e-3, sharding=sharding),
        "optax.contrib.muon": lambda sharding: optax.contrib.muon(1e-3),
        DION: lambda sharding: optax.contrib.muon(1e-3, ns_coeffs="dion"),
    }
    package = methods.rollfast(note)
    if package:
        makers["rollfast.muon"] = lambda sharding: package.muon(1e-3)
    return makers


def _matrices(width, layers):
    square = jax.ShapeDtypeStruct((width, width), jnp.float32)
    layer = dict.fromkeys(("query", "key", "value", "out"), square)
    layer["up"] = jax.ShapeDtypeStruct((width, 4 * width), jnp.float32)
    layer["down"] = jax.ShapeDtypeStruct((4 * width, width), jnp.float32)
    return {f"layer_{index}": layer for index in range(layers)}
