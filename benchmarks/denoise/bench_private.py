"""Private training on digits at equal epsilon: optimizers, denoised or not, and their rivals."""

import concurrent.futures
import functools
from typing import NamedTuple

import dp_accounting
import jax
import jax.numpy as jnp
import numpy as np
import optax
from dp_accounting.pld import PLDAccountant
from jax_privacy import clipping, noise_addition
from scipy import stats

from benchmarks import harness, tuning
from benchmarks.denoise import training
from jaxkit import denoise, spectral
from jaxkit.train import Estimate


class Size(NamedTuple):
    """Steps of training, the expected batch, and the levels of noise."""

    steps: int
    batch: int
    multipliers: tuple[float, ...]

    def __str__(self):
        return f"MLP 64-32-10, {self.steps} steps, Poisson batch {self.batch}"


SIZES = {
    "smoke": Size(2, 16, (8.0,)),
    "short": Size(300, 128, (2.0, 8.0)),
    "full": Size(300, 128, (2.0, 8.0)),
}
SEEDS = {"smoke": (1, 2), "short": range(1, 9), "full": range(1, 17)}
TUNE_SEEDS = (1001, 1002, 1003)  # never reported
CLIP, DELTA = 1.0, 1e-4
TOO_MANY = 1e-9  # probability that a Poisson batch does not fit, a step
SGD, ADAM, MUON, AWARE = "normalized SGD", "Adam", "Muon", "Muon, noise-aware"
RAW, ORDER_1, ORDER_2, DISK = "raw", "order 1", "order 2", "DiSK"
DPSGD, JAX_PRIVACY = "optax.contrib.dpsgd", "jax_privacy, Adam"
AVERAGE = "weight average"
OTHER_RATE = 3e-3  # of Adam, for what Muon leaves to it: the biases
# Momentum behind a denoiser, and where it is not tuned.
BEHIND = {SGD: None, ADAM: 0.9, MUON: 0.0, AWARE: 0.0}
ALONE = {SGD: None, ADAM: 0.9, MUON: 0.95}
RATES = {
    SGD: (0.03, 0.1, 0.3, 1.0),
    ADAM: (3e-3, 1e-2, 3e-2, 1e-1),
    MUON: (0.0125, 0.025, 0.05, 0.1),
    AWARE: (0.02, 0.04, 0.08, 0.16),
}
GAINS = {
    SGD: (0.03, 0.1, 0.3, 0.7),
    ADAM: (0.03, 0.1, 0.3, 0.7),
    MUON: (0.03, 0.06, 0.12, 0.25),
    AWARE: (0.03, 0.06, 0.12, 0.25),
}
LOW_GAINS = (0.01, 0.03, 0.1, 0.3)  # of Adam's own momentum
AVERAGES = {"average": (0.01, 0.03, 0.1, 0.3)}


def _link(kind, gain):
    """Returns the denoiser of a kind as a link."""
    if kind == DISK:
        return denoise.disk(gain, gamma=0.5)
    return {ORDER_1: denoise.ema, ORDER_2: denoise.igt}[kind](gain)


def _base(base, rate, momentum):
    """Returns an optimizer with its own momentum; None is none for SGD."""
    if base == SGD:
        average = optax.identity() if momentum is None else optax.ema(momentum, debias=False)
        return optax.chain(
            average, optax.normalize_by_update_norm(), optax.scale_by_learning_rate(rate)
        )
    if base == ADAM:
        return optax.adam(rate, b1=momentum)
    return spectral.muon(rate, b1=momentum, nesterov=False, other_learning_rate=OTHER_RATE)


