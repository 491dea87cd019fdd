"""The training steps of all benchmarks: where they lower, in which dtype they learn, their cost."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from benchmarks import catalog, costs, harness, lm, report
from benchmarks.scale import bench_steps, layouts
from jaxkit import train

TRAINING = bench_steps.benchmarks()
CONTEXT = harness.Context("smoke", {}, None, iter, lambda line: None)
# Form and number of steps. The rates of these fall to zero over the steps of a form, few in smoke.
LEARN = dict.fromkeys(TRAINING, ("smoke", 40))
LEARN |= dict.fromkeys(("blr.certificate", "blr.classify", "blr.text"), ("short", 40))
LEARN |= {"zo.bandit": ("short", 100), "zo.digits": ("short", 100), "zo.finetune": ("short", 20)}
pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated"),  # in jax_privacy
]


def exported(fun, *args):
    """Returns the text of the program for TPUs and for NVIDIA's GPUs."""
    return jax.export.export(jax.jit(fun), platforms=["tpu", "cuda"])(*args).mlir_module()


def test_every_benchmark_that_trains_has_steps():
    """What has settings to tune trains; so do the comparisons of steps and of layouts."""
    tuned = {name for name in catalog.discover() if hasattr(catalog.load(name), "tune")}
    assert tuned < set(TRAINING)
    named = {"blr.step", "denoise.step", "zo.step", "scale.layouts", "scale.processes"}
    assert named < set(TRAINING)


@pytest.mark.parametrize("name", TRAINING)
def test_step_lowers_for_tpu_and_cuda(name):
    """The step of each method is a program for both, and calls nothing on the host."""
    found = list(bench_steps.steps_of(name, CONTEXT))
    assert len(found) >= 2
    for step in found:
        text = exported(step.fun, *step.args)
        assert "callback" not in text
        assert "bf16" not in text
        assert step.tokens > 0


@pytest.mark.parametrize("kind", layouts.KINDS)
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
def test_step_on_a_mesh_lowers_for_tpu_and_cuda(layout, kind):
    """So does the step on eight devices, in each layout and kind of axes."""
    run = layouts.on_mesh(layouts.Size(16, 1, 8, 16, 1), layout, kind)
    assert "sharding" in exported(run.step, run.state, run.windows[0])


def descent(step, turns):
    """Returns the state after ``turns`` steps on one batch, and the loss of each."""
    state, *rest = step.args
    losses = []
    fun = jax.jit(step.fun)
    for _ in range(turns):
        state, metrics = fun(state, *rest)
        losses.append(float(metrics["loss"]))
    return state, losses


@pytest.mark.parametrize("name", [name for name in TRAINING if name != "zo.step"])
def test_ours_learns_in_bf16_with_a_float32_state(name):
    """The first method computes in bf16, keeps its types, and its loss falls on one batch."""
    form, turns = LEARN[name]
    step = next(bench_steps.steps_of(name, CONTEXT._replace(form=form, dtype=jnp.bfloat16)))
    assert "bf16" in str(jax.make_jaxpr(step.model)(*step.args))
    state, losses = descent(step, turns)
    before, after = (jax.tree.map(lambda x: x.dtype, x) for x in (step.args[0], state))
    assert before == after
    floats = [x for x in jax.tree.leaves(after) if jnp.issubdtype(x, jnp.floating)]
    assert set(floats) == {np.dtype("float32")}
    assert np.mean(losses[-5:]) < losses[0] - 3 * np.std(losses[-5:])


def test_steps_without_a_state_compute_in_bf16():
    """Those of zo.step map parameters to parameters, which stay float32."""
    context = CONTEXT._replace(dtype=jnp.bfloat16)
    steps = bench_steps.steps_of("zo.step", context)
    for step in steps:
        assert "bf16" in str(jax.make_jaxpr(step.fun)(*step.args))
        params = jax.eval_shape(step.fun, *step.args)
        assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype("float32")}


# What is counted.


def test_products_are_counted_by_hand():
    """A product of [m, k] and [k, n] counts 2 m k n, with batches of it, in loops and branches."""
    x, y = jnp.ones((3, 5, 7)), jnp.ones((3, 7, 11))
    one = 2 * 3 * 5 * 7 * 11
    assert costs.matmul_flops(jnp.matmul, x, y) == one
    assert costs.matmul_flops(jax.jit(jnp.matmul), x, y) == one
    assert costs.matmul_flops(lambda x: x + 1, x) == 0

    def loop(x, y):
        return lax.scan(lambda c, _: (c + x @ y, None), jnp.zeros((3, 5, 11)), length=6)[0]

    def branch(x, y):
        zeros = jnp.zeros((3, 5, 11))
        return lax.cond(x[0, 0, 0] > 0, lambda: x @ y + x @ y, lambda: zeros)

    def turns(x, y):
        return lax.fori_loop(0, 4, lambda _, c: c + x @ y, jnp.zeros((3, 5, 11)))

    assert costs.matmul_flops(loop, x, y) == 6 * one
    assert costs.matmul_flops(branch, x, y) == 2 * one
    assert costs.matmul_flops(turns, x, y) == 4 * one


def test_loop_of_unknown_length_is_refused_only_with_products():
    """How often a while loop turns is not known before it has run."""
    x = jnp.ones((4, 4))

    def loop(body, x):
        return lax.while_loop(lambda c: c[0, 0] < 9, body, x)

    with pytest.raises(ValueError, match="known length"):
        costs.matmul_flops(functools.partial(loop, lambda c: c @ c), x)
    assert costs.matmul_flops(functools.partial(loop, lambda c: c + 1), x) == 0


