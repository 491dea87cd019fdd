"""The matrix: each estimator with each optimizer on one small real problem.

A new estimator or optimizer is one line in its table. Each estimator meets the optimizers in
``FEW_OPTIMIZERS``, each optimizer the estimators in ``FEW_ESTIMATORS``; the rest of the product is
marked slow. Estimators around a posterior meet the optimizers that keep one, and no others; those
that ask at the query points of a denoiser meet every optimizer behind one.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from problems import (
    assert_close,
    assert_equal,
    cross_entropies,
    digits,
    jit_as_by_default,
    step_of,
)

from jaxkit import blr, denoise, spectral, train, zo

PRIVACY = {"l2_clip_norm": 1.0, "noise_multiplier": 0.2, "noise_variance": False}
# name -> what takes Losses and returns an estimator
ESTIMATORS = {
    "backprop": lambda losses: train.backprop(losses.mean),
    "accumulate": lambda losses: train.accumulate(train.backprop(losses.mean), 2),
    "zo": lambda losses: zo.gradient_estimator(
        losses.mean, num_samples=16, mu=0.01, direction=zo.rademacher()
    ),
    "zo_node": lambda losses: zo.gradient_estimator(
        losses.per_example, num_samples=4, mu=0.01, direction=zo.node(), per_example=True
    ),
    "private": lambda losses: denoise.private_gradient_estimator(
        losses.mean, denoised=False, **PRIVACY
    ),
}
# name -> the same, for estimators that sample a posterior
BAYESIAN_ESTIMATORS = {
    "blr": lambda losses: blr.gradient_estimator(train.backprop(losses.mean), num_samples=2),
    "accumulate_blr": lambda losses: train.accumulate(
        blr.gradient_estimator(train.backprop(losses.mean)), 2
    ),
    "blr_accumulate": lambda losses: blr.gradient_estimator(ESTIMATORS["accumulate"](losses)),
    "blr_zo": lambda losses: blr.gradient_estimator(ESTIMATORS["zo"](losses)),
}


def _denoised(make):
    return lambda losses: denoise.gradient_estimator(make(losses))


def _behind(make, gain=0.5):
    """Returns what makes the optimizer of ``make`` behind a denoiser of order 2."""
    return lambda: optax.chain(denoise.igt(gain), make())


# name -> the same, for estimators that ask at the query points of a denoiser
DENOISED_ESTIMATORS = {
    **{
        f"denoise_{name}": _denoised(ESTIMATORS[name])
        for name in ("backprop", "accumulate", "zo", "zo_node")
    },
    "accumulate_denoise": lambda losses: train.accumulate(
        _denoised(ESTIMATORS["backprop"])(losses), 2
    ),
    "private_denoised": lambda losses: denoise.private_gradient_estimator(losses.mean, **PRIVACY),
}
DENOISED_BAYESIAN_ESTIMATORS = {"denoise_blr": _denoised(BAYESIAN_ESTIMATORS["blr"])}
# name -> what returns an optimizer that keeps a posterior
BAYESIAN_OPTIMIZERS = {
    "gblr": lambda: blr.gblr(0.2, ess=1e5, alpha=1.5, b2=0.99),
    "clipped_gblr": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), blr.gblr(0.2, ess=1e5, alpha=0.9, b2=0.99)
    ),
}
# name -> what returns an optimizer
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.3),
    "adamw": lambda: optax.adamw(3e-3),
    "lion": lambda: optax.lion(3e-3),
    "muon": lambda: spectral.muon(0.02),
    "polargrad": lambda: spectral.polargrad(0.1, other_learning_rate=0.02),
    "normuon": lambda: spectral.normuon(0.02),
    "row_norm": lambda: spectral.row_norm(0.02),
    "hybrid": lambda: spectral.hybrid(0.02),
    "scion": lambda: spectral.scion(0.02, radius=2.0),
    "symmetry_compatible": lambda: spectral.symmetry_compatible(
        0.02, overrides={"out/kernel": "lm_head"}
    ),
}
# Steps of polargrad are as long as gradients, those of zo too long to ask a step farther ahead.
DENOISED_OPTIMIZERS = {name: _behind(make) for name, make in OPTIMIZERS.items()} | {
    "polargrad": _behind(lambda: spectral.polargrad(0.05, other_learning_rate=0.02))
}
DENOISED_BAYESIAN_OPTIMIZERS = {name: _behind(make) for name, make in BAYESIAN_OPTIMIZERS.items()}
# What meets what: every estimator of a row is legal with every optimizer of it, and no other.
LEGAL = (
    (ESTIMATORS, OPTIMIZERS),
    (BAYESIAN_ESTIMATORS, BAYESIAN_OPTIMIZERS),
    (DENOISED_ESTIMATORS, DENOISED_OPTIMIZERS),
    (DENOISED_BAYESIAN_ESTIMATORS, DENOISED_BAYESIAN_OPTIMIZERS),
)
# Of forward passes alone 20 steps see little of 2,410 parameters, and losses that round differently
# are divided by mu.
LEFT = dict.fromkeys(("zo", "blr_zo", "denoise_zo"), 0.985)
# Four probes of the nodes see more, and private gradients are clipped at every example.
LEFT |= dict.fromkeys(("zo_node", "denoise_zo_node", "private", "private_denoised"), 0.95)
ROUNDING = dict.fromkeys(("zo", "blr_zo", "denoise_zo", "zo_node", "denoise_zo_node"), 1e-3)
# Where rounding turns the sign of an entry near 0, lion moves it by 0.006 the other way.
ROUNDING["denoise_zo", "lion"] = 0.03
FEW_ESTIMATORS = ("backprop", "accumulate")
FEW_OPTIMIZERS = ("sgd", "adamw")
FEW_PAIRS = (("blr", "gblr"), ("denoise_blr", "gblr"), ("denoise_backprop", "muon"))

KEY = jax.random.key(0)
DIGITS = digits(20, 64)


def pairs():
    """Returns the rows of the product, those outside the short list marked slow."""
    rows = []
    for estimators, optimizers in LEGAL:
        for estimator, optimizer in itertools.product(estimators, optimizers):
            few = (
                estimator in FEW_ESTIMATORS
                or optimizer in FEW_OPTIMIZERS
                or (estimator, optimizer) in FEW_PAIRS
            )
            marks = () if few else pytest.mark.slow
            name = f"{estimator}-{optimizer}"
            rows.append(pytest.param(estimator, optimizer, id=name, marks=marks))
    return rows


@functools.cache
def params():
    """Returns the parameters of a net with one hidden layer of 32."""
    rng = np.random.default_rng(0)

    def dense(rows, columns):
        kernel = rng.normal(size=(rows, columns)) / rows**0.5
        return {"kernel": np.float32(kernel), "bias": np.zeros(columns, np.float32)}

    return {"hidden": dense(64, 32), "out": dense(32, 10)}


class Losses:
    """The loss of the net, as its mean and of each example; counts how often it is traced."""

    def __init__(self):
        self.traces = 0

    def per_example(self, params, batch, key):
        self.traces += 1
        images, labels = batch

        def dense(layer, x):
            return x @ layer["kernel"] + layer["bias"][None, :]

        logits = dense(params["out"], jax.nn.relu(dense(params["hidden"], images)))
        return cross_entropies(logits, labels), {"logits": jnp.mean(logits)}

    def mean(self, params, batch, key):
        losses, aux = self.per_example(params, batch, key)
        return jnp.mean(losses), aux


class Run:
    """One pair of the matrix, with its 20 steps from one fit."""

    def __init__(self, estimator, optimizer):
        self.losses = Losses()
        estimators, optimizers = next(group for group in LEGAL if estimator in group[0])
        self.tx = optimizers[optimizer]()
        self.step = train.make_step(estimators[estimator](self.losses), self.tx)
        self.whole = self.fit(self.create())

    def create(self, place=lambda tree: tree):
        return train.create(place(params()), self.tx, KEY)

    def fit(self, state, *part):
        return train.fit(self.step, state, step_of(DIGITS, slice(*part or (None,))))


@pytest.fixture(autouse=True)
def standard_promotion():
    """Optax's adamw mixes int32 and float32."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@functools.cache
