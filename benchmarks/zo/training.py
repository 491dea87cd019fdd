"""What the benchmarks of zo share: runs that train with a traced learning rate, many in a vmap."""

import jax
import numpy as np
import optax

from benchmarks import costs, tuning
from jaxkit import train


def decayed(make, steps):
    """Returns the optimizer of ``make``; its rate falls linearly to zero, and is set in its state.

    Without the decay the noise of the estimates, not their quality, would rule the last loss.
    """
    return optax.chain(optax.inject_hyperparams(make)(1.0), _fall(steps))


def _fall(steps):
    return optax.scale_by_schedule(optax.linear_schedule(1.0, 0.0, steps))


def with_rate(opt_state, rate):
    """Returns the state of a :func:`decayed` optimizer at another rate."""
    return optax.tree.set(opt_state, learning_rate=rate)


def runner(estimator, make, steps):
    """Returns ``run(params, key, rate, batches) -> params, losses [steps]``."""
    tx = decayed(make, steps)
    step = train.make_step(estimator, tx)

    def run(params, key, rate, batches):
        state = train.create(params, tx, key)
        state = state._replace(opt_state=with_rate(state.opt_state, rate))
        state, metrics = train.fit(step, state, batches)
        return state.params, metrics["loss"]

    return run


def step_of(name, estimator, make, rate, steps, params, batch, tokens):
    """Returns one step of :func:`runner` at a rate that falls over the steps."""
    tx = optax.chain(make(rate), _fall(steps))
    return costs.training_step(name, estimator, tx, params, batch, tokens)


def side_by_side(run, runs, *, in_turn=False):
    """Returns ``run(*x)`` for each of many runs, ``x`` their part of the tuple of trees ``runs``.

    ``in_turn`` for directions with decompositions: a vmap over eight such runs hung on two CPU
    cores.
    """
    if in_turn:
        return jax.jit(lambda runs: jax.lax.map(lambda x: run(*x), runs))(runs)
    return jax.jit(jax.vmap(run))(*runs)


def search(race, grids, seeds, value, **about):
    """Returns the entry of ``settings.json`` for one learning rate a method.

    ``race(rates, seeds)`` gives ``{name: result}``, with one value for each pair of a rate of
    ``rates[name]`` and a seed; ``value(result)`` are those values, and the lowest counts.
    """
    (points,) = {len(grid) for grid in grids.values()}
    rates = {name: np.repeat(grid, len(seeds)) for name, grid in grids.items()}
    found = race(rates, list(seeds) * points)
    tables = {name: np.reshape(value(found[name]), (points, len(seeds))).mean(1) for name in grids}
    grids = {name: {"learning_rate": grid} for name, grid in grids.items()}
    return tuning.entry(tables, grids=grids, seeds=seeds, **about)


def rate_of(context, name):
    """Returns the tuned learning rate of ``name``."""
    return tuning.chosen(context, name)["learning_rate"]


def total_memory(compiled):
    """Returns the bytes that a program holds at once, what it gets and returns included."""
    m = compiled.memory_analysis()
    return (
        m.argument_size_in_bytes
        + m.output_size_in_bytes
        + m.temp_size_in_bytes
        - m.alias_size_in_bytes
    )
