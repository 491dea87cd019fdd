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

from benchmarks import data, harness, tuning
from benchmarks.denoise import training
from jaxkit import denoise, spectral
from jaxkit.train import Estimate

READS_DATA = True


class Size(NamedTuple):
    """Steps of training, the expected batch, and the levels of noise."""

    steps: int
    batch: int
    multipliers: tuple[float, ...]

    def __str__(self):
        return f"{self.steps} steps, Poisson batch {self.batch}"


SIZES = {
    "smoke": Size(2, 16, (8.0,)),
    "short": Size(300, 128, (2.0, 8.0)),
    "full": Size(300, 128, (2.0, 8.0)),
}
SEEDS = {"smoke": (1, 2), "short": range(1, 7), "full": range(1, 17)}
TUNE_SEEDS = (1001, 1002, 1003)  # never reported
CLIP = 1.0
DIGITS = "digits"
WIDTHS, REAL_WIDTHS = (32, 10), (256, 10)  # of the MLP, for digits and for --data
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
SMOKE = [f"{AWARE}, {ORDER_2}", DPSGD]
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
    methods = {"smoke": SMOKE, "short": SHORT, "full": list(GRIDS)}[context.form]
    names = [DIGITS, *(_read(context.data) if context.data else ())]
    for name in names:
        tuned = name
        if _label(name, size.multipliers[0], DPSGD) not in context.settings["methods"]:
            context.note(f"{name}: with the settings of {DIGITS}; --tune --data makes its own.")
            tuned = DIGITS
        settings = {
            method: [
                {**tuning.chosen(context, _label(tuned, noise, method)), "noise": noise}
                for noise in size.multipliers
                for _ in seeds
            ]
            for method in methods
        }
        where, all_seeds = (name, context.data), seeds * len(size.multipliers)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:  # compiling takes one core
            waiting = {
                method: pool.submit(
                    _race, size, where, method, settings[method], all_seeds, context.dtype
                )
                for method in methods
            }
            labels = context.track([f"{name}: {method}" for method in methods])
            found = {
                method: waiting[method].result() for method, _ in zip(methods, labels, strict=True)
            }
        yield from _rows_of(size, where, found, seeds)


def steps(context):
    """Yields those of the short form and, in the full one, of all methods, at the least noise."""
    size = SIZES[context.form]
    noise = size.multipliers[0]
    for method in dict.fromkeys((*SHORT, *(GRIDS if context.form == "full" else ()))):
        settings = tuning.chosen(context, _label(DIGITS, noise, method)) | {"noise": noise}
        known = task(size, dtype=context.dtype)
        yield training.step_of(method, known, _method(size, method), settings, size.batch)


def _rows_of(size, where, found, seeds):
    shown = [method for method in found if method in OURS]
    for index, noise in enumerate(size.multipliers):
        part = slice(index * len(seeds), (index + 1) * len(seeds))
        spent, delta = epsilon(size, noise, where)
        case = f"{where[0]}, noise multiplier {noise:g}, epsilon {spent:.2f} by PLD"
        for metric, unit, better in (("loss", "nats", "down"), ("accuracy", "1", "up")):
            yield from harness.versus(
                shown,
                {method: result[metric][part] for method, result in found.items()},
                case=case,
                size=f"{size}, delta {delta:g}",
                metric=f"test {metric}",
                unit=unit,
                better=better,
                seeds=seeds,
            )


def tune(context):
    """Searches the settings of every method at every level, by the loss on the validation rows."""
    size = SIZES["full"]
    names = [DIGITS, *(_read(context.data) if context.data else ())]
    cases = {
        _label(name, noise, method): (name, noise, method)
        for name in names
        for noise in size.multipliers
        for method in GRIDS
    }
    labels = iter(context.track(list(cases)))

    def race(label, settings, seeds):
        next(labels)
        name, noise, method = cases[label]
        settings = [{**one, "noise": noise} for one in settings]
        return _race(size, (name, context.data), method, settings, seeds)["validation"]

    return tuning.search(
        race,
        {label: GRIDS[method] for label, (*_, method) in cases.items()},
        TUNE_SEEDS,
        criterion="lowest mean validation loss, nats, after the last step",
        size=str(size),
    )


def epsilon(size, noise, where=(DIGITS, None)):
    """Returns epsilon by the PLD accountant, and delta; adding or removing an example counts."""
    rate, total = _rate(size, where)
    delta = min(1e-4, 0.5 / total)
    release = dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(noise))
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.SelfComposedDpEvent(release, size.steps))
    return accountant.get_epsilon(delta), delta


def _rate(size, where):
    total = len(_parts(*where)[0][0])
    return size.batch / total, total


def _label(name, noise, method):
    return f"{name}, noise multiplier {noise:g}: {method}"


@functools.cache
def _read(folder):
    """Returns ``{name: parts}`` of the data sets in a folder, a row an image, uint8."""
    return {
        name: [(x.reshape(len(x), -1), y) for x, y in data.split(images)]
        for name, images in data.read(folder).items()
    }


def _parts(name, folder):
    return training.digits_rows() if name == DIGITS else _read(folder)[name]


def _race(size, where, method, settings, seeds, dtype=None):
    """Returns ``{metric: [runs]}`` as NumPy arrays; run i has its own settings and seed."""
    found = _program(size, where, method, dtype)(*training.arrays(seeds, settings))
    return jax.tree.map(np.asarray, found)


@functools.cache
def _program(size, where, method, dtype):
    return training.run(task(size, where, dtype), _method(size, method), size.steps)


def _method(size, name):
    if name == DPSGD:
        return with_dpsgd(size)
    if name == JAX_PRIVACY:
        return with_jax_privacy(size)
    return ours(size, *PAIRS.get(name, (AVERAGED.get(name), RAW)))


@functools.cache
def task(size, where=(DIGITS, None), dtype=None):
    """Returns the task of a data set, which draws Poisson batches."""
    rate, total = _rate(size, where)
    # Beyond max_size examples are left out, once in a billion steps.
    max_size = min(int(stats.binom.isf(TOO_MANY, total, rate)) + 1, total)
    draw = functools.partial(denoise.poisson_sample, rate=rate, max_size=max_size)
    if where[0] == DIGITS:
        return training.images(_parts(*where), WIDTHS, draw, dtype=dtype)
    return training.images(_parts(*where), REAL_WIDTHS, draw, largest=255.0, dtype=dtype)
