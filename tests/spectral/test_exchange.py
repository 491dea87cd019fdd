"""Sharded matrices: the numbers of one device, the layout of each leaf, and what crosses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import (
    BOTH_AGREE,
    assert_close,
    assert_same_layout,
    both_kinds,
    is_spec,
    make_mesh,
    place,
    run_two_processes,
)
from spectral.models import kernel_specs, kernels

from benchmarks.collectives import collective_bytes
from jaxkit import spectral
from jaxkit.spectral import MatrixSpec


# One batched program and another round differently; the rest of 1e-5 is room for that.
def _check(kind, shapes, specs, *, collectives, distribute=(), **options):
    """Compares with one device, checks layouts, and returns the kinds of collectives."""
    mesh, params = make_mesh(kind), kernels(shapes)
    placed, named = place(mesh, params, kernel_specs(specs))
    single = spectral.scale_by_spectral(**options)
    tx = spectral.scale_by_spectral(
        sharding=None if kind == "explicit" else named, distribute=distribute, **options
    )
    want, _ = jax.jit(single.update)(params, single.init(params))
    state = jax.jit(tx.init)(placed)
    compiled = jax.jit(tx.update).lower(placed, state).compile()
    got, new = compiled(placed, state)
    assert_close(got, want, 1e-5)
    for tree in (got, state.mu, new.mu):
        assert_same_layout(tree, placed)
    assert collective_bytes(compiled).keys() == set(collectives)
    return compiled


SQUARE, STACK = [(64, 32)] * 3, [(4, 64, 32)] * 2
BATCH_FIRST = {"overrides": {"*": MatrixSpec(unit=2, feature=1, batch=0)}}
LAYOUTS = {
    "rows": (SQUARE, [P("data", None)] * 3, {}, {"all-to-all"}),
    "columns": (SQUARE, [P(None, "data")] * 3, {}, {"all-to-all"}),
    "mixed": (SQUARE, [P("data", None), P(None, "data"), P("data")], {}, {"all-to-all"}),
    "two_axes": (SQUARE, [P("data", "model")] * 3, {}, {"all-to-all"}),
    "tuple_axes_reversed": (
        SQUARE,
        [P(("model", "data"), None), P(None, ("data", "model")), P("model", "data")],
        {},
        {"all-to-all"},
    ),
    "transposed_leaves": (
        [(64, 32), (32, 64)],
        [P("data", "model"), P("model", "data")],
        {},
        {"all-to-all"},
    ),
    "model_axis_only": (SQUARE, [P(None, "model")] * 3, {}, {"all-to-all"}),
    "model_axis_distributed": (
        SQUARE,
        [P(None, "model")] * 3,
        {"distribute": ("data",)},
        {"all-to-all", "all-gather"},
    ),
    "replicated_distributed": (
        SQUARE,
        [P()] * 3,
        {"distribute": ("data", "model")},
        {"all-gather"},
    ),
    "stack_axis": (STACK, [P("data")] * 2, BATCH_FIRST, set()),
    "inside_a_stack": (
        STACK,
        [P(None, "data", None), P("model", "data", None)],
        BATCH_FIRST,
        {"all-to-all"},
    ),
    "six_on_eight": ([(64, 32)] * 6, [P(("data", "model"))] * 6, {}, {"all-to-all"}),
    "some_replicated": (SQUARE, [P("data"), P(), P("data")], {}, {"all-to-all"}),
    "few_long_matrices_stay": (
        [(8, 4096), (4096, 8)],
        [P(None, ("data", "model")), P(("model", "data"), None)],
        {"alpha": 1.0},
        {"all-reduce"},
    ),
    "exact_methods_exchange": (
        [(8, 256)],
        [P(None, ("data", "model"))],
        {"method": "qdwh"},
        {"all-to-all"},
    ),
    # Only where a leaf is cut does the order of its shards matter: polar commutes with
    # permutations.
    "fused": (
        [(64, 96)] * 3,
        [P("data", "model"), P("data"), P(None, ("model", "data"))],
        {
            "overrides": {"*": MatrixSpec(unit=1, feature=0, split=((32, 64), 1))},
            "scale": "muon",
        },
        {"all-to-all"},
    ),
    "heads": (
        [(64, 4, 8)],
        [P("data", "model", None)],
        {"overrides": {"*": MatrixSpec(unit=2, feature=0, batch=1)}, "alpha": 1.0},
        {"all-reduce"},  # heads are long
    ),
}


@both_kinds
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_one_device(layout, kind):
    """Updates to 1e-5 of one device, each leaf's layout kept, only the expected collectives."""
    shapes, specs, options, collectives = LAYOUTS[layout]
    _check(kind, shapes, specs, collectives=collectives, **options)