def run(estimator, optimizer):
    """Returns the run of one pair; all its tests share the compiled programs."""
    return Run(estimator, optimizer)


matrix = pytest.mark.parametrize(("estimator", "optimizer"), pairs())


@matrix
def test_the_loss_falls(estimator, optimizer):
    """20 steps take their share off the loss, which starts near log 10 and stays finite."""
    _, metrics = run(estimator, optimizer).whole
    losses = np.asarray(metrics["loss"])
    assert np.isfinite(losses).all() and abs(losses[0] - np.log(10)) < 0.5
    assert losses[-3:].mean() < LEFT.get(estimator, 0.9) * losses[0]


@matrix
def test_two_fits_trace_the_step_once(estimator, optimizer):
    """A second fit of the same shapes traces nothing."""
    case = run(estimator, optimizer)
    state, _ = case.fit(case.create())
    before = case.losses.traces
    case.fit(state)
    assert case.losses.traces == before


@matrix
def test_types_stay(estimator, optimizer):
    """Structure, shapes, dtypes and weak types of the state are those at the start."""
    case = run(estimator, optimizer)
    types = functools.partial(jax.tree.map, jax.typeof)
    assert types(case.whole[0]) == types(case.create())


@matrix
def test_the_scan_is_the_loop(estimator, optimizer):
    """Eight steps of a Python loop over the jitted step give the bits of fit."""
    case = run(estimator, optimizer)
    step, fit = jit_as_by_default(case.step), functools.partial(train.fit, case.step)
    state, losses = case.create(), []
    for i in range(8):
        state, metrics = step(state, step_of(DIGITS, i))
        losses.append(metrics["loss"])
    scanned, metrics = jit_as_by_default(fit)(case.create(), step_of(DIGITS, slice(8)))
    assert_equal((state, jnp.stack(losses)), (scanned, metrics["loss"]))


