"""QK-clip: its factors, where they go, stacks, devices and bad input."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkit.spectral._qk_clip import qk_clip

LOGITS = np.array([400.0, 1600.0, 25.0, 150.0], np.float32)
D, HEADS, HEAD_DIM = 8, 4, 2
clip = jax.jit(qk_clip)


def _block(key_heads=HEADS, *lead):
    """Returns an attention block in the layout of flax, biases for all but the values."""

    def projection(heads, seed):
        return {
            "kernel": contract.normal(*lead, D, heads, HEAD_DIM, seed=seed),
            "bias": contract.normal(*lead, heads, HEAD_DIM, seed=seed),
        }

    return {
        "query": projection(HEADS, 1),
        "key": projection(key_heads, 2),
        "value": {"kernel": contract.normal(*lead, D, key_heads, HEAD_DIM, seed=3)},
        "out": {"kernel": contract.normal(*lead, HEADS, HEAD_DIM, D, seed=4)},
    }


def _flat(block, query, key, bias=None, first=False):
    """Returns query and key of a block as matrices of the given paths, units last or first."""
    out = {"v_proj": {"weight": jnp.ones((D, D))}}
    for path, leaves in ((query, block["query"]), (key, block["key"])):
        matrix = leaves["kernel"].reshape(D, -1)
        name, _, leaf = path.partition("/")
        out[name] = {leaf: matrix.T if first else matrix} if leaf else matrix
        if bias:
            out[name][bias] = leaves["bias"].reshape(-1)
    return out


def _case(name, key_heads):
    def fun(params, logits, tau):
        return qk_clip(params, {"attention": logits}, tau=tau)

    args = {"attention": _block(key_heads)}, jnp.asarray(LOGITS), jnp.asarray(100.0)
    return contract.Case(name, lambda: (fun, args), public="qk_clip")


test_contract = contract.function(_case("qk_clip", HEADS), _case("grouped", 2))


def test_factors_of_shared_key_heads():
    """A key head gets the root of its group's largest factor, the queries the rest: none grows."""
    params = _block(2)
    got = qk_clip(params, {"": jnp.asarray(LOGITS)})
    # Factors of the logits: 1/4 and 1/16 share a key head, 1 and 2/3 the other.
    for kind, wanted in (("query", [1 / 2, 1 / 8, 1, 2 / 3]), ("key", [1 / 2, 1])):
        for name, leaf in params[kind].items():
            factor = np.asarray(got[kind][name]) / np.asarray(leaf)
            wide = np.broadcast_to(np.array(wanted)[:, None], leaf.shape)
            np.testing.assert_allclose(factor, wide, rtol=1e-6)
    assert all(got[kind] == params[kind] for kind in ("value", "out"))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_head_that_is_not_over_tau_keeps_every_bit(dtype):
    """Down to subnormal, infinite and NaN weights; a logit may be tau, zero, negative, -inf."""
    tiny = jnp.finfo(dtype).smallest_subnormal
    odd = np.array([tiny, -3 * tiny, -0.0, np.inf, np.nan, 1.1, -7.3, tiny * 1e3], dtype)
    weight = jnp.asarray(odd[:, None, None] * np.ones((1, HEADS, HEAD_DIM), dtype))
    params = {"wq": weight, "wk": weight}
    bits = np.asarray(weight).tobytes()
    for logits in ([100, 99.9, 0, -np.inf], [-1, -1e9, 1e-30, 100]):
        for fun in (qk_clip, jax.jit(qk_clip)):
            got = fun(params, {"": np.array(logits, np.float32)})
            assert np.asarray(got["wq"]).tobytes() == np.asarray(got["wk"]).tobytes() == bits


def test_product_is_rounded_once():
    """With weights and logits in bfloat16 the factors and products are float32 until the end."""
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _block())
    logits = np.array([101, 103, 130, 776])  # bfloat16 holds them
    got = qk_clip(params, {"": jnp.asarray(logits, jnp.bfloat16)})
    factor = np.sqrt(100 / logits)[None, :, None]
    for kind in ("query", "key"):
        exact = np.asarray(params[kind]["kernel"], np.float64) * factor
        np.testing.assert_array_equal(got[kind]["kernel"], jnp.asarray(exact, jnp.bfloat16))


