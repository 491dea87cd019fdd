"""Time and memory of a denoised step against plain gradients, and of a private one."""

import jax
import jax.numpy as jnp
import optax

from benchmarks import harness, lm
from benchmarks.denoise import bench_private, training
from jaxkit import denoise, train

# Width, layers, context and batch of the decoder.
SIZES = {"smoke": (16, 1, 8, 2), "short": (128, 2, 64, 8), "full": (256, 4, 128, 32)}
ROUNDS = {"smoke": 1, "short": 9, "full": 21}
PRIVATE = {"smoke": bench_private.Size(1, 16, ()), "short": bench_private.SIZES["full"]}
PRIVATE["full"] = PRIVATE["short"]
OURS = "denoise.private_gradient_estimator"


def run(context):
    form = context.form
    for order in context.track([2] if form == "smoke" else [2, 3]):
        yield from _order(form, order)
    for _ in context.track([] if form == "smoke" else ["private"]):
        yield from _private(form)


def _order(form, order):
    """Compares with the plain gradients that the order needs, each of a whole batch."""
    width, layers, context, batch = SIZES[form]
    loss_fn, params, windows = lm.one_batch(*SIZES[form])
    backprop, adamw, plain = train.backprop(loss_fn), optax.adamw(1e-3), order - 1
    gradients = backprop if plain == 1 else train.accumulate(backprop, plain)
    tx = optax.chain(denoise.denoise(0.1, order=order), adamw)
    name, rival = f"denoise, order {order}", f"{plain} plain gradient{'s' if plain > 1 else ''}"
    key = jax.random.key(0)
    calls = {
        name: (
            train.make_step(denoise.gradient_estimator(backprop), tx),
            train.create(params, tx, key),
            windows,
        ),
        rival: (
            train.make_step(gradients, adamw),
            train.create(params, adamw, key),
            jnp.concatenate([windows] * plain),
        ),
    }
    numbers = sum(x.size for x in jax.tree.leaves(params)) / 1e6
    size = f"{layers} x {width}, {batch} x {context}, {numbers:.2g} M parameters, AdamW"
    yield from _compared(calls, (name,), "one step", size, ROUNDS[form])


def _private(form):
    """Compares steps of SGD with the clipped gradients of as many examples."""
    size = PRIVATE[form]
    parts = training.digits_rows()
    batch = denoise.Padded(
        jax.tree.map(lambda x: x[: size.batch], parts[0]), jnp.ones(size.batch, bool)
    )
    task = training.images(parts, (32, 10), training.uniform(size.batch))
    settings = {name: jnp.float32(x) for name, x in {"noise": 2, "gain": 0.1, "seed": 0}.items()}
    key, calls = jax.random.key(0), {}
    for name, method in {
        OURS: bench_private.ours(size, bench_private.SGD, bench_private.RAW),
        bench_private.DPSGD: bench_private.with_dpsgd(size),
        bench_private.JAX_PRIVACY: bench_private.with_jax_privacy(size),
    }.items():
        tx = method.optimizer(0.1, settings)
        step = train.make_step(method.estimator(task.loss_fn, settings), tx)
        calls[name] = step, train.create(task.start(key), tx, key), batch
    yield from _compared(calls, (OURS,), "one private step", str(size), ROUNDS[form])


def _compared(calls, ours, case, size, rounds):
    measured = harness.measure(calls, rounds=rounds, compiles=1)
    about = {"case": case, "size": size, "better": "down"}
    times = {name: [1e3 * s for s in result.run_s] for name, result in measured.items()}
    yield from harness.versus(
        ours, times, **about, metric="run time", unit="ms", seeds=range(rounds)
    )
    memory = {name: [result.temp_bytes / 1e6] for name, result in measured.items()}
    yield from harness.versus(ours, memory, **about, metric="temporary memory", unit="MB")
