"""Time of a step with a posterior against AdamW and the noise alone, and of the noise itself."""

import functools

import jax
import optax

from benchmarks import costs, harness, lm
from benchmarks.blr import tasks
from jaxkit import blr, train

ON_REQUEST = True

# Width, layers, context and batch of the decoder.
SIZES = {"smoke": (16, 1, 8, 2), "short": (128, 2, 64, 8), "full": (256, 4, 128, 32)}
DRAWS = {"smoke": 1000, "short": 200_000, "full": 20_000_000}
ROUNDS = {"smoke": 1, "short": 7, "full": 21}
SMOKE = ("the text model", "the noise")
OURS = "blr.gblr, alpha 2"  # alpha is a number in the state: others take the same program
ADAMW, FLOOR = "optax.adamw", "optax.adamw and two uniforms a parameter"


def run(context):
    parts = {"the text model": _text_model, "the classifier": _classifier, "the noise": _noise}
    for name in context.track([x for x in parts if context.form != "smoke" or x in SMOKE]):
        yield from parts[name](context)


def steps(context):
    """Yields the steps of the text model."""
    _, _, length, batch = SIZES[context.form]
    yield from _steps(*lm.one_batch(*SIZES[context.form], context.dtype), length * batch)


def _text_model(context):
    width, layers, length, batch = SIZES[context.form]
    size = f"{layers} x {width}, {batch} x {length}"
    yield from _compared(list(steps(context)), context.form, size)


def _classifier(context):
    task = tasks.TASKS[list(tasks.TASKS)[1]]
    model, (x, y) = task.model.clone(dtype=context.dtype), task.make(0).train
    params = model.init(jax.random.key(0), x[:1])

    def loss_fn(params, batch, key):
        del key
        return tasks.loss_fn(model, params, batch)

    found = _steps(loss_fn, params, (x[:64], y[:64]), 64)
    yield from _compared(list(found), context.form, "MLP 64-64-8, batch 64")


def _steps(loss_fn, params, batch, tokens):
    estimator = train.backprop(loss_fn)
    for name, inner, tx in (
        (OURS, blr.gradient_estimator(estimator), blr.gblr(0.1, ess=1e4, alpha=2)),
        (ADAMW, estimator, optax.adamw(1e-3)),
    ):
        yield costs.training_step(name, inner, tx, params, batch, tokens)


def _compared(steps, form, size):
    calls = {step.method: (step.fun, *step.args) for step in steps}
    step, state, batch = calls[ADAMW]
    calls[FLOOR] = (functools.partial(_with_uniforms, step), state, batch)
    rounds, params = ROUNDS[form], state.params
    measured = harness.measure(calls, rounds=rounds, compiles=0)
    numbers = sum(x.size for x in jax.tree.leaves(params))
    about = {"case": "one step", "size": f"{size}, {numbers / 1e6:.2g} M parameters"}
    times = {name: [1e3 * s for s in result.run_s] for name, result in measured.items()}
    yield from harness.versus(
        (OURS,), times, **about, metric="run time", unit="ms", better="down", seeds=range(rounds)
    )
    memory = {name: [result.temp_bytes / 1e6] for name, result in measured.items()}
    yield from harness.versus(
        (OURS,), memory, **about, metric="temporary memory", unit="MB", better="down"
    )


def _with_uniforms(step, state, batch):
    """Takes a step, and makes the numbers that no noise can do without."""
    leaves, treedef = jax.tree.flatten(state.params)
    drawn = [
        jax.random.uniform(jax.random.fold_in(state.key, i), (2, *x.shape)).sum(0)
        for i, x in enumerate(leaves)
    ]
    return step(state, batch), treedef.unflatten(drawn)


def _noise(context):
    form = context.form
    size, rounds, key = (DRAWS[form],), ROUNDS[form], jax.random.key(0)
    draws = {
        "alpha 2": lambda key: blr.q_gaussian_noise(key, size, 2.0),
        "alpha 0.8": lambda key: blr.q_gaussian_noise(key, size, 0.8),
        "jax.random.normal": lambda key: jax.random.normal(key, size),
        "jax.random.t": lambda key: jax.random.t(key, 9.0, size),  # alpha 0.8 in one dimension
    }
    measured = harness.measure({n: (f, key) for n, f in draws.items()}, rounds=rounds, compiles=0)
    times = {name: [1e3 * s for s in result.run_s] for name, result in measured.items()}
    about = {"case": "blr.q_gaussian_noise", "size": f"{size[0]} numbers", "seeds": range(rounds)}
    yield from harness.versus(
        ("alpha 2", "alpha 0.8"), times, **about, metric="run time", unit="ms", better="down"
    )
