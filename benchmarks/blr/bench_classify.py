"""Posteriors on small classifiers: likelihood, calibration and unseen classes, and certificates."""

import concurrent.futures
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from blackjax.vi import meanfield_vi

from benchmarks import costs, harness, tuning
from benchmarks.blr import images, tasks
from jaxkit import blr, train

READS_DATA = True


class Size(NamedTuple):
    """Steps of training, examples a step, and samples of a prediction."""

    steps: int
    batch: int
    samples: int

    def __str__(self):
        return f"{self.steps} steps, batch {self.batch}, {self.samples} samples"


SIZES = {"smoke": Size(5, 8, 2), "short": Size(600, 64, 32), "full": Size(3000, 64, 64)}
SEEDS = {"smoke": (1, 2), "short": range(1, 13), "full": range(1, 25)}
TUNE_SEEDS = (1001, 1002, 1003, 1004, 1005, 1006)  # never reported
ENSEMBLE = 5
AT_ONCE = 8  # runs on real images, whose predictions take memory
ADAMW, VI, NETS = "optax.adamw", "blackjax mean-field VI", "5 nets of optax.adamw"
OURS = {"alpha 1 (IVON)": (1.0, "tsallis"), "alpha 2": (2.0, "tsallis")}
OURS["alpha 2, logdet"] = 2.0, "logdet"
LONG = ("alpha 2, logdet",)  # a program of its own: in the full form only
BREAST, DIGITS = tasks.TASKS
LITTLE, MUCH = (1e-5, 1e-4, 1e-3, 1e-2), (1e-4, 1e-3, 1e-2, 1e-1)
# The decay of AdamW is multiplied by the learning rate.
SOME, MOST = (0.01, 0.1, 1.0, 10.0), (0.1, 1.0, 10.0, 100.0)


def _grid(rates, decays, **third):
    """Returns a grid of three settings; ess is in units of the number of examples."""
    return {"learning_rate": rates, "weight_decay": decays, **third}


GRIDS = {
    BREAST: {
        **dict.fromkeys(
            OURS, _grid((0.01, 0.03, 0.1, 0.3), LITTLE, ess=(1.0, 16.0, 256.0, 4096.0))
        ),
        ADAMW: _grid((1e-3, 3e-3, 1e-2, 3e-2), SOME, b2=(0.5, 0.8, 0.9, 0.99)),
        VI: _grid((1e-3, 3e-3, 1e-2, 3e-2), LITTLE, ess=(1.0, 16.0, 256.0, 4096.0)),
    },
    DIGITS: {
        **dict.fromkeys(OURS, _grid((0.03, 0.1, 0.3, 1.0), MUCH, ess=(1.0, 4.0, 16.0, 64.0))),
        ADAMW: _grid((1e-3, 3e-3, 1e-2, 3e-2), MOST, b2=(0.99, 0.999, 0.9999, 0.99999)),
        VI: _grid((0.01, 0.03, 0.1, 0.3), MUCH, ess=(4.0, 16.0, 64.0, 256.0)),
    },
}
METRICS = {
    "nll": ("test loss", "nats", "down"),
    "accuracy": ("test accuracy", "1", "up"),
    "calibration error": ("calibration error", "1", "down"),
    "AUROC of unseen classes": ("AUROC of unseen classes", "1", "up"),
}


