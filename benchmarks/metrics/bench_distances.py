"""Sliced Wasserstein against POT, Frechet distance against usual recipes: spread, error, time."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.metrics import samples
from jaxkit import metrics

ROWS = {"smoke": (40,), "short": (1000, 10_000), "full": (1000, 10_000, 50_000)}
ROUNDS = {"smoke": 2, "short": 5, "full": 9}
SEEDS = {"smoke": (1, 2), "short": range(1, 6), "full": range(1, 11)}
DIRECTIONS = 64
REPEATS = {"smoke": 4, "short": 100, "full": 400}  # of the directions
OURS, POT = "jaxkit", "POT"
EIGENVALUES, ROOTS = "eigenvalues of the product, float32", "symmetric root, float32"
SCIPY = "scipy sqrtm, float64"


def run(context):
    rounds = ROUNDS[context.form]
    for rows in context.track([f"{rows} rows" for rows in ROWS[context.form]]):
        rows = int(rows.split()[0])
        x = samples.digits(2 * rows)
        real, fake = x[::2].copy(), x[1::2].copy()
        for metric, calls in (
            ("sliced W2", _sliced(real, fake)),
            ("Frechet distance", _frechet(real, fake)),
        ):
            harness.alternate(calls, range(1))  # compiles, warms up
            seconds = harness.alternate(calls, range(rounds))
            yield from harness.versus(
                (OURS,),
                {name: 1e3 * np.array(times) for name, times in seconds.items()},
                case=f"{metric}, {rows} rows",
                size=f"noisy digits, {DIRECTIONS} directions" if "W2" in metric else "64 features",
                metric="time",
                unit="ms",
                better="down",
                seeds=range(rounds),
            )
    yield from _spread(context)
    yield from _errors(context)


def _sliced(real, fake):
    import ot

    ours = jax.jit(
        lambda key, real, fake: metrics.sliced_wasserstein(
            key, real=real, fake=fake, num_directions=DIRECTIONS
        )
    )
    args = jax.random.key(0), jnp.asarray(real), jnp.asarray(fake)
    return {
        OURS: lambda: ours(*args),
        POT: lambda: ot.sliced_wasserstein_distance(real, fake, n_projections=DIRECTIONS),
    }


def _frechet(real, fake):
    ours = jax.jit(lambda real, fake: metrics.frechet_distance(real=real, fake=fake))
    args = jnp.asarray(real), jnp.asarray(fake)
    return {OURS: lambda: ours(*args), SCIPY: lambda: _by_recipe(SCIPY, real, fake)}


def _spread(context):
    """Measures how much the distance of a seed's split varies with the directions."""
    import ot

    repeats, seeds = REPEATS[context.form], SEEDS[context.form]
    ours = jax.jit(
        jax.vmap(
            lambda key, real, fake: metrics.sliced_wasserstein(
                key, real=real, fake=fake, num_directions=DIRECTIONS
            ),
            (0, None, None),
        )
    )
    both = {OURS: [], POT: []}
    for seed in seeds:
        real, fakes = samples.split(seed, ROWS["smoke"][0] if context.form == "smoke" else 200)
        fake = fakes["noise 0.3"]
        keys = jax.random.split(jax.random.key(seed), repeats)
        both[OURS].append(np.std(ours(keys, jnp.asarray(real), jnp.asarray(fake))))
        both[POT].append(
            np.std(
                [
                    ot.sliced_wasserstein_distance(real, fake, n_projections=DIRECTIONS, seed=i)
                    for i in range(repeats)
                ]
            )
        )
    yield from harness.versus(
        (OURS,),
        both,
        case="sliced W2, other directions",
        size=f"200 digits with noise 0.3, {DIRECTIONS} directions",
        metric="standard deviation",
        unit="distance",
        better="down",
        seeds=seeds,
    )


def _errors(context):
    """Measures the error in float32 for digits, whose pixels lack rank, and for ten of them."""
    seeds, rows = SEEDS[context.form], 60 if context.form == "smoke" else 800
    ours = jax.jit(lambda real, fake: metrics.frechet_distance(real=real, fake=fake))
    for name in (samples.HELD_OUT, samples.FEW):
        found = {OURS: [], EIGENVALUES: [], ROOTS: []}
        for seed in seeds:
            real, fakes = samples.split(seed, rows)
            fake = fakes[name]
            want = _by_recipe(ROOTS, np.float64(real), np.float64(fake))
            trace = np.sum(np.var(real, 0)) + np.sum(np.var(fake, 0))
            got = {OURS: float(ours(jnp.asarray(real), jnp.asarray(fake)))}
            got |= {recipe: _by_recipe(recipe, real, fake) for recipe in (EIGENVALUES, ROOTS)}
            for recipe, value in got.items():
                found[recipe].append(abs(value - want) / trace)
        yield from harness.versus(
            (OURS,),
            found,
            case=f"Frechet distance, {name}",
            size=f"{rows} rows of 64",
            metric="error over the traces",
            unit="1",
            better="down",
            seeds=seeds,
        )


def _by_recipe(recipe, real, fake):
    """Returns the Frechet distance as it is usually computed, in the dtype of the samples."""
    import scipy.linalg

    if recipe == SCIPY:
        real, fake = np.float64(real), np.float64(fake)
    first, second = (np.cov(x.T, dtype=x.dtype) for x in (real, fake))
    if recipe == SCIPY:
        cross = np.trace(scipy.linalg.sqrtm(first @ second)).real
    elif recipe == EIGENVALUES:
        cross = np.sqrt(np.linalg.eigvals(first @ second).astype(complex)).real.sum()
    else:
        values, vectors = np.linalg.eigh(first)
        root = vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T
        cross = np.sqrt(np.maximum(np.linalg.eigvalsh(root @ second @ root), 0)).sum()
    gap = np.sum((real.mean(0) - fake.mean(0)) ** 2)
    return float(gap + np.trace(first) + np.trace(second) - 2 * cross)
