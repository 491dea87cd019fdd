"""The private estimator on eight devices: the numbers of one, and what would break the clip."""

import functools

import jax
import jax.numpy as jnp
import pytest
from denoise.private_problem import BATCH, KEY, PARAMS, jitted, loss_fn, make, moved, norms_fn
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import assert_close, make_mesh

STATE = moved("order_3")
LARGE = tuple(jnp.concatenate([x, -x, 2 * x, x / 2]) for x in BATCH)


@functools.cache
def on_one():
    return jitted("order_3", 1.0)(KEY, PARAMS, STATE, LARGE)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("explicit", {}), ("explicit", {"norms_fn": norms_fn}), ("auto", {"num_micro": 2})],
    ids=["explicit", "explicit, norms_fn", "auto, slices"],
)
def test_eight_devices_are_one(kind, options):
    """A batch split over 4 and parameters over 2 of them, under jit: gradient, value, noise."""
    mesh = make_mesh(kind)
    specs = {"w": P(None, "model"), "v": P("model")}
    if kind == "explicit":
        specs = {"w": P(), "v": P()}  # else the loss would not be typed
    placed = {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in PARAMS.items()}
    state, key = jax.device_put((STATE, KEY), NamedSharding(mesh, P()))
    batch = jax.device_put(LARGE, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        got = jitted("order_3", 1.0, **options)(key, placed, state, batch)
    assert_close(got, on_one(), 1e-5)


@pytest.mark.parametrize(("options", "check_vma"), [({"num_micro": 2}, True), ({}, False)], ids=str)
def test_shard_map_adds_sums_over_devices_and_noise_once(options, check_vma):
    """With axis_name: clipped apart, one noise, the keys of one device, the same numbers."""
    rows = P(("data", "model"))
    run = jax.shard_map(
        make(loss_fn, 1.0, axis_name=("data", "model"), **options),
        mesh=make_mesh("auto"),
        in_specs=(P(), P(), P(), rows),
        out_specs=P(),
        check_vma=check_vma,
    )
    assert_close(jax.jit(run)(KEY, PARAMS, STATE, LARGE), on_one(), 1e-5)


def test_shard_map_is_told_what_would_break_the_clip():
    """No axis for a split batch, an axis for a whole one, and parameters in shards."""
    mesh = make_mesh("auto")

    def run(batch, params=None, **options):
        specs = P(), P() if params is None else params, P(), batch
        fun = jax.shard_map(make(loss_fn, **options), mesh=mesh, in_specs=specs, out_specs=P())
        return jax.eval_shape(fun, KEY, PARAMS, STATE, LARGE)

    split = P("data")
    with pytest.raises(ValueError, match=r"axis_name must hold .* wanted \['data'\], got \[\]"):
        run(split)
    with pytest.raises(ValueError, match=r"axis_name must hold .* wanted \[\], got \['data'\]"):
        run(P(), axis_name="data")
    with pytest.raises(ValueError, match=r"wanted \['data'\], got \['data', 'model'\]"):
        run(split, axis_name=("data", "model"))
    with pytest.raises(ValueError, match="params must be the same on all devices .* got v varying"):
        run(split, {"w": P(None, "model"), "v": P("model")}, axis_name="data")