def run(context):
    size, seeds = SIZES[context.form], SEEDS[context.form]
    real = images.found(context.data) if context.data else {}
    names = [DIGITS] if context.form == "smoke" else [BREAST, DIGITS]
    for name in context.track([*names, *real]):
        left_out = () if context.form == "full" else LONG
        task, tuned = (tasks.TASKS | real)[name], name
        task = task._replace(model=task.model.clone(dtype=context.dtype))
        if name in real and f"{name}: {ADAMW}" not in context.settings["methods"]:
            context.note(f"{name}: with the settings of {DIGITS}; --tune --data makes its own.")
            tuned = DIGITS
        methods = [method for method in (*_grids(name), NETS) if method not in left_out]
        data = task.make() if name in real else tasks.stacked(task.make, seeds)

        def race(method, name=name, tuned=tuned, task=task, data=data):
            chosen = tuning.chosen(context, f"{tuned}: {ADAMW if method == NETS else method}")
            return _race(task, size, method, seeds, [chosen] * len(seeds), data, name in real)

        with concurrent.futures.ThreadPoolExecutor(2) as pool:  # compiling takes one core
            found = dict(zip(methods, pool.map(race, methods), strict=True))
        about = {"case": name, "size": str(size), "seeds": seeds}
        for key, (metric, unit, better) in METRICS.items():
            if key in found[ADAMW]:
                values = {method: result[key] for method, result in found.items()}
                ours = [x for x in OURS if x in found] if key == "nll" else ["alpha 2"]
                values = {x: v for x, v in values.items() if x in ours or x not in OURS}
                yield from harness.versus(
                    ours, values, **about, metric=metric, unit=unit, better=better
                )


def steps(context):
    """Yields the steps on digits of a posterior and of AdamW."""
    for name, kind, more in (("alpha 2", "tsallis", {"alpha": 2.0}), (ADAMW, ADAMW, {})):
        settings = tuning.chosen(context, f"{DIGITS}: {name}") | more
        yield step_of(name, kind, DIGITS, SIZES[context.form], settings, context.dtype)


def step_of(name, kind, task, size, settings, dtype):
    """Returns one step on the task of a name."""
    data, model = tasks.TASKS[task].make(0).train, tasks.TASKS[task].model.clone(dtype=dtype)
    batch = _batch(size, jax.random.key(0), jax.tree.map(jnp.asarray, data))
    params = model.init(jax.random.key(0), batch[0][:1])
    estimator, tx = _parts(kind, model, size, settings, len(data[0]))
    return costs.training_step(name, estimator, tx, params, batch, size.batch)


def tune(context):
    """Searches the settings of every method on every task, by the loss on the validation rows."""
    size = SIZES[context.form]
    real = images.found(context.data) if context.data else {}
    known = tasks.TASKS | real
    grids = {f"{name}: {method}": grid for name in known for method, grid in _grids(name).items()}
    labels = iter(context.track(list(grids)))
    make = {name: functools.cache(task.make) for name, task in known.items()}

    def race(label, settings, seeds):
        next(labels)
        name, method = label.rsplit(": ", 1)
        data = make[name]() if name in real else tasks.stacked(make[name], seeds)
        found = _race(known[name], size, method, seeds, settings, data, name in real)
        return found["validation"]

    return tuning.search(
        race,
        grids,
        TUNE_SEEDS,
        criterion="lowest mean validation loss, nats, after the last step",
        size=str(size),
    )


def _grids(name):
    """Returns the grids of a task; those of the digits are for real images too."""
    return GRIDS.get(name, GRIDS[DIGITS])


def _race(task, size, method, seeds, settings, data, is_shared):
    """Returns ``{metric: [runs]}``; run i has its own seed, settings and, if not shared, data."""
    kind = method
    if method in OURS:
        alpha, kind = OURS[method]
        settings = [{**x, "alpha": alpha} for x in settings]
    settings = jax.tree.map(lambda *x: jnp.asarray(x, jnp.float32), *settings)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    program = _program(task.model, size, kind, is_shared)
    return jax.tree.map(np.asarray, program(keys, settings, data))


@functools.cache
def _program(model, size, kind, is_shared):
    """Returns the compiled run over many seeds, settings and splits; alpha is one of these."""
    one = functools.partial(_one, model, size, kind)

    def few_at_once(keys, settings, data):
        def run(own):
            return one(*own, data)

        return jax.lax.map(run, (keys, settings), batch_size=AT_ONCE)

    return jax.jit(few_at_once if is_shared else jax.vmap(one))


