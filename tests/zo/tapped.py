"""Loss functions as people write them, and backpropagation from what a tap sees."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from spectral.models import ConvNet, NnxTransformer, Transformer, normal_like, quick_jit

from jaxkit.zo import _tap_plan, _tap_run

IDS = jnp.asarray(np.arange(12).reshape(3, 4) % 11)
PROBLEMS = {}


def problem(make):
    """Registers a function that returns ``(loss_fn, params, *args)``, the loss ``[B]``."""

    @functools.cache
    def cached():
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return make()

    PROBLEMS[make.__name__] = cached
    return cached


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape), jnp.float32)


def token_loss(logits, ids):
    log_probs = jax.nn.log_softmax(logits)
    picked = jnp.take_along_axis(log_probs, ids[..., None] % logits.shape[-1], -1)
    return -jnp.mean(picked[..., 0], 1)


@problem
def linen_scanned():
    """Layers stacked on the second axis of each leaf, each one checkpointed."""
    model = Transformer(layers=2, axis=1)
    params = normal_like(jax.eval_shape(model.init, jax.random.key(0), IDS)["params"])

    def loss_fn(p, ids):
        return token_loss(jax.checkpoint(model.apply)({"params": p}, ids), ids)

    return loss_fn, params, IDS


@problem
def nnx_transformer():
    """All kinds of layers, and an embedding that is the head as well."""
    model = nnx.eval_shape(lambda: NnxTransformer(nnx.Rngs(0)))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(p, ids, images):
        model = nnx.merge(graph, p, rest)
        h = model.embed(ids)
        for layer in model.layers:
            h = h + layer(h)
        h = model.norm(h)
        stacked = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None), out_axes=1)(model.stack, h)
        seen = jnp.mean(model.conv(images) ** 2, (1, 2, 3)) + jnp.mean(stacked**2, (1, 2, 3))
        return token_loss(model.head(h), ids) + token_loss(model.embed.attend(h), ids) + seen

    return loss_fn, normal_like(params), IDS, normal(3, 5, 5, 4)


@problem
def conv_net():
    """A convolution, a depthwise one and batch statistics that are only read."""
    model, images = ConvNet(), normal(3, 6, 6, 3)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    stats = jax.tree.map(lambda x: 1.0 + jnp.zeros(x.shape), variables["batch_stats"])

    def loss_fn(p, images):
        out = model.apply({"params": p, "batch_stats": stats}, images)
        return jnp.mean(out**2, -1)

    return loss_fn, normal_like(variables["params"]), images


@problem
def grouped_conv():
    model = nn.Conv(6, (3,), feature_group_count=2, strides=2, kernel_dilation=2)
    x = normal(3, 9, 4)
    params = normal_like(jax.eval_shape(model.init, jax.random.key(0), x)["params"])
    return lambda p, x: jnp.mean(jnp.sin(model.apply({"params": p}, x)), (1, 2)), params, x


@problem
def mlp():
    """A plain dictionary of arrays, jitted and checkpointed."""
    params = {
        "first": {"w": normal(5, 7), "b": normal(7)},
        "second": {"w": normal(7, 2), "b": normal(2)},
    }

    @jax.checkpoint
    @jax.jit
    def loss_fn(p, x, y):
        h = jax.nn.relu(x @ p["first"]["w"] + p["first"]["b"][None])
        return jnp.mean((h @ p["second"]["w"] + p["second"]["b"][None] - y) ** 2, 1)

    return loss_fn, params, normal(3, 5), normal(3, 2)


@problem
def recurrent():
    """Weights that a scan over time shares, a start that is learned, and a scaled weight."""
    params = {"u": normal(4, 4), "w": normal(5, 4) / 4, "start": normal(4), "scale": normal(1, 4)}

    def loss_fn(p, x):
        def step(h, xt):
            h = jnp.tanh(h @ p["u"] + xt @ (p["w"] * jnp.exp(p["scale"])))
            return h, jnp.sum(h * h, 1)

        start = jnp.broadcast_to(p["start"], (x.shape[0], 4))
        _, sums = jax.lax.scan(step, start, jnp.swapaxes(x, 0, 1))
        return jnp.mean(sums, 0)

    return loss_fn, params, normal(3, 4, 5)


@problem
def branches():
    """A cond whose branches use different leaves; one of them returns a leaf as it is."""
    params = {"w": normal(5, 4), "u": normal(4, 4), "b": normal(4), "d": normal(3, 4)}

    def loss_fn(p, x):
        h = jnp.tanh(x @ p["w"])
        yes = lambda h: (h @ p["u"] + p["b"][None], h)  # noqa: E731
        no = lambda h: (2 * h, p["d"])  # noqa: E731
        first, second = jax.lax.cond(jnp.sum(x) > 0, yes, no, h)
        third, _ = jax.lax.cond(jnp.sum(x) < 0, yes, no, h)
        return jnp.sum((first + second) ** 2, 1) + jnp.sum(third * third, 1)

    return loss_fn, params, normal(3, 5)


@problem
def tied():
    """An embedding that is the head too, half as a transpose, and a weight used in two ways."""
    params = {"embed": normal(11, 4), "w": normal(4, 6)}

    def loss_fn(p, ids):
        h = p["embed"][ids]
        h = jnp.tanh(h @ p["w"]) @ p["w"].T
        return token_loss(h @ p["embed"].T, ids)

    return loss_fn, params, IDS


def plan_of(name):
    loss_fn, params, *args = PROBLEMS[name]()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return _tap_plan.plan(loss_fn, params, tuple(args)), params, args


def backprop_by_sites(plan, params, args):
    """Returns the sum of the losses, and its gradient put together at the sites."""

    def sizes(site):
        return tuple(int(loop[5:-1]) for loop in site.loops if loop.startswith("scan"))

    def loss(eps):
        def at_site(step, read, y, index):
            return (y + eps[step.site.index][index] if step.site.group else y), {}

        outs, _ = _tap_run.run(plan, params, args, _tap_run.Visitor(at_site))
        return jnp.sum(outs[0])

    sites = [site for site in plan.sites if site.group]
    eps = {s.index: jnp.zeros(sizes(s) + s.type.shape, s.type.dtype) for s in sites}
    value, delta = jax.value_and_grad(loss)(eps)

    def at_site(step, read, y, index):
        if not step.site.group:
            return y, {}
        return y, _tap_run.pull_back(step.site, read, delta[step.site.index][index])

    visitor = _tap_run.Visitor(at_site, jnp.add, pull=True)
    _, found = _tap_run.run(plan, params, args, visitor)
    return value, jax.tree.structure(params).unflatten([found[i] for i in range(len(found))])


@functools.cache
def true_gradient(name):
    """Returns the sum of the losses and its gradient by JAX."""
    loss_fn, params, *args = PROBLEMS[name]()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return quick_jit(jax.value_and_grad(lambda p: jnp.sum(loss_fn(p, *args))))(params)
