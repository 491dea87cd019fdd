"""Roles by name, sibling and rank, and the axes of each layout."""

import jax
import jax.numpy as jnp
import pytest

from jaxkit.spectral import MatrixSpec
from jaxkit.spectral._roles import default_spec, find_role, leaves, words_of


def leaf(path, shape, *, dtype=jnp.float32, beside=()):
    """Returns the leaf of a tree that holds it and, per sibling name, a bias of rank 1."""
    tree = {
        path: jax.ShapeDtypeStruct(shape, dtype),
        **{other: jax.ShapeDtypeStruct((2,), jnp.float32) for other in beside},
    }
    return next(found for found in leaves(tree) if found.path == path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("q_proj", {"q", "proj"}),
        ("gateUpProj", {"gate", "up", "proj"}),
        ("LMHead_0", {"lm", "head"}),
        ("RMSNorm_1", {"rms", "norm"}),
        ("MultiHeadDotProductAttention_0", {"multihead", "dot", "product", "attention"}),
        ("multi_head_attention", {"multihead", "attention"}),
        ("MoEBlock", {"moe", "block"}),
        ("wi_0", {"wi"}),
        ("w1", {"w1"}),
        ("norm2", {"norm", "norm2"}),
        ("overheads", {"overheads"}),
        ("0", set()),
    ],
)
def test_names_split_at_underscores_digits_and_capitals(name, words):
    """Whole lower-case words; a multi-head has no head, and a letter keeps its digit."""
    assert words_of(name) == words


@pytest.mark.parametrize(
    ("path", "shape", "role"),
    [
        ("bias", (8,), "other"),
        ("temperature", (), "other"),
        ("query/bias", (2, 4), "other"),
        ("LayerNorm_0/scale", (3, 8), "other"),
        ("ln_1/weight", (3, 8), "other"),
        ("input_layernorm/weight", (3, 8), "other"),
        ("wpe/embedding", (16, 8), "other"),
        ("pos_embed", (16, 8), "other"),
        ("position_embeddings/embedding", (16, 8), "other"),
        ("Embed_0/embedding", (9, 8), "embedding"),
        ("wte/weight", (9, 8), "embedding"),
        ("token_embed", (9, 8), "embedding"),
        ("lm_head/kernel", (8, 9), "lm_head"),
        ("logits/kernel", (8, 9), "lm_head"),
        ("unembed", (8, 9), "lm_head"),
        ("MultiHeadAttention_0/kernel", (8, 8), "hidden"),
        ("overhead/kernel", (8, 8), "hidden"),
        ("moe/router/kernel", (8, 4), "router"),
        ("query/kernel", (8, 2, 4), "attention_in"),
        ("qkv/kernel", (8, 24), "attention_in"),
        ("attn/wk", (8, 8), "attention_in"),
        ("o_proj/kernel", (8, 8), "attention_out"),
        ("out/kernel", (2, 4, 8), "attention_out"),
        ("gate_up_proj/kernel", (8, 24), "mlp_gate_up"),
        ("wi_0/kernel", (8, 12), "mlp_gate_up"),
        ("mlp/w3", (8, 12), "mlp_gate_up"),
        ("mlp/wo/kernel", (12, 8), "mlp_down"),
        ("mlp/w2", (12, 8), "mlp_down"),
        ("updown/kernel", (12, 8), "hidden"),
        ("conv/kernel", (3, 3, 4, 8), "conv"),
        ("up/kernel", (3, 3, 4, 8), "conv"),
        ("out/kernel", (3, 3, 4, 8), "conv"),
        ("patch_embed/kernel", (4, 4, 3, 8), "conv"),
        ("conv/weight", (8, 4, 3, 3), "conv"),
        ("depthwise/kernel", (3, 3, 1, 8), "other"),
        ("depthwise/weight", (8, 1, 3, 3), "other"),
        ("Dense_0/kernel", (4, 8), "hidden"),
        ("layers/0/weight", (8, 4), "hidden"),
        ("head/0/kernel", (8, 9), "lm_head"),
        ("embed/block/Dense_0/kernel", (4, 8), "hidden"),
        ("experts/Dense_0/kernel", (5, 4, 8), "hidden"),
        ("experts/up/kernel", (5, 4, 8), "mlp_gate_up"),
        ("layers/experts/up/kernel", (3, 5, 4, 8), "mlp_gate_up"),
        ("Conv_0/kernel", (3, 4, 8), None),
        ("w", (3, 4, 8), None),
        ("qkv/kernel", (8, 3, 8), None),
        ("attn/wq", (8, 2, 4), None),
    ],
)
def test_role_of_a_lone_leaf(path, shape, role):
    """The first line of the list that fits decides, None is the line that knows nothing."""
    assert find_role(leaf(path, shape), {}) == role


@pytest.mark.parametrize(
    ("path", "beside", "role"),
    [
        ("mlp/gate/kernel", ["mlp/up/kernel", "mlp/down/kernel"], "mlp_gate_up"),
        ("mlp/gate/kernel", [], "mlp_gate_up"),
        ("mlp/gate/kernel", ["mlp/experts/up/kernel"], "router"),
        ("moe/gate/kernel", [], "router"),
        ("moe/gate", ["moe/w1"], "router"),
        ("moe/gate/kernel", ["moe/up/kernel"], "mlp_gate_up"),
        ("experts/gate/kernel", ["experts/up/kernel"], "mlp_gate_up"),
        ("experts/0/gate/kernel", ["experts/0/down/kernel"], "mlp_gate_up"),
        ("attn/wo/kernel", ["attn/wq/kernel"], "attention_out"),
        ("attn/output_proj/weight", ["attn/query_proj/weight"], "attention_out"),
        ("output/kernel", ["input/kernel"], "hidden"),
    ],
)
def test_siblings_tell_two_readings_apart(path, beside, role):
    """SwiGLU gate or router, output of an attention or of an MLP: the neighbors decide."""
    assert find_role(leaf(path, (8, 8), beside=beside), {}) == role


