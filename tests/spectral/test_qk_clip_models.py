"""QK-clip against the logits of real attention modules, before and after."""

import contract
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxkit.spectral._qk_clip import qk_clip

D, HEADS, HEAD_DIM = 8, 4, 2
clip = jax.jit(qk_clip)


class Probe:
    """Stands in for the attention function of a flax module and keeps the logits it would use."""

    def __call__(self, query, key, value, **_):
        groups = query.shape[-2] // key.shape[-2]
        whole, values = (jnp.repeat(x, groups, axis=-2) for x in (key, value))
        self.logits = jnp.einsum("...qhd,...khd->...hqk", query, whole) / query.shape[-1] ** 0.5
        out = jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(self.logits), values)
        # Which query head uses which key head is JAX's own choice.
        wanted = jax.nn.dot_product_attention(query, key, value)
        np.testing.assert_allclose(out, wanted, rtol=1e-4, atol=1e-5)
        return out


class Block(nn.Module):
    probe: Probe

    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(x)
        return x + nn.MultiHeadDotProductAttention(
            HEADS, attention_fn=self.probe, bias_init=nn.initializers.normal(), name="attention"
        )(x)


def _inputs():
    return 3 * contract.normal(2, 5, D, seed=7)


def _linen():
    """Returns params, the path of their block, and a function from params to logits."""
    probe, x = Probe(), _inputs()
    model = Block(probe)

    def logits(params):
        model.apply({"params": params}, x)
        return probe.logits

    return model.init(jax.random.key(0), x)["params"], "attention", logits


def _nnx(key_heads):
    probe = Probe()
    attention = nnx.MultiHeadAttention(
        HEADS, D, num_kv_heads=key_heads, decode=False, attention_fn=probe,
        bias_init=nnx.initializers.normal(), dropout_rate=0.5, deterministic=True,
        rngs=nnx.Rngs(0),
    )  # fmt: skip
    # The state of the random numbers is in it too, with leaves called key.
    graph, state = nnx.split({"layers": nnx.List([attention])})

    def logits(state):
        nnx.merge(graph, state)["layers"][0](_inputs())
        return probe.logits

    return state, "layers/0", logits


def _equinox():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MultiheadAttention(
        HEADS, D, use_query_bias=True, use_key_bias=True, key=jax.random.key(0)
    )

    params, static = eqx.partition(model, eqx.is_inexact_array)

    def logits(params):
        seen = []

        def process(query, key, value):
            seen.append(jnp.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5)
            return query, key, value

        x = _inputs()[0]
        eqx.combine(params, static)(x, x, x, process_heads=process)
        return seen[0]

    return params, "", logits


MODELS = {
    "linen": _linen,
    "nnx": lambda: _nnx(HEADS),
    "nnx_grouped": lambda: _nnx(2),
    "nnx_one_key_head": lambda: _nnx(1),
    "equinox": _equinox,
}


def _largest(logits):
    """Returns the largest logit of each head of ``[..., heads, q, k]``."""
    return jnp.max(logits, axis=[i for i in range(logits.ndim) if i != logits.ndim - 3])


@pytest.mark.parametrize("name", MODELS)
def test_largest_logit_becomes_the_smaller_of_itself_and_tau(name):
    """Each head's logits are multiplied by min(1, tau / S), those of the others do not change."""
    params, block, logits_of = MODELS[name]()
    logits = logits_of(params)
    largest = _largest(logits)
    ordered = np.sort(largest)
    assert ordered[0] > 0
    for over, tau in ((4, 0.7 * ordered[0]), (2, (ordered[1] + ordered[2]) / 2), (0, ordered[-1])):
        after = logits_of(clip(params, {block: largest}, tau=tau))
        gamma = np.minimum(1, tau / np.asarray(largest))[:, None, None]
        assert np.sum(gamma < 1) == over
        np.testing.assert_allclose(_largest(after), np.minimum(largest, tau), rtol=1e-5)
        np.testing.assert_allclose(after, gamma * np.asarray(logits), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(after, logits)
