"""Roles and matrices of real models, and overrides."""

import collections
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.core import freeze
from spectral.models import IMAGES, ConvNet, MoE, NnxTransformer, Transformer, params_of

from jaxkit import spectral
from jaxkit.spectral import MatrixSpec
from jaxkit.spectral._labels import assign


def matrices(params, **options):
    """Returns ``{path: (role, unit, feature, batch)}`` of all leaves but those of role other."""
    return {
        item.path: (item.role, *item.spec[:3])
        for item in assign(params, **options)
        if item.role != "other"
    }


def attention(prefix, lead=0):
    """What four flax attention kernels are, behind ``lead`` stack axes."""
    stack = tuple(range(lead))
    names = ("query", "key", "value")
    rows = {
        f"{prefix}/{name}/kernel": ("attention_in", (lead + 2,), (lead,), (*stack, lead + 1))
        for name in names
    }
    return rows | {
        f"{prefix}/out/kernel": ("attention_out", (lead + 2,), (lead + 1,), (*stack, lead))
    }


EMBED_AND_HEAD = {
    "embed/embedding": ("embedding", (0,), (1,), ()),
    "lm_head/kernel": ("lm_head", (1,), (0,), ()),
}


@pytest.mark.parametrize("wrap", [dict, freeze, lambda params: {"params": params}])
def test_linen_transformer(wrap):
    """Embedding, head, attention per head and SwiGLU, as dict, FrozenDict and with its prefix."""
    found = matrices(wrap(params_of(Transformer())), strict=True)
    found = {path.removeprefix("params/"): row for path, row in found.items()}
    assert found == {
        **EMBED_AND_HEAD,
        **attention("block/MultiHeadDotProductAttention_0"),
        "block/mlp/gate/kernel": ("mlp_gate_up", (1,), (0,), ()),
        "block/mlp/up/kernel": ("mlp_gate_up", (1,), (0,), ()),
        "block/mlp/down/kernel": ("mlp_down", (1,), (0,), ()),
    }


def test_scanned_layers_are_a_batch_on_axis_0():
    """nn.scan adds an axis in front: the same roles, one more batch axis."""
    found = matrices(params_of(Transformer(layers=3)), strict=True)
    assert found == {
        **EMBED_AND_HEAD,
        **attention("block/MultiHeadDotProductAttention_0", lead=1),
        "block/mlp/gate/kernel": ("mlp_gate_up", (2,), (1,), (0,)),
        "block/mlp/up/kernel": ("mlp_gate_up", (2,), (1,), (0,)),
        "block/mlp/down/kernel": ("mlp_down", (2,), (1,), (0,)),
    }


@pytest.mark.parametrize("layers", [0, 2])
def test_mixture_of_experts(layers):
    """The gate beside experts is the router; experts are a batch, also below scanned layers."""
    found = matrices(params_of(Transformer(layers=layers, mlp=MoE)), strict=True)
    lead = 1 if layers else 0
    batch = tuple(range(lead))
    assert found == {
        **EMBED_AND_HEAD,
        **attention("block/MultiHeadDotProductAttention_0", lead),
        "block/mlp/gate/kernel": ("router", (lead + 1,), (lead,), batch),
        "block/mlp/experts/up/kernel": ("mlp_gate_up", (lead + 2,), (lead + 1,), (*batch, lead)),
        "block/mlp/experts/down/kernel": ("mlp_down", (lead + 2,), (lead + 1,), (*batch, lead)),
    }


def test_conv_net():
    """HWIO kernels are (out, kh * kw * in) matrices; a depthwise one is left to the other rule."""
    assert matrices(params_of(ConvNet(), IMAGES), strict=True) == {
        "stem/kernel": ("conv", (3,), (0, 1, 2), ()),
        "Conv_0/kernel": ("conv", (3,), (0, 1, 2), ()),
        "Dense_0/kernel": ("hidden", (1,), (0,), ()),
        "head/kernel": ("lm_head", (1,), (0,), ()),
    }


@pytest.mark.parametrize("view", ["state", "params", "pure dict", "module"])
def test_nnx_transformer(view):
    """nnx trees have the paths of the modules; keys and counters of random streams are other."""
    model = nnx.eval_shape(lambda: NnxTransformer(nnx.Rngs(0)))
    tree = {
        "state": lambda: nnx.state(model),
        "params": lambda: nnx.state(model, nnx.Param),
        "pure dict": lambda: nnx.to_pure_dict(nnx.state(model, nnx.Param)),
        "module": lambda: model,
    }[view]()
    assert matrices(tree, strict=True) == {
        "embed/embedding": ("embedding", (0,), (1,), ()),
        **attention("layers/0"),
        **attention("layers/1"),
        "conv/kernel": ("conv", (3,), (0, 1, 2), ()),
        "stack/kernel": ("hidden", (2,), (1,), (0,)),
        "head/kernel": ("lm_head", (1,), (0,), ()),
    }
    labels = spectral.label_params(tree)
    assert jax.tree.structure(labels) == jax.tree.structure(tree)