def test_integer_and_key_leaves_are_other():
    """Tables of indices and random keys are no matrices."""
    assert find_role(leaf("w", (4, 4), dtype=jnp.int32), {}) == "other"
    assert find_role(leaf("w", (4, 4), dtype=jax.random.key(0).dtype), {}) == "other"


@pytest.mark.parametrize(
    ("path", "shape", "role", "spec"),
    [
        ("a/kernel", (4, 8), "hidden", MatrixSpec(1, 0)),
        ("a/weight", (8, 4), "hidden", MatrixSpec(0, 1)),
        ("w", (4, 8), "hidden", MatrixSpec(1, 0)),
        ("a/kernel", (3, 4, 8), "hidden", MatrixSpec(2, 1, (0,))),
        ("a/weight", (3, 8, 4), "hidden", MatrixSpec(1, 2, (0,))),
        ("a/kernel", (3, 3, 4, 8), "hidden", None),
        ("experts/kernel", (2, 3, 4, 8), "hidden", MatrixSpec(3, 2, (0, 1))),
        ("a/embedding", (9, 4), "embedding", MatrixSpec(0, 1)),
        ("a/embedding", (9, 4), "lm_head", MatrixSpec(0, 1)),
        ("embed/kernel", (9, 4), "embedding", MatrixSpec(0, 1)),
        ("a/kernel", (4, 9), "lm_head", MatrixSpec(1, 0)),
        ("a/weight", (9, 4), "lm_head", MatrixSpec(0, 1)),
        ("q/kernel", (4, 8), "attention_in", MatrixSpec(1, 0)),
        ("q/kernel", (4, 2, 8), "attention_in", MatrixSpec(2, 0, (1,))),
        ("q/kernel", (3, 4, 2, 8), "attention_in", MatrixSpec(3, 1, (0, 2))),
        ("q/kernel", (2, 3, 4, 2, 8), "attention_in", None),
        ("q/weight", (3, 8, 4), "attention_in", MatrixSpec(1, 2, (0,))),
        ("out/kernel", (2, 8, 4), "attention_out", MatrixSpec(2, 1, (0,))),
        ("out/kernel", (3, 2, 8, 4), "attention_out", MatrixSpec(3, 2, (0, 1))),
        ("c/kernel", (3, 2, 4, 8), "conv", MatrixSpec(3, (0, 1, 2))),
        ("c/weight", (8, 4, 3, 2), "conv", MatrixSpec(0, (1, 2, 3))),
        ("c/kernel", (3, 4, 8), "conv", MatrixSpec(2, (0, 1))),
        ("c/kernel", (4, 8), "conv", None),
    ],
)
def test_axes_of_a_layout(path, shape, role, spec):
    """Kernels have their units last, weights and embeddings first; one axis more is a stack."""
    found = default_spec(leaf(path, shape), role)
    assert found is spec is None or found._replace(batch=tuple(found.batch)) == spec


@pytest.mark.parametrize(
    ("path", "shape", "role", "spec"),
    [
        ("layers/Dense_0/kernel", (3, 4, 8), "hidden", MatrixSpec(2, 1, (0,))),
        ("layers/q_proj/kernel", (3, 4, 8), "attention_in", MatrixSpec(2, 1, (0,))),
        ("layers/query/kernel", (3, 4, 2, 8), "attention_in", MatrixSpec(3, 1, (0, 2))),
        ("layers/attn/wq", (3, 4, 8), "attention_in", MatrixSpec(2, 1, (0,))),
        ("layers/Conv_0/kernel", (3, 5, 5, 4, 8), "conv", MatrixSpec(4, (1, 2, 3), (0,))),
        ("layers/Conv_0/kernel", (3, 5, 5, 1, 8), "other", None),
        ("layers/Conv_0/weight", (3, 8, 4, 5, 5), "conv", MatrixSpec(1, (2, 3, 4), (0,))),
        ("layers/gamma", (3, 8), "other", None),
        ("layers/to_heads/kernel", (3, 4, 2, 8), None, None),
    ],
)
@pytest.mark.parametrize("mark", ["ln/scale", "norm/weight", "Dense_1/bias"])
def test_a_stacked_bias_or_norm_tells_that_the_whole_module_is_stacked(
    path, shape, role, spec, mark
):
    """Where all leaves of a module share the leading size and a vector has rank 2: axis 0."""
    tree = {
        path: jax.ShapeDtypeStruct(shape, jnp.float32),
        f"layers/{mark}": jax.ShapeDtypeStruct((3, 8), jnp.float32),
        "head/kernel": jax.ShapeDtypeStruct((8, 9), jnp.float32),
    }
    found = next(other for other in leaves(tree) if other.path == path)
    assert find_role(found, {}) == role
    assert spec is None or default_spec(found, role) == spec


def test_modules_with_unequal_leading_sizes_are_no_stack():
    """The bias (heads, head_dim) beside a kernel (d, heads, head_dim) is no stacked vector."""
    tree = {
        "query": {"kernel": jnp.ones((8, 2, 4)), "bias": jnp.ones((2, 4))},
        "Conv_0": {"kernel": jnp.ones((3, 4, 8)), "bias": jnp.ones((8,))},
    }
    assert [found.stacked for found in leaves(tree)] == [0, 0, 0, 0]
