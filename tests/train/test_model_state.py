"""Tests of models that carry a state: batch statistics and random streams, linen and nnx."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_equal, cross_entropy, digits, step_of

from jaxkit import train

nnx = pytest.importorskip("flax.nnx")
linen = pytest.importorskip("flax.linen")

KEY = jax.random.key(0)
STEPS, SIZE, DECAY = 60, 64, 0.9


class LinenModel(linen.Module):
    """Normalizes its input, so that the statistics are those of the data."""

    @linen.compact
    def __call__(self, x):
        x = linen.BatchNorm(use_running_average=False, momentum=DECAY)(x)
        return linen.Dense(10)(linen.relu(linen.Dense(32)(x)))


def linen_problem():
    """Returns the loss, params and model state of the linen model."""
    model = LinenModel()
    variables = jax.jit(model.init)(KEY, jnp.zeros((2, 64)))

    def loss_fn(params, batch, key):
        (images, labels), stats = batch.batch, batch.model_state
        variables = {"params": params, "batch_stats": stats}
        logits, new = model.apply(variables, images, mutable="batch_stats")
        return cross_entropy(logits, labels), {"model_state": new["batch_stats"]}

    return loss_fn, variables["params"], variables["batch_stats"]


class NnxModel(nnx.Module):
    """The same with dropout, whose random stream is part of the model state."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(64, momentum=DECAY, rngs=rngs)
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.out = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(nnx.relu(self.hidden(self.norm(x)))))


def nnx_problem():
    """Returns the loss, params and model state of the nnx model."""
    graph, params, rest = nnx.split(NnxModel(nnx.Rngs(0)), nnx.Param, ...)

    def loss_fn(params, batch, key):
        images, labels = batch.batch
        model = nnx.merge(graph, params, batch.model_state, copy=True)
        loss = cross_entropy(model(images), labels)
        return loss, {"model_state": nnx.state(model, nnx.Not(nnx.Param)), "mark": loss}

    return loss_fn, params, rest


PROBLEMS = {"linen": linen_problem, "nnx": nnx_problem}


def statistics(model_state):
    """Returns the running mean of either model."""
    if "BatchNorm_0" in model_state:
        return model_state["BatchNorm_0"]["mean"]
    return model_state["norm"]["mean"][...]


@pytest.mark.parametrize("num_micro", [None, 2])
@pytest.mark.parametrize("name", PROBLEMS)
def test_batch_norm_and_dropout_learn_digits(name, num_micro):
    """The loss falls, the running mean is that of the data, and nothing is traced twice."""
    loss_fn, params, model_state = PROBLEMS[name]()
    traces = []

    def counted(*args):
        traces.append(1)
        return loss_fn(*args)

    estimator, tx = train.backprop(counted), optax.sgd(0.5)
    if num_micro:
        estimator = train.accumulate(estimator, num_micro)
    step = train.make_step(estimator, tx)
    state = train.create(params, tx, KEY, model_state=model_state)
    images, labels = digits(STEPS, SIZE)
    losses = []
    for part in (slice(0, STEPS // 2), slice(STEPS // 2, STEPS)):
        state, metrics = train.fit(step, state, (images[part], labels[part]))
        losses.append(metrics["loss"])
    assert len(traces) == 1
    assert losses[0][0] > 1.8 and losses[1][-5:].mean() < 0.6
    # By hand: each slice i, i + n, ... moves the mean by a tenth of the way, in order.
    mean = np.zeros(64)
    for batch in np.asarray(images, np.float64):
        for i in range(num_micro or 1):
            mean = DECAY * mean + (1 - DECAY) * batch[i :: num_micro or 1].mean(0)
    np.testing.assert_allclose(statistics(state.model_state), mean, atol=1e-5)
    if name == "nnx":
        count = state.model_state["dropout"]["rngs"]["count"][...]
        start = model_state["dropout"]["rngs"]["count"][...]
        assert count == start + jnp.uint32(STEPS * (num_micro or 1))
        assert "mark" in metrics
    assert "model_state" not in metrics
    # The caller's tree was neither changed nor consumed.
    np.testing.assert_array_equal(statistics(model_state), np.zeros(64))


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_scan_equals_a_loop_with_a_model_state(name):
    """A Python loop of the jitted step ends with the same bits."""
    loss_fn, params, model_state = PROBLEMS[name]()
    step, tx = train.make_step(train.backprop(loss_fn), optax.sgd(0.5)), optax.sgd(0.5)
    batches = step_of(digits(STEPS, SIZE), slice(5))
    start = functools.partial(train.create, params, tx, KEY, model_state=model_state)
    scanned, _ = train.fit(step, start(), batches)
    state, jitted = start(), jax.jit(step)
    for i in range(5):
        state, _ = jitted(state, step_of(batches, i))
    assert_equal(state, scanned)


STATE = {"mean": jnp.zeros(3), "seen": {"n": jnp.int32(0)}}


@pytest.mark.parametrize(
    ("before", "aux", "match"),
    [
        (None, {"model_state": STATE}, "no 'model_state' for a state without one"),
        (STATE, None, "a dict with 'model_state' .* got NoneType"),
        (STATE, {"acc": 1.0}, r"a dict with 'model_state' .* got a dict with \['acc'\]"),
        (
            STATE,
            {"model_state": {**STATE, "mean": jnp.zeros(4)}},
            r"wanted float32\[3\] at mean, got float32\[4\]",
        ),
        (
            STATE,
            {"model_state": {**STATE, "seen": {"n": jnp.float32(0)}}},
            r"wanted int32\[\] at seen/n, got float32\[\]",
        ),
        (STATE, {"model_state": {"mean": STATE["mean"]}}, r"int32\[\] at seen/n, got nothing"),
        (
            STATE,
            {"model_state": {**STATE, "var": jnp.zeros(1)}},
            r"wanted nothing at var, got float32\[1\]",
        ),
        ({"a": [jnp.zeros(1)]}, {"model_state": {"a": (jnp.zeros(1),)}}, "structure of"),
    ],
)
def test_a_model_state_of_another_kind_is_refused(before, aux, match):
    """What the loss returns must be like what create was given; the first difference is named."""
    tx = optax.sgd(0.1)
    step = train.make_step(train.backprop(lambda p, b, k: (jnp.sum(p), aux)), tx)
    state = train.create(jnp.ones(2), tx, KEY, model_state=before)
    with pytest.raises(ValueError, match=match):
        step(state, jnp.ones(4))


def test_an_empty_model_state_is_a_model_state():
    """A model without statistics may give {}: the loss gets Stateful and returns {} again."""

    def loss_fn(params, batch, key):
        assert isinstance(batch, train.Stateful) and batch.model_state == {}
        return jnp.sum(params * batch.batch), {"model_state": {}}

    tx = optax.sgd(0.1)
    step = train.make_step(train.accumulate(train.backprop(loss_fn), 2), tx)
    state = train.create(jnp.float32(1), tx, KEY, model_state={})
    state, metrics = train.fit(step, state, jnp.ones((3, 4)))
    assert state.model_state == {} and set(metrics) == {"loss"}


def test_a_weakly_typed_model_state_becomes_strong():
    """A Python number as new state does not compile the step a second time."""

    def loss_fn(params, batch, key):
        return jnp.sum(params), {"model_state": 1.0}

    tx = optax.sgd(0.1)
    step = train.make_step(train.backprop(loss_fn), tx)
    state = train.create(jnp.ones(2), tx, KEY, model_state=0.0)
    after, _ = jax.jit(step)(state, None)
    assert not after.model_state.weak_type and after.model_state == 1