def ours(size, base, kind):
    """Returns the method of an optimizer, raw or behind a denoiser."""
    is_aware = base == AWARE

    def estimator(loss_fn, settings):
        inner = denoise.private_gradient_estimator(
            loss_fn,
            l2_clip_norm=CLIP,
            noise_multiplier=settings["noise"],
            batch_size=size.batch,
            denoised=kind != RAW,
            noise_variance=is_aware,
        )
        if kind != RAW or not is_aware:
            return inner

        def of_momentum(key, params, opt_state, batch):
            estimate = inner(key, params, opt_state, batch)
            gain = settings["gain"]
            variance = estimate.extras["noise_variance"] * gain / (2 - gain)
            return estimate._replace(extras={"noise_variance": variance})

        return of_momentum

    def optimizer(rate, settings):
        if kind != RAW:
            return optax.chain(_link(kind, settings["gain"]), _base(base, rate, BEHIND[base]))
        return _base(base, rate, 1 - settings["gain"] if "gain" in settings else ALONE[base])

    return training.Method(estimator, optimizer)


def with_dpsgd(size):
    """Returns optax's DP-SGD, which takes gradients of examples and draws its own noise."""

    def estimator(loss_fn, settings):
        del settings

        def gradients(key, params, opt_state, batch):
            del opt_state

            def one(example):
                example = jax.tree.map(lambda x: x[None], example)
                return jax.grad(loss_fn)(params, example, key)

            grads = jax.vmap(one)(batch.examples)
            return _no_loss(jax.tree.map(lambda x: x * _like(batch.mask, x), grads))

        return gradients

    def optimizer(rate, settings):
        # As optax.contrib.dpsgd, but for a key of its own in each run; that takes a fixed seed.
        aggregate = optax.contrib.differentially_private_aggregate(
            CLIP, settings["noise"], jax.random.key(settings["seed"].astype(jnp.int32))
        )
        return optax.chain(aggregate, optax.sgd(rate, momentum=1 - settings["gain"]))

    return training.Method(estimator, optimizer)


def with_jax_privacy(size):
    """Returns Adam behind the clipping of jax_privacy; it leaves the noise to be added."""

    def estimator(loss_fn, settings):
        def gradient(params, batch, key):
            return loss_fn(params, batch, key)

        clipped = clipping.clipped_grad(gradient, l2_clip_norm=CLIP, normalize_by=size.batch)

        def gradients(key, params, opt_state, batch):
            del opt_state
            grads = clipped(params, batch.examples, key, is_padding_example=~batch.mask)
            return _no_loss(grads)

        return gradients

    def optimizer(rate, settings):
        noise = noise_addition.gaussian_privatizer(
            stddev=settings["noise"] * CLIP / size.batch,
            prng_key=jax.random.key(settings["seed"].astype(jnp.int32)),
        )
        return optax.chain(noise, optax.adam(rate, b1=1 - settings["gain"]))

    return training.Method(estimator, optimizer)


def _no_loss(grads):
    return Estimate(jnp.float32(0), grads, None, {})


def _like(mask, x):
    return mask.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype)


BASES, KINDS = (SGD, ADAM, MUON, AWARE), (RAW, ORDER_1, ORDER_2, DISK)
PAIRS = {f"{base}, {kind}": (base, kind) for base in BASES for kind in KINDS}
AVERAGED = {f"{base}, {AVERAGE}": base for base in (ADAM, MUON)}
OURS = [f"{base}, {kind}" for base in (ADAM, MUON, AWARE) for kind in (ORDER_1, ORDER_2)]
# The programs take long to compile, so the short form keeps to these.
SHORT = [f"{AWARE}, {ORDER_2}", f"{MUON}, {RAW}", DPSGD, JAX_PRIVACY]
GRIDS = {
    **{
        name: {"learning_rate": RATES[base], "gain": GAINS[base]}
        for name, (base, _) in PAIRS.items()
    },
    f"{AWARE}, {RAW}": {"learning_rate": RATES[AWARE], "gain": (0.01, 0.03, 0.06, 0.12)},
    # It has no momentum: that would be order 1.
    f"{SGD}, {RAW}": {
        "learning_rate": tuple(float(x) for x in np.geomspace(0.02, 20, 16).round(3))
    },
    **{name: {"learning_rate": RATES[base], **AVERAGES} for name, base in AVERAGED.items()},
    DPSGD: {"learning_rate": (0.1, 0.3, 1.0, 3.0), "gain": (0.1, 0.3, 0.6, 0.9)},
    **dict.fromkeys(
        (f"{ADAM}, {RAW}", JAX_PRIVACY), {"learning_rate": RATES[ADAM], "gain": LOW_GAINS}
    ),
}


