"""The role that a leaf plays by its path and rank, and the axes that its layout gives it."""

import collections
import functools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _tree
from jaxkit.spectral._matrix_spec import MatrixSpec

HIDDEN_ROLES = ("hidden", "attention_in", "attention_out", "mlp_gate_up", "mlp_down", "conv")
ROLES = (*HIDDEN_ROLES, "embedding", "lm_head", "router", "other")

_NORM = frozenset("norm layernorm rmsnorm batchnorm groupnorm ln".split())
_VECTOR = _NORM | {"bias", "scale"}
_POSITION = frozenset("wpe pos position positional".split())
_EXPERT = frozenset("moe expert experts".split())
_QUERY_KEY_VALUE = frozenset("q k v qkv kv wq wk wv query key value".split())
# In the order in which they are tried; what the siblings decide is in _is_named.
_NAMED = (
    ("embedding", frozenset("embed embedding wte".split())),
    ("lm_head", frozenset("head logits unembed".split())),
    ("router", frozenset(["router"])),
    ("attention_in", _QUERY_KEY_VALUE),
    ("attention_out", frozenset("out o output wo".split())),
    ("mlp_gate_up", frozenset("gate up wi w1 w3".split())),
    ("mlp_down", frozenset("down wo w2".split())),
)


def leaves_with_parts(tree, *, masked=False):
    """Returns ``[(parts of the path, leaf)]`` without the ``value`` of a flax variable or box.

    ``masked=True`` keeps the marks of masked leaves.
    """
    is_leaf = _tree.is_masked if masked else None
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)
    inside = collections.Counter(path[:i] for path, _ in flat for i in range(len(path)))
    out = []
    for path, leaf in flat:
        # A box holds one array; where an attribute `value` has neighbors it is a name like others.
        is_box = path[-1:] == (jax.tree_util.GetAttrKey("value"),) and inside[path[:-1]] == 1
        keys = path[:-1] if is_box else path
        name = jax.tree_util.keystr(keys, simple=True, separator="/")
        out.append((tuple(name.split("/")) if keys else (), leaf))
    return out


class Leaf(NamedTuple):
    """A leaf and what its place in the tree says about it."""

    parts: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    stacked: int  # leading axes known to be stacks: 0 or 1
    children: dict[tuple[str, ...], set[str]]  # of every inner node of the tree

    @property
    def path(self):
        return "/".join(self.parts) or "<root>"

    @property
    def core(self):
        return len(self.shape) - self.stacked

    @property
    def named(self):
        """Positions of the last two parts that are names, not indices."""
        return [i for i, part in enumerate(self.parts) if not part.isdigit()][-2:]

    @property
    def words(self):
        return frozenset().union(*(words_of(self.parts[i]) for i in self.named))

    @property
    def in_expert(self):
        return any(words_of(part) & _EXPERT for part in self.parts)

    def beside(self, wanted):
        """Returns the words of the siblings of the part that has a wanted word, and its own."""
        at = max(i for i in self.named if words_of(self.parts[i]) & wanted)
        return frozenset().union(*map(words_of, self.children[self.parts[:at]]))


def leaves(params):
    """Returns every leaf of ``params`` with its place; masked ones are seen as siblings only."""
    flat, children = [], collections.defaultdict(set)
    for parts, leaf in leaves_with_parts(params, masked=True):
        for i, part in enumerate(parts):
            children[parts[:i]].add(part)
        if not _tree.is_masked(leaf):
            flat.append((parts, *_aval(parts, leaf)))
    sizes, has_stacked_vector = collections.defaultdict(set), set()
    for parts, shape, _ in flat:
        last, parent = ("", *parts)[-1], ("", "", *parts)[-2]
        # Not (n, 1): so Equinox keeps the bias of one convolution.
        named = words_of(last) & _VECTOR or words_of(parent) & _NORM
        vector = len(shape) == 2 and shape[1] > 1 and named
        for i in range(len(parts)):
            sizes[parts[:i]].add(shape[:1])
            if vector:
                has_stacked_vector.add(parts[:i])
    # Below a scanned or vmapped module all leaves share the leading size, and a bias has rank 2.
    stacks = {at for at in has_stacked_vector if len(sizes[at]) == 1}
    return [
        Leaf(
            parts, shape, dtype, int(any(parts[:i] in stacks for i in range(len(parts)))), children
        )
        for parts, shape, dtype in flat
    ]


