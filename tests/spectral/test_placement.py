"""Where a leaf lives: the type's Explicit axes, the given ones elsewhere, and their order."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkit.spectral import _placement


def _mesh(*kinds):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)


def _axes(x, given=None):
    return jax.jit(lambda x: jnp.zeros(0) + (_seen.append(_placement.placement(x, given)) or 0))(x)


_seen = []


def _placed(kinds, own, given=None):
    """Returns the placement that is read of a traced array that lives at ``own``."""
    x = jax.device_put(jnp.zeros((16, 8)), NamedSharding(_mesh(*kinds), own))
    _axes(x, given)
    return _seen.pop()


EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto


def test_explicit_axes_come_from_the_type_and_win():
    """What the type says is taken, whatever is given."""
    assert _placed((EXPLICIT, EXPLICIT), P("data", "model")).axes == (("data",), ("model",))
    assert _placed((EXPLICIT, EXPLICIT), P("data"), P("model")).axes == (("data",), ())


def test_auto_axes_come_from_what_is_given():
    """A type knows nothing of Auto axes."""
    assert _placed((AUTO, AUTO), P("data")).axes == ((), ())
    assert _placed((AUTO, AUTO), P("data"), P("data", None)).axes == (("data",), ())
    given = P(None, ("model", "data"))
    assert _placed((AUTO, AUTO), P(), given).axes == ((), ("model", "data"))


def test_mixed_kinds_join():
    """An Explicit axis from the type and an Auto one from what is given share an array axis."""
    assert _placed((EXPLICIT, AUTO), P("data"), P(("data", "model"))).axes[0] == ("data", "model")
    assert _placed((EXPLICIT, AUTO), P("data"), P("model")).axes[0] == ("data", "model")
    assert _placed((EXPLICIT, AUTO), P("data"), P(("model", "data"))).axes[0] == ("model", "data")


def test_what_does_not_divide_or_exist_is_left_out():
    """Wrong specs cost bytes, not correctness."""
    x = jnp.zeros((6, 8))
    given = NamedSharding(_mesh(AUTO, AUTO), P("data", "model"))
    assert _placement.placement(x, given).axes == ((), ("model",))
    assert _placement.placement(jnp.zeros((8, 8)), P("data")).mesh is None
    assert _placed((AUTO, AUTO), P(), P(P.UNCONSTRAINED, "data")).axes == ((), ("data",))


def test_inside_a_shard_map_shapes_are_local_and_the_whole_is_known():
    """Manual axes are named, and the global shape counts them."""
    seen = []

    def body(x):
        place = _placement.placement(x, P("data", "model"))
        seen.append((place.manual, place.global_shape(x.shape), place.used()))
        return x

    mesh = _mesh(AUTO, AUTO)
    x = jax.device_put(jnp.zeros((16, 8)), NamedSharding(mesh, P("data", "model")))
    jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    )(x)
    assert seen[0] == ({"data"}, (16, 8), {"data", "model"})
    # 6 local rows do not divide by the Auto axis; what is split by hand stays known.
    x = jax.device_put(jnp.zeros((12, 8)), NamedSharding(mesh, P()))
    body_odd = lambda x: (seen.append(_placement.placement(x, P(("data", "model")))), x)[1]  # noqa: E731
    odd = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AUTO, AUTO))
    x = jax.device_put(jnp.zeros((12, 8)), NamedSharding(odd, P()))
    jax.jit(
        jax.shard_map(
            body_odd, mesh=odd, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
        )
    )(x)
    assert seen[1].axes == (("data",), ()) and seen[1].global_shape((6, 8)) == (12, 8)


def test_manual_axes_come_first_where_the_type_disagrees_with_what_is_given():
    """A surrounding shard_map has split the leaf before the Explicit axis of its type does."""
    seen = []

    def body(x):
        seen.append(_placement.placement(x, P("data")).axes)
        return x

    mesh = _mesh(EXPLICIT, EXPLICIT)
    x = jax.device_put(jnp.zeros((16, 8)), NamedSharding(mesh, P(("data", "model"))))
    with jax.set_mesh(mesh):
        fun = jax.shard_map(body, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        jax.jit(fun)(x)
    assert seen[0][0] == ("data", "model")


def test_shardings_are_read_once_and_by_path():
    """Arrays, NamedShardings and PartitionSpecs are taken; one device splits nothing."""
    mesh = _mesh(AUTO, AUTO)
    named = NamedSharding(mesh, P("data"))
    tree = {"a": jax.device_put(jnp.zeros((8, 8)), named), "b": [P("model"), jnp.zeros(3)]}
    found = _placement.read_shardings(tree)
    assert found == {"a": named, "b/0": P("model"), "b/1": None}
    assert _placement.read_shardings(None) is None
    with pytest.raises(TypeError, match="sharding at b must be a NamedSharding.*got str"):
        _placement.read_shardings({"b": "data"})
