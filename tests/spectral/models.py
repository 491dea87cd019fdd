"""Small models of flax as people write them: linen and nnx transformers, experts, a conv net."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

IDS = jax.ShapeDtypeStruct((1, 4), jnp.int32)
IMAGES = jax.ShapeDtypeStruct((1, 6, 6, 3), jnp.float32)


class SwiGLU(nn.Module):
    @nn.compact
    def __call__(self, x):
        gate = nn.Dense(12, use_bias=False, name="gate")(x)
        up = nn.Dense(12, use_bias=False, name="up")(x)
        return nn.Dense(8, use_bias=False, name="down")(nn.silu(gate) * up)


class Expert(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, name="down")(nn.relu(nn.Dense(12, name="up")(x)))


class MoE(nn.Module):
    @nn.compact
    def __call__(self, x):
        weights = nn.softmax(nn.Dense(3, use_bias=False, name="gate")(x))
        experts = nn.vmap(
            Expert, variable_axes={"params": 0}, split_rngs={"params": True}, in_axes=None,
            out_axes=-1, axis_size=3,
        )(name="experts")  # fmt: skip
        return jnp.einsum("...de,...e->...d", experts(x), weights)


class Block(nn.Module):
    mlp: type[nn.Module] = SwiGLU

    @nn.compact
    def __call__(self, x, _=None):
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        return x + self.mlp(name="mlp")(nn.RMSNorm()(x)), None


class Transformer(nn.Module):
    layers: int = 0  # 0: one block that is not scanned
    mlp: type[nn.Module] = SwiGLU
    axis: int = 0  # on which scanned layers are stacked

    @nn.compact
    def __call__(self, ids):
        block = Block
        if self.layers:
            block = nn.scan(
                Block, variable_axes={"params": self.axis}, split_rngs={"params": True},
                length=self.layers,
            )  # fmt: skip
        x = nn.Embed(12, 8, name="embed")(ids)
        x = x + self.param("pos_embed", nn.initializers.normal(), (4, 8))[None]
        x, _ = block(self.mlp, name="block")(x, None)
        return nn.Dense(12, name="lm_head")(nn.LayerNorm()(x))


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Conv(8, (3, 3), name="stem")(x)
        x = nn.Conv(8, (3, 3), feature_group_count=8, name="depthwise")(x)
        x = nn.BatchNorm(use_running_average=True)(nn.Conv(6, (1, 1))(x))
        return nn.Dense(5, name="head")(nn.Dense(7)(x.mean((1, 2))))


class NnxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(11, 8, rngs=rngs)
        self.layers = nnx.List(
            [nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs) for _ in range(2)]
        )
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.conv = nnx.Conv(4, 8, (3, 3), rngs=rngs)
        self.stack = nnx.vmap(lambda rngs: nnx.Linear(8, 6, rngs=rngs))(rngs.split(3))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(8, 11, rngs=rngs)


def quick_jit(fun):
    """Compiles what runs a few times only, so that passes which take long do not pay."""
    return jax.jit(fun, compiler_options={"xla_backend_optimization_level": 0})


def params_of(model, x=IDS):
    """Returns the shapes of a linen model's params."""
    return jax.eval_shape(model.init, jax.random.key(0), x)["params"]


def normal_like(tree, seed=0):
    """Returns a tree of fixed normal numbers, float32."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), tree)


def by_path(tree):
    """Returns the dict from the path of each leaf, such as ``mlp/up/kernel``, to the leaf."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def small_model(seed=0):
    """Returns an embedding, a dense layer and a head with normal entries."""
    shapes = {
        "embed": {"embedding": (11, 4)},
        "up": {"kernel": (4, 8), "bias": (8,)},
        "lm_head": {"kernel": (4, 11)},
    }
    rng = np.random.default_rng(seed)
    draw = lambda shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return jax.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def first_update(tx, params, grads):
    """Returns the first update of an optimizer that may hold one of optax's."""
    with jax.numpy_dtype_promotion("standard"):
        return tx.update(grads, tx.init(params), params)[0]


def kernels(shapes, seed=0):
    """Returns a tree of matrices of these shapes."""
    rng = np.random.default_rng(seed)
    return {f"w{i}": {"kernel": np.float32(rng.normal(size=s))} for i, s in enumerate(shapes)}


def kernel_specs(specs):
    """Returns these specs in the tree of ``kernels``."""
    return {f"w{i}": {"kernel": spec} for i, spec in enumerate(specs)}
