"""The measurement behind every zeroth-order estimate: losses, slopes and one scalar a direction."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import _check, _estimator, _numerics, _tree
from jaxkit.zo import _replay
from jaxkit.zo._directions import Direction, gaussian
from jaxkit.zo._node import Node

MODES = "two_sided", "one_sided", "jvp"


class Options(NamedTuple):
    """What a measurement is told; explained at ``zo.value_and_zo_grad``."""

    has_aux: bool = False
    num_samples: int = 1
    mu: Any = 1e-3
    direction: Direction = gaussian()
    mode: str = "two_sided"
    aggregate: str = "mean"
    matched: bool = True
    batch: str = "map"
    per_example: bool = False
    skip_nonfinite: bool = False
    axis_name: Any = None
    axis_directions: str = "same"


class Measured(NamedTuple):
    """Keys ``[K]`` and coefficients ``[K]`` of independent draws, and what was seen."""

    keys: jax.Array
    coeffs: jax.Array
    value: jax.Array
    basis: Any
    aux: Any
    slopes: jax.Array
    num_skipped: jax.Array


def check_options(loss_fn, options):
    """Checks all static options; the messages name the argument."""
    _check.function("loss_fn", loss_fn)
    direction = options.direction
    if isinstance(direction, Node):
        raise TypeError(
            "direction must be one of the parameters, got zo.node(), which goes with "
            "value_and_zo_grad and gradient_estimator only."
        )
    if not isinstance(direction, Direction):
        raise TypeError(
            "direction must be a Direction such as zo.gaussian(), "
            f"got {getattr(direction, '__name__', type(direction).__name__)}."
        )
    _check.count("num_samples", options.num_samples)
    _check.between("mu", options.mu, 0, math.inf, closed=False)
    _check.choice("mode", options.mode, MODES)
    _check.choice("aggregate", options.aggregate, ("mean", "project", "rloo"))
    _check.choice("batch", options.batch, ("map", "vmap"))
    _check.choice("axis_directions", options.axis_directions, ("same", "own"))
    if options.axis_directions == "own" and options.axis_name is None:
        raise ValueError("axis_directions='own' needs axis_name, got None.")
    if options.aggregate == "rloo":
        if options.mode != "one_sided":
            raise ValueError(f"aggregate='rloo' needs mode='one_sided', got {options.mode!r}.")
        if not options.matched:
            raise ValueError("aggregate='rloo' needs matched=True, for it has no second call.")
    if options.mode == "jvp" and not options.matched:
        raise ValueError("mode='jvp' needs matched=True, for it has no second call.")
    if options.aggregate == "project" and direction.estimate is not None:
        raise ValueError(
            "aggregate='project' needs a direction that enters the gradient as it perturbs, "
            "got a corrected one."
        )


def measure(loss_fn, options):
    """Returns ``(key, params, args, args_minus, oracle_key) -> Measured``."""
    check_options(loss_fn, options)
    direction, num, mode = options.direction, int(options.num_samples), options.mode
    is_rloo = options.aggregate == "rloo"
    has_base = mode == "one_sided" and not is_rloo
    is_own = options.axis_directions == "own"

    def run(key, params, args, args_minus=None, oracle_key=None):
        kind = str(jax.random.key_impl(check_key(key)))
        if options.batch == "vmap" and "rbg" in kind:
            # Under vmap such keys draw other numbers than in a loop, which the sum would not find.
            raise ValueError(f"batch='vmap' needs a key of kind 'threefry2x32', got {kind!r}.")
        params = check_params(params)
        args, args_of = _second_data(options, args, args_minus, oracle_key)
        basis = direction.prepare(loss_fn, params, args)
        if options.axis_name is not None and jax.tree.leaves(basis):
            raise ValueError(
                "axis_name needs a direction without a basis, got one that looks at the model: "
                "devices with other data would see other directions."
            )
        total, first = num, 0
        if is_own:
            total = num * jax.lax.axis_size(options.axis_name)
            first = num * jax.lax.axis_index(options.axis_name)
        if is_rloo and total < 2:
            raise ValueError(f"num_samples must be at least 2 for 'rloo', got {total}.")
        keys = direction_keys(key, total)
        mixing = _mixing(direction, params, keys, basis)
        dtype = _numerics.wide(*(x.dtype for x in jax.tree.leaves(params)))

        def moved(start, k, scale):
            """Returns ``start + scale * u_k``."""
            scale = jnp.asarray(scale, dtype) * mixing[k].astype(dtype)
            if mixing.ndim == 2:
                return _replay.add(direction, start, keys, scale, basis)
            return _replay.add(direction, start, keys[k][None], scale[None], basis)

        def evaluate(x):
            """Returns the loss, its slope where that comes at once, and aux, of one call."""
            k, sign, is_minus = x
            call_args = args_of(k, is_minus)
            if mode == "jvp":
                u = moved(_tree.zeros_like(params), k, 1.0)
                loss, slope, aux = jax.jvp(
                    lambda p: outcome(loss_fn(p, *call_args), options),
                    (params,),
                    (u,),
                    has_aux=True,
                )
                return (loss, slope), aux
            scale = sign * jnp.asarray(options.mu, dtype)
            if direction.loss_at is None:
                out = loss_fn(moved(params, k, scale), *call_args)
            else:
                out = direction.loss_at(loss_fn)(params, scale, keys[k], basis, *call_args)
            loss, aux = outcome(out, options)
            return (loss, jnp.zeros_like(loss)), aux

        ks, signs = np.arange(num, dtype=np.int32), np.ones(num, np.float32)
        if mode == "two_sided":
            ks, signs = np.repeat(ks, 2), np.tile(np.float32([1, -1]), num)
        elif has_base:
            ks, signs = np.append(np.int32(0), ks), np.append(np.float32(0), signs)
        xs = first + jnp.asarray(ks), jnp.asarray(signs, dtype), jnp.asarray(signs <= 0)
        (losses, slopes), aux = over_calls(evaluate, xs, options)

        if options.axis_name is not None and not is_own:
            losses, slopes = jax.lax.pmean((losses, slopes), options.axis_name)
        seen = losses[:1] if has_base or mode == "jvp" else losses

        def gather(x):
            """Returns the entries of all devices; as a sum, so that JAX knows they are equal."""
            if not is_own:
                return x
            x = jax.lax.dynamic_update_slice_in_dim(jnp.zeros(total, x.dtype), x, first, 0)
            return jax.lax.psum(x, options.axis_name)

        mu = jnp.asarray(options.mu, losses.dtype)
        if mode == "two_sided":
            slopes = gather((losses[::2] - losses[1::2]) / (2 * mu))
        elif is_rloo:
            losses = gather(losses)
            # Each loss against the mean of the others.
            slopes = (losses - jnp.mean(losses)) * (total / (total - 1)) / mu
        elif has_base:
            slopes = gather((losses[1:] - losses[0]) / mu)
        else:
            slopes = gather(slopes)

        ok = jnp.isfinite(slopes) if options.skip_nonfinite else jnp.ones(slopes.shape, bool)
        slopes_used = jnp.where(ok, slopes, 0)
        coeffs = _aggregate(options, params, keys, basis, mixing, slopes_used)
        value = _mean(seen, options, is_own)
        return Measured(keys, coeffs, value, basis, aux, slopes, jnp.sum(~ok, dtype=jnp.int32))

    return run


def outcome(out, options):
    """Returns the loss of a call in float32 or wider, and aux."""
    given = {"per_example": options.per_example, "has_aux": options.has_aux}
    loss, aux = _estimator.split_loss(out, **given)
    return jnp.mean(loss.astype(_numerics.wide(loss.dtype))), aux


def over_calls(evaluate, xs, options):
    """Runs ``evaluate`` over all calls; returns losses and slopes, and aux of the first call."""
    if options.batch == "vmap":
        out, aux = jax.vmap(evaluate)(xs)
        return out, jax.tree.map(lambda x: x[0], aux)
    if not options.has_aux:
        return jax.lax.map(evaluate, xs)

    # Only one aux is kept: stacked, they would take its size for every call.
    def step(carry, x):
        index, first_aux = carry
        out, aux = evaluate(x)
        aux = jax.tree.map(lambda new, old: jnp.where(index == 0, new, old), aux, first_aux)
        return (index + 1, aux), out

    # Only types are read, so nothing of this call is left in the program.
    first = jax.tree.map(lambda x: x[0], xs)
    start = jax.jit(
        lambda: jax.tree.map(lambda x: _estimator.zeros_of(jax.typeof(x)), evaluate(first)[1])
    )()
    (_, aux), out = jax.lax.scan(step, (jnp.int32(0), start), xs)
    return out, aux


def direction_keys(key, num):
    """Returns the keys ``[num]`` of the directions of one probe."""
    return jax.lax.map(lambda k: jax.random.fold_in(key, k), jnp.arange(num, dtype=jnp.int32))


def check_key(key):
    """Checks that ``key`` is one typed key, and returns it."""
    if not jnp.issubdtype(getattr(key, "dtype", None), jax.dtypes.prng_key) or key.shape:
        raise TypeError(f"key must be a typed key of shape [], got {jax.typeof(key)}.")
    return key


def check_params(params):
    """Checks that ``params`` is a tree of real floating arrays with an entry; returns arrays."""
    _estimator.check_params(params)
    if not sum(jnp.size(x) for x in jax.tree.leaves(params)):
        raise ValueError("params must hold at least one number, got an empty tree.")
    return _tree.strong(params)


def _second_data(options, args, args_minus, oracle_key):
    """Returns the first call's args, and ``(k, is_minus) -> args`` of any call."""
    if options.matched:
        if args_minus is not None or oracle_key is not None:
            raise ValueError("args_minus and oracle_key are for matched=False, got matched=True.")
        return args, lambda k, is_minus: args
    if args_minus is None and oracle_key is None:
        raise ValueError("matched=False needs args_minus or oracle_key, got neither.")
    if args_minus is not None:
        _check.same_types("args_minus", args_minus, "args", args)

    def args_of(k, is_minus):
        out = args
        if args_minus is not None:
            out = jax.tree.map(lambda p, m: jnp.where(is_minus, m, p), args, args_minus)
        if oracle_key is not None:
            call = 2 * k + jnp.asarray(is_minus, jnp.int32)
            out = (*out, jax.random.fold_in(oracle_key, call))
        return out

    return args_of(0, False), args_of


