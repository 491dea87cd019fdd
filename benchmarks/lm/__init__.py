"""A small language model, and the race of several optimizers on it.

The model is a decoder as large ones are built: pre-norm blocks of attention and SwiGLU, learned
positions, embedding and head untied. All seeds of a method train in one vmap and a lap of steps is
one scan; the methods take turns, lap by lap, so that their times compare.
"""

import concurrent.futures
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import costs, harness, text

# By name: the file train.py of this package would take the place of a module called train.
from jaxkit.train import backprop, create, fit, make_step


class Size(NamedTuple):
    """How large the model and its training are; ``corpus`` is a function of ``text``."""

    corpus: str
    width: int
    mlp: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    lap: int  # steps of one scan; divides steps
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
    step_seconds: np.ndarray  # [laps], of all seeds together


class Block(nn.Module):
    heads: int
    mlp: int
    dtype: Any = None  # of the computation, None for that of the parameters, which are float32

    @nn.compact
    def __call__(self, x):
        width = x.shape[-1]
        dense = functools.partial(nn.Dense, use_bias=False, dtype=self.dtype)
        norm = functools.partial(nn.RMSNorm, dtype=self.dtype)
        y = norm(name="attention_norm")(x)
        query, key, value = (
            dense(width, name=name)(y).reshape(*y.shape[:-1], self.heads, -1)
            for name in ("query", "key", "value")
        )
        y = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + dense(width, name="out")(y.reshape(x.shape))
        y = norm(name="mlp_norm")(x)
        y = nn.silu(dense(self.mlp, name="gate")(y)) * dense(self.mlp, name="up")(y)
        return x + dense(width, name="down")(y)


class Decoder(nn.Module):
    vocabulary: int
    width: int
    mlp: int
    layers: int
    heads: int
    dtype: Any = None  # of the computation, as of a block

    @nn.compact
    def __call__(self, tokens):
        scale = nn.initializers.normal(0.1)
        embed = nn.Embed(
            self.vocabulary, self.width, self.dtype, embedding_init=scale, name="embed"
        )
        x = embed(tokens)
        x = x + self.param("position", scale, (tokens.shape[-1], self.width)).astype(x.dtype)
        for layer in range(self.layers):
            x = Block(self.heads, self.mlp, self.dtype, name=f"block_{layer}")(x)
        zeros = nn.initializers.zeros
        head = nn.Dense(self.vocabulary, False, self.dtype, kernel_init=zeros, name="head")
        return head(nn.RMSNorm(dtype=self.dtype, name="final_norm")(x))


class Programs(NamedTuple):
    """The jitted functions of one method, each of many runs at once."""

    start: Callable[..., Any]  # (params, keys, numbers) -> states
    lap: Callable[..., Any]  # (states, windows [runs, lap, batch, context + 1]) -> states, metrics


# A program knows neither the text nor the rates nor the number of steps, so that races share it.


@functools.cache
def _evaluations(model):
    """Returns the jitted ``init(keys, tokens)`` and ``evaluate(params, batches)`` of many runs."""

    def init(keys, tokens):  # a loop, since that compiles sooner than a vmap
        return jax.lax.map(lambda key: model.init(key, tokens), keys)

    def evaluate(params, batches):
        return jnp.mean(jax.lax.map(functools.partial(loss, model, params), batches))

    return jax.jit(init), jax.jit(jax.vmap(evaluate, (0, None)))


@functools.cache
def _programs(model, make):
    """Returns the programs of the optimizer that ``make`` makes of two rates."""
    tx = decaying(make)

    def loss_fn(params, windows, key):
        del key
        return loss(model, params, windows)

    def start(params, key, numbers):
        state = create(params, tx, key)
        return state._replace(opt_state=optax.tree.set(state.opt_state, **numbers))

    lap = functools.partial(fit, make_step(backprop(loss_fn), tx))
    return Programs(jax.jit(jax.vmap(start)), jax.jit(jax.vmap(lap), donate_argnums=0))


def decaying(make):
    """Returns the optimizer with its rates and the number of steps, ``horizon``, in its state.

    All decay alike: constant, then linear to zero over the last 40 percent; steps after the last
    change nothing.
    """

    def decay(horizon):
        return optax.scale_by_schedule(lambda step: jnp.clip(2.5 * (1 - step / horizon), 0.0, 1.0))

    return optax.chain(
        optax.inject_hyperparams(make)(1.0, 1.0), optax.inject_hyperparams(decay)(1.0)
    )


def window_losses(model, params, windows):
    """Returns the mean loss of each window in nats per token, float32 or wider."""
    logits = model.apply(params, windows[:, :-1])
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    nats = optax.losses.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:])
    return nats.mean(-1)


def loss(model, params, windows):
    """Returns the mean of :func:`window_losses`."""
    return window_losses(model, params, windows).mean()


def one_batch(width, layers, context, batch, dtype=None):
    """Returns ``(loss_fn, params, windows)`` of a decoder of bytes, to measure its steps on."""
    tokens, vocabulary = text.help_topics()
    windows = jnp.asarray(tokens[: batch * (context + 1)], jnp.int32).reshape(batch, context + 1)
    model = Decoder(vocabulary, width, 4 * width, layers, 4, dtype)

    def loss_fn(params, windows, key):
        del key
        return loss(model, params, windows)

    return loss_fn, jax.jit(model.init)(jax.random.key(0), windows[:1, :-1]), windows


