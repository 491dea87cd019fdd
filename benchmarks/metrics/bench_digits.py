"""Seven stand-ins for a model of digits: what each metric sees, and agreement with float64."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import ot
from sklearn.metrics import pairwise_distances
from sklearn.metrics.pairwise import polynomial_kernel
from sklearn.neighbors import NearestNeighbors

from benchmarks import harness
from benchmarks.metrics import samples
from jaxkit import metrics

SIZE = {"smoke": 80, "short": 500, "full": 500}
SEEDS = {"smoke": (1, 2), "short": range(1, 6), "full": range(1, 21)}
DIRECTIONS = {"smoke": 8, "short": 256, "full": 2048}
OURS = "jaxkit, float32"
BY_NEIGHBORS, BY_POT, BY_EIGENVALUES, BY_KERNEL = (
    "scikit-learn neighbors, float64",
    "POT, float64, own directions",
    "NumPy eigenvalues, float64",
    "scikit-learn kernel, float64",
)
# Unit, which way is better, and who computes it too.
METRICS = {
    "Chamfer fidelity": ("distance", "down", BY_NEIGHBORS),
    "Chamfer fidelity, median": ("distance", "down", BY_NEIGHBORS),
    "Chamfer coverage": ("distance", "down", BY_NEIGHBORS),
    "FID": ("squared distance", "down", BY_EIGENVALUES),
    "KID": ("1", "down", BY_KERNEL),
    "precision": ("1", "up", BY_NEIGHBORS),
    "recall": ("1", "up", BY_NEIGHBORS),
    "density": ("1", "up", BY_NEIGHBORS),
    "coverage": ("1", "up", BY_NEIGHBORS),
    "sliced W2": ("distance", "down", BY_POT),
}


def run(context):
    size, seeds, num = SIZE[context.form], SEEDS[context.form], DIRECTIONS[context.form]
    context.note("torch-fidelity is not compared: it needs torch, a large download.")
    ours, theirs = {}, {}  # [metric][set] -> values of the seeds
    for seed in context.track([f"split {seed}" for seed in seeds]):
        seed = int(seed.split()[1])
        real, fakes = samples.split(seed, size)
        known = _known(np.float64(real))
        for name, fake in fakes.items():
            got = _ours(jax.random.key(seed), jnp.asarray(real), jnp.asarray(fake), num)
            want = _oracle(seed, known, np.float64(fake), num)
            for metric in METRICS:
                ours.setdefault(metric, {}).setdefault(name, []).append(float(got[metric]))
                theirs.setdefault(metric, {}).setdefault(name, []).append(want[metric])
    for metric, (unit, better, rival) in METRICS.items():
        mean, reference = (np.mean(list(x[metric].values()), axis=0) for x in (ours, theirs))
        yield from harness.versus(
            (OURS,),
            {OURS: mean, rival: reference},
            case="digits, mean over the stand-ins",
            size=f"{size} rows of 64",
            metric=metric,
            unit=unit,
            better=better,
            seeds=seeds,
        )
        for name in ours[metric]:
            if name != samples.HELD_OUT:
                yield from harness.versus(
                    (name,),
                    {name: ours[metric][name], samples.HELD_OUT: ours[metric][samples.HELD_OUT]},
                    case=name,
                    size=f"{size} rows of 64",
                    metric=metric,
                    unit=unit,
                    better=better,
                    seeds=seeds,
                )
    exact = [metric for metric in METRICS if METRICS[metric][2] != BY_POT]
    gaps = {
        metric: np.max(np.abs(np.subtract(*(list(x[metric].values()) for x in (ours, theirs)))))
        for metric in exact
    }
    worst = max(gaps, key=gaps.get)
    context.note(f"Largest gap to float64 over all splits and sets: {gaps[worst]:.2g} ({worst}).")


@functools.partial(jax.jit, static_argnums=3)
def _ours(key, real, fake, num_directions):
    both = {"real": real, "fake": fake}
    fidelity, coverage, _ = metrics.chamfer(**both)
    precision, recall = metrics.precision_recall(**both)
    density, covered = metrics.density_coverage(**both)
    return {
        "Chamfer fidelity": fidelity,
        "Chamfer fidelity, median": metrics.chamfer(**both, median=True).fidelity,
        "Chamfer coverage": coverage,
        "FID": metrics.frechet_distance(**both),
        "KID": metrics.kid(**both),
        "precision": precision,
        "recall": recall,
        "density": density,
        "coverage": covered,
        "sliced W2": metrics.sliced_wasserstein(key, **both, num_directions=num_directions),
    }


class Known(NamedTuple):
    """What the oracles know of the real sample alone."""

    rows: np.ndarray
    radii: dict[int, np.ndarray]
    kernel: float
    covariance: np.ndarray


def _known(real):
    radii = {k: _radii(real, k) for k in (3, 5)}
    return Known(real, radii, _other_pairs(real), np.cov(real.T))


def _oracle(seed, known, fake, num_directions):
    """Returns the same by other packages, in float64."""
    real, limit = known.rows, 1 + 1e-9  # pairs and radii are rounded differently
    pairs = pairwise_distances(real, fake)
    inside = pairs <= limit * known.radii[5][:, None]
    covariance = np.cov(fake.T)
    roots = np.sqrt(np.maximum(np.linalg.eigvals(known.covariance @ covariance).real, 0))
    gap = np.sum((real.mean(0) - fake.mean(0)) ** 2)
    traces = np.trace(known.covariance) + np.trace(covariance)
    across = polynomial_kernel(real, fake, degree=3).mean()
    to_real = _nearest(fake, real)
    return {
        "Chamfer fidelity": to_real.mean(),
        "Chamfer fidelity, median": np.median(to_real),
        "Chamfer coverage": _nearest(real, fake).mean(),
        "FID": gap + traces - 2 * roots.sum(),
        "KID": known.kernel + _other_pairs(fake) - 2 * across,
        "precision": (pairs <= limit * known.radii[3][:, None]).any(0).mean(),
        "recall": (pairs <= limit * _radii(fake, 3)[None]).any(1).mean(),
        "density": inside.sum(0).mean() / 5,
        "coverage": inside.any(1).mean(),
        "sliced W2": ot.sliced_wasserstein_distance(
            real, fake, n_projections=num_directions, seed=seed
        ),
    }


def _nearest(x, y):
    return NearestNeighbors(n_neighbors=1, algorithm="brute").fit(y).kneighbors(x)[0][:, 0]


def _radii(x, k):
    return NearestNeighbors(n_neighbors=k, algorithm="brute").fit(x).kneighbors()[0][:, -1]


def _other_pairs(x):
    """Returns the mean of the kernel over pairs of different rows."""
    matrix = polynomial_kernel(x, degree=3)
    return (matrix.sum() - np.trace(matrix)) / (len(x) * (len(x) - 1))
