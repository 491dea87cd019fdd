"""Time and memory of a denoised step against plain gradients, and of a private one."""

import jax
import jax.numpy as jnp
import optax

from benchmarks import costs, harness, lm
from benchmarks.denoise import bench_private, training
from jaxkit import denoise, train

# Width, layers, context and batch of the decoder.
SIZES = {"smoke": (16, 1, 8, 2), "short": (128, 2, 64, 8), "full": (256, 4, 128, 32)}
ROUNDS = {"smoke": 1, "short": 7, "full": 21}
PRIVATE = {"smoke": bench_private.Size(1, 16, ()), "short": bench_private.SIZES["full"]}
PRIVATE["full"] = PRIVATE["short"]
OURS = "denoise.private_gradient_estimator"


def run(context):
    form = context.form
    for order in context.track([2] if form == "smoke" else [2, 3]):
        width, layers, length, batch = SIZES[form]
        found = list(_order(context, order))
        numbers = sum(x.size for x in jax.tree.leaves(found[0].args[0].params)) / 1e6
        size = f"{layers} x {width}, {batch} x {length}, {numbers:.2g} M parameters, AdamW"
        yield from _compared(found, "one step", size, ROUNDS[form])
    for _ in context.track([] if form == "smoke" else ["private"]):
        found = list(_private(context))
        yield from _compared(found, "one private step", str(PRIVATE[form]), ROUNDS[form])


def steps(context):
    yield from _order(context, 2)
    yield from _order(context, 3)
    yield from _private(context)


def _order(context, order):
    """Yields a step and its rival: the plain gradients that the order needs, of a whole batch."""
    *_, length, batch = SIZES[context.form]
    loss_fn, params, windows = lm.one_batch(*SIZES[context.form], context.dtype)
    backprop, adamw, plain = train.backprop(loss_fn), optax.adamw(1e-3), order - 1
    gradients = backprop if plain == 1 else train.accumulate(backprop, plain)
    tx = optax.chain(denoise.denoise(0.1, order=order), adamw)
    name, rival = f"denoise, order {order}", f"{plain} plain gradient{'s' if plain > 1 else ''}"
    tokens = length * batch
    yield costs.training_step(
        name, denoise.gradient_estimator(backprop), tx, params, windows, tokens
    )
    windows = jnp.concatenate([windows] * plain)
    yield costs.training_step(rival, gradients, adamw, params, windows, plain * tokens)


def _private(context):
    """Yields steps of SGD with the clipped gradients of as many examples, ours first."""
    size = PRIVATE[context.form]
    parts = training.digits_rows()
    batch = denoise.Padded(
        jax.tree.map(lambda x: x[: size.batch], parts[0]), jnp.ones(size.batch, bool)
    )
    task = training.images(parts, (32, 10), lambda key, rows: batch, dtype=context.dtype)
    settings = {"learning_rate": 0.1, "noise": 2.0, "gain": 0.1}
    for name, method in {
        OURS: bench_private.ours(size, bench_private.SGD, bench_private.RAW),
        bench_private.DPSGD: bench_private.with_dpsgd(size),
        bench_private.JAX_PRIVACY: bench_private.with_jax_privacy(size),
    }.items():
        yield training.step_of(name, task, method, settings, size.batch)


def _compared(steps, case, size, rounds):
    calls = {step.method: (step.fun, *step.args) for step in steps}
    measured = harness.measure(calls, rounds=rounds, compiles=0)
    ours = (steps[0].method,)
    about = {"case": case, "size": size, "better": "down"}
    times = {name: [1e3 * s for s in result.run_s] for name, result in measured.items()}
    yield from harness.versus(
        ours, times, **about, metric="run time", unit="ms", seeds=range(rounds)
    )
    memory = {name: [result.temp_bytes / 1e6] for name, result in measured.items()}
    yield from harness.versus(ours, memory, **about, metric="temporary memory", unit="MB")
