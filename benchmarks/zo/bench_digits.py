"""Digits at equal forward passes: the estimators of zo, MeZO, evosax and backprop; into Muon."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from evosax.algorithms import Open_ES
from sklearn.datasets import load_digits

from benchmarks import harness
from benchmarks.mlp import MLP
from benchmarks.zo import training
from jaxkit import spectral, train, zo


class Size(NamedTuple):
    """``probes`` two-sided probes a step, ``few`` in the comparison of optimizers."""

    steps: int
    batch: int
    probes: int
    few: int

    def __str__(self):
        return f"MLP 64-128-64-10, batch {self.batch}, {self.steps} steps"


SIZES = {"smoke": Size(5, 8, 2, 1), "short": Size(100, 64, 8, 4), "full": Size(1000, 64, 8, 4)}
SEEDS = {"smoke": (1, 2), "short": range(1, 6), "full": range(1, 11)}
TUNE_SEEDS = (1001, 1002)  # never reported
MU = 1e-2
NODE, MEZO, BACKPROP = "node, per example", "isotropic (MeZO)", "backprop"
MISMATCHED, OPEN_ES = "isotropic, two batches", "evosax Open_ES"
DIRECTIONS = {
    "SZO -1/4, corrected": zo.activation(-0.25, corrected=True),
    "SZO 1/2, centered": zo.activation(0.5),
    "low rank 1": zo.low_rank(1),
    MEZO: zo.gaussian(),
}
OURS = (NODE, *list(DIRECTIONS)[:3])
METHODS = (NODE, *DIRECTIONS, MISMATCHED, OPEN_ES, BACKPROP)
INTO = " into "
FEW_OURS = f"{NODE}{INTO}Muon"
FEW_METHODS = (
    FEW_OURS,
    *(f"{NODE}{INTO}Adam", f"{MEZO}{INTO}Muon", f"{MEZO}{INTO}Adam", f"{BACKPROP}{INTO}Muon"),
)
# The programs take long to compile, so only the full form has all.
LONG = ("SZO 1/2, centered", *FEW_METHODS[1:4])
LEFT_OUT = {"full": (), "short": LONG, "smoke": (*LONG, "low rank 1", MISMATCHED, FEW_METHODS[4])}
GRID = (3e-3, 1e-2, 3e-2, 1e-1)
GRIDS = dict.fromkeys((*METHODS, *FEW_METHODS), GRID)
WIDTHS = 128, 64, 10


def run(context):
    size, seeds = SIZES[context.form], SEEDS[context.form]
    used = [name for name in GRIDS if name not in LEFT_OUT[context.form]]
    rates = {name: np.repeat(training.rate_of(context, name), len(seeds)) for name in used}
    found = _race(size, rates, seeds, context.track, context.dtype)
    for case, ours, names, probes in (
        ("digits", OURS, METHODS, size.probes),
        ("digits, into Muon", (FEW_OURS,), [*FEW_METHODS, BACKPROP], size.few),
    ):
        about = {"case": case, "seeds": seeds}
        about["size"] = f"{size}, {2 * probes} forward passes, node and SZO one more"
        names = [name for name in names if name in found]
        ours = [name for name in ours if name in found]
        losses = {name: found[name]["loss"] for name in names}
        yield from harness.versus(
            ours, losses, **about, metric="validation loss", unit="nats", better="down"
        )
        accuracies = {name: found[name]["accuracy"] for name in names}
        yield from harness.versus(
            ours[:1], accuracies, **about, metric="validation accuracy", unit="1", better="up"
        )
        for name in names:
            yield harness.loss_curve(case, name, found[name]["train"], "nats")


def tune(context):
    size = SIZES[context.form]
    return training.search(
        lambda rates, seeds: _race(size, rates, seeds, context.track),
        GRIDS,
        TUNE_SEEDS,
        lambda result: result["loss"],
        criterion="lowest mean validation loss, nats, after the last step",
        size=str(size),
    )


def steps(context):
    """Yields the steps of all methods that are estimators, ours and MeZO first."""
    size, model = SIZES[context.form], MLP(WIDTHS, dtype=context.dtype)
    batch = [jnp.asarray(z[: size.batch]) for z in _digits()]
    params = model.init(jax.random.key(0), batch[0])
    for name in dict.fromkeys((NODE, MEZO, *GRIDS)):
        if name not in (OPEN_ES, MISMATCHED):  # of these one is none, the other takes two batches
            estimator, make = _parts(model, size, name)
            rate, more = training.rate_of(context, name), (params, tuple(batch), size.batch)
            yield training.step_of(name, estimator, make, rate, size.steps, *more)


def _digits():
    x, y = load_digits(return_X_y=True)
    return (x / 16).astype(np.float32), y.astype(np.int32)


def _race(size, rates, seeds, track, dtype=None):
    """Trains with each method in runs of ``rates[method]`` and ``seeds``, all from equal starts."""
    x, y = _digits()
    order = np.random.default_rng(0).permutation(len(x))
    held_out, kept = np.split(order, [len(x) // 4])
    draws = np.stack(
        [
            np.random.default_rng(seed).integers(len(kept), size=(size.steps, 2, size.batch))
            for seed in seeds
        ]
    )
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    model = MLP(WIDTHS, dtype=dtype)
    start = jax.jit(jax.vmap(model.init, (0, None)))(keys, x[:1])
    evaluate = jax.jit(jax.vmap(functools.partial(_evaluate, model), (0, None, None)))

    def call(name):
        run = _runner(model, size, name)
        batches = x[kept][draws], y[kept][draws]
        if name != MISMATCHED:
            batches = jax.tree.map(lambda leaf: leaf[:, :, 0], batches)
        runs = start, keys, jnp.asarray(rates[name], jnp.float32), batches
        params, losses = training.side_by_side(run, runs, in_turn=name.startswith("SZO"))
        return {"train": losses} | evaluate(params, x[held_out], y[held_out])

    return harness.in_pairs({name: functools.partial(call, name) for name in rates}, track)


def _evaluate(model, params, x, y):
    accuracy = jnp.mean(jnp.argmax(model.apply(params, x), -1) == y)
    return {"loss": _loss(model, params, (x, y), None).mean(), "accuracy": accuracy}


def _loss(model, params, batch, key):
    """Returns the loss of each example."""
    del key
    x, y = batch
    logits = model.apply(params, x)
    return optax.losses.softmax_cross_entropy_with_integer_labels(logits, y)


def _runner(model, size, name):
    """Returns what :func:`training.runner` does, for the method ``name``."""
    if name == OPEN_ES:
        return _open_es(model, functools.partial(_mean_loss, model), size)
    return training.runner(*_parts(model, size, name), size.steps)


def _mean_loss(model, *args):
    return _loss(model, *args).mean()


def _parts(model, size, name):
    """Returns the estimator of a method, and what makes its optimizer of a rate."""
    losses, mean_loss = (functools.partial(fun, model) for fun in (_loss, _mean_loss))
    base, _, optimizer = name.partition(INTO)
    options = {"num_samples": size.few if optimizer else size.probes, "mu": MU}
    if base == BACKPROP:
        estimator = train.backprop(mean_loss)
    elif base == MISMATCHED:
        estimator = _mismatched(mean_loss, options)
    elif base == NODE:
        estimator = zo.gradient_estimator(losses, direction=zo.node(), per_example=True, **options)
    else:
        estimator = zo.gradient_estimator(mean_loss, direction=DIRECTIONS[base], **options)
    return estimator, _muon if optimizer == "Muon" else optax.adam


def _muon(learning_rate):
    return spectral.muon(learning_rate, b1=0.9, nesterov=False)


def _mismatched(loss_fn, options):
    """Returns the estimator whose second call of each pair sees another batch."""
    run = zo.value_and_zo_grad(loss_fn, matched=False, **options)

    def estimator(key, params, opt_state, batches):
        del opt_state
        first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], batches) for i in (0, 1))
        value, grads = run(key, params, first, None, args_minus=(second, None))
        return train.Estimate(value, grads, None, {})

    return estimator


def _open_es(model, loss_fn, size):
    """Returns the runs of evosax; all members of a generation see the same batch."""
    template = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape),
        jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 64))),
    )
    strategy = Open_ES(
        2 * size.probes,
        template,
        optimizer=training.decayed(optax.adam, size.steps),
        std_schedule=optax.constant_schedule(MU),
    )
    options = strategy.default_params

    def run(params, key, rate, batches):
        state = strategy.init(key, params, options)
        state = state.replace(opt_state=training.with_rate(state.opt_state, rate))

        def step(state, x):
            key, batch = x
            members, state = strategy.ask(key, state, options)
            losses = jax.vmap(loss_fn, (0, None, None))(members, batch, None)
            return strategy.tell(key, members, losses, state, options)[0], losses.mean()

        state, losses = jax.lax.scan(step, state, (jax.random.split(key, size.steps), batches))
        return strategy.get_mean(state), losses

    return run