@pytest.mark.parametrize(("strides", "groups"), [(1, 1), (2, 1), (1, 2)])
def test_convolutions_are_counted_as_xla_does(strides, groups):
    """XLA counts them too, forward and, but for the zeros of a dilated one, backward."""
    x, kernel = jnp.ones((2, 8, 8, 4)), jnp.ones((2, 2, 4 // groups, 6))

    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x,
            kernel,
            (strides, strides),
            "VALID",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
            feature_group_count=groups,
        )

    def by_xla(fun):
        return jax.jit(fun).lower(x, kernel).compile().cost_analysis()["flops"]

    assert costs.matmul_flops(convolve, x, kernel) == by_xla(convolve)
    side = 7 if strides == 1 else 4
    one = 2 * 2 * side * side * 6 * 4 * (4 // groups)
    assert costs.matmul_flops(convolve, x, kernel) == one
    both = jax.grad(lambda x, k: jnp.sum(convolve(x, k) ** 2), (0, 1))
    assert one < costs.matmul_flops(both, x, kernel) <= 4 * one


def test_products_of_a_decoder_follow_its_shapes():
    """Six times the matrices' entries a token, and attention's two products of all positions."""
    width, mlp, layers, length, batch, vocabulary = 16, 48, 2, 8, 4, 32
    model = lm.Decoder(vocabulary, width, mlp, layers, 4)
    windows = jnp.zeros((batch, length + 1), jnp.int32)
    params = model.init(jax.random.key(0), windows[:, :-1])
    entries = layers * (4 * width**2 + 3 * width * mlp) + width * vocabulary
    attention = layers * 2 * 2 * length * width  # multiply-adds for each token, both products
    found = costs.matmul_flops(jax.grad(functools.partial(lm.loss, model)), params, windows)
    assert found == batch * length * (6 * entries + 3 * attention)


def test_limits_double_the_size_until_it_takes_long_enough(monkeypatch):
    """The peak is the best rate seen: at 1 GFLOP/s and one slow call each, 1 GFLOP/s."""
    seen = []

    def quickest(fun, x, *more):
        del fun
        seen.append(x.shape)
        work = 2 * x.shape[0] ** 3 if more else 8 * x.size
        return work / 1e9 + 1e-4

    monkeypatch.setattr(costs, "_quickest", quickest)
    peak, bandwidth = costs.limits(jnp.bfloat16, seconds=0.2)
    sides = [shape[0] for shape in seen if len(shape) == 2]
    assert sides == [512]
    assert peak == pytest.approx(2 * 512**3 / (2 * 512**3 / 1e9 + 1e-4))
    sizes = [shape[0] for shape in seen if len(shape) == 1]
    assert all(b == 2 * a for a, b in zip(sizes, sizes[1:], strict=False))
    assert 8 * sizes[-1] / 1e9 + 1e-4 >= 0.2 > 8 * sizes[-2] / 1e9 + 1e-4
    assert 0.9e9 < bandwidth < 1e9


def test_costs_fit_together():
    """Shares and speed are what times, products, bytes and limits say; the rounds are paired."""

    def loss_fn(params, batch, key):
        del key
        return jnp.mean((batch @ params) ** 2)

    params, batch = jnp.ones((8, 4)), jnp.ones((16, 8))
    step = costs.training_step("m", train.backprop(loss_fn), optax.sgd(0.1), params, batch, 16)
    peak, bandwidth = 1e9, 1e8
    found = {}
    about = {"size": "s", "peak": peak, "bandwidth": bandwidth, "rounds": 3}
    for row in costs.rows("c", [step], **about):
        assert row.method == row.rival == "m"
        assert (row.case, row.size) == ("c", "s")
        found.setdefault(row.metric, []).append(row.value)
    seconds = np.array(found["run time"]) / 1e3
    flops = 2 * (2 * 16 * 8 * 4)  # forward, and backward to the matrix alone
    assert found["products of the model"] == [flops / 1e9]
    np.testing.assert_allclose(found["share of the matmul peak"], flops / peak / seconds)
    np.testing.assert_allclose(found["speed"], 16 / seconds)
    moved = 16 * 8 * 4 + 2 * (8 * 4 * 4 + 4) + 4  # batch; params and counter twice; the loss
    np.testing.assert_allclose(found["share of the copy bandwidth"], moved / bandwidth / seconds)
    assert len(found["compile time"]) == len(found["temporary memory"]) == 1


# What is printed.


def test_what_has_no_rival_is_a_table_of_its_own():
    """A line a method, a column a metric: lowest, median and highest of rounds."""
    rows = [
        {"topic": "t", **row._asdict()}
        for values, metric in (([3.0, 1.0, 2.0], "time"), ([7.0], "memory"))
        for row in harness.alone(
            "m", values, case="c", size="s", metric=metric, unit="ms", better="down"
        )
    ]
    assert report.sections(rows) == {}
    columns = ("method", "time, ms", "memory, ms")
    assert report.alone(rows) == {"t: c (s)": (columns, [("m", "1 / 2 / 3", "7")])}
    compared = [
        {"topic": "t", **row._asdict()}
        for row in harness.versus(
            "a",
            {"a": [1.0], "b": [2.0]},
            case="c",
            size="s",
            metric="x",
            unit="1",
            better="up",
        )
    ]
    assert report.alone(compared) == {}
    assert len(report.sections(compared + rows)) == 1


@pytest.mark.slow
def test_smoke_form_measures_limits_and_a_step():
    """Both limits are positive, and the step of the smallest benchmark has all its costs."""
    rows = list(bench_steps.run(CONTEXT._replace(track=lambda names: iter(names))))
    limits = {row.metric: row.value for row in rows if row.case == "limits of the device"}
    assert len(limits) == 2
    assert min(limits.values()) > 0
    assert len([row for row in rows if row.case == "a training step of zo.bandit"]) == 7
