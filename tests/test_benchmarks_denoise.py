"""What the denoise benchmarks compare: the same data and the same release for every method."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_close

from benchmarks.denoise import bench_private, training
from jaxkit import train

SIZE = bench_private.Size(2, 128, (2.0,))


@pytest.fixture(autouse=True)
def as_by_default():
    """The benchmarks run with JAX's own promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def test_rows_for_training_validation_and_test_are_disjoint():
    """All 1,797 digits are used, each once."""
    parts = training.digits_rows()
    assert [len(y) for _, y in parts] == [1437, 180, 180]
    images = np.concatenate([x for x, _ in parts])
    # No two digits are alike, but for one pair in the data set itself.
    assert len(np.unique(images, axis=0)) >= len(images) - 1


def test_epsilon_is_that_of_the_accountants():
    """At rate 128 of 1,437, 300 steps and a multiplier of 2 it is 3.15; more noise, less."""
    size = bench_private.SIZES["full"]
    (spent, delta), (less, _) = (bench_private.epsilon(size, noise) for noise in (2.0, 8.0))
    assert spent == pytest.approx(3.15, abs=0.01) and delta == 1e-4
    assert less < spent


@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")  # jax_privacy's
def test_all_private_methods_clip_alike():
    """Without noise a Poisson batch gives DP-SGD of optax, jax_privacy and ours one direction."""
    task = bench_private.task(SIZE)
    batch = task.draw(jax.random.key(1))
    assert 0 < batch.mask.sum() < len(batch.mask)
    params = task.start(jax.random.key(0))
    settings = {"noise": jnp.float32(0), "gain": jnp.float32(1), "seed": jnp.float32(0)}
    sums = []
    for method, divisor in (
        (bench_private.ours(SIZE, bench_private.ADAM, bench_private.RAW), SIZE.batch),
        (bench_private.with_jax_privacy(SIZE), SIZE.batch),
        (bench_private.with_dpsgd(SIZE), len(batch.mask)),
    ):
        estimator = method.estimator(task.loss_fn, settings)
        grads = jax.jit(estimator)(jax.random.key(2), params, (), batch).grads
        if jax.tree.leaves(grads)[0].ndim > jax.tree.leaves(params)[0].ndim:
            aggregate = optax.contrib.differentially_private_aggregate(
                bench_private.CLIP, 0.0, jax.random.key(0)
            )
            grads, _ = aggregate.update(grads, aggregate.init(params))
        sums.append(jax.tree.map(lambda g, n=divisor: g * n, grads))
    assert_close(sums[1], sums[0], 1e-5)
    assert_close(sums[2], sums[0], 1e-5)


def test_runs_differ_by_their_settings_and_seeds_only():
    """Runs in a vmap are those alone; an average of weight 1 is the last iterate."""
    task = training.images(training.digits_rows(), (4, 10), training.uniform(4))
    method = training.Method(
        lambda loss_fn, settings: train.backprop(loss_fn),
        lambda rate, settings: optax.sgd(rate),
    )
    run = training.run(task, method, 3)
    settings = [{"learning_rate": 0.1}, {"learning_rate": 0.1, "average": 0.5}]
    together = run(*training.arrays([1, 1], settings))
    alone = run(*training.arrays([1], settings[:1]))
    np.testing.assert_allclose(together["train"][0], alone["train"][0], rtol=1e-5)
    np.testing.assert_array_equal(together["train"][0], together["train"][1])
    assert together["loss"][0] != together["loss"][1]
    decayed = run(*training.arrays([1, 2], [{"learning_rate": 0.1, "decay": 1.0}, settings[0]]))
    assert decayed["train"][0, 0] == alone["train"][0, 0] != decayed["train"][1, 0]
    assert decayed["loss"][0] != alone["loss"][0]
