"""Transport problems on real data, and how Sinkhorn's iterations and exact costs are counted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from ott.geometry import pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn
from sklearn.datasets import load_digits, load_sample_images

from jaxkit import ot

LEVELS = (1e-1, 1e-2, 1e-3)  # of the L1 error of the marginals
LABEL = 1e-4  # level of the known potentials; float32 reaches little less
MOST = 5000  # iterations


def digits(seed, count):
    """Returns pairs of digits: weights on a grid of 8 x 8 points in the unit square."""
    images = _images()
    a, b = images[_drawn(seed, count)]
    axis = np.arange(8) / 7
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(64, 2)
    grid = np.broadcast_to(grid, (count, 64, 2))
    return _float32(ot.Pair(grid, grid, a, b))


def other_digits(seed, count, first, images):
    """Returns weights ``[images, 64]`` that no pair of ``digits`` has from the ``first`` on."""
    free = np.setdiff1d(np.arange(len(_images())), _drawn(seed, count)[:, first:])
    return _float32(_images()[np.random.default_rng(seed).choice(free, images, replace=False)])


@functools.cache
def _images():
    images = load_digits().data
    return images / images.sum(1, keepdims=True)


def _drawn(seed, count):
    return np.random.default_rng(seed).integers(len(_images()), size=(2, count))


def colors(seed, count, pixels, crop=256):
    """Returns pairs of pixel colors in [0, 1]^3, from random crops of two photographs."""
    rng = np.random.default_rng(seed)
    sides = []
    for image in load_sample_images().images:  # a temple in China, a flower
        height, width, _ = image.shape
        sets = []
        for _ in range(count):
            top, left = rng.integers(height - crop), rng.integers(width - crop)
            part = image[top : top + crop, left : left + crop].reshape(-1, 3) / 255
            sets.append(part[rng.choice(len(part), pixels, replace=False)])
        sides.append(np.stack(sets))
    return _float32(ot.Pair(*sides))


def noise_to_digits(seed, count, points):
    """Returns pairs of Gaussian noise and images of digits, 64 dimensions of mean 0, variance 1."""
    rng = np.random.default_rng(seed)
    images = load_digits().data
    images = (images - images.mean()) / images.std()
    y = np.stack([images[rng.choice(len(images), points, replace=False)] for _ in range(count)])
    return _float32(ot.Pair(rng.normal(size=y.shape), y))


def _float32(pairs):
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), pairs)


def mean_cost(pairs):
    """Returns the mean squared distance between the points of two sides, a number."""
    centers = pairs.x.mean(1), pairs.y.mean(1)
    spread = sum(jnp.square(z).sum(-1).mean(1) for z in (pairs.x, pairs.y))
    return float(jnp.mean(spread - 2 * jnp.sum(centers[0] * centers[1], -1)))


def problem(pair, epsilon):
    """Returns ott's form of a problem."""
    geometry = pointcloud.PointCloud(pair.x, pair.y, epsilon=epsilon)
    return linear_problem.LinearProblem(geometry, a=pair.a, b=pair.b)


def solve(pair, epsilon, *, level, init=None):
    """Returns ott's Sinkhorn output; the error is looked at after every iteration."""
    solver = sinkhorn.Sinkhorn(threshold=level, inner_iterations=1, max_iterations=MOST)
    return solver(problem(pair, epsilon), init=init)


@jax.jit
def labelled(pairs, epsilon):
    """Returns the pairs with the potentials of Sinkhorn's algorithm, and the costs of its plans."""

    def label(pair):
        out = solve(pair, epsilon, level=LABEL)
        g = ot.from_ott(out.g, pair.b, epsilon)
        # The answer to g, since out.f says nothing where a is 0.
        f = ot.soft_f(g, pair.x, pair.y, pair.b, epsilon)
        return pair._replace(f=f), jnp.sum(out.matrix * out.geom.cost_matrix)

    return jax.lax.map(label, pairs)


def iterations(errors):
    """Returns ``{level: mean}`` of the iterations after which ``errors`` ``[pairs, MOST]`` fit."""
    errors = np.where(np.asarray(errors) < 0, np.inf, errors)  # -1 stands for not reached
    found = {}
    for level in LEVELS:
        fits = errors <= level
        if not fits.any(1).all():
            raise RuntimeError(f"Sinkhorn did not reach {level} in {MOST} iterations.")
        found[level] = float(np.mean(fits.argmax(1) + 1))
    return found