def _compiled(kind, shapes, spec):
    """Returns the compiled update for abstract parameters, all with one layout over 8 devices."""
    mesh = make_mesh(kind, (8,), ("x",))
    sharding = NamedSharding(mesh, spec)
    params = {
        f"w{i}": {"kernel": jax.ShapeDtypeStruct(s, jnp.float32, sharding=sharding)}
        for i, s in enumerate(shapes)
    }
    named = jax.tree.map(lambda x: x.sharding, params)
    tx = spectral.scale_by_spectral(sharding=None if kind == "explicit" else named)
    state = jax.eval_shape(tx.init, params)
    state = state._replace(mu=params)
    return jax.jit(tx.update).lower(params, state).compile()


@both_kinds
def test_eight_matrices_cross_once_each_way(kind):
    """Eight 256 x 1024 matrices with sharded rows: two all-to-all of 1.05 MB, nothing else."""
    compiled = _compiled(kind, [(256, 1024)] * 8, P("x"))
    assert collective_bytes(compiled) == {"all-to-all": 2 * 256 * 1024 * 4}


@both_kinds
def test_the_work_is_shared_without_repeats(kind):
    """The operations per device are an eighth of one device's, to 2 percent."""
    shapes = [(64, 256)] * 8
    params = kernels(shapes)
    tx = spectral.scale_by_spectral()
    # Pieces for a CPU's cache are a loop, whose body XLA counts once: these matrices need none.
    one = jax.jit(tx.update).lower(params, tx.init(params)).compile().cost_analysis()["flops"]
    eight = _compiled(kind, shapes, P("x")).cost_analysis()["flops"]
    assert eight == pytest.approx(one / 8, rel=0.02)


