"""The matrix: each estimator with each optimizer on one small real problem.

A new estimator or optimizer is one line in its table. Each estimator meets the optimizers in
``FEW_OPTIMIZERS``, each optimizer the estimators in ``FEW_ESTIMATORS``; the rest of the product is
marked slow. Estimators around a posterior meet the optimizers that keep one, and no others.
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
    cross_entropy,
    digits,
    jit_as_by_default,
    step_of,
)

from jaxkit import blr, spectral, train, zo

# name -> what takes a loss function and returns an estimator
ESTIMATORS = {
    "backprop": train.backprop,
    "accumulate": lambda loss_fn: train.accumulate(train.backprop(loss_fn), 2),
    "zo": lambda loss_fn: zo.gradient_estimator(
        loss_fn, num_samples=16, mu=0.01, direction=zo.rademacher()
    ),
}
# name -> what takes a loss function and returns an estimator that samples a posterior
BAYESIAN_ESTIMATORS = {
    "blr": lambda loss_fn: blr.gradient_estimator(train.backprop(loss_fn), num_samples=2),
    "accumulate_blr": lambda loss_fn: train.accumulate(
        blr.gradient_estimator(train.backprop(loss_fn)), 2
    ),
    "blr_accumulate": lambda loss_fn: blr.gradient_estimator(ESTIMATORS["accumulate"](loss_fn)),
    "blr_zo": lambda loss_fn: blr.gradient_estimator(ESTIMATORS["zo"](loss_fn)),
}
# name -> what returns an optimizer that keeps one
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
# Of forward passes alone 20 steps see little of 2,410 parameters, and losses that round differently
# are divided by mu.
LEFT = {"zo": 0.985, "blr_zo": 0.985}
ROUNDING = {"zo": 1e-3, "blr_zo": 1e-3}
FEW_ESTIMATORS = ("backprop", "accumulate")
FEW_OPTIMIZERS = ("sgd", "adamw")

KEY = jax.random.key(0)
DIGITS = digits(20, 64)


def pairs():
    """Returns the rows of the product, those outside the short list marked slow."""
    rows = []
    products = (
        itertools.product(ESTIMATORS, OPTIMIZERS),
        itertools.product(BAYESIAN_ESTIMATORS, BAYESIAN_OPTIMIZERS),
    )
    for estimator, optimizer in itertools.chain(*products):
        few = (
            estimator in FEW_ESTIMATORS
            or optimizer in FEW_OPTIMIZERS
            or (estimator, optimizer) == ("blr", "gblr")
        )
        marks = () if few else pytest.mark.slow
        rows.append(pytest.param(estimator, optimizer, id=f"{estimator}-{optimizer}", marks=marks))
    return rows


@functools.cache
def params():
    """Returns the parameters of a net with one hidden layer of 32."""
    rng = np.random.default_rng(0)

    def dense(rows, columns):
        kernel = rng.normal(size=(rows, columns)) / rows**0.5
        return {"kernel": np.float32(kernel), "bias": np.zeros(columns, np.float32)}

    return {"hidden": dense(64, 32), "out": dense(32, 10)}


def loss_fn(params, batch, key):
    images, labels = batch

    def dense(layer, x):
        return x @ layer["kernel"] + layer["bias"][None, :]

    logits = dense(params["out"], jax.nn.relu(dense(params["hidden"], images)))
    return cross_entropy(logits, labels), {"logits": jnp.mean(logits)}


class Run:
    """One pair of the matrix, with its 20 steps from one fit."""

    def __init__(self, estimator, optimizer):
        self.traces = []

        def counted(*args):
            self.traces.append(1)
            return loss_fn(*args)

        self.tx = {**OPTIMIZERS, **BAYESIAN_OPTIMIZERS}[optimizer]()
        make = {**ESTIMATORS, **BAYESIAN_ESTIMATORS}[estimator]
        self.step = train.make_step(make(counted), self.tx)
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
    before = len(case.traces)
    case.fit(state)
    assert len(case.traces) == before


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
    assert_close(got, (want.params, want_metrics["loss"]), ROUNDING.get(estimator, 1e-5))
