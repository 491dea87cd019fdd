"""Runs of ``train.loop`` for its tests; as a script one that is to be killed in the middle."""

import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxkit import train

NUM_STEPS = 30


def loss_fn(params, batch, key):
    noise = 0.1 * jax.random.normal(key, batch["x"].shape)
    hidden = jnp.tanh((batch["x"] + noise) @ params["w"])
    loss = jnp.mean((hidden @ params["v"] - batch["y"]) ** 2)
    return loss, {"size": jnp.linalg.norm(params["w"]), "row": params["w"][0]}


TX = optax.sgd(0.05, momentum=0.9)
STEP = train.make_step(train.backprop(loss_fn), TX, ema_decay=0.9)


def new_state():
    w, v = jnp.ones((4, 8)) / 4, jnp.linspace(-1, 1, 8)
    return train.create({"w": w, "v": v}, TX, jax.random.key(0))


def batch_of(index):
    x = np.random.default_rng(index).normal(size=(16, 4)).astype(np.float32)
    return {"x": x, "y": x[:, 0] * x[:, 1]}


def run(folder, batches=batch_of, num_steps=NUM_STEPS, **options):
    options = {"log_every": 3, "checkpoint_every": 5, "progress": False} | options
    return train.loop(
        STEP, new_state(), batches, num_steps=num_steps, checkpoint_dir=folder, **options
    )


SGD = optax.sgd(0.5)
# The optimum follows the batch, and a batch that is not finite gives such a loss.
SMALL = train.make_step(train.backprop(lambda w, x, key: jnp.sum((w - x) ** 2) / 2), SGD)


def small_state(value=0.0):
    return train.create(jnp.full(3, value), SGD, jax.random.key(0))


def ones(index):
    return np.ones(3, np.float32)


def small(num_steps=8, batches=ones, state=None, **options):
    options = {"log_every": 1, "progress": False} | options
    state = small_state() if state is None else state
    return train.loop(SMALL, state, batches, num_steps=num_steps, **options)


def numbers(folder):
    """Returns the numbers of the complete checkpoints."""
    return sorted(int(path.name) for path in pathlib.Path(folder).iterdir() if path.name.isdigit())


def lines(folder):
    return pathlib.Path(folder, "history.jsonl").read_text()


def assert_same_bits(a, b):
    def check(x, y):
        assert x.dtype == y.dtype
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y), strict=True)

    jax.tree.map(check, a, b)


def main(folder, hold):
    def batches(index):
        if index == hold:  # says so, and waits for the parent, so that no clock decides
            pathlib.Path(folder, "ready").touch()
            deadline = time.monotonic() + 300
            while not pathlib.Path(folder, "go").exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        return batch_of(index)

    run(folder, batches)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