def test_derivative_where_a_largest_logit_is_zero():
    """It is zero as for every head under tau, although tau / S has none."""
    slope = jax.grad(lambda x: jnp.sum(qk_clip(_block(), {"": x})["query"]["kernel"]))(
        jnp.array([0.0, -1.0, 99.0, 400.0])
    )
    np.testing.assert_array_equal(slope[:3], 0)
    assert np.isfinite(slope[3]) and slope[3] != 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logit_that_is_not_finite_shows_in_its_group(bad):
    """The key head is NaN and so are its query heads; the other group is clipped as ever."""
    params, logits = _block(2), jnp.asarray(LOGITS)
    want = qk_clip(params, {"": logits})
    got = jax.jit(qk_clip)(params, {"": logits.at[1].set(bad)})
    for kind, size in (("query", 2), ("key", 1)):
        for name, leaf in got[kind].items():
            nans = np.isnan(leaf)
            assert nans[..., :size, :].all() and not nans[..., size:, :].any()
            np.testing.assert_allclose(
                leaf[..., size:, :], want[kind][name][..., size:, :], rtol=1e-6
            )


@pytest.mark.parametrize("lead", [(3,), (2, 3)])
@pytest.mark.parametrize("flat", [False, True])
def test_stack_is_a_loop(lead, flat):
    """Scanned layers are clipped each by its own logits, in both layouts of a kernel."""
    params = _block(2, *lead)
    if flat:
        for kind in ("query", "key"):
            params[kind] = {
                name: leaf.reshape(*leaf.shape[:-2], -1) for name, leaf in params[kind].items()
            }
    logits = 150 * jnp.abs(contract.normal(*lead, HEADS, seed=5))
    got = qk_clip({"layers": params}, {"layers": logits})["layers"]
    for index in np.ndindex(*lead):
        one = qk_clip(jax.tree.map(lambda x, i=index: x[i], params), {"": logits[index]})
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(one), strict=True):
            np.testing.assert_allclose(x[index], y, rtol=1e-6)


@pytest.mark.parametrize(
    ("query", "key", "bias", "first"),
    [
        ("query/kernel", "key/kernel", "bias", False),
        ("q_proj/weight", "k_proj/weight", "bias", True),
        ("to_q/w", "to_k/w", "b", False),
        ("wq", "wk", None, False),
        ("QueryProj/kernel", "KeyProj/kernel", None, False),
    ],
)
@pytest.mark.parametrize("key_heads", [4, 2, 1])
def test_matrices_of_rank_two(query, key, bias, first, key_heads):
    """Head after head along the units: last of a kernel, first of a weight."""
    whole = {kind: _block(key_heads)[kind] for kind in ("query", "key")}
    want = clip(whole, {"": LOGITS})
    names = query, key, bias, first
    got = clip({"block_0": {"attention": _flat(whole, *names)}}, {"block_0/attention": LOGITS})
    want = {"block_0": {"attention": _flat(want, *names)}}
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, want)


def test_several_blocks_and_what_is_not_named():
    """Every block goes by its own logits; leaves of other blocks are the same arrays."""
    params = {f"block_{i}": {"attention": _block()} for i in range(3)}
    got = qk_clip(
        params, {"block_2/attention": 2 * LOGITS, "block_0/attention": LOGITS}, tau=jnp.float32(50)
    )
    for i, factor in ((0, 2), (2, 4)):
        want = qk_clip(params[f"block_{i}"], {"attention": factor * LOGITS})
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got[f"block_{i}"], want
        )
    same = jax.tree.map(lambda x, y: x is y, params, got)
    assert all(jax.tree.leaves(same["block_1"]))
    assert all(jax.tree.leaves([same["block_0"]["attention"][x] for x in ("value", "out")]))
    assert qk_clip(params, {}) == params


