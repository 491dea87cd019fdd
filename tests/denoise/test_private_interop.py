"""The private estimator against optax, jax_privacy and dp-accounting."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from denoise.private_problem import (
    BATCH,
    CLIP,
    KEY,
    PARAMS,
    by_hand,
    flat,
    jitted,
    loss_fn,
    moved,
)

from jaxkit import denoise


def shifted(points, weights):
    """Returns the loss whose gradient at a shift of zero is the combined gradient."""

    def loss(shift, batch, key):
        at = jax.vmap(lambda z, v: jax.tree.map(jnp.add, z, v), (0, None))(points, shift)
        losses = jax.vmap(lambda p: loss_fn(p, batch, key)[0])(at)
        return jnp.sum(weights * losses)

    return loss


def keys_of_examples():
    handed = jax.random.split(KEY)[1]
    return jax.vmap(lambda i: jax.random.fold_in(handed, i))(jnp.arange(8))


@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")
@pytest.mark.parametrize("name", ["order_3", "storm"])
def test_a_library_that_clips_gradients_of_a_loss_clips_the_combination(name):
    """jax_privacy's clipped gradient of the shifted loss is the release without its noise."""
    clipping = pytest.importorskip("jax_privacy.clipping")
    points, weights = denoise.query_points(moved(name), PARAMS)
    grad = clipping.clipped_grad(
        lambda v, batch, key: shifted(points, weights)(v, batch, key[0]),
        l2_clip_norm=CLIP,
        batch_argnums=(1, 2),
    )
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        theirs = jax.jit(grad)(zeros, BATCH, keys_of_examples())
    ours = jitted(name)(KEY, PARAMS, moved(name), BATCH).grads
    np.testing.assert_allclose(flat(theirs) / 8, flat(ours), rtol=1e-4, atol=1e-6)


def test_optax_aggregates_combined_gradients_of_examples_to_the_same():
    """differentially_private_aggregate without noise, given the gradients of single examples."""
    points, weights = denoise.query_points(moved("order_3"), PARAMS)
    one = jax.grad(shifted(points, weights))
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)

    def grads(example, key):
        return one(zeros, jax.tree.map(lambda x: x[None], example), key)

    rows = jax.jit(jax.vmap(grads))(BATCH, keys_of_examples())
    tx = optax.contrib.differentially_private_aggregate(CLIP, 0.0, jax.random.key(1))
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        theirs, _ = tx.update(rows, tx.init(PARAMS))
    ours = jitted("order_3")(KEY, PARAMS, moved("order_3"), BATCH).grads
    np.testing.assert_allclose(flat(ours), flat(theirs), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(flat(ours), by_hand("order_3")[0].mean(0), rtol=1e-4, atol=1e-5)


def epsilons(noise_multiplier, *, rate, num_steps, delta):
    """Returns epsilon of Gaussian releases on Poisson samples, by the PLD and RDP accountants."""
    accounting = pytest.importorskip("dp_accounting")
    from dp_accounting import pld, rdp

    gaussian = accounting.GaussianDpEvent(noise_multiplier)
    step = accounting.PoissonSampledDpEvent(rate, gaussian)
    event = accounting.SelfComposedDpEvent(step, num_steps)
    accountants = pld.PLDAccountant(value_discretization_interval=1e-3), rdp.RdpAccountant()
    return [accountant.compose(event).get_epsilon(delta) for accountant in accountants]


def test_one_release_a_step_costs_less_than_two():
    """3.15 (PLD) and 3.50 (RDP) against 5.21 and 5.80 for a release at each of two points."""
    common = {"rate": 128 / 1437, "num_steps": 300, "delta": 1e-4}
    np.testing.assert_allclose(epsilons(2.0, **common), [3.15, 3.50], atol=0.005)
    # Two Gaussian releases on one sample are one of a width smaller by the root of two.
    np.testing.assert_allclose(epsilons(2 / np.sqrt(2), **common), [5.21, 5.80], atol=0.005)