def test_equinox_trees():
    """Weights are (out, in), convolutions OIHW, stacks of vmapped layers lead; None stays None."""
    eqx = pytest.importorskip("equinox")
    keys = jax.random.split(jax.random.key(0), 3)
    model = {
        "mlp": eqx.nn.MLP(2, 3, 4, 1, use_bias=False, key=keys[0]),
        "embed": eqx.filter_eval_shape(eqx.nn.Embedding, 9, 4, key=keys[0]),
        "attn": eqx.filter_eval_shape(eqx.nn.MultiheadAttention, 2, 8, key=keys[0]),
        "conv": eqx.filter_eval_shape(eqx.nn.Conv2d, 4, 8, 3, key=keys[0]),
        "blocks": eqx.filter_eval_shape(
            eqx.filter_vmap(lambda key: eqx.nn.Linear(4, 5, key=key)), keys
        ),
    }
    params = eqx.filter(model, lambda x: hasattr(x, "dtype"))
    assert matrices(params, strict=True) == {
        "mlp/layers/0/weight": ("hidden", (0,), (1,), ()),
        "mlp/layers/1/weight": ("hidden", (0,), (1,), ()),
        "embed/weight": ("embedding", (0,), (1,), ()),
        **{f"attn/{x}_proj/weight": ("attention_in", (0,), (1,), ()) for x in
           ("query", "key", "value")},
        "attn/output_proj/weight": ("attention_out", (0,), (1,), ()),
        "conv/weight": ("conv", (0,), (1, 2, 3), ()),
        "blocks/weight": ("hidden", (1,), (2,), (0,)),
    }  # fmt: skip
    labels = spectral.label_params(params)
    assert labels["mlp"].layers[0].weight == "hidden" and labels["mlp"].layers[0].bias is None
    with pytest.raises(TypeError, match="arrays only, got .* at 'mlp/activation'"):
        spectral.label_params(model)


def test_any_tree_is_labeled_in_its_own_structure():
    """Named tuples, lists, None, masks, a bare array and the empty tree keep their structure."""
    pair = collections.namedtuple("pair", ["w", "b"])
    tree = {"x": [pair(jnp.ones((3, 4)), None)], "y": (optax.MaskedNode(), jnp.ones(3)), "z": {}}
    assert spectral.label_params(tree) == {
        "x": [pair("hidden", None)],
        "y": (optax.MaskedNode(), "other"),
        "z": {},
    }
    assert spectral.label_params(jnp.ones((3, 4))) == "hidden"
    assert spectral.label_params(2.0) == "other"
    assert spectral.label_params({}) == {} and assign(None) == []


def test_flax_boxes_and_flat_dicts_have_the_same_paths():
    """The attribute value of a box counts for nothing, and a key with slashes is a path."""
    array = jnp.ones((8, 2, 4))
    for tree in (
        {"query": {"kernel": nn.Partitioned(array, names=(None, "heads", None))}},
        {"query/kernel": array},
    ):
        (found,) = assign(tree)
        assert (found.path, found.role) == ("query/kernel", "attention_in")
    attention = collections.namedtuple("attention", ["key", "value"])
    tree = {"attn": attention(jnp.ones((8, 8)), jnp.ones((8, 8)))}  # here it is a name
    assert [item.path for item in assign(tree)] == ["attn/key", "attn/value"]


def test_masked_leaves_are_still_siblings():
    """What optax.masked hides is no leaf, but its name still tells a router from a SwiGLU gate."""
    hidden = optax.MaskedNode()
    tree = {"gate": {"kernel": jnp.ones((4, 8))}, "experts": {"up": hidden}}
    assert spectral.label_params(tree)["gate"]["kernel"] == "router"
    assert spectral.label_params({"gate": jnp.ones((4, 8)), "up": hidden})["gate"] == "mlp_gate_up"
    assert spectral.label_params(tree, overrides={"experts/up": "hidden"}) is not None


