"""Every rule on sharded leaves: the numbers of one device, each leaf's layout, and what crosses."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import (
    PLAIN,
    assert_close,
    assert_same_layout,
    both_kinds,
    compile_for,
    make_mesh,
    place,
)

from benchmarks.collectives import collective_bytes
from jaxkit import spectral
from jaxkit.spectral import MatrixSpec


class Leaf(NamedTuple):
    shape: tuple[int, ...]
    spec: P
    axes: MatrixSpec


STACK = MatrixSpec(unit=1, feature=2, batch=0)
SPLIT = MatrixSpec(unit=1, feature=0, split=((12, 20), 1))
TWO_AXES = MatrixSpec(unit=(1, 2), feature=0, split=((4, 8), 2))
DEALT = MatrixSpec(unit=2, feature=1, batch=0, split=((12, 36), 2), interleave=3)
PAIR = MatrixSpec(unit=1, feature=0, interleave=2, pair=True)
HALVES = MatrixSpec(unit=1, feature=2, batch=0, split=((16, 16), 1), pair=True)
GROUPS = (
    {
        "features": Leaf((24, 16), P("data"), MatrixSpec(1, 0)),
        "both": Leaf((16, 24), P("model", "data"), MatrixSpec(1, 0)),
        "split": Leaf((12, 32), P("model", "data"), SPLIT),
        "long": Leaf((256, 4), P(("data", "model")), MatrixSpec(0, 1)),
    },
    {
        "units": Leaf((24, 16), P(None, ("model", "data")), MatrixSpec(1, 0)),
        "stack": Leaf((8, 6, 4), P(("data", "model")), STACK),
        "interleaved": Leaf((12, 32), P(None, ("data", "model")), PAIR._replace(pair=False)),
        "two_axes": Leaf((12, 4, 12), P(None, "model", "data"), TWO_AXES),
        "dealt": Leaf((2, 12, 48), P("model", None, "data"), DEALT),
    },
    {
        "inside_stack": Leaf((3, 8, 6), P(None, "data", "model"), STACK),
        "pair": Leaf((12, 32), P("data", "model"), PAIR),
        "halves": Leaf((2, 32, 4), P("model", None, "data"), HALVES),
        "replicated": Leaf((12, 8), P(), MatrixSpec(1, 0)),
    },
)
LEAVES = {name: leaf for group in GROUPS for name, leaf in group.items()}
# Two sets of options for each rule: together all that it takes.
RULES = {
    "polar": ({"alpha": 1.0, "polar_first": True}, {"centered": True, "noisy": True}),
    "right_spectral": ({"alpha": 1.0, "centered": True, "eps": 0.1}, {"polar_first": True}),
    "left_spectral": ({"eps": 0.1, "noisy": True}, {"alpha": 1.0, "eps_mode": "absolute"}),
    "row_norm": ({"rows": "feature", "eps_mode": "absolute", "eps": 0.1}, {"centered": True}),
    "row_then_polar": (
        {"alpha": 1.0, "centered": True},
        {"rows": "feature", "polar_first": True, "nesterov": True},
    ),
    "polar_then_row": ({"centered": True}, {"rows": "feature", "polar_first": True}),
    "normuon": ({"centered": True, "noisy": True}, {"rows": "feature", "polar_first": True}),
    "sign": ({"nesterov": True}, {"centered": True}),
}
MODES = ("explicit", "auto", "by_hand")


def _options(rule, variant, names):
    """Returns the arguments of the transformation, and those of its update."""
    options = {"rule": rule, "scale": "muon", **PLAIN, **RULES[rule][variant]}
    noise = {name: 0.1 + 0.1 * list(LEAVES).index(name) for name in names}
    given = {"noise_variance": noise} if options.pop("noisy", False) else {}
    return {**options, "overrides": {name: LEAVES[name].axes for name in names}}, given


def _grads(names):
    """Returns the gradients of two steps, with a mean that centering takes away."""
    rng = np.random.default_rng(0)
    grads = [
        {name: np.float32(rng.normal(size=leaf.shape) + 0.3) for name, leaf in LEAVES.items()}
        for _ in range(2)
    ]
    return [{name: grad[name] for name in names} for grad in grads]


def _two_steps(update, grads, state):
    """Returns the updates of both steps, and the last state."""
    first, state = update(grads[0], state)
    second, state = update(grads[1], state)
    return first, second, state


def _check(rule, variant, mode, names):
    """Compares two steps with those of one device, and the layouts before and after."""
    options, given = _options(rule, variant, names)
    specs = {name: LEAVES[name].spec for name in names}
    mesh = make_mesh("explicit" if mode == "explicit" else "auto")
    whole = _grads(names)
    grads, named = zip(*(place(mesh, grad, specs) for grad in whole), strict=True)
    single = spectral.scale_by_spectral(**options)
    state = compile_for(single.init, whole[0])(whole[0])
    update = compile_for(functools.partial(single.update, **given), whole[0], state)
    want = _two_steps(update, whole, state)
    if mode == "by_hand":
        tx = spectral.scale_by_spectral(sharding=specs, **options)

        def scanned(*grads):  # the state keeps its type, and what it varies over
            both = jax.tree.map(lambda *xs: jnp.stack(xs), *grads)
            step = lambda state, grad: tx.update(grad, state, **given)[::-1]  # noqa: E731
            return jax.lax.scan(step, tx.init(grads[0]), both)[1]

        stacked = {name: P(None, *spec) for name, spec in specs.items()}
        update = jax.shard_map(scanned, mesh=mesh, in_specs=(specs, specs), out_specs=stacked)
        both = jax.tree.map(lambda *xs: np.stack(xs), *want[:2])
        assert_close(compile_for(update, *grads)(*grads), both, 1e-5)
        return
    tx = spectral.scale_by_spectral(sharding=None if mode == "explicit" else named[0], **options)
    init = compile_for(tx.init, grads[0])(grads[0])
    # Compiled once: it refuses a state that does not lie where the one of init lies.
    update = compile_for(functools.partial(tx.update, **given), grads[0], init)
    got = _two_steps(update, grads, init)
    assert_close(got, want, 1e-5)
    for tree in (*got[:2], init.mu, got[2].mu):
        assert_same_layout(tree, named[0])
    for name, nu in (got[2].nu_unit or {}).items():
        if nu.ndim == len(LEAVES[name].shape):  # else the fused axis of a pair is cut in two
            spec = [*specs[name], *[None] * nu.ndim]
            spec = P(*(None if size == 1 else s for size, s in zip(nu.shape, spec, strict=False)))
            assert_same_layout(nu, NamedSharding(mesh, spec))
    moved = {"all-reduce"} if rule in ("row_norm", "sign") else {"all-reduce", "all-to-all"}
    assert collective_bytes(update).keys() <= moved


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_one_device(rule, mode):
    """Updates and state to 1e-5 of one device, layouts kept, nothing gathered, in any mesh."""
    turn = list(RULES).index(rule) + MODES.index(mode)
    _check(rule, turn % 2, mode, list(GROUPS[turn % 3]))


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("variant", (0, 1))
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_one_device_on_every_leaf(rule, variant, mode):
    """The same with all options of a rule on all leaves in each mesh."""
    _check(rule, variant, mode, list(LEAVES))


def _moved(kind, leaf, *rules, **options):
    """Returns the bytes of each kind that one of eight devices moves in one update by all rules."""
    sharding = NamedSharding(make_mesh(kind, (8,), ("x",)), leaf.spec)
    params = {"w": jax.ShapeDtypeStruct(leaf.shape, jnp.float32, sharding=sharding)}
    options |= {"overrides": {"w": leaf.axes}}
    options |= {} if kind == "explicit" else {"sharding": {"w": sharding}}
    txs = [spectral.scale_by_spectral(rule, **options) for rule in rules]

    def update(params):
        return [tx.update(params, tx.init(params))[0] for tx in txs]

    return collective_bytes(compile_for(update, params))


ROWS = MatrixSpec(unit=0, feature=1)
UNITS, FEATURES = Leaf((64, 32), P("x"), ROWS), Leaf((64, 32), P(None, "x"), ROWS)
ABSOLUTE = {"eps_mode": "absolute"}
NUMBERS = {  # of float32 that one device gives to an all-reduce
    "whole_rows": ("row_norm", UNITS, ABSOLUTE, 0),
    "split_rows": ("row_norm", FEATURES, ABSOLUTE, 2 * 64),  # its largest entry and its square
    "whole_columns": ("row_norm", FEATURES, {"rows": "feature", **ABSOLUTE}, 0),
    "relative_floor": ("row_norm", UNITS, {}, 2),  # the largest row and the mean square
    "relative_floor_split_rows": ("row_norm", FEATURES, {}, 2 * 64),
    "centered_split_units": ("sign", UNITS, {"centered": True}, 2 * 32),  # before and after
    "centered_split_features": ("sign", FEATURES, {"centered": True}, 0),
    "centered_rows": ("row_norm", UNITS, {"centered": True, **ABSOLUTE}, 3 * 32),  # and between
}


@both_kinds
@pytest.mark.parametrize("case", NUMBERS)
def test_rows_and_means_cross_as_a_few_numbers(case, kind):
    """A split row sends two numbers, a relative floor two a matrix, centering a row of means."""
    rule, leaf, options, numbers = NUMBERS[case]
    assert _moved(kind, leaf, rule, **options) == ({"all-reduce": 4 * numbers} if numbers else {})


@both_kinds
def test_stack_sharded_on_its_layers_sends_nothing(kind):
    """Every rule, centered or not, finds whole matrices on each device."""
    leaf = Leaf((8, 12, 6), P("x"), STACK)
    assert _moved(kind, leaf, *RULES) == {}
    assert _moved(kind, leaf, *RULES, centered=True) == {}


EMBEDDING = Leaf((8192, 256), P("x"), ROWS)
VOCABULARY = {  # rules of an embedding or head, and how often a row of means is summed
    "right_spectral": ({}, 0),
    "right_spectral_centered": ({"centered": True}, 2),
    "row_then_polar_centered": ({"centered": True, "alpha": 1.0}, 3),
    "normuon": ({}, 0),
}


@pytest.mark.parametrize("case", VOCABULARY)
def test_embedding_split_by_vocabulary_stays(case):
    """Two Gram matrices are summed (0.52 MB), rows of means, and a few numbers; nothing moves."""
    options, centerings = VOCABULARY[case]
    moved = _moved("explicit", EMBEDDING, case.removesuffix("_centered"), **options)
    assert moved.keys() == {"all-reduce"}
    numbers = moved["all-reduce"] // 4 - 2 * 256**2 - centerings * 256
    assert 0 < numbers <= 8


def test_embedding_in_an_auto_mesh_moves_the_same():
    """Given its sharding, a head in an Auto mesh sends the bytes of an Explicit one."""
    auto, explicit = (
        _moved(kind, EMBEDDING, "row_then_polar", centered=True) for kind in ("auto", "explicit")
    )
    assert auto == explicit


def test_damped_factor_of_a_matrix_that_stays_is_one_devices():
    """In place with the default table and its restart: damped, by noise, hybrid, centered."""
    x = np.float32(np.random.default_rng(0).normal(size=(512, 8)) + 0.3)
    axes = {"overrides": {"w": ROWS}}
    cases = (
        ({"rule": "right_spectral", "alpha": 1.0, "centered": True, "eps": 0.01}, {}),
        ({"rule": "left_spectral", "eps": 0.01}, {"noise_variance": 0.01}),
        ({"rule": "row_then_polar", "alpha": 1.0, "centered": True}, {}),
        ({"rule": "normuon"}, {}),
    )
    txs = [(spectral.scale_by_spectral(**axes, **options), given) for options, given in cases]

    def update(x):
        return [tx.update({"w": x}, tx.init({"w": x}), **given)[0]["w"] for tx, given in txs]

    want = compile_for(update, x)(x)
    placed, _ = place(make_mesh("explicit", (8,), ("x",)), x, P("x"))
    compiled = compile_for(update, placed)
    assert collective_bytes(compiled).keys() == {"all-reduce"}
    got = compiled(placed)
    assert_close(got, want, 1e-5)
    assert_same_layout(got, [placed] * len(cases))


@both_kinds
def test_devices_share_the_matrices_of_any_rule(kind):
    """distribute= with rules of rows and means: the numbers of one device, split and replicated."""
    specs = {"split": P(None, None, "model"), "whole": P()}
    rng = np.random.default_rng(0)
    grad = {name: np.float32(rng.normal(size=(3, 12, 16)) + 0.3) for name in specs}
    placed, named = place(make_mesh(kind), grad, specs)
    options = {"overrides": {"*": MatrixSpec(2, 1, 0)}, "centered": True, **PLAIN}
    rules = {"right_spectral": {}, "row_then_polar": {"alpha": 1.0}, "normuon": {"rows": "feature"}}

    def update_of(**given):
        txs = [
            spectral.scale_by_spectral(rule, **own, **options, **given)
            for rule, own in rules.items()
        ]
        return lambda grad: [tx.update(grad, tx.init(grad))[0] for tx in txs]

    want = compile_for(update_of(), grad)(grad)
    sharding = None if kind == "explicit" else named
    compiled = compile_for(update_of(sharding=sharding, distribute="data"), placed)
    assert collective_bytes(compiled).keys() == {"all-gather", "all-reduce", "all-to-all"}
    got = compiled(placed)
    assert_close(got, want, 1e-5)
    assert_same_layout(got, [named] * len(rules))


def test_seeds_on_a_mesh_axis_of_their_own():
    """vmap over sharded seeds is a loop over them, row states and sizes included (Auto axes)."""
    names = list(GROUPS[1])
    options, given = _options("normuon", 0, names)
    specs = {name: LEAVES[name].spec for name in names}
    mesh, grads = make_mesh("auto", (2, 2, 2), ("seed", "data", "model")), _grads(names)
    _, named = place(mesh, grads[0], specs)
    seeds = jax.tree.map(lambda *xs: np.stack(xs), *grads)
    placed, home = place(mesh, seeds, {name: P("seed", *spec) for name, spec in specs.items()})

    def update_of(**given_sharding):
        tx = spectral.scale_by_spectral(**options, **given_sharding)
        return lambda grad: tx.update(grad, tx.init(grad), **given)[0]

    by_seed = jax.vmap(update_of(sharding=named), spmd_axis_name="seed")
    got = compile_for(by_seed, placed)(placed)
    assert_same_layout(got, home)
    one = compile_for(update_of(), grads[0])
    assert_close(got, jax.tree.map(lambda *xs: np.stack(xs), *map(one, grads)), 1e-5)
