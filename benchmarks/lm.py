"""A small language model, and the race of several optimizers on it.

The model is a decoder as large ones are built: pre-norm blocks of attention and SwiGLU, learned
positions, embedding and head untied. All seeds (in a search all settings too) train in one vmap,
all steps of a lap in one scan, so each method compiles once.
"""

import functools
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import harness, text
from jaxkit import train


class Size(NamedTuple):
    """How large the model and its training are; ``corpus`` is a function of ``text``."""

    corpus: str
    width: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    laps: int  # pieces of the training that are timed in turns; divides steps
    held_out: int  # windows of the validation loss, a multiple of batch

    def __str__(self):
        return (
            f"{self.corpus}, {self.layers} x {self.width}, context {self.context}, "
            f"batch {self.batch}, {self.steps} steps"
        )


class Result(NamedTuple):
    """What a race gives for one method."""

    train_loss: np.ndarray  # [seeds, steps]
    validation_loss: np.ndarray  # [seeds]
    step_seconds: np.ndarray  # [laps], of one step of all seeds


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, use_bias=False)
        y = nn.RMSNorm(name="attention_norm")(x)
        query, key, value = (
            dense(width, name=name)(y).reshape(*y.shape[:-1], self.heads, -1)
            for name in ("query", "key", "value")
        )
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + dense(width, name="out")(y.reshape(x.shape))
        y = nn.RMSNorm(name="mlp_norm")(x)
        y = nn.silu(dense(2 * width, name="gate")(y)) * dense(2 * width, name="up")(y)
        return x + dense(width, name="down")(y)


class Decoder(nn.Module):
    vocabulary: int
    size: Size

    @nn.compact
    def __call__(self, tokens):
        scale = nn.initializers.normal(0.1)
        width = self.size.width
        x = nn.Embed(self.vocabulary, width, embedding_init=scale, name="embed")(tokens)
        x = x + self.param("position", scale, (self.size.context, width))
        for layer in range(self.size.layers):
            x = Block(self.size.heads, name=f"block_{layer}")(x)
        head = nn.Dense(self.vocabulary, False, kernel_init=nn.initializers.zeros, name="head")
        return head(nn.RMSNorm(name="final_norm")(x))


class Task:
    """The data and the model of one size."""

    def __init__(self, size):
        self.size = size
        tokens, vocabulary = getattr(text, size.corpus)()
        self.tokens, held_out = map(jnp.asarray, text.split(tokens, size.context))
        # Evenly spread, since neighboring windows are of one subject; in batches, to save memory.
        held_out = held_out[:: max(1, len(held_out) // size.held_out)][: size.held_out]
        self.held_out = held_out.reshape(-1, size.batch, size.context + 1)
        self.model = Decoder(vocabulary, size)
        # Of many runs at once, and compiled once for all methods.
        self.init = jax.jit(jax.vmap(lambda key: self.model.init(key, self.held_out[0, :1, :-1])))
        self.evaluate = jax.jit(jax.vmap(self.held_out_loss))

    def loss(self, params, windows):
        logits = self.model.apply(params, windows[:, :-1])
        return jnp.mean(
            optax.losses.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
        )

    def held_out_loss(self, params):
        return jnp.mean(jax.lax.map(functools.partial(self.loss, params), self.held_out))

    def batches(self, seed):
        """Returns the starts of the training windows, ``[steps, batch]``."""
        high = len(self.tokens) - self.size.context
        shape = (self.size.steps, self.size.batch)
        return np.random.default_rng(seed).integers(high, size=shape, dtype=np.int32)

    def runners(self, make):
        """Returns jitted functions of many runs at once: ``start`` and ``lap``.

        The two rates live in the optimizer's state, so that runs with different ones share a
        program. All runs decay alike: constant, then linear to zero over the last 40 percent.
        """
        last = self.size.steps * 2 // 5
        decay = optax.linear_schedule(1.0, 0.0, last, self.size.steps - last)
        tx = optax.chain(optax.inject_hyperparams(make)(1.0, 1.0), optax.scale_by_schedule(decay))

        def start(params, key, rates):
            state = train.create(params, tx, key)
            return state._replace(opt_state=optax.tree.set(state.opt_state, **rates))

        def loss_fn(params, starts, key):
            del key
            windows = self.tokens[starts[:, None] + np.arange(self.size.context + 1)]
            return self.loss(params, windows)

        step = train.make_step(train.backprop(loss_fn), tx)

        lap = functools.partial(train.fit, step)
        return jax.jit(jax.vmap(start)), jax.jit(jax.vmap(lap), donate_argnums=0)


def race(size, makers, rates, seeds, track):
    """Trains with each method and its rates from the same seeds, in turns: ``{name: Result}``.

    ``makers[name](learning_rate, other_learning_rate)`` is the optimizer, ``rates[name]`` holds
    both. A seed gives the same start and the same batches to all.
    """
    task = Task(size)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    batches = np.stack([task.batches(seed) for seed in seeds])
    laps = np.split(batches, size.laps, axis=1)
    params = task.init(keys)
    losses, states, calls = {}, {}, {}
    for name in track(list(makers)):
        start, lap = task.runners(makers[name])
        own_rates = {key: jnp.full(len(seeds), x) for key, x in rates[name].items()}
        states[name] = start(params, keys, own_rates)
        compiled = lap.lower(states[name], laps[0]).compile()
        losses[name] = []

        def call(name=name, compiled=compiled):
            done = len(losses[name])
            states[name], metrics = compiled(states[name], laps[done])
            losses[name].append(metrics["loss"])
            return losses[name][-1]

        calls[name] = call
    seconds = harness.alternate(calls, track([f"lap {i + 1}" for i in range(size.laps)]))
    return {
        name: Result(
            np.concatenate(losses[name], axis=1),
            np.asarray(task.evaluate(states[name].params)),
            np.array(seconds[name]) / laps[0].shape[1],
        )
        for name in makers
    }


def search(size, make, grid, seeds):
    """Returns the mean validation loss over ``seeds`` at each point of a grid of two rates.

    ``grid`` maps the names of two rates to their values; the result is ``[first, second]``.
    """
    task = Task(size)
    start, lap = task.runners(make)
    (first, firsts), (second, seconds) = grid.items()
    runs = [(x, seed) for x in seconds for seed in seeds]
    keys = jnp.stack([jax.random.key(seed) for _, seed in runs])
    batches = np.stack([task.batches(seed) for _, seed in runs])
    params = task.init(keys)
    table = []
    for value in firsts:
        rates = {first: jnp.full(len(runs), value), second: jnp.array([x for x, _ in runs])}
        states, _ = lap(start(params, keys, rates), batches)
        loss = np.asarray(task.evaluate(states.params))
        table.append(loss.reshape(len(seconds), len(seeds)).mean(1))
    return np.array(table)