class Task:
    """The data and the model of one size; ``dtype`` is that of its computation."""

    def __init__(self, size, dtype=None):
        self.size = size
        tokens, vocabulary = getattr(text, size.corpus)()
        self.tokens, held_out = text.split(tokens, size.context)
        # Evenly spread, since neighboring windows are of one subject; in batches, to save memory.
        held_out = held_out[:: max(1, len(held_out) // size.held_out)][: size.held_out]
        self.held_out = held_out.reshape(-1, size.batch, size.context + 1)
        self.model = Decoder(vocabulary, size.width, size.mlp, size.layers, size.heads, dtype)

    def steps(self, makers, rates):
        """Yields a step of each method with its rates, as in a race but for one seed."""

        def loss_fn(params, windows, key):
            del key
            return loss(self.model, params, windows)

        windows = jnp.asarray(next(self.laps([0]))[0, 0])
        params = jax.jit(self.model.init)(jax.random.key(0), windows[:1, :-1])
        for name, make in makers.items():
            yield costs.training_step(
                name, backprop(loss_fn), make(**rates[name]), params, windows, windows[:, 1:].size
            )

    def laps(self, seeds):
        """Yields the training windows, ``[seeds, lap, batch, context + 1]`` at a time."""
        high = len(self.tokens) - self.size.context
        draws = [np.random.default_rng(seed) for seed in seeds]
        for _ in range(self.size.steps // self.size.lap):
            shape = (self.size.lap, self.size.batch, 1)
            starts = np.stack([draw.integers(high, size=shape) for draw in draws])
            yield self.tokens[starts + np.arange(self.size.context + 1)]

    def start(self, make, rates, seeds, horizon):
        """Returns the states of all seeds before the first step."""
        init, _ = _evaluations(self.model)
        keys = jnp.stack([jax.random.key(seed) for seed in seeds])
        numbers = {
            name: jnp.asarray(np.broadcast_to(np.float32(x), len(seeds)))
            for name, x in {**rates, "horizon": horizon}.items()
        }
        params = init(keys, self.held_out[0, :1, :-1])
        return _programs(self.model, make).start(params, keys, numbers)

    def race(self, makers, rates, seeds, track, *, horizons=None):
        """Trains with each method and its rates from the same seeds: ``{name: Result}``.

        ``makers[name]`` makes the optimizer of two rates, ``rates[name]`` holds them by name,
        and ``horizons[name]``, if given, the number of steps until its rates are zero. A seed
        gives the same start and the same batches to all.
        """
        _, evaluate = _evaluations(self.model)
        horizons = horizons or dict.fromkeys(makers, self.size.steps)
        laps = {name: _programs(self.model, make).lap for name, make in makers.items()}
        windows = list(self.laps(seeds))
        losses = {name: [] for name in makers}

        def start(name):
            return self.start(makers[name], rates[name], seeds, horizons[name])

        def warm_up(name):
            jax.block_until_ready(laps[name](start(name), windows[0]))

        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            list(pool.map(warm_up, makers))
        states = {name: start(name) for name in makers}

        def call(name):
            done = len(losses[name])
            states[name], metrics = laps[name](states[name], windows[done])
            losses[name].append(metrics["loss"])
            return metrics["loss"]

        labels = [f"{self.size.lap * (lap + 1)} steps" for lap in range(len(windows))]
        calls = {name: functools.partial(call, name) for name in makers}
        seconds = harness.alternate(calls, track(labels))
        return {
            name: Result(
                np.concatenate(losses[name], axis=1),
                np.asarray(evaluate(states[name].params, self.held_out)),
                np.array(seconds[name]) / self.size.lap,
            )
            for name in makers
        }

    def search(self, makers, grids, seeds, track):
        """Returns each method's mean validation loss over ``seeds`` at the points of its grid.

        ``grids[name]`` maps two rates to their values; a table is ``[first, second]``.
        """
        _, evaluate = _evaluations(self.model)
        tables = {}
        for name, label in zip(makers, track(list(makers)), strict=True):
            del label
            (first, firsts), (second, seconds) = grids[name].items()
            runs = [(y, seed) for y in seconds for seed in seeds]
            table = []
            for x in firsts:
                rates = {first: x, second: [y for y, _ in runs]}
                own_seeds = [seed for _, seed in runs]
                states = self.start(makers[name], rates, own_seeds, self.size.steps)
                for windows in self.laps(own_seeds):
                    states, _ = _programs(self.model, makers[name]).lap(states, windows)
                found = np.asarray(evaluate(states.params, self.held_out))
                table.append(found.reshape(len(seconds), len(seeds)).mean(1))
            tables[name] = np.array(table)
        return tables


def losses(ours, results, *, case, metric, size, unit, seeds):
    """Yields the rows of the validation losses, seed by seed."""
    return harness.versus(
        ours,
        {name: result.validation_loss for name, result in results.items()},
        case=case,
        size=str(size),
        metric=metric,
        unit=unit,
        better="down",
        seeds=seeds,
    )


def times(ours, results, *, case, size):
    """Yields the rows of the step times, lap by lap."""
    (runs, _), laps = results[ours[0]].train_loss.shape, size.steps // size.lap
    return harness.versus(
        ours,
        {name: 1e3 * result.step_seconds for name, result in results.items()},
        case=case,
        size=str(size),
        metric=f"time per step of {runs} seeds",
        unit="ms",
        better="down",
        seeds=range(laps),
    )


def curves(results, *, case, unit):
    """Yields the training loss of each method, in at most 30 pieces."""
    for name, result in results.items():
        yield harness.loss_curve(case, name, result.train_loss, unit)
