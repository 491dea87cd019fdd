"""A step of zo on a flax transformer: memory against backprop, time against its forward passes."""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import costs, harness, lm
from benchmarks.zo import training
from jaxkit import zo


class Size(NamedTuple):
    """A decoder with scanned layers, and the data of a step."""

    vocabulary: int
    width: int
    mlp: int
    layers: int
    context: int
    batch: int

    def __str__(self):
        return (
            f"{self.layers} x {self.width}, MLP {self.mlp}, vocabulary {self.vocabulary}, "
            f"batch {self.batch} x {self.context}"
        )


LARGE = Size(1024, 256, 1024, 5, 128, 16)  # 5.8 M parameters
SIZES = {"smoke": Size(16, 8, 16, 2, 8, 4), "short": LARGE, "full": LARGE}
PROBES = {"smoke": 1, "short": 1, "full": 8}  # two-sided
ROUNDS = {"smoke": 2, "short": 3, "full": 20}
RATE = 1e-3
OURS = {"gaussian": zo.gaussian(), "low rank 1": zo.low_rank(1), "node, per example": zo.node()}
INFERENCE, BACKPROP = "inference", "jax.value_and_grad + SGD"


class Layer(nn.Module):
    mlp: int
    dtype: Any

    @nn.compact
    def __call__(self, x, _):
        return lm.Block(4, self.mlp, self.dtype, name="block")(x), None


class Decoder(nn.Module):
    size: Size
    dtype: Any = None

    @nn.compact
    def __call__(self, tokens):
        size, dtype = self.size, self.dtype
        x = nn.Embed(size.vocabulary, size.width, dtype, name="embed")(tokens)
        scale = nn.initializers.normal(0.1)
        x = x + self.param("position", scale, (size.context, size.width)).astype(x.dtype)
        layers = nn.scan(
            Layer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=size.layers,
        )
        x, _ = layers(size.mlp, dtype, name="layers")(x, None)
        head = nn.Dense(size.vocabulary, use_bias=False, dtype=dtype, name="head")
        return head(nn.RMSNorm(dtype=dtype)(x))


def run(context):
    size, probes = SIZES[context.form], PROBES[context.form]
    params, key, windows = _start(size)
    funs = _steps(size, probes, context.dtype)

    def build(name):
        donated = () if name == INFERENCE else (0,)
        return jax.jit(funs[name], donate_argnums=donated).lower(params, key, windows).compile()

    compiled = harness.in_pairs(
        {name: functools.partial(build, name) for name in funs}, context.track
    )
    million = sum(leaf.size for leaf in jax.tree.leaves(params)) / 1e6
    about = {
        "case": f"a step, {probes} two-sided probes",
        "size": f"{million:.1f} M parameters, {size}",
        "better": "down",
    }
    yield from harness.versus(
        tuple(OURS),
        {name: [training.total_memory(program) / 2**20] for name, program in compiled.items()},
        **about,
        metric="memory",
        unit="MiB",
    )

    held = {name: jax.tree.map(jnp.copy, params) for name in compiled}

    def passes():
        for _ in range(2 * probes):
            jax.block_until_ready(compiled[INFERENCE](params, key, windows))

    def step(name):
        held[name] = compiled[name](held[name], key, windows)
        return held[name]

    calls = {name: functools.partial(step, name) for name in (*OURS, BACKPROP)}
    calls[f"{2 * probes} forward passes"] = passes
    harness.alternate(calls, range(1))  # warm up
    rounds = ROUNDS[context.form]
    seconds = harness.alternate(calls, context.track([f"round {index}" for index in range(rounds)]))
    yield from harness.versus(
        tuple(OURS),
        {name: 1e3 * np.array(times) for name, times in seconds.items()},
        **about,
        metric="time",
        unit="ms",
        seeds=range(rounds),
    )


def steps(context):
    """Yields the steps of all methods but inference; of node and of backprop first."""
    size, probes = SIZES[context.form], PROBES[context.form]
    params, key, windows = _start(size)
    found = _steps(size, probes, context.dtype)
    for name in dict.fromkeys(("node, per example", BACKPROP, *OURS)):
        fun = found[name]  # its products are the model's: the update has none
        yield costs.Step(name, fun, (params, key, windows), fun, size.batch * size.context)


def _start(size):
    tokens = jnp.arange(size.batch * (size.context + 1)) * 7 % size.vocabulary
    windows = tokens.reshape(size.batch, -1)
    key = jax.random.key(0)
    return jax.jit(Decoder(size).init)(key, windows[:, :-1]), key, windows


def _steps(size, probes, dtype):
    """Returns ``{name: (params, key, windows) -> ...}``, new parameters but for inference."""

    losses = functools.partial(lm.window_losses, Decoder(size, dtype))

    def loss(params, windows):
        return losses(params, windows).mean()

    def descended(params, grads):
        return jax.tree.map(lambda p, g: p - RATE * g, params, grads)

    def by_replay(direction, params, key, windows):
        state = zo.zo_init(key, num_samples=probes)
        return zo.zo_update(
            key, loss, params, state, windows, learning_rate=RATE, direction=direction
        )[0]

    def by_node(direction, params, key, windows):
        run = zo.value_and_zo_grad(
            losses, direction=direction, num_samples=probes, mu=1e-2, per_example=True
        )
        return descended(params, run(key, params, windows)[1])

    def by_backprop(params, key, windows):
        del key
        return descended(params, jax.value_and_grad(loss)(params, windows)[1])

    node = OURS["node, per example"]
    return {
        **{
            name: functools.partial(by_node if direction is node else by_replay, direction)
            for name, direction in OURS.items()
        },
        INFERENCE: lambda params, key, windows: loss(params, windows),
        BACKPROP: by_backprop,
    }
