"""A small problem for the tests of the private estimator, and its release by hand."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import denoise

KEY = jax.random.key(0)
CLIP = 0.5
TX = {
    "plain": None,
    "igt": lambda: denoise.igt(0.2),
    "order_3": lambda: denoise.denoise(0.2, order=3),
    "radius": lambda: denoise.denoise(0.05, trust_radius=0.5),
    "random": lambda: denoise.denoise(0.3, order=3, random_node=True),
    "disk": lambda: denoise.disk(0.3),
    "storm": lambda: denoise.storm(0.1),
    "auto": lambda: denoise.denoise("auto", order=1),
}
PARAMS = {"w": contract.normal(5, 6), "v": contract.normal(6)}
BATCH = contract.normal(8, 5, seed=1), contract.normal(8, seed=2)


def make(loss_fn, noise=0.0, **options):
    return denoise.private_gradient_estimator(
        loss_fn, l2_clip_norm=CLIP, noise_multiplier=noise, **options
    )


def moved(name, params=PARAMS):
    """Returns a state whose last update was at 0.98 of the parameters; () for plain DP-SGD."""
    if name == "plain":
        return ()
    tx, before = TX[name](), jax.tree.map(lambda p: 0.98 * p, params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    extra = {"queried": True, "query_variance": 1.0, "noise_variance": 2e-4}
    return tx.update(zeros, tx.init(before), before, **extra)[1]


def padded(mask=None, examples=BATCH):
    return denoise.Padded(examples, np.ones(8, bool) if mask is None else mask)


def outputs(params, x, key, taps=(0.0, 0.0)):
    """Returns the outputs ``[B, 1]``, and the inputs of both layers."""
    hidden = jnp.tanh(x @ params["w"] + 0.1 * jax.random.normal(key, (1, 6)) + taps[0])
    return hidden @ params["v"][:, None] + taps[1], (x, hidden)


def loss_fn(params, batch, key):
    """A loss with noise of its own, and something beside it."""
    x, y = batch
    error = outputs(params, x, key)[0][:, 0] - y
    return jnp.mean(error**2) / 2, {"error": jnp.mean(error), "hit": error[0] > 0}


def norms_fn(points, weights, batch, keys):
    """Squared norms of the combined gradients of ``loss_fn``, of two layers without a bias."""

    def one(params, example, key):
        x, y = example

        def loss(taps):
            out, inputs = outputs(params, x[None], key, taps)
            return jnp.sum((out - y) ** 2) / 2, inputs

        return jax.grad(loss, has_aux=True)((jnp.zeros((1, 6)), jnp.zeros((1, 1))))

    rows = jax.vmap(jax.vmap(one, (None, 0, 0)), (0, None, None))(points, batch, keys)
    return sum(denoise.dense_norms(x, d, weights, bias=False) for d, x in zip(*rows, strict=True))


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@functools.cache
def jitted(name, noise=0.0, **options):
    return jax.jit(make(loss_fn, noise, denoised=name != "plain", **options))


_one = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))


def by_hand(name):
    """Returns the clipped gradients of the examples, their losses and errors, one by one."""
    own, handed = jax.random.split(KEY)
    points, weights = jax.tree.map(lambda p: p[None], PARAMS), np.ones(1)
    if name != "plain":
        node_key = jax.random.split(own)[0] if name == "random" else None
        points, weights = denoise.query_points(moved(name), PARAMS, node_key)
    rows = []
    for i in range(8):
        example, key = (
            jax.tree.map(lambda x, i=i: x[i : i + 1], BATCH),
            jax.random.fold_in(handed, i),
        )
        at = [
            _one(jax.tree.map(lambda z, j=j: z[j], points), example, key)
            for j in range(len(weights))
        ]
        grad = sum(float(w) * flat(g) for w, (_, g) in zip(weights, at, strict=True))
        value = sum(float(w) * float(v) for w, ((v, _), _) in zip(weights, at, strict=True))
        error = float(at[0][0][1]["error"])
        rows.append((grad * min(1, CLIP / np.linalg.norm(grad)), value, error))
    return tuple(np.array(column) for column in zip(*rows, strict=True))
