"""A bandit by forward passes: stored rollouts (BOLT) against fresh ones in each call (GRPO)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import harness
from benchmarks.zo import training
from jaxkit import rl, train, zo


class Size(NamedTuple):
    """``rollouts`` per context; ``repeats`` of each slope whose variance is measured."""

    contexts: int
    arms: int
    rollouts: int
    steps: int
    repeats: int

    def __str__(self):
        return (
            f"{self.contexts} contexts, {self.arms} arms, {self.rollouts} rollouts, "
            f"{self.steps} steps"
        )


SIZES = {
    "smoke": Size(2, 3, 4, 5, 8),
    "short": Size(8, 8, 16, 200, 500),
    "full": Size(32, 16, 16, 3000, 20000),
}
SEEDS = {"smoke": (1, 2), "short": range(1, 6), "full": range(1, 11)}
TUNE_SEEDS = (1001, 1002)  # never reported
PROBES = 8
MU = 1e-2  # of training
MUS = (1e-3, 1e-2, 1e-1)
SLOPE_MUS = 2  # the smallest ones, over which the exponent is fitted
BETA = 0.1
STORED, FRESH, SHARED = "BOLT, stored rollouts", "GRPO, fresh rollouts", "GRPO, same rollouts"
FLOOR, START = "sigma² / 2 mu²", "before training"
GRIDS = {**dict.fromkeys((STORED, SHARED), (0.1, 0.3, 1.0, 3.0)), FRESH: (1.0, 3.0, 10.0, 30.0)}


def run(context):
    size, seeds = SIZES[context.form], SEEDS[context.form]
    rates = {name: np.repeat(training.rate_of(context, name), len(seeds)) for name in GRIDS}
    found = _race(size, rates, seeds, context.track, context.dtype)
    about = {"case": f"bandit, mu {MU}", "size": str(size), "seeds": seeds}
    rewards = {name: result["reward"] for name, result in found.items()}
    rewards[START] = found[STORED]["start"]
    yield from harness.versus(
        (STORED, SHARED), rewards, **about, metric="expected reward", unit="1", better="up"
    )
    yield from _slopes(size, seeds, context.dtype)


def tune(context):
    size = SIZES[context.form]
    return training.search(
        lambda rates, seeds: _race(size, rates, seeds, context.track),
        GRIDS,
        TUNE_SEEDS,
        lambda result: -result["reward"],
        criterion="lowest mean of minus the expected reward after the last step",
        size=str(size),
    )


def steps(context):
    size = SIZES[context.form]
    problem = _problem(size, jax.random.key(0))
    tokens = size.contexts * size.rollouts
    for name in (STORED, FRESH, SHARED):
        estimator, rate = _estimator(size, name, context.dtype), training.rate_of(context, name)
        yield training.step_of(
            name, estimator, optax.adam, rate, size.steps, problem["logits"], problem, tokens
        )


def _slopes(size, seeds, dtype):
    """Measures the variance of a slope, over directions and rollouts, where training starts."""
    mus = jnp.array(MUS)

    def whole(key):
        problem = _problem(size, key)
        keys = jax.random.split(jax.random.fold_in(key, 1), size.repeats)

        def variance(name, mu):
            probe = _measure(zo.probe, size, name, mu, 1, dtype)
            slopes = jax.vmap(lambda k: probe(k, problem["logits"], problem).coeffs[0])(keys)
            return jnp.var(slopes)

        losses = jax.vmap(lambda k: _grpo(size, dtype, problem["logits"], problem, k))(keys)
        variances = {name: jax.lax.map(functools.partial(variance, name), mus) for name in GRIDS}
        return variances | {FLOOR: jnp.var(losses) / (2 * mus**2)}

    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    variances = jax.tree.map(np.asarray, jax.jit(functools.partial(jax.lax.map, whole))(keys))
    about = {"size": str(size), "seeds": seeds}
    for index, mu in enumerate(MUS):
        values = {name: variance[:, index] for name, variance in variances.items()}
        for ours, names in (
            ((STORED, SHARED), (STORED, SHARED, FRESH)),
            ((FRESH,), (FRESH, FLOOR)),
        ):
            yield from harness.versus(
                ours,
                {name: values[name] for name in names},
                **about,
                case="slope of the bandit",
                metric=f"variance, mu {mu}",
                unit="1",
                better="down",
            )
    logs = np.log(MUS[:SLOPE_MUS])
    exponents = {
        name: np.polyfit(logs, np.log(variances[name][:, :SLOPE_MUS].T), 1)[0] for name in GRIDS
    }
    yield from harness.versus(
        (STORED, SHARED),
        exponents,
        **about,
        case="slope of the bandit",
        metric="exponent of the variance in mu",
        unit="1",
        better="up",
    )
    for name, variance in variances.items():
        yield harness.Curve(
            "slope of the bandit",
            name,
            "mu",
            "variance",
            np.array(MUS),
            variance,
            "log",
        )


def _race(size, rates, seeds, track, dtype=jnp.float32):
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])

    def call(name):
        run = training.runner(_estimator(size, name, dtype), optax.adam, size.steps)

        def whole(key, rate):
            problem = _problem(size, key)
            batches = jax.tree.map(lambda x: jnp.broadcast_to(x, (size.steps, *x.shape)), problem)
            logits, _ = run(problem["logits"], key, rate, batches)
            start = _expected_reward(problem["logits"], problem)
            return {"reward": _expected_reward(logits, problem), "start": start}

        return training.side_by_side(whole, (keys, jnp.asarray(rates[name], jnp.float32)))

    return harness.in_pairs({name: functools.partial(call, name) for name in rates}, track)


def _problem(size, key):
    """Returns mean rewards, the reference policy, and its stored rollouts with their weights."""
    keys = jax.random.split(key, 4)
    shape = size.contexts, size.arms
    problem = {
        "means": jax.random.uniform(keys[0], shape),
        "logits": jax.random.normal(keys[1], shape),
    }
    actions = _draw(keys[2], problem["logits"], size)
    rewards = _rewards(keys[3], problem, actions)
    weights = jax.vmap(lambda r: rl.boltzmann_weights(r, BETA))(rewards)
    return problem | {"actions": actions, "weights": weights}


def _draw(key, logits, size):
    """Draws ``[contexts, rollouts]`` arms."""
    return jax.random.categorical(key, logits[:, None], shape=(size.contexts, size.rollouts))


def _rewards(key, problem, actions):
    """Returns rewards that are 0 or 1."""
    means = jnp.take_along_axis(problem["means"], actions, 1)
    return jax.random.bernoulli(key, means).astype(jnp.float32)


def _likelihood(logits, actions, weights, dtype):
    """Returns minus the weighted likelihood, of log-probabilities that are computed in a dtype."""
    log_probs = jax.nn.log_softmax(logits.astype(dtype)).astype(jnp.float32)
    return -jnp.mean(weights * jnp.take_along_axis(log_probs, actions, 1))


def _bolt(dtype, logits, problem):
    return _likelihood(logits, problem["actions"], problem["weights"], dtype)


def _grpo(size, dtype, logits, problem, key):
    """The rollouts come from the current policy, ``problem["current"]`` where it moved on.

    If the perturbed policy drew them, the slope would have a part that GRPO does not mean.
    """
    action_key, reward_key = jax.random.split(key)
    actions = _draw(action_key, problem.get("current", problem["logits"]), size)
    rewards = _rewards(reward_key, problem, actions)
    return _likelihood(logits, actions, jax.vmap(rl.group_advantages)(rewards), dtype)


def _expected_reward(logits, problem):
    return jnp.mean(jnp.sum(jax.nn.softmax(logits) * problem["means"], -1))


def _measure(measure, size, name, mu, num_samples, dtype):
    """Returns ``(key, logits, problem) -> ...`` by ``zo.probe`` or ``zo.value_and_zo_grad``."""
    options = {"num_samples": num_samples, "mu": mu}
    if name == STORED:
        return measure(functools.partial(_bolt, dtype), **options)
    run = measure(functools.partial(_grpo, size, dtype), matched=name == SHARED, **options)

    def measured(key, logits, problem):
        own, oracle = jax.random.split(key)
        problem = problem | {"current": logits}
        if name == SHARED:
            return run(own, logits, problem, oracle)
        return run(own, logits, problem, oracle_key=oracle)

    return measured


def _estimator(size, name, dtype):
    run = _measure(zo.value_and_zo_grad, size, name, MU, PROBES, dtype)

    def estimator(key, params, opt_state, problem):
        del opt_state
        value, grads = run(key, params, problem)
        return train.Estimate(value, grads, None, {})

    return estimator
