"""The checks of the contract. Each takes a ``contract.Subject`` and raises if it does not hold."""

import io
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import export
from jax.sharding import AxisType

from jaxkit import train

CHECKS = {"transformation": {}, "function": {}, "estimator": {}}


def _check(*kinds):
    def register(check):
        for kind in kinds or CHECKS:
            CHECKS[kind][check.__name__] = check
        return check

    return register


@_check()
def jit_equals_eager(s):
    _assert_close(s.jitted(*s.args), s.fun(*s.args), s.case.rtol)


@_check()
def vmap_equals_loop(s):
    other = [
        x if axis is None else y
        for x, y, axis in zip(s.args, s.case.vary(s.args), s.axes, strict=True)
    ]
    both = [
        x if axis is None else _stack(x, y)
        for x, y, axis in zip(s.args, other, s.axes, strict=True)
    ]
    loop = _stack(s.jitted(*s.args), s.jitted(*other))
    _assert_close(jax.jit(jax.vmap(s.fun, s.axes))(*both), loop, s.case.rtol)


@_check()
def sharded_equals_whole(s):
    _, args = s.placed(AxisType.Auto)
    shardings = [x.sharding for x in jax.tree.leaves(args)]
    assert not all(x.is_fully_replicated for x in shardings), "no argument splits over 8 devices"
    _assert_close(s.jitted(*args), s.jitted(*s.args), s.case.rtol / 10)


@_check()
def lowers_everywhere(s):
    # Export refuses every kind of host callback too.
    export.export(s.jitted, platforms=("cpu", "tpu", "cuda"))(*s.args)


@_check("transformation", "function")
def grad_is_finite(s):
    _assert_finite(s.derivative(*s.args))


@_check("transformation", "function")
def dtype_is_kept(s):
    def check(dtype):
        for path, x in _leaves(jax.eval_shape(s.value, *_structs(s.args, dtype))):
            assert not _is_float(x) or x.dtype == dtype, f"{dtype} becomes {x.dtype} at {path}"

    for dtype in s.case.dtypes:
        if dtype != "float64":
            check(dtype)
        if dtype in ("float32", "float64"):
            with jax.enable_x64(True):
                check(dtype)


@_check("transformation")
def same_call_same_result(s):
    first = s.fun(*s.args)
    _assert_equal(s.fun(*s.args), first)
    _assert_equal(s.fresh()[1](*s.args), first)


@_check("transformation")
def state_is_stable(s):
    for dtype in {"float32", "bfloat16"} & set(s.case.dtypes):
        _assert_stable(s, s.tx, dtype)


@_check("transformation")
def tree_agnostic(s):
    class Node(NamedTuple):
        first: Any
        rest: tuple
        nothing: None
        empty: dict

    def nest(tree):
        # The order of the leaves stays: random draws may depend on it.
        first, *rest = jax.tree.leaves(tree)
        return Node(first, tuple(rest), None, {})

    _assert_equal(s.value(*map(nest, s.args)), nest(s.value(*s.args)))
    leaf = jax.tree.leaves(s.args[0])[0]
    assert jax.eval_shape(s.value, leaf, leaf).shape == leaf.shape
    assert s.value({}, {}) == {}


@_check("transformation")
def zero_grad_is_finite(s):
    for dtype in {"float32", "float16"} & set(s.case.dtypes):
        params = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), s.args[0])
        zeros = jax.tree.map(jnp.zeros_like, params)
        _assert_finite(s.derivative(params, zeros, zeros))


@_check("transformation")
def keeps_explicit_sharding(s):
    mesh, args = s.placed(AxisType.Explicit)
    with jax.set_mesh(mesh):
        start = jax.jit(s.tx.init)(args[0])
        updates, state = s.jitted(*args)
    _assert_same_sharding(updates, args[0])
    _assert_same_sharding(state, start)
    _assert_follows(start, args[0])
    _assert_close((updates, state), s.jitted(*s.args), s.case.rtol / 10)


@_check("transformation")
def init_keeps_sharding(s):
    _, args = s.placed(AxisType.Auto)
    _assert_follows(jax.jit(s.tx.init)(args[0]), args[0])


@_check("transformation")
def checkpoint_roundtrip(s):
    params, grads, more = s.args
    _, state = s.fun(params, grads)
    leaves, treedef = jax.tree.flatten(state)
    file = io.BytesIO()
    np.savez(file, *map(_array, leaves))
    file.seek(0)
    with np.load(file) as saved:
        loaded = [saved[name] for name in saved.files]

    def restore(x, old):
        # A file knows no bfloat16 and gives its bytes back.
        x = jnp.asarray(x.view(_array(old).dtype))
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(old)) if is_key(old) else x

    restored = treedef.unflatten(map(restore, loaded, leaves))
    extra = s.case.extra(more, params)
    got = s.tx.update(more, restored, params, **extra)
    _assert_equal(got, s.tx.update(more, state, params, **extra))


