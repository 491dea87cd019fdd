"""Cost against size, topic by topic: how time, memory and compiled text grow beside a rival's."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks import harness
from benchmarks.denoise.training import digits_rows
from benchmarks.ot import bench_duals
from jaxkit import blr, denoise, metrics, ot, rl, spectral, train, zo

ON_REQUEST = True

OCTAVES = {"smoke": 1, "short": 3, "full": 5}
ROUNDS = {"smoke": 2, "short": 5, "full": 11}
WIDTH = 256  # of the hidden layer of the MLP


class Growth(NamedTuple):
    """What grows, and the functions whose cost grows with it."""

    label: str  # what is counted, with a place for the size that stays
    sizes: dict[str, tuple[int, int]]  # by form: the smallest, and the one that stays
    calls: Callable[[int, int], dict[str, tuple[Any, ...]]]  # {name: (fun, *args)}, ours first


def run(context):
    form = context.form
    for case in context.track([case for case, x in CURVES.items() if form in x.sizes]):
        yield from _report(case, *_measure(CURVES[case], form))


def exponent(sizes, values):
    """Returns the p of the power law c * size**p that fits ``values`` ``[..., sizes]`` best.

    That is the least-squares slope of the logarithms.
    """
    x = np.log(sizes) - np.mean(np.log(sizes))
    return np.log(values) @ x / (x @ x)


def doubled(start, form):
    """Returns the sizes of a curve, an octave between two."""
    return [start * 2**octave for octave in range(OCTAVES[form] + 1)]


def _measure(growth, form):
    """Returns label, sizes and ``{cost: {method: [rounds, sizes]}}``, one round but for times."""
    start, fixed = growth.sizes[form]
    sizes = doubled(start, form)
    calls = {(name, n): call for n in sizes for name, call in growth.calls(n, fixed).items()}
    # Compiling takes longest, and takes one core.
    builds = {key: functools.partial(_compile, *calls[key]) for key in calls}
    programs = harness.in_pairs(builds, iter)
    ready = {key: functools.partial(programs[key], *calls[key][1:]) for key in calls}
    harness.alternate(ready, range(1))  # warm up
    seconds = harness.alternate(ready, range(ROUNDS[form]))
    # No temporary memory counts as a byte, so that none at any size has the exponent 0.
    memory = {
        key: [max(1, program.memory_analysis().temp_size_in_bytes)]
        for key, program in programs.items()
    }
    costs = {
        "run time": {key: 1e3 * np.array(times) for key, times in seconds.items()},
        "temporary memory": memory,
        "compiled text": {key: [len(program.as_text())] for key, program in programs.items()},
    }
    names = dict.fromkeys(name for name, _ in calls)
    by_name = {
        cost: {name: np.stack([found[name, n] for n in sizes], axis=1) for name in names}
        for cost, found in costs.items()
    }
    return growth.label.format(fixed), sizes, by_name


def _compile(fun, *args):
    return jax.jit(fun).lower(*args).compile()


def _report(case, label, sizes, costs):
    times = costs["run time"]
    ours, *_ = times
    for name, values in times.items():
        yield harness.Curve(case, name, label, "run time, ms", np.array(sizes), values, "log")
    about = {"case": case, "better": "down"}
    for cost, found in costs.items():
        rounds = len(found[ours])
        yield from harness.versus(
            (ours,),
            # Less than a hundredth is rounding, or a longer number in the text; + 0.0 for -0.0.
            {name: exponent(sizes, values).round(2) + 0.0 for name, values in found.items()},
            **about,
            size=f"{sizes[0]} to {sizes[-1]} {label}",
            metric=f"exponent of the {cost}",
            unit="1",
            seeds=range(rounds) if rounds > 1 else (None,),
        )
    yield from harness.versus(
        (ours,),
        {name: values[:, -1] for name, values in times.items()},
        **about,
        size=f"{sizes[-1]} {label}",
        metric="run time",
        unit="ms",
        seeds=range(len(times[ours])),
    )


def _matrices(count, width):
    """Time and memory grow with exponent 1.

    Text: 1 for optax's, which has the products of each matrix; below 1 for ours, which has them
    once, and for each matrix only what reads and writes it.
    """
    params = {f"layer_{i}": {"kernel": _normal(i, width, width)} for i in range(count)}
    methods = {
        "spectral.muon": spectral.muon(1e-3),
        "optax.contrib.muon": optax.contrib.muon(1e-3),
    }
    return {name: (tx.update, params, tx.init(params), params) for name, tx in methods.items()}


def _parameters(count, steps):
    """Time grows with exponent 1, as all is elementwise, memory with that or 0, text with 0.

    The steps go in one loop, or fresh memory for the results would be what is timed.
    """

    def call(tx, **extra):
        def run(params, grads, state):
            def step(carry, _):
                params, state = carry
                updates, state = tx.update(grads, state, params, **extra)
                return (optax.apply_updates(params, updates), state), None

            return jax.lax.scan(step, (params, state), length=steps)[0]

        return run, params, grads, tx.init(params)

    params, grads = _normal(0, count), _normal(1, count)
    return {
        "denoise.denoise, order 2": call(denoise.denoise(0.1, order=2), queried=True),
        "optax.ema": call(optax.ema(0.9)),
    }


def _digits(count, images):
    """Returns parameters of an MLP, and images of digits with their classes, ``count`` batches."""
    batches = jax.tree.map(
        lambda x: jnp.asarray(np.resize(x, (count, images, *x.shape[1:]))),
        digits_rows()[0],
    )
    return [_normal(0, 64, WIDTH) / 8, _normal(1, WIDTH, 10) / 16], batches


def _loss_fn(params, batch, key):
    del key
    x, classes = batch
    logits = jnp.tanh(x @ params[0]) @ params[1]
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, classes).mean()


def _probes(count, images):
    """Time grows with exponent 1, memory and text with 0: a probe is two passes in a loop."""
    params, batches = _digits(2 * count, images)
    key, batch = jax.random.key(0), jax.tree.map(lambda x: x[0], batches)

    def passes(params, batches):
        return jax.lax.map(lambda batch: _loss_fn(params, batch, key), batches)

    probes = zo.value_and_zo_grad(_loss_fn, num_samples=count)
    return {
        "zo.value_and_zo_grad": (probes, key, params, batch, key),
        "forward passes": (passes, params, batches),
    }


def _samples(count, images):
    """Time grows with exponent 1, memory and text with 0: a sample is a gradient in a loop."""
    params, batches = _digits(count, images)
    key, batch = jax.random.key(0), jax.tree.map(lambda x: x[0], batches)
    state = blr.gblr(0.1, ess=1e4).init(params)

    def gradients(params, batches):
        def add(total, batch):
            return jax.tree.map(jnp.add, total, jax.grad(_loss_fn)(params, batch, key)), None

        return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), batches)[0]

    sampled = blr.gblr_value_and_grad(_loss_fn, num_samples=count)
    return {
        "blr.gblr_value_and_grad": (sampled, key, params, state, batch, key),
        "plain gradients": (gradients, params, batches),
    }


def _slices(count, images):
    """Time grows with exponent 1; memory with 1 for all at once and with 0 for slices in turn."""
    params, batches = _digits(count, images)
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)
    backprop, key = train.backprop(_loss_fn), jax.random.key(0)
    return {
        "train.accumulate": (train.accumulate(backprop, count), key, params, (), batch),
        "train.backprop": (backprop, key, params, (), batch),
    }


def _points(count, directions):
    """Time of ours grows like n log n, exponent 1.1 here; memory with 1, text with 0.

    Time of ott's tends to exponent 2: it takes n steps, and in a batch each chooses between two
    whole states.
    """
    x, y = (_normal(side, directions, count) for side in (0, 1))
    return {
        bench_duals.METHOD: (jax.vmap(ot.duals_1d), x, y),
        "ott.univariate": (bench_duals.ott_duals, x, y),
    }


def _directions(count, points):
    """Time and memory grow with exponent 1, text with 0; toy sizes are those of points."""
    return _points(points, count)


def _rows(count, features):
    """Time of all pairs grows with exponent 2; text with 0, but that one chunk needs no loops.

    Ours looks again at 80 candidates of each row, exponent 1, until there are many more rows.
    Memory: 2 for the whole matrix; ours holds one chunk of it, 0, and rows, 1.
    """
    real, fake = (_normal(side, count, features) for side in (0, 1))

    def ours(real, fake):
        return metrics.chamfer(real=real, fake=fake).total

    def whole(real, fake):
        squares = jnp.sum(real**2, 1)[:, None] - 2 * real @ fake.T + jnp.sum(fake**2, 1)[None]
        distances = jnp.sqrt(jnp.maximum(squares, 0))
        return distances.min(0).mean() + distances.min(1).mean()

    return {"metrics.chamfer": (ours, real, fake), "all pairs in jax": (whole, real, fake)}


def _rollouts(count, group):
    """Time grows with exponent 1, memory with that or 0, text with 0."""
    rewards = _normal(0, count // group, group)

    def softmax(rewards):
        return group * jax.nn.softmax(rewards / 0.5)

    return {
        "rl.boltzmann_weights": (jax.vmap(lambda r: rl.boltzmann_weights(r, 0.5)), rewards),
        "jax.nn.softmax": (softmax, rewards),
    }


def _normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, "float32"))


CURVES = {
    "spectral, matrices": Growth(
        "matrices of width {}", {"smoke": (1, 8), "short": (4, 128), "full": (4, 512)}, _matrices
    ),
    "denoise, parameters": Growth(
        "parameters, {} updates",
        {"smoke": (8, 2), "short": (2**18, 8), "full": (2**22, 8)},
        _parameters,
    ),
    "blr, samples": Growth(
        "samples, {} images", {"smoke": (1, 4), "short": (4, 512), "full": (8, 8192)}, _samples
    ),
    "zo, probes": Growth(
        "two-sided probes, {} images",
        {"smoke": (1, 4), "short": (4, 512), "full": (8, 8192)},
        _probes,
    ),
    "ot, points": Growth(
        "points, {} slices", {"smoke": (4, 2), "short": (64, 128), "full": (512, 128)}, _points
    ),
    "ot, slices": Growth(
        "slices, {} points", {"short": (32, 256), "full": (64, 1024)}, _directions
    ),
    "metrics, rows": Growth(
        "rows of {} numbers", {"smoke": (8, 2), "short": (1024, 64), "full": (2048, 64)}, _rows
    ),
    "rl, rollouts": Growth(
        "rollouts, {} a prompt",
        {"smoke": (8, 4), "short": (2**19, 16), "full": (2**20, 16)},
        _rollouts,
    ),
    "train, slices": Growth(
        "slices of {} images", {"smoke": (1, 4), "short": (4, 512), "full": (8, 8192)}, _slices
    ),
}