def _mixing(direction, params, keys, basis):
    """Returns W with ``u_k = W[k] z_k`` (``[K]``) or ``u_k = sum_j W[k, j] z_j`` (``[K, K]``)."""
    size = sum(x.size for x in jax.tree.leaves(params))
    if direction.mixing == "orthogonal":
        if len(keys) > size:
            raise ValueError(
                f"num_samples must be at most {size}, the number of parameters, for orthogonal "
                f"directions, got {len(keys)}."
            )
        root = jnp.linalg.cholesky(_replay.gram(direction, params, keys, basis))
        eye = jnp.eye(len(keys), dtype=root.dtype)
        return size**0.5 * jax.scipy.linalg.solve_triangular(root, eye, lower=True)
    if direction.mixing == "sphere":
        return jax.lax.rsqrt(_replay.squared_norms(direction, params, keys, basis) / size)
    return jnp.ones(len(keys))


def _aggregate(options, params, keys, basis, mixing, slopes):
    """Returns the coefficients of the independent draws."""
    direction = options.direction
    if options.aggregate != "project":
        weights = slopes / len(slopes)
    elif direction.mixing == "orthogonal":
        weights = slopes / sum(x.size for x in jax.tree.leaves(params))
    else:
        gram = _replay.gram(direction, params, keys, basis)
        scale = mixing.astype(gram.dtype)
        gram = scale[:, None] * gram * scale[None, :]
        # Directions may be dependent: the least of all combinations that fit the slopes.
        weights = jnp.linalg.pinv(gram.astype(slopes.dtype), hermitian=True) @ slopes
    mixing = mixing.astype(weights.dtype)
    return mixing.T @ weights if mixing.ndim == 2 else mixing * weights


def _mean(losses, options, is_own):
    """Returns the mean loss, over the finite ones where the others are skipped."""
    ok = jnp.isfinite(losses) if options.skip_nonfinite else jnp.ones(losses.shape, bool)
    sums = jnp.sum(jnp.where(ok, losses, 0)), jnp.sum(ok, dtype=losses.dtype)
    if is_own:
        sums = jax.lax.psum(sums, options.axis_name)
    return sums[0] / sums[1]
