"""What a step of training costs on this device, and what share of the device's limits it uses."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from jaxkit.train import create, make_step


class Step(NamedTuple):
    """One step of training of a benchmark, ready to be measured, exported or repeated.

    A benchmark that trains has ``steps(context)``, which yields those of its methods, ours first.
    ``fun(*args)`` is the step; with a training state it returns ``(state, metrics)``. The products
    of ``model(*args)`` count as the model's: all that the estimator does, nothing of the optimizer.
    """

    method: str
    fun: Callable[..., Any]
    args: tuple
    model: Callable[..., Any]
    tokens: int  # or examples, that the step takes in


def training_step(method, estimator, tx, params, batch, tokens):
    """Returns the :class:`Step` of an estimator and an optimizer."""

    def model(state, batch):
        return estimator(state.key, state.params, state.opt_state, batch)

    state = create(params, tx, jax.random.key(0))
    return Step(method, make_step(estimator, tx), (state, batch), model, tokens)


def matmul_flops(fun, *args):
    """Returns the floating-point operations of all matrix products and convolutions of ``fun``.

    A product of ``[m, k]`` and ``[k, n]`` counts ``2 m k n``, a loop all of its turns, a branch as
    much as the most expensive one. Zeros that dilate the input of a convolution do not count.
    Raises ValueError if there are products in a loop that does not say how often it turns.
    """
    return _count(jax.make_jaxpr(fun)(*args).jaxpr)


def _count(jaxpr):
    total = 0
    for equation in jaxpr.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "dot_general":
            (contracted, _), _ = params["dimension_numbers"]
            shape = equation.invars[0].aval.shape
            inner = int(np.prod([shape[axis] for axis in contracted], dtype=np.int64))
            total += 2 * equation.outvars[0].aval.size * inner
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval
            outputs = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
            taken = equation.outvars[0].aval.size * (kernel.size // outputs)
            total += 2 * taken // int(np.prod(params["lhs_dilation"], dtype=np.int64))
        elif name == "cond":
            total += max(_count(branch.jaxpr) for branch in params["branches"])
        else:
            inner = sum(_count(body) for body in _bodies(params))
            if inner and name == "while":
                raise ValueError("a loop with products must have a known length, got a while loop.")
            total += inner * params.get("length", 1) if name == "scan" else inner
    return total


def _bodies(params):
    """Yields the jaxprs among the parameters of an equation."""
    for value in params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            x = getattr(x, "jaxpr", x)
            if hasattr(x, "eqns"):
                yield x


def matmul_peak(dtype, seconds=0.05):
    """Returns the operations per second of the quickest square product with entries of a dtype.

    The sides double until a product takes ``seconds``. The precision is JAX's default, as in the
    models.
    """
    best, side, took = 0.0, 256, 0.0
    while took < seconds:
        side *= 2
        x = jax.random.normal(jax.random.key(0), (side, side), dtype)
        took = _quickest(jax.jit(jnp.matmul), x, x)
        best = max(best, 2 * side**3 / took)
    return best


def copy_bandwidth(seconds=0.02):
    """Returns the bytes per second, read and written, of the quickest copy of an array.

    Its size doubles until a copy takes ``seconds``.
    """
    best, size, took = 0.0, 2**21, 0.0
    while took < seconds:
        size *= 2
        took = _quickest(jax.jit(jnp.negative), jnp.ones(size))
        best = max(best, 2 * 4 * size / took)
    return best


def _quickest(fun, *args, runs=5):
    """Returns the seconds of the quickest run after the first."""
    jax.block_until_ready(fun(*args))
    took = []
    for _ in range(runs):
        start = time.perf_counter()
        jax.block_until_ready(fun(*args))
        took.append(time.perf_counter() - start)
    return min(took)


def limits(dtype, **shorter):
    """Returns the matmul peak in FLOP/s and the copy bandwidth in bytes/s, measured now."""
    return matmul_peak(dtype, **shorter), copy_bandwidth(**shorter)


def rows(case, steps, *, size, peak, bandwidth, rounds):
    """Yields what each of ``steps`` costs; nothing is compared.

    The share of the peak is that of the model's products in the time of the step; that of the
    bandwidth, of the bytes which a step must at least move: its arguments in and its results out.
    """
    steps = list(steps)
    measured = harness.measure(
        {step.method: (step.fun, *step.args) for step in steps}, rounds=rounds, compiles=1
    )
    for step in steps:
        found, flops = measured[step.method], matmul_flops(step.model, *step.args)
        moved = _bytes(step.args) + _bytes(jax.eval_shape(step.fun, *step.args))
        seconds = np.array(found.run_s)
        for metric, unit, better, values in (
            ("compile time", "s", "down", found.compile_s),
            ("run time", "ms", "down", 1e3 * seconds),
            ("temporary memory", "MB", "down", [found.temp_bytes / 1e6]),
            ("products of the model", "GFLOP", "down", [flops / 1e9]),
            ("share of the matmul peak", harness.SHARE, "up", flops / peak / seconds),
            ("share of the copy bandwidth", harness.SHARE, "up", moved / bandwidth / seconds),
            ("speed", harness.SPEED, "up", step.tokens / seconds),
        ):
            about = {"case": case, "size": size, "metric": metric, "unit": unit, "better": better}
            yield from harness.alone(step.method, values, **about)


def _bytes(tree):
    """Returns the bytes of the arrays of a tree but for random keys, which are a few words."""
    leaves = [x for x in jax.tree.leaves(tree) if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return sum(x.size * x.dtype.itemsize for x in leaves)