def test_deepest_name_counts():
    """A name above, here that of a value model, does not make every leaf below a value's."""
    got = clip({"value_model": {"attention": _block(2)}}, {"": LOGITS})
    want = clip(_block(2), {"": LOGITS})
    jax.tree.map(np.testing.assert_array_equal, got["value_model"]["attention"], want)


# How the kernels and the largest logits are split. In the last two the logits are and the heads of
# a kernel are not: then in an Auto mesh the compiler has the choice.
SPLITS = [
    ((None, "model", None), ()),
    (("data", "model", None), ("model",)),
    (("data", None, "model"), ("data",)),
    ((("data", "model"), None, None), ("model",)),
]


@pytest.mark.parametrize(
    ("kind", "weights", "logits"),
    [(AxisType.Auto, *split) for split in SPLITS[:2]]
    + [(AxisType.Explicit, *split) for split in SPLITS],
)
def test_eight_devices(kind, weights, logits):
    """Whatever a mesh splits: the numbers of one device, and each leaf keeps its sharding."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)

    def put(x, *spec):
        return jax.device_put(x, NamedSharding(mesh, P(*spec)))

    def place(path, x):
        return put(
            x, *(weights if x.ndim > 1 and "bias" not in str(path) else weights[1:])[: x.ndim]
        )

    block = _block(2)
    params = {
        "flax": {kind: block[kind] for kind in ("query", "key")},
        "flat": _flat(block, "query/kernel", "key/kernel", "bias"),
    }
    largest = {"flax": jnp.asarray(LOGITS), "flat": 2 * jnp.asarray(LOGITS)}
    placed = jax.tree_util.tree_map_with_path(place, params)
    got = clip(placed, {path: put(x, *logits) for path, x in largest.items()})
    want = clip(params, largest)
    for x, y, z in zip(*map(jax.tree.leaves, (got, placed, want)), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim), (x.sharding, y.sharding)
        np.testing.assert_allclose(x, z, rtol=1e-6)


def test_inside_shard_map():
    """With the heads split over devices each device clips its own."""
    params = {kind: leaf["kernel"] for kind, leaf in _block().items() if kind in ("query", "key")}
    mesh = jax.make_mesh((4,), ("heads",), axis_types=(AxisType.Auto,))
    split = jax.shard_map(
        lambda params, logits: qk_clip(params, {"": logits}),
        mesh=mesh,
        in_specs=(P(None, "heads"), P("heads")),
        out_specs=P(None, "heads"),
    )
    want = clip(params, {"": LOGITS})
    got = jax.jit(split)(params, jnp.asarray(LOGITS))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), got, want)


NO_MATRIX = "one query matrix, at most one bias and no norm, got none"


def _renamed(block, **names):
    return {names.get(kind, kind): leaf for kind, leaf in block.items()}


@pytest.mark.parametrize(
    ("params", "max_logits", "error", "match"),
    [
        ({}, LOGITS, TypeError, "max_logits must be a mapping, got ndarray"),
        ({}, None, TypeError, "max_logits must be a mapping, got NoneType"),
        ({}, {1: LOGITS}, TypeError, "max_logits must map paths to arrays, got 1"),
        ({}, {"": {"b": LOGITS}}, TypeError, r"max_logits\[''\] must be a floating.* got dict"),
        ({}, {"": np.ones(4, int)}, TypeError, "must be a floating array, got int64"),
        ({}, {"": LOGITS}, ValueError, "must have paths in params, got '', which has no leaf"),
        ({"a": _block()}, {"b": LOGITS}, ValueError, "paths in params, got 'b', which has no"),
        ({"ab": _block()}, {"a": LOGITS}, ValueError, "paths in params, got 'a', which has no"),
        ({"a": {"w": LOGITS}}, {"a": LOGITS}, ValueError, rf"\['a'\] .*{NO_MATRIX}"),
        ({"q": np.ones((8, 4), int)}, {"": LOGITS}, ValueError, NO_MATRIX),
        (
            {"q": LOGITS, "k": LOGITS},
            {"": LOGITS},
            ValueError,
            r"in front .* .* 'q' of shape \(4,\), got",
        ),
        (_renamed(_block(), key="kappa"), {"": LOGITS}, ValueError, "one key matrix, .* got none"),
        (
            {"b": {"qkv": {"kernel": np.ones((8, 24))}}},
            {"b": LOGITS},
            ValueError,
            r"\['b'\] must be .* leaves of their own, got 'b/qkv/kernel' for query and key and val",
        ),
        (
            _renamed(_block(), key="key_value"),
            {"": LOGITS},
            ValueError,
            "got 'key_value/bias' for key and value",
        ),
        (
            {"a": {**_block(), "query_ln": {"scale": np.ones(2)}}},
            {"a": LOGITS},
            ValueError,
            r"\['a'\] .* no norm, got 'a/query/kernel', 'a/query_ln/scale', 'a/query/bias'",
        ),
        (
            {"a": _block(), "b": _block()},
            {"": LOGITS},
            ValueError,
            "one attention block.* got 'a/query/kernel', 'b/query/kernel', 'a/query/bias', 'b/q",
        ),
        (
            {"a": _block()},
            {"": LOGITS, "a": LOGITS},
            ValueError,
            "separate blocks, got '' and 'a', which share 'a/",
        ),
        (_block(), {"": LOGITS[0]}, ValueError, r"\[..., heads\], got \(\)"),
        (_block(), {"": LOGITS[:0]}, ValueError, r"\[..., heads\], got \(0,\)"),
        (
            _block(),
            {"": LOGITS[:3]},
            ValueError,
            r"'query/kernel' must hold 3 heads of size 2 to fit .*\(3,\), got shape \(8, 4, 2\)",
        ),
        (
            _flat(_block(), "q/kernel", "k/kernel"),
            {"": LOGITS[:3]},
            ValueError,
            r"'q/kernel' must hold 3 heads of size 2 to fit .*\(3,\), got shape \(8, 8\)",
        ),
        (_block(), {"": LOGITS[None]}, ValueError, r"of shape \(8, 4, 2\), got \(1, 4\)"),
        (_block(4, 2), {"": LOGITS}, ValueError, r"of shape \(2, 8, 4, 2\), got \(4,\)"),
        (
            _block(3),
            {"": LOGITS},
            ValueError,
            r"'key/kernel' must hold a number of heads that divides 4 to fit .* got 3 in shape",
        ),
        (
            {**_block(), "key": {"kernel": np.ones((8, 2, 5))}},
            {"": LOGITS},
            ValueError,
            r"'key/kernel' must hold 2 heads of size 2 to fit .*, got shape \(8, 2, 5\)",
        ),
        (
            {**_block(), "query": {"kernel": np.ones((8, 8)), "bias": np.ones(4)}},
            {"": LOGITS},
            ValueError,
            r"'query/bias' must hold 4 heads of size 2 to fit .*, got shape \(4,\)",
        ),
        (
            {**_block(), "key": {"weight": np.ones((8, 4, 2))}},
            {"": LOGITS},
            ValueError,
            r"'key/weight' of shape \(8, 4, 2\), got \(4,\)",
        ),
    ],
)
def test_bad_input_is_named(params, max_logits, error, match):
    """Each message names the path, what was wanted and what was given."""
    with pytest.raises(error, match=match):
        qk_clip(params, max_logits)


@pytest.mark.parametrize(
    ("tau", "error", "match"),
    [
        (0, ValueError, r"tau must be in \(0, inf\), got 0"),
        (-1.0, ValueError, "got -1.0"),
        (np.nan, ValueError, "got nan"),
        ("100", TypeError, "tau must be a number, got '100'"),
        (np.ones(4), ValueError, r"tau must have shape \[\], got \(4,\)"),
    ],
)
def test_tau_is_a_positive_number(tau, error, match):
    """Zero would take every weight to zero, for ever."""
    with pytest.raises(error, match=match):
        qk_clip(_block(), {"": LOGITS}, tau=tau)