@_check("transformation")
def composes(s):
    leaves, treedef = jax.tree.flatten(s.args[0])
    mask = treedef.unflatten([False] + [True] * (len(leaves) - 1))
    wholes = {
        "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), s.tx, optax.scale(-1.0)),
        "masked": lambda: optax.masked(s.tx, mask),
        "multi_steps": lambda: optax.MultiSteps(s.tx, 2),
    }
    with jax.numpy_dtype_promotion("standard"):  # optax's own parts need it
        for name in s.case.within:
            _assert_stable(s, wholes[name](), "bfloat16")


@_check("transformation")
def buffers_are_donatable(s):
    # Init twice: a buffer that is the factory's own (its key, say) dies with the first donation.
    params = s.args[0]
    arrays = jax.tree.leaves((params, s.tx.init(params), s.tx.init(params)))
    arrays = [jax.random.key_data(x) if is_key(x) else x for x in arrays]
    buffers = [x.unsafe_buffer_pointer() for x in arrays if x.size]
    assert len(set(buffers)) == len(buffers), "two leaves share a buffer"


@_check("function", "estimator")
def same_key_same_result(s):
    same_call_same_result(s)
    other = jax.tree.map(lambda x: next_key(x) if is_key(x) else x, s.args)
    differs = _differ(s.fun(*s.args), s.fun(*other))
    if s.kind == "estimator":
        assert differs, "the key does not reach the loss"
        quiet = s.case.make()(loss)
        differs = _differ(quiet(*s.args), quiet(*other))
    assert differs == s.case.draws, f"another key gives other numbers: {differs}"


@_check("function")
def masked_entries_do_not_matter(s):
    args = list(s.args)
    for position, masked in s.case.mask.items():
        mask = args[position]
        assert not mask.all(), "the mask must leave something out"
        for i in masked:
            wide = mask.reshape(mask.shape + (1,) * (args[i].ndim - mask.ndim))
            args[i] = jnp.where(wide, args[i], jnp.asarray(jnp.nan, args[i].dtype))
    # Eager too: XLA rewrites a product with a mask as a select, which hides a leak.
    _assert_equal(s.fun(*args), s.fun(*s.args))
    _assert_equal(s.jitted(*args), s.jitted(*s.args))
    _assert_equal(s.derivative(*args), s.derivative(*s.args))
    _assert_finite(s.derivative(*args))


@_check("estimator")
def types(s):
    key, params, _, batch = s.args
    for dtype in {"float32", "bfloat16"} & set(s.case.dtypes):
        params = _structs(params, dtype)
        out = jax.eval_shape(s.fun, key, params, jax.eval_shape(s.case.opt_state, params), batch)
        assert isinstance(out, train.Estimate), f"got {type(out)}"
        assert (out.value.shape, out.value.dtype) == ((), jnp.float32), f"value is {out.value}"
        assert _types(out.grads) == _types(params), f"grads are {_types(out.grads)}"
        assert out.aux is None, f"aux is {out.aux}"
        assert isinstance(out.extras, dict), f"extras is a {type(out.extras)}"
        for path, x in _leaves(out.extras):
            assert _is_float(x), f"extras holds {x.dtype} at {path}"


@_check("estimator")
def opt_state_is_read_only(s):
    key, params, opt_state, batch = s.args
    # A dict, since a container that can change would show it; and the state lies deeper.
    around = {"other": jnp.ones(3), "inner": opt_state}
    leaves, treedef = jax.tree.flatten(around)
    _assert_equal(s.fun(key, params, around, batch), s.fun(*s.args))
    after, treedef_after = jax.tree.flatten(around)
    assert treedef == treedef_after, "the structure of opt_state changed"
    assert all(x is y for x, y in zip(leaves, after, strict=True)), "a leaf of opt_state changed"


@_check("estimator")
def with_stateful(s):
    key, params, opt_state, batch = s.args

    def moved(model_state, batch):
        # The total is the same however the batch is cut into slices.
        total = model_state["total"] + jnp.sum(batch[0], 0)
        return {"calls": model_state["calls"] + 1, "total": total}

    def stateful_loss(params, batch, key):
        value = loss(params, batch.batch, key)
        return value, {"model_state": moved(batch.model_state, batch.batch), "loss_fn": value}

    start = {"calls": jnp.zeros([], jnp.int32), "total": jnp.zeros(8)}
    want = {**moved(start, batch), "calls": jnp.asarray(s.case.num_micro, jnp.int32)}
    estimate = jax.jit(s.case.make()(stateful_loss))
    out = estimate(key, params, opt_state, train.Stateful(start, batch))
    _assert_close(out.aux["model_state"], want, 1e-5)
    assert out.aux.keys() == {"model_state", "loss_fn"}, f"aux has {sorted(out.aux)}"