@matrix
def test_twelve_and_eight_steps_are_twenty(estimator, optimizer):
    """A run in two parts ends with the bits of a run in one."""
    case = run(estimator, optimizer)
    state, _ = case.fit(case.create(), 12)
    assert_equal(case.fit(state, 12, None)[0], case.whole[0])


@matrix
def test_eight_devices_are_one(estimator, optimizer):
    """With each batch sharded over 8 devices, eight steps give the numbers of one device."""
    case = run(estimator, optimizer)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    state = case.create(lambda tree: jax.device_put(tree, NamedSharding(mesh, P())))
    batches = jax.device_put(DIGITS, NamedSharding(mesh, P(None, "data")))
    state, metrics = train.fit(case.step, state, step_of(batches, slice(8)))
    want, want_metrics = case.fit(case.create(), 8)
    got = state.params, metrics["loss"]
    rtol = ROUNDING.get((estimator, optimizer), ROUNDING.get(estimator, 1e-5))
    assert_close(got, (want.params, want_metrics["loss"]), rtol)


# What the error of an illegal pair names, by the rows of LEGAL that the two parts come from.
MISSING = {
    (0, 1): "hess",
    (0, 2): "queried|denoised=False",
    (0, 3): "queried|denoised=False",
    (1, 0): "GBLRState",
    (1, 2): "GBLRState",
    (1, 3): "queried",
    (2, 0): "DenoiseState",
    (2, 1): "DenoiseState",
    (2, 3): "hess",
    (3, 0): "DenoiseState",
    (3, 1): "DenoiseState",
    (3, 2): "GBLRState",
}


@pytest.mark.parametrize(("row", "other"), MISSING)
def test_an_illegal_pair_names_what_is_missing(row, other):
    """Each estimator of one row with the first optimizer of another, and the other way round."""
    estimators, optimizers = LEGAL[row][0], LEGAL[other][1]
    few = [
        *itertools.product(estimators, list(optimizers)[:1]),
        *itertools.product(list(estimators)[:1], optimizers),
    ]
    for estimator, optimizer in few:
        tx = optimizers[optimizer]()
        step = train.make_step(estimators[estimator](Losses()), tx)
        state = train.create(params(), tx, KEY)
        with pytest.raises(ValueError, match=MISSING[row, other]):
            jax.eval_shape(step, state, step_of(DIGITS, 0))