def test_overrides_set_role_axes_or_both():
    """A role takes its usual axes; axes keep the role; the first pattern that fits counts."""
    params = {
        "embed": {"embedding": jnp.ones((9, 4))},
        "blocks": {"qkv": {"kernel": jnp.ones((4, 8))}, "w": jnp.ones((4, 2, 6))},
    }
    tied = spectral.label_params(params, overrides={"embed/*": "lm_head"})
    assert tied["embed"]["embedding"] == "lm_head"
    split = MatrixSpec(-1, 0, split=((4, 2, 2), -1))
    stacked = MatrixSpec(2, 0, 1)
    found = matrices(params, overrides={"*qkv*": split, "blocks/w": stacked, "*/w": "other"})
    assert found["blocks/qkv/kernel"] == ("attention_in", (1,), (0,), ())
    assert found["blocks/w"] == ("hidden", (2,), (0,), (1,))
    found = assign(params, overrides={"*/w": ("mlp_down", stacked), "*qkv*": split})
    assert [(item.role, item.spec and item.spec.split) for item in found] == [
        ("attention_in", ((4, 2, 2), 1)),
        ("mlp_down", None),
        ("embedding", None),
    ]


def test_rules_add_words_before_the_built_in_ones():
    """A rule matches whole words, never a bias, and one that matches nothing is no error."""
    params = {
        "value": {"kernel": jnp.ones((4, 1)), "bias": jnp.ones(1)},
        "values": {"kernel": jnp.ones((4, 1))},
        "pos_embed": jnp.ones((4, 3)),
    }
    rules = {"value": "lm_head", "pos": "embedding", "absent": "conv"}
    assert spectral.label_params(params, rules=rules) == {
        "value": {"kernel": "lm_head", "bias": "other"},
        "values": {"kernel": "hidden"},
        "pos_embed": "embedding",
    }
    kept = spectral.label_params(params, rules=rules, overrides={"value/kernel": "other"})
    assert kept["value"]["kernel"] == "other"


def test_strict_refuses_what_no_rule_knows():
    """A leaf that only the last line takes raises with its path, unless an override takes it."""
    params = {"blocks": {"w": jnp.ones((3, 4, 5))}, "temperature": jnp.ones(())}
    assert spectral.label_params(params)["blocks"]["w"] == "other"
    with pytest.raises(ValueError, match=re.escape("'blocks/w' of shape (3, 4, 5) under strict")):
        spectral.label_params(params, strict=True)
    for override in ("other", "hidden", MatrixSpec(2, 1, 0)):
        spectral.label_params(params, strict=True, overrides={"*/w": override})


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"overrides": {"mpl/*": "hidden"}}, ValueError, "got 'mpl/*', which matches none"),
        ({"overrides": {"*": "matrix"}}, ValueError, "'hidden', 'attention_in', 'attention_out'"),
        ({"rules": {"up": "matrix"}}, ValueError, "role of rule 'up' must be one of 'hidden'"),
        ({"rules": {"up_proj": "hidden"}}, ValueError, "one lower-case word to a role, got 'up_"),
        ({"overrides": {"*": 3}}, TypeError, "overrides['*'] must be a role, a MatrixSpec or"),
        ({"overrides": {"*": ("other", MatrixSpec(0, 1))}}, ValueError, "a MatrixSpec for other"),
        ({"overrides": {"*bias": "hidden"}}, ValueError, "shape (8,) at 'mlp/up/bias'"),
        ({"overrides": {"*bias": MatrixSpec(0, 0)}}, ValueError, "shape (8,) at 'mlp/up/bias'"),
        ({"overrides": {"table": "hidden"}}, ValueError, "int32 of shape (2, 2) at 'table'"),
        ({"overrides": {"*kernel": "conv"}}, ValueError, "'mlp/up/kernel' as conv, since its"),
        ({"overrides": {"*kernel": MatrixSpec(1, 1)}}, ValueError, "for 'mlp/up/kernel' of shape"),
        ({"overrides": {"empty": "hidden"}}, ValueError, "for 'empty' of shape (0, 4) needs"),
    ],
)
def test_bad_options_name_what_is_wrong(options, error, message):
    """Unknown roles list the valid ones; what does not fit a leaf names its path and shape."""
    params = {
        "mlp": {"up": {"kernel": jnp.ones((4, 8)), "bias": jnp.ones(8)}},
        "table": jnp.zeros((2, 2), jnp.int32),
        "empty": jnp.ones((0, 4)),
    }
    if "overrides" not in options or "empty" not in options["overrides"]:
        del params["empty"]
    with pytest.raises(error, match=re.escape(message)):
        spectral.label_params(params, **options)


def test_convolution_with_a_bias_of_one_column_is_no_stack():
    """The bias (out, 1) of one 1-D convolution, as Equinox keeps it, does not make a stack."""
    params = {"weight": jnp.ones((8, 3, 5)), "bias": jnp.ones((8, 1))}
    assert spectral.label_params(params) == {"weight": "other", "bias": "other"}


def test_plain_path_with_a_bracket_is_found():
    """A path that looks like a pattern is still a path."""
    params = {"a[0]": jnp.ones((2, 2))}
    assert spectral.label_params(params, overrides={"a[0]": "other"}) == {"a[0]": "other"}
