"""How the benchmarks of zo train, tune and choose their data."""

import functools
import pydoc_data.topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks import text
from benchmarks.zo import bench_bandit, bench_finetune, training
from jaxkit import train


def loss_fn(params, batch, key):
    del key
    return jnp.sum(params * batch)


def sgd(learning_rate):
    return optax.sgd(learning_rate)


@pytest.mark.parametrize("in_turn", [False, True])
def test_rate_is_set_per_run_and_falls_linearly_to_zero(in_turn):
    """Nine steps of gradient one move by the rate times 1 + 8/9 + ... + 1/9 = 5."""
    run = training.runner(train.backprop(loss_fn), sgd, 9)
    keys = jax.random.split(jax.random.key(0), 2)
    runs = jnp.zeros((2, 1)), keys, jnp.array([0.1, 0.2]), jnp.ones((2, 9, 1))
    params, losses = training.side_by_side(run, runs, in_turn=in_turn)
    np.testing.assert_allclose(params[:, 0], [-0.5, -1.0], rtol=1e-6)
    assert losses.shape == (2, 9)


def test_search_pairs_each_rate_with_each_seed():
    """Values rate x seed fill the table with rate x mean seed, and the lowest is chosen."""
    found = training.search(
        lambda rates, seeds: {name: {"x": x * np.array(seeds)} for name, x in rates.items()},
        {"a": (3.0, 1.0, 2.0), "b": (5.0, 6.0, 7.0)},
        (10, 20),
        lambda result: result["x"],
        criterion="c",
        size="s",
    )["methods"]
    assert found["a"]["chosen"] == {"learning_rate": 1.0}
    assert found["a"]["values"] == [45.0, 15.0, 30.0]
    assert found["b"]["values"] == [75.0, 90.0, 105.0]


def test_pretraining_has_not_seen_the_help_texts():
    """The first megabyte of the sources ends before the file of the help texts."""
    sources = text.library_sources()[0][: bench_finetune.SOURCES].astype(np.uint8).tobytes()
    topic = max(pydoc_data.topics.topics.values(), key=len)
    lines = [line.strip() for line in topic.splitlines() if len(line.strip()) > 60]
    assert len(lines) > 100
    assert not any(line.encode() in sources for line in lines)


def test_fresh_rollouts_give_the_policy_gradient():
    """With two arms, one always rewarded, the mean slope is minus that of the log odds.

    A group of N with k rewards has advantages sqrt((N - k) / k) and -sqrt(k / (N - k)), so the
    derivative of the loss by the first logit is -E sqrt(k (N - k)) / N, with k binomial.
    """
    size = bench_bandit.SIZES["smoke"]._replace(contexts=1, arms=2, rollouts=4)
    problem = {"means": jnp.array([[1.0, 0.0]]), "logits": jnp.zeros((1, 2))}
    keys = jax.random.split(jax.random.key(0), 4000)
    slope = jax.grad(functools.partial(bench_bandit._grpo, size, jnp.float32))
    grads = jax.vmap(lambda key: slope(problem["logits"], problem, key))(keys)[:, 0, 0]
    chance = np.array([1, 4, 6, 4, 1]) / 16
    want = -np.sum(chance * np.sqrt(np.arange(5) * np.arange(4, -1, -1))) / 4
    error = float(jnp.std(grads)) / len(keys) ** 0.5
    assert abs(float(jnp.mean(grads)) - want) < 4 * error + 1e-5
