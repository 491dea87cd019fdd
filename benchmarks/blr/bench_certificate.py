"""How many predictions of a linear classifier hold for every draw of a bounded posterior."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import harness
from benchmarks.blr import bench_classify, tasks
from jaxkit import blr

ALPHA = 5.0
STRENGTHS = (1.0, 16.0, 64.0)  # ess in units of the number of examples
SEEDS = {"smoke": (1, 2), "short": range(1, 13), "full": range(1, 25)}
DRAWS = {"smoke": 10, "short": 4000, "full": 4000}
OURS, RIVAL = f"alpha {ALPHA:g}", "alpha 1 (IVON)"
SETTINGS = {"learning_rate": 0.3, "weight_decay": 1e-3}


def run(context):
    size, seeds = bench_classify.SIZES[context.form], SEEDS[context.form]
    task = tasks.TASKS[bench_classify.BREAST]
    data = tasks.stacked(task.make, seeds)
    keys = jnp.stack([jax.random.key(seed) for seed in seeds])
    model = task.model.clone(dtype=context.dtype)
    one = functools.partial(_certified, model, size, DRAWS[context.form])
    one = jax.jit(jax.vmap(one, (0, 0, None, None)))
    for strength in context.track(STRENGTHS):
        found = {
            name: jax.tree.map(np.asarray, one(keys, data, strength, alpha))
            for name, alpha in ((OURS, ALPHA), (RIVAL, 1.0))
        }
        about = {"case": "certificates on breast cancer", "seeds": seeds}
        about["size"] = f"ess {strength:g} times the examples, {DRAWS[context.form]} draws"
        for key, metric, better in (
            ("share", "share of test rows certified", "up"),
            ("violations", "draws that break a certificate", "down"),
        ):
            values = {name: result[key] for name, result in found.items()}
            yield from harness.versus(
                (OURS,), values, **about, metric=metric, unit="1", better=better
            )
        names = {"accuracy": f"{OURS}, certified rows", "plain": f"{OURS}, all rows"}
        values = {names[key]: found[OURS][key] for key in names}
        yield from harness.versus(
            (names["accuracy"],), values, **about, metric="accuracy", unit="1", better="up"
        )


def steps(context):
    size = bench_classify.SIZES[context.form]
    for name, alpha in ((OURS, ALPHA), (RIVAL, 1.0)):
        settings = SETTINGS | {"ess": STRENGTHS[0], "alpha": alpha}
        yield bench_classify.step_of(
            name, "tsallis", bench_classify.BREAST, size, settings, context.dtype
        )


def _certified(model, size, draws, key, data, strength, alpha):
    """Trains, and certifies the rows whose class no parameters in the box change."""
    settings = SETTINGS | {"ess": strength, "alpha": alpha}
    start, training, sampling = jax.random.split(key, 3)
    x, y = data.test
    params = model.init(start, x[:1])
    trained = bench_classify.trained("tsallis", model, size, settings, data.train, params, training)
    params, state = trained.params, trained.opt_state
    low, high = blr.support_box(params, state)

    def margin(row):
        """The range of the difference of the logits over the box, linear in the parameters."""
        grads = jax.grad(lambda p: jnp.vdot(model.apply(p, row[None])[0], jnp.array([-1.0, 1.0])))
        return blr.linear_range(grads(params), low, high)

    least, most = jax.vmap(margin)(x)
    sure = (least > 0) | (most < 0)
    guess = jnp.where(least > 0, 1, 0)

    def broken(key):
        theta, _ = blr.sample_posterior(key, params, state)
        return jnp.sum(sure & (jnp.argmax(model.apply(theta, x), 1) != guess))

    violations = jnp.sum(jax.lax.map(broken, jax.random.split(sampling, draws), batch_size=50))
    return {
        "share": jnp.mean(sure),
        "violations": violations,
        "accuracy": jnp.sum(sure & (guess == y)) / jnp.sum(sure),
        "plain": jnp.mean(jnp.argmax(model.apply(params, x), 1) == y),
    }
