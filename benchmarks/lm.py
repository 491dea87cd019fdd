"""A small language model, and the race of several optimizers on it.

The model is a decoder as large ones are built: pre-norm blocks of attention and SwiGLU, learned
positions, embedding and head untied. A run is one seed with one method; runs of a method share a
compiled program, and two at a time use what a small model leaves idle of two cores.
"""

import concurrent.futures
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
    mlp: int
    layers: int
    heads: int
    context: int
    batch: int
    steps: int
    lap: int  # steps of one compiled scan; divides steps
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


class Block(nn.Module):
    heads: int
    mlp: int

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
        y = nn.silu(dense(self.mlp, name="gate")(y)) * dense(self.mlp, name="up")(y)
        return x + dense(width, name="down")(y)


class Decoder(nn.Module):
    vocabulary: int
    width: int
    mlp: int
    layers: int
    heads: int

    @nn.compact
    def __call__(self, tokens):
        scale = nn.initializers.normal(0.1)
        x = nn.Embed(self.vocabulary, self.width, embedding_init=scale, name="embed")(tokens)
        x = x + self.param("position", scale, (tokens.shape[-1], self.width))
        for layer in range(self.layers):
            x = Block(self.heads, self.mlp, name=f"block_{layer}")(x)
        head = nn.Dense(self.vocabulary, False, kernel_init=nn.initializers.zeros, name="head")
        return head(nn.RMSNorm(name="final_norm")(x))


# A program knows neither the text nor the number of steps, so that races on several share it.


@functools.cache
def _evaluations(model):
    """Returns the jitted functions ``init(key, tokens)`` and ``evaluate(params, batches)``."""

    def evaluate(params, batches):
        return jnp.mean(jax.lax.map(functools.partial(_loss, model, params), batches))

    return jax.jit(model.init), jax.jit(evaluate)


@functools.cache
def _training(model, make):
    """Returns the optimizer and the step of one method.

    Its two rates and the number of steps live in the optimizer's state, so that runs with
    different ones share a program. All decay alike: constant, then linear to zero over the last
    40 percent.
    """

    def decay(horizon):
        return optax.scale_by_schedule(lambda step: jnp.minimum(1.0, 2.5 * (1 - step / horizon)))

    tx = optax.chain(optax.inject_hyperparams(make)(1.0, 1.0), optax.inject_hyperparams(decay)(1.0))

    def loss_fn(params, windows, key):
        del key
        return _loss(model, params, windows)

    return tx, train.make_step(train.backprop(loss_fn), tx)


def _loss(model, params, windows):
    logits = model.apply(params, windows[:, :-1])
    return jnp.mean(optax.losses.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]))


