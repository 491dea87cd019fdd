"""Sharded matrices inside a user's own shard_map: the numbers of one device."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from problems import assert_close, both_kinds, is_spec, make_mesh, place
from spectral.models import kernel_specs, kernels

from jaxkit import spectral
from jaxkit.spectral import MatrixSpec


@both_kinds
def test_inside_a_users_shard_map(kind):
    """With specs the update over local shards is that of the whole, all axes manual or some."""
    shapes = [(64, 32), (32, 64), (64, 32)]
    params = kernels(shapes)
    specs = kernel_specs([P("data", "model"), P("model", "data"), P(("data", "model"), None)])
    options = {"scale": "muon", "alpha": 1.0}
    single = spectral.scale_by_spectral(**options)
    want, _ = jax.jit(single.update)(params, single.init(params))
    mesh = make_mesh(kind)
    placed, _ = place(mesh, params, specs)
    tx = spectral.scale_by_spectral(sharding=specs, **options)

    def update(params):
        return tx.update(params, tx.init(params))[0]

    whole = jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=specs)
    assert_close(jax.jit(whole)(placed), want, 1e-5)

    def only_data(spec):
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
        return P(*("data" if "data" in entry else None for entry in entries))

    outer = jax.tree.map(only_data, specs, is_leaf=is_spec)
    some = jax.shard_map(update, mesh=mesh, in_specs=(outer,), out_specs=outer, axis_names={"data"})
    with jax.set_mesh(mesh):
        assert_close(jax.jit(some)(placed), want, 1e-5)


def _inside(tx, params, specs, vary, mesh):
    """Updates in a user's shard_map; leaves named in ``vary`` differ from device to device."""

    def update(params):
        shift = jax.lax.axis_index("data").astype(jnp.float32)
        grads = {k: {"kernel": x["kernel"] + shift} if k in vary else x for k, x in params.items()}
        return tx.update(grads, tx.init(params))[0]

    out = {k: {"kernel": P("data") if k in vary else s["kernel"]} for k, s in specs.items()}
    return jax.jit(jax.shard_map(update, mesh=mesh, in_specs=(specs,), out_specs=out))(params)


def test_leaves_that_vary_and_leaves_that_do_not_share_no_bucket():
    """In a user's shard_map a replicated leaf stays so beside one of its shape that varies."""
    params, specs = kernels([(64, 32)] * 2), kernel_specs([P(), P()])
    mesh, tx = make_mesh("auto"), spectral.scale_by_spectral()
    placed, _ = place(mesh, params, specs)
    got = _inside(tx, placed, specs, {"w0"}, mesh)
    want, _ = tx.update(params, tx.init(params))
    assert_close(got["w1"]["kernel"], want["w1"]["kernel"], 1e-5)
    shifted = {"w": params["w0"]["kernel"] + 3}
    last, _ = tx.update(shifted, tx.init(shifted))
    assert_close(got["w0"]["kernel"][-64:], last["w"], 1e-5)


def test_distributed_gradients_without_their_mean_are_refused():
    """Devices must not share the work on matrices that differ from one to the other."""
    params, specs = kernels([(64, 32)]), kernel_specs([P()])
    mesh = make_mesh("auto")
    placed, _ = place(mesh, params, specs)
    tx = spectral.scale_by_spectral(sharding=specs, distribute=("data",))
    with pytest.raises(ValueError, match=r"got w0/kernel, which varies over \['data'\]"):
        _inside(tx, placed, specs, {"w0"}, mesh)
    single = spectral.scale_by_spectral()
    want, _ = single.update(params, single.init(params))
    assert_close(_inside(tx, placed, specs, set(), mesh), want, 1e-5)


def test_fused_leaf_inside_a_users_shard_map_scales_its_own_part():
    """Where the cut axis is split by hand, every device finds its part of the scales."""
    params = kernels([(8, 32)])
    options = {
        "scale": "muon",
        "overrides": {"*": MatrixSpec(unit=1, feature=0, split=((12, 20), 1))},
    }
    single = spectral.scale_by_spectral(**options)
    want, _ = single.update(params, single.init(params))
    mesh, specs = make_mesh("auto"), kernel_specs([P(None, "data")])
    placed, _ = place(mesh, params, specs)
    for tx in (
        spectral.scale_by_spectral(sharding=specs, **options),
        spectral.muon(-1.0, nesterov=False, sharding=specs, **options),
    ):
        update = jax.shard_map(
            lambda params, tx=tx: tx.update(params, tx.init(params))[0],
            mesh=mesh,
            in_specs=(specs,),
            out_specs=specs,
        )
        with jax.numpy_dtype_promotion("standard"):
            assert_close(jax.jit(update)(placed), want, 1e-5)
