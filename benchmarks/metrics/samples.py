"""Digits and what a model might make of them."""

import numpy as np
from sklearn.datasets import load_digits

HELD_OUT, FEW = "held-out digits", "ten images repeated"


def digits(rows):
    """Returns ``rows`` noisy copies of digits ``[rows, 64]``, no two of them equal."""
    images = load_digits().data / 16
    rng = np.random.default_rng(0)
    return (images[np.arange(rows) % len(images)] + 0.1 * rng.normal(size=(rows, 64))).astype("f4")


def split(seed, size):
    """Returns real digits ``[size, 64]``, and ``{name: fakes}`` of a random split."""
    data = load_digits()
    order = np.random.default_rng(seed).permutation(len(data.data))
    images, labels = data.data[order] / 16, data.target[order]
    real, held_out, pool = images[:size], images[size : 2 * size], images[size:]
    few = pool[labels[size:] < 5]
    rng = np.random.default_rng((seed, 1))
    noise = rng.normal(size=held_out.shape)
    cloud = rng.multivariate_normal(real.mean(0), np.cov(real.T), size)
    spoiled = held_out.copy()
    spoiled[: size // 20] = 3 * rng.uniform(size=(size // 20, 64))
    fakes = {
        HELD_OUT: held_out,
        "digits 0 to 4 only": few[:size],
        FEW: held_out[np.arange(size) % 10],
        "noise 0.1": held_out + 0.1 * noise,
        "noise 0.3": held_out + 0.3 * noise,
        "Gaussian of equal moments": cloud,
        "5 % outliers": spoiled,
    }
    return real.astype(np.float32), {name: x.astype(np.float32) for name, x in fakes.items()}
