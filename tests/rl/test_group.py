"""One group of rewards: what is masked is not seen."""

import jax.numpy as jnp
import numpy as np

from jaxkit.rl import _group


def test_rewards_are_widened_and_zero_where_masked():
    """Half precision becomes float32, NaN under the mask is gone, and no mask is all True."""
    rewards = jnp.array([1.5, jnp.nan], jnp.bfloat16)
    wide, mask = _group.checked(rewards, jnp.array([True, False]))
    assert wide.dtype == jnp.float32
    np.testing.assert_array_equal(wide, [1.5, 0])
    np.testing.assert_array_equal(_group.checked(jnp.array([1.0, 2.0]), None)[1], [True, True])