def _one(model, size, kind, key, settings, data):
    """Trains once, and returns what the predictions are worth."""
    if kind == NETS:
        keys = jax.random.split(key, ENSEMBLE)
        all_log_probs = jax.lax.map(
            lambda key: _log_probs(model, size, ADAMW, key, settings, data), keys
        )
        log_probs = jax.tree.map(
            lambda x: jax.nn.logsumexp(x, axis=0) - jnp.log(float(ENSEMBLE)), all_log_probs
        )
    else:
        log_probs = _log_probs(model, size, kind, key, settings, data)
    validation, test, outside = log_probs
    found = tasks.judge(test, data.test[1], outside)
    found["validation"] = tasks.negative_log_likelihood(validation, data.validation[1])
    return found


def _log_probs(model, size, kind, key, settings, data):
    """Returns the predicted log-probabilities of the rows for validation, test, and outside."""
    start, training, prediction = jax.random.split(key, 3)
    params = model.init(start, data.train[0][:1])
    fit = {ADAMW: _adamw, VI: _vi}.get(kind) or functools.partial(_gblr, kind)
    predict = fit(model, size, settings, data.train, params, training)
    sides = data.validation[0], data.test[0], data.outside
    return tuple(predict(prediction, side) for side in sides)


def _batch(size, key, data):
    rows = jax.random.randint(key, (size.batch,), 0, len(data[0]))
    return jax.tree.map(lambda x: x[rows], data)


def _adamw(model, size, settings, data, params, key):
    state = trained(ADAMW, model, size, settings, data, params, key)
    return lambda key, x: jax.nn.log_softmax(model.apply(state.params, x))


def _gblr(geometry, model, size, settings, data, params, key):
    state = trained(geometry, model, size, settings, data, params, key)

    def predict(key, x):
        return blr.predictive_log_probs(
            model.apply, key, state.params, state.opt_state, x, size.samples
        )

    return predict


def trained(kind, model, size, settings, data, params, key):
    """Returns the training state after all steps."""
    estimator, tx = _parts(kind, model, size, settings, len(data[0]))
    step = train.make_step(estimator, tx)
    own, drawing = jax.random.split(key)

    def one(state, key):
        return step(state, _batch(size, key, data))[0], None

    keys = jax.random.split(drawing, size.steps)
    return jax.lax.scan(one, train.create(params, tx, own), keys)[0]


def _parts(kind, model, size, settings, total):
    """Returns estimator and optimizer of AdamW, or of a posterior by its geometry, one sample."""
    estimator = train.backprop(functools.partial(_loss_fn, model))
    rate = _falling(settings["learning_rate"], size.steps)
    decay = settings["weight_decay"]
    if kind == ADAMW:
        return estimator, optax.adamw(rate, b2=settings["b2"], weight_decay=decay)
    tx = blr.gblr(
        rate,
        ess=settings["ess"] * total,
        weight_decay=decay,
        alpha=settings["alpha"],
        geometry=kind,
        b2=0.99,
    )
    return blr.gradient_estimator(estimator), tx


def _loss_fn(model, params, batch, key):
    del key
    return tasks.loss_fn(model, params, batch)


def _vi(model, size, settings, data, params, key):
    """Fits with one sample a step, as ours; the prior and the loss weigh as there."""
    ess = settings["ess"] * len(data[0])
    optimizer = optax.adam(_falling(settings["learning_rate"], size.steps))
    state = meanfield_vi.init(params, optimizer)._replace(mu=params)

    def step(state, key):
        draw, key = jax.random.split(key)
        drawn = _batch(size, draw, data)

        def log_density(params):
            square = sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(params))
            loss = tasks.loss_fn(model, params, drawn)
            return -ess * (loss + settings["weight_decay"] * square / 2)

        return meanfield_vi.step(key, state, log_density, optimizer, num_samples=1)[0], None

    state, _ = jax.lax.scan(step, state, jax.random.split(key, size.steps))

    def predict(key, x):
        samples = meanfield_vi.sample(key, state, size.samples)
        log_probs = jax.nn.log_softmax(jax.vmap(model.apply, (0, None))(samples, x))
        return jax.nn.logsumexp(log_probs, axis=0) - jnp.log(float(size.samples))

    return predict


def _falling(rate, steps):
    """Returns the schedule that falls linearly from ``rate``, which may be traced, to zero."""
    return lambda step: rate * (1 - step / steps)