def test_all_sixteen_buckets_of_a_transformer_cross_in_four_exchanges():
    """48 matrices of two shapes: four all-to-all, 6.3 MB a device, no all-gather."""
    shapes = ([(256, 256)] * 4 + [(256, 1024), (1024, 256)]) * 8
    compiled = _compiled("explicit", shapes, P("x"))
    assert collective_bytes(compiled) == {"all-to-all": 2 * sum(a * b * 4 for a, b in shapes) // 8}
    assert compiled.as_text().count(" all-to-all(") == 4


def test_bfloat16_crosses_in_sixteen_bits():
    """The wire dtype is that of the products (in StableHLO: a CPU widens it later)."""
    mesh = make_mesh("explicit")
    params = {"kernel": jnp.ones((64, 32), jnp.bfloat16)}
    placed, _ = place(mesh, params, {"kernel": P("data")})
    tx = spectral.scale_by_spectral()
    text = jax.jit(tx.update).lower(placed, tx.init(placed)).as_text()
    sent = [line for line in text.splitlines() if "all_to_all" in line]
    assert len(sent) == 2 and all("bf16" in line and "f32" not in line for line in sent)


@both_kinds
def test_optax_muon_moves_twenty_times_as_much_where_it_runs(kind):
    """On the same eight matrices optax gathers 94 MB in an Auto mesh; in an Explicit it raises."""
    mesh = make_mesh(kind, (8,), ("x",))
    leaf = jax.ShapeDtypeStruct((256, 1024), jnp.float32, sharding=NamedSharding(mesh, P("x")))
    params = {f"w{i}": leaf for i in range(8)}
    tx = optax.contrib.muon(0.02)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = jax.eval_shape(tx.init, params)
        sharded = jax.tree.map(lambda x: leaf if x.shape == leaf.shape else x, state)
        if kind == "explicit":
            with pytest.raises(Exception, match="[Ss]hard") as error:
                jax.jit(tx.update).lower(params, sharded, params)
            assert type(error.value).__name__ == "ShardingTypeError"  # JAX does not export it
            return
        moved = collective_bytes(jax.jit(tx.update).lower(params, sharded, params).compile())
    assert sum(moved.values()) >= 20 * 2 * 256 * 1024 * 4


def test_seeds_sharded_under_vmap():
    """vmap over seeds on a mesh axis of their own is a loop over them (Auto axes)."""
    mesh = make_mesh("auto", (2, 2, 2), ("seed", "data", "model"))
    params = kernels([(64, 32), (32, 64)])
    specs = kernel_specs([P("data", "model"), P("model", None)])
    _, named = place(mesh, params, specs)
    seeds = jax.tree.map(lambda x: np.stack([x, 2 * x + 1]), params)
    stacked = jax.tree.map(lambda s: P("seed", *s), specs, is_leaf=is_spec)
    placed, _ = place(mesh, seeds, stacked)
    tx = spectral.scale_by_spectral(sharding=named)

    def update(params):
        return tx.update(params, tx.init(params))[0]

    got = jax.jit(jax.vmap(update, spmd_axis_name="seed"))(placed)
    assert_same_layout(got, placed)
    single = spectral.scale_by_spectral()
    for i in range(2):
        one = jax.tree.map(lambda x, i=i: x[i], seeds)
        want, _ = single.update(one, single.init(one))
        assert_close(jax.tree.map(lambda x, i=i: x[i], got), want, 1e-5)


@both_kinds
def test_whole_muon_keeps_every_leafs_layout(kind):
    """Through the partition too: matrices, embedding and bias come back where they were."""
    mesh = make_mesh(kind)
    rng = np.random.default_rng(0)
    params = {
        "embed": {"embedding": np.float32(rng.normal(size=(16, 8)))},
        "up": {
            "kernel": np.float32(rng.normal(size=(8, 32))),
            "bias": np.float32(rng.normal(size=32)),
        },
    }
    specs = {
        "embed": {"embedding": P("data")},
        "up": {"kernel": P("data", "model"), "bias": P("model")},
    }
    placed, named = place(mesh, params, specs)
    single = spectral.muon(0.1)
    tx = spectral.muon(0.1, sharding=None if kind == "explicit" else placed)
    with jax.numpy_dtype_promotion("standard"):
        want, _ = jax.jit(single.update)(params, single.init(params), params)
        got, _ = jax.jit(tx.update)(placed, jax.jit(tx.init)(placed), placed)
    assert_close(got, want, 1e-5)
    assert_same_layout(got, placed)


@both_kinds
def test_polar_of_a_sharded_matrix(kind):
    """The function itself keeps an Explicit sharding, and gives the numbers of one device."""
    x = kernels([(64, 32)])["w0"]["kernel"]
    placed = jax.device_put(x, NamedSharding(make_mesh(kind), P("data", "model")))
    for method in ("newton_schulz", "gram", "qdwh", "eigh"):
        got = jax.jit(lambda x, method=method: spectral.polar(x, method))(placed)
        assert_close(got, spectral.polar(x, method), 1e-4 if method == "eigh" else 1e-5)
        if kind == "explicit":
            assert_same_layout(got, placed)


def test_wrong_specs_cost_bytes_not_correctness():
    """A spec that names the wrong axes, or one that does not divide, still gives the update."""
    params = kernels([(64, 32)])
    mesh = make_mesh("auto")
    placed, _ = place(mesh, params, kernel_specs([P("data")]))
    single = spectral.scale_by_spectral()
    want, _ = single.update(params, single.init(params))
    for wrong in (P(None, "model"), P(("data", "model"), None)):
        tx = spectral.scale_by_spectral(sharding=kernel_specs([wrong]))
        got, _ = jax.jit(tx.update)(placed, tx.init(placed))
        assert_close(got, want, 1e-5)


def test_bad_sharding_is_named():
    """A missing entry, too many entries, and distribute without what it needs raise."""
    params = kernels([(64, 32)])
    placed, named = place(make_mesh("auto"), params, kernel_specs([P("data")]))
    specs = kernel_specs
    for options, leaf, match in (
        ({"sharding": {"other": P()}}, placed, "entry for w0/kernel, got other"),
        (
            {"sharding": specs([P(None, None, "data")])},
            placed,
            "at most 2 entries for w0/kernel",
        ),
        (
            {"sharding": specs([P("dta")])},
            placed,
            "axes of the mesh, each once.*'dta'.*w0/kernel",
        ),
        ({"sharding": specs([P("data", "data")])}, placed, "axes of the mesh, each once"),
        ({"distribute": ("model",)}, placed, r"sharding= where they are not Explicit"),
        ({"distribute": ("model",)}, params, r"needs a mesh with these axes at w0/kernel"),
        ({"distribute": "pipe", "sharding": named}, placed, r"distribute=\('pipe',\) needs a mesh"),
    ):
        tx = spectral.scale_by_spectral(**options)
        with pytest.raises(ValueError, match=match):
            jax.jit(tx.update)(leaf, tx.init(leaf))


PROCESS = """
import jax.numpy as jnp, numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from jaxkit import spectral
rng = np.random.default_rng(0)
shapes = {"a": (64, 32), "b": (32, 64)}
params = {k: {"kernel": np.float32(rng.normal(size=s))} for k, s in shapes.items()}
specs = {"a": {"kernel": P("data", "model")}, "b": {"kernel": P(("model", "data"), None)}}
single = spectral.scale_by_spectral()
want = jax.jit(lambda p: single.update(p, single.init(p))[0])(params)
for kind in (AxisType.Auto, AxisType.Explicit):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
    named = jax.tree.map(
        lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P))
    placed = jax.tree.map(
        lambda x, s: jax.make_array_from_callback(x.shape, s, lambda i: x[i]), params, named)
    tx = spectral.scale_by_spectral(sharding=named)
    got = jax.jit(lambda p: tx.update(p, tx.init(p))[0])(placed)
    whole = multihost_utils.process_allgather(got, tiled=True)
    for x, y in zip(jax.tree.leaves(whole), jax.tree.leaves(want)):
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * np.abs(y).max())
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(placed)):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
"""


def test_two_processes_are_one_device():
    """Two processes of two devices each give the same numbers and keep the layout."""
    assert run_two_processes(PROCESS) == BOTH_AGREE