def run(context):
    size, seeds = SIZES[context.form], list(SEEDS[context.form])
    methods = SHORT if context.form != "full" else list(GRIDS)
    settings = {
        method: [
            {**tuning.chosen(context, _label(noise, method)), "noise": noise}
            for noise in size.multipliers
            for _ in seeds
        ]
        for method in methods
    }

    def call(method):
        return _race(size, method, settings[method], seeds * len(size.multipliers))

    with concurrent.futures.ThreadPoolExecutor(2) as pool:  # compiling takes one core
        waiting = {method: pool.submit(call, method) for method in methods}
        found = {method: waiting[method].result() for method in context.track(methods)}
    shown = [method for method in methods if method in OURS]
    for index, noise in enumerate(size.multipliers):
        part = slice(index * len(seeds), (index + 1) * len(seeds))
        case = f"noise multiplier {noise:g}, epsilon {epsilon(size, noise):.2f} by PLD"
        for metric, unit, better in (("loss", "nats", "down"), ("accuracy", "1", "up")):
            yield from harness.versus(
                shown,
                {method: result[metric][part] for method, result in found.items()},
                case=case,
                size=str(size),
                metric=f"test {metric}",
                unit=unit,
                better=better,
                seeds=seeds,
            )


def tune(context):
    """Searches the settings of every method at every level, by the loss on the validation rows."""
    size = SIZES["full"]
    cases = {
        _label(noise, method): (noise, method) for noise in size.multipliers for method in GRIDS
    }
    labels = iter(context.track(list(cases)))

    def race(label, settings, seeds):
        next(labels)
        noise, method = cases[label]
        return _race(size, method, [{**x, "noise": noise} for x in settings], seeds)["validation"]

    return tuning.search(
        race,
        {label: GRIDS[method] for label, (_, method) in cases.items()},
        TUNE_SEEDS,
        criterion="lowest mean validation loss, nats, after the last step",
        size=str(size),
    )


def epsilon(size, noise):
    """Returns epsilon at DELTA by the PLD accountant; adding or removing an example counts."""
    release = dp_accounting.PoissonSampledDpEvent(_rate(size), dp_accounting.GaussianDpEvent(noise))
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(release, size.steps))
    return accountant.get_epsilon(DELTA)


def _rate(size):
    return size.batch / len(training.digits_rows()[0][0])


def _label(noise, method):
    return f"noise multiplier {noise:g}: {method}"


def _race(size, method, settings, seeds):
    """Returns ``{metric: [runs]}`` as NumPy arrays; run i has its own settings and seed."""
    found = _program(size, method)(*training.arrays(seeds, settings))
    return jax.tree.map(np.asarray, found)


@functools.cache
def _program(size, method):
    if method == DPSGD:
        made = with_dpsgd(size)
    elif method == JAX_PRIVACY:
        made = with_jax_privacy(size)
    else:
        made = ours(size, *PAIRS.get(method, (AVERAGED.get(method), RAW)))
    return training.run(_task(size), made, size.steps)


@functools.cache
def _task(size):
    rate, total = _rate(size), len(training.digits_rows()[0][0])
    # Beyond max_size examples are left out, once in a billion steps.
    max_size = int(stats.binom.isf(TOO_MANY, total, rate)) + 1
    draw = functools.partial(denoise.poisson_sample, rate=rate, max_size=max_size)
    return training.digits((32, 10), draw)