def _aval(parts, leaf):
    """Returns shape and dtype of one leaf."""
    try:
        dtype = leaf.dtype if hasattr(leaf, "dtype") else jnp.result_type(leaf)
        return tuple(jnp.shape(leaf)), dtype
    except TypeError:
        raise TypeError(
            f"params must hold arrays only, got {type(leaf).__name__} at {'/'.join(parts)!r}."
        ) from None


@functools.lru_cache(maxsize=4096)
def words_of(name):
    """Returns the lower-case words of a name; ``w1`` stays whole, ``norm1`` counts as norm too."""
    # "MultiHeadAttention" has no head of its own, and "MoE" is one word.
    name = re.sub(r"(?i)multi_?head", "Multihead", name).replace("MoE", "Moe")
    words = set()
    for word, digits in re.findall(r"([A-Z]+(?![a-z])|[A-Z]?[a-z]+)(\d*)", name):
        words.add((word + digits).lower())
        if len(word) > 1:
            words.add(word.lower())
    return frozenset(words)


def find_role(leaf, rules):
    """Returns the first role that fits by the lines of :func:`label_params`, None for the last."""
    words = leaf.words
    if leaf.core <= 1 or not jnp.issubdtype(leaf.dtype, jnp.inexact) or words & _VECTOR:
        return "other"
    for word, role in rules.items():
        if word in words:
            return role
    if words & _POSITION:
        return "other"
    for role, vocabulary in _NAMED:
        if _is_named(leaf, role, words & vocabulary) and default_spec(leaf, role):
            return role
    if leaf.parts[-1:] in (("kernel",), ("weight",)) and leaf.core == 4 and not leaf.in_expert:
        inputs = leaf.shape[-2] if leaf.parts[-1] == "kernel" else leaf.shape[-3]
        return "other" if inputs == 1 else "conv"
    if leaf.core == 2 or (leaf.in_expert and default_spec(leaf, "hidden")):
        return "hidden"
    return None


def _is_named(leaf, role, hit):
    """Says whether the words that hit mean the role, given the siblings."""
    if role == "router" and "gate" in leaf.words:
        # In a SwiGLU the gate is a matrix of the MLP, in a mixture of experts it is the router.
        around = leaf.beside({"gate"})
        in_experts = leaf.in_expert or bool(around & _EXPERT)
        return bool(hit) or (in_experts and not around & {"up", "down"})
    if role == "attention_out" and hit and not leaf.beside(hit) & _QUERY_KEY_VALUE:
        # Without queries beside it only plain names count, and rank 4 is a convolution's.
        return bool(hit & {"out", "o"}) and leaf.core < 4
    return bool(hit)


def default_spec(leaf, role):
    """Returns the spec that the libraries' layouts give a role, None where the rank fits none."""
    rank, first = len(leaf.shape), leaf.stacked
    name = leaf.parts[-1] if leaf.parts else ""
    if role == "conv":
        if leaf.core < 3:
            return None
        axes = tuple(range(first, rank))
        unit, feature = (axes[0], axes[1:]) if name == "weight" else (axes[-1], axes[:-1])
        return MatrixSpec(unit, feature, tuple(range(first)))
    if role == "attention_in" and leaf.core > 2 and name != "weight":
        # Only flax's own kernel (d, heads, head_dim) is known; others put the heads elsewhere.
        if name != "kernel" or leaf.words & {"qkv", "kv"} or leaf.core > 4:
            return None
        return MatrixSpec(rank - 1, rank - 3, (*range(rank - 3), rank - 2))
    most = 4 if leaf.in_expert or role == "attention_out" else 3
    if not 2 <= leaf.core <= most:
        return None
    unit_first = role == "embedding" or name in ("weight", "embedding")
    unit, feature = (rank - 2, rank - 1) if unit_first else (rank - 1, rank - 2)
    return MatrixSpec(unit, feature, tuple(range(rank - 2)))