class Task:
    """The data and the model of one size."""

    def __init__(self, size):
        self.size = size
        tokens, vocabulary = getattr(text, size.corpus)()
        self.tokens, held_out = text.split(tokens, size.context)
        # Evenly spread, since neighboring windows are of one subject; in batches, to save memory.
        held_out = held_out[:: max(1, len(held_out) // size.held_out)][: size.held_out]
        self.held_out = held_out.reshape(-1, size.batch, size.context + 1)
        self.model = Decoder(vocabulary, size.width, size.mlp, size.layers, size.heads)

    def windows(self, seed):
        """Returns the training windows of one seed, ``[steps, batch, context + 1]``."""
        high = len(self.tokens) - self.size.context
        shape = (self.size.steps, self.size.batch, 1)
        starts = np.random.default_rng(seed).integers(high, size=shape)
        return self.tokens[starts + np.arange(self.size.context + 1)]

    def start(self, make, rates, seed, steps):
        """Returns the state before the first of ``steps`` steps."""
        init, _ = _evaluations(self.model)
        tx, _ = _training(self.model, make)
        key = jax.random.key(seed)
        state = train.create(init(key, self.held_out[0, :1, :-1]), tx, key)
        numbers = {name: jnp.float32(x) for name, x in {**rates, "horizon": steps}.items()}
        return state._replace(opt_state=optax.tree.set(state.opt_state, **numbers))

    def run(self, make, rates, seed, steps):
        """Trains once; returns the loss of each step and the validation loss at the end."""
        _, evaluate = _evaluations(self.model)
        _, step = _training(self.model, make)
        state, losses = self.start(make, rates, seed, steps), []
        for windows in np.split(self.windows(seed)[:steps], steps // self.size.lap):
            state, metrics = train.fit(step, state, windows)
            losses.append(metrics["loss"])
        return np.concatenate(losses), float(evaluate(state.params, self.held_out))

    def race(self, makers, rates, seeds, track, *, steps=None):
        """Trains with each method and its rates from the same seeds: ``{name: Result}``.

        ``makers[name]`` makes the optimizer of two rates, ``rates[name]`` holds them by name,
        and ``steps[name]``, if given, the number of steps. A seed gives the same start and the
        same batches to all.
        """
        steps = steps or dict.fromkeys(makers, self.size.steps)
        runs = [(makers[name], rates[name], seed, steps[name]) for seed in seeds for name in makers]
        results = self._run_all(runs, track([f"seed {run[2]}" for run in runs]))
        found = {}
        for index, name in enumerate(makers):
            losses, validation = zip(*results[index :: len(makers)], strict=True)
            found[name] = Result(np.stack(losses), np.array(validation))
        return found

    def search(self, makers, grids, seeds, track):
        """Returns each method's mean validation loss over ``seeds`` at the points of its grid.

        ``grids[name]`` maps two rates to their values; a table is ``[first, second]``.
        """
        tables = {}
        for name, label in zip(makers, track(list(makers)), strict=True):
            del label
            (first, firsts), (second, seconds) = grids[name].items()
            runs = [
                (makers[name], {first: x, second: y}, seed, self.size.steps)
                for x in firsts
                for y in seconds
                for seed in seeds
            ]
            losses = [loss for _, loss in self._run_all(runs, runs)]
            tables[name] = np.reshape(losses, (len(firsts), len(seconds), -1)).mean(-1)
        return tables

    def step_seconds(self, makers, rates, rounds):
        """Returns the seconds of a step in each of ``rounds``, one run at a time."""
        windows, calls = self.windows(0)[: self.size.lap], {}
        for name, make in makers.items():
            states = [self.start(make, rates[name], 0, self.size.steps)]
            _, step = _training(self.model, make)

            def call(step=step, states=states):
                state, metrics = train.fit(step, states.pop(), windows)
                states.append(state)
                return metrics["loss"]

            calls[name] = call
        with concurrent.futures.ThreadPoolExecutor(2) as pool:  # compiles
            list(pool.map(lambda call: jax.block_until_ready(call()), calls.values()))
        seconds = harness.alternate(calls, rounds)
        return {name: np.array(seconds[name]) / self.size.lap for name in makers}

    def _run_all(self, runs, labels):
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            pairs = zip(labels, pool.map(lambda run: self.run(*run), runs), strict=True)
            return [result for _, result in pairs]


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


def times(ours, seconds, *, case, size):
    """Yields the rows of the step times, round by round."""
    return harness.versus(
        ours,
        {name: 1e3 * x for name, x in seconds.items()},
        case=case,
        size=str(size),
        metric="time per step",
        unit="ms",
        better="down",
        seeds=range(len(seconds[ours[0]])),
    )


def curves(results, *, case, unit):
    """Yields the training loss of each method, in at most 30 pieces."""
    for name, result in results.items():
        pieces = np.array_split(result.train_loss, min(30, result.train_loss.shape[1]), axis=1)
        ends = np.cumsum([piece.shape[1] for piece in pieces])
        means = np.stack([piece.mean(1) for piece in pieces], axis=1)
        yield harness.Curve(case, name, "step", f"training loss, {unit}", ends, means)