@_check("estimator")
def grads_descend(s):
    key, params, _, batch = s.args
    grads = jax.jit(s.case.make()(loss))(*s.args).grads
    size = 3e-3 / optax.tree.norm(grads)
    after = jax.tree.map(lambda p, g: p - size * g, params, grads)
    assert loss(after, batch, key) < loss(params, batch, key)


def loss(params, batch, key):
    """Returns the loss of a small network in the dtype of its parameters; draws nothing."""
    del key
    dtype = params["third"].dtype
    x, y = (z.astype(dtype) for z in batch)
    error = jnp.tanh(x @ params["first"]) @ params["second"] + params["third"][None] - y
    return jnp.mean(jnp.square(error))


def noisy_loss(params, batch, key):
    """Returns ``loss`` with noise on the inputs."""
    x, y = batch
    return loss(params, (x + 0.1 * jax.random.normal(key, x.shape, x.dtype), y), key)


def derivative(fun, *args):
    """Returns ``fun(*args)`` and the derivative of its sum in every floating leaf."""
    leaves, treedef = jax.tree.flatten(args)
    floats = {i: x for i, x in enumerate(leaves) if _is_float(x)}

    def total(floats):
        out = fun(*treedef.unflatten([floats.get(i, x) for i, x in enumerate(leaves)]))
        values = [x for x in jax.tree.leaves(out) if _is_float(x)]
        return sum(jnp.sum(x.astype(jnp.float32)) for x in values), out

    slopes, out = jax.grad(total, has_aux=True)(floats)
    return out, slopes


def is_key(x):
    """Says whether ``x`` is an array of random keys."""
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def next_key(x):
    """Returns other random keys in the shape of ``x``."""
    return jax.vmap(lambda key: jax.random.fold_in(key, 1))(x.reshape(-1)).reshape(x.shape)


def _is_float(x):
    return jnp.issubdtype(x.dtype, jnp.floating)


def _array(x):
    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def _leaves(tree):
    return [(jax.tree_util.keystr(k), x) for k, x in jax.tree_util.tree_leaves_with_path(tree)]


def _stack(*trees):
    return jax.tree.map(lambda *xs: jnp.stack(xs), *trees)


def _structs(tree, dtype):
    """Returns the types of ``tree`` with ``dtype`` in place of every floating dtype."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype if _is_float(x) else x.dtype), tree
    )


def _types(tree):
    leaves, treedef = jax.tree.flatten(tree)
    return treedef, [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves]


def _assert_stable(s, tx, dtype):
    params, grads, _ = _structs(s.args, dtype)
    state = jax.eval_shape(tx.init, params)

    def update(grads, state, params):
        return tx.update(grads, state, params, **s.case.extra(grads, params))

    updates, after = jax.eval_shape(update, grads, state, params)
    assert _types(updates) == _types(params), f"{_types(updates)} differs from {_types(params)}"
    assert _types(after) == _types(state), f"{_types(after)} differs from {_types(state)}"
    weak = [path for path, x in _leaves(state) if x.weak_type]
    assert not weak, f"weak types at {weak}"


def _assert_same_structure(got, want):
    got, want = jax.tree.structure(got), jax.tree.structure(want)
    assert got == want, f"{got} differs from {want}"


def _assert_close(got, want, rtol):
    _assert_same_structure(got, want)
    for (path, x), (_, y) in zip(_leaves(got), _leaves(want), strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape), f"{x} differs from {y} at {path}"
        if _is_float(y):
            x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
            size = np.max(np.abs(y), initial=0.0, where=np.isfinite(y))
            np.testing.assert_allclose(x, y, rtol, rtol * size, equal_nan=False, err_msg=path)
        else:
            np.testing.assert_array_equal(_array(x), _array(y), path)


def _assert_equal(got, want):
    _assert_same_structure(got, want)
    for (path, x), (_, y) in zip(_leaves(got), _leaves(want), strict=True):
        np.testing.assert_array_equal(_array(x), _array(y), path, strict=True)


def _assert_finite(tree):
    bad = [path for path, x in _leaves(tree) if _is_float(x) and not jnp.isfinite(x).all()]
    assert not bad, f"not finite at {bad}"


def _differ(first, second):
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return any(not np.array_equal(_array(x), _array(y)) for x, y in pairs if not is_key(x))


def _assert_same_sharding(got, want):
    for (path, x), (_, y) in zip(_leaves(got), _leaves(want), strict=True):
        same = x.sharding.is_equivalent_to(y.sharding, x.ndim)
        assert same, f"{x.sharding} differs from {y.sharding} at {path}"


def _assert_follows(state, params):
    """Checks that what has the shape of a parameter matrix is split as that matrix is."""
    by_shape = {x.shape: x for x in jax.tree.leaves(params) if x.ndim > 1}
    for path, x in _leaves(state):
        if x.shape in by_shape:
            _assert_same_sharding({path: x}, {path: by_shape[x.shape]})
