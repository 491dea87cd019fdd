"""Whole models under one optimizer: their layouts, the libraries around them, and training."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import assert_close, assert_equal, digits
from spectral.models import MoE, Transformer, by_path, normal_like, params_of, quick_jit

from jaxkit import spectral, train
from jaxkit.spectral import MatrixSpec

# What holds for any polynomial is shown with a short one.
make = functools.partial(spectral.symmetry_compatible, steps=2)
WITH_SGD = make(0.5, other=optax.sgd(2.0))
MODEL = {
    "embed": {"embedding": (12, 8)},
    "mix": {"kernel": (8, 12), "bias": (12,)},
    "mlp": {"gate": {"kernel": (8, 3)}, "experts": {"up": {"kernel": (3, 8, 12)}}},
    "lm_head": {"kernel": (8, 12)},
}
MODEL = jax.tree.map(jnp.zeros, MODEL, is_leaf=lambda x: isinstance(x, tuple))


@pytest.fixture(autouse=True)
def standard_promotion():
    """Flax and optax need it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@functools.cache
def update_of(tx):
    return quick_jit(tx.update)


def moves(tx, *grads, params=None):
    """Returns the updates of every step."""
    params = grads[0] if params is None else params
    state, out = tx.init(params), []
    for grad in grads:
        updates, state = update_of(tx)(grad, state, params)
        out.append(updates)
    return out


@functools.cache
def pixels(steps, size):
    """Returns gray values of digits and those one row below, ``[steps, size * 14, 4]`` below 9."""
    images, _ = digits(steps, size)
    gray = np.int32(np.round(images * 8)).reshape(steps, size, 8, 2, 4)
    return gray[:, :, :-1].reshape(steps, -1, 4), gray[:, :, 1:].reshape(steps, -1, 4)


def small(shapes):
    """Returns parameters to start from."""
    return jax.tree.map(lambda x: 0.3 * x, normal_like(shapes))


def nats(logits, ids):
    return optax.softmax_cross_entropy_with_integer_labels(logits, ids).mean()


# Layouts.


@pytest.mark.parametrize("axis", [0, 1])
def test_scanned_layers_move_as_unrolled_ones(axis):
    """Attention, router, experts and vectors, stacked in front by nn.scan or, if told, behind."""
    grads = normal_like(params_of(Transformer(layers=2, mlp=MoE, axis=axis))["block"])
    behind = {
        "*/query/kernel": MatrixSpec(3, 0, (1, 2)),
        "*/key/kernel": MatrixSpec(3, 0, (1, 2)),
        "*/value/kernel": MatrixSpec(3, 0, (1, 2)),
        "*/out/kernel": MatrixSpec(3, 2, (0, 1)),
        "*/gate/kernel": MatrixSpec(2, 0, 1),
        "*/experts/*/kernel": MatrixSpec(3, 2, (0, 1)),
    }

    def layer(tree, i):
        return jax.tree.map(lambda x: jnp.take(x, i, axis), tree)

    scanned = make(0.5, other=optax.sgd(2.0), overrides=behind if axis else None, strict=True)
    (got,), (want,) = moves(scanned, grads), moves(WITH_SGD, [layer(grads, i) for i in range(2)])
    assert_close([layer(got, i) for i in range(2)], want, 1e-5)


def test_equinox_model_moves_as_its_transpose_in_flax():
    """Weights (out, in) and OIHW, the embedding tied as a head, leaves of None, callable layers."""
    eqx = pytest.importorskip("equinox")

    def model(key):
        return {
            "embed": eqx.nn.Embedding(12, 8, key=key),
            "mlp": {
                "gate": eqx.nn.Linear(8, 12, use_bias=False, key=key),
                "up": eqx.nn.Linear(8, 12, key=key),
                "down": eqx.nn.Linear(12, 8, use_bias=False, key=key),
            },
            "conv": eqx.nn.Conv2d(4, 8, 3, key=key),
            "depthwise": eqx.nn.Conv2d(8, 8, 3, groups=8, use_bias=False, key=key),
        }

    shapes = eqx.filter_eval_shape(model, jax.random.key(0))
    grads = normal_like(eqx.filter(shapes, lambda x: hasattr(x, "dtype")))

    def to_flax(tree):
        mlp = {name: {"kernel": layer.weight.T} for name, layer in tree["mlp"].items()}
        mlp["up"]["bias"] = tree["mlp"]["up"].bias
        conv = {
            "kernel": tree["conv"].weight.transpose(2, 3, 1, 0),
            "bias": tree["conv"].bias[:, 0],
        }
        depthwise = {"kernel": tree["depthwise"].weight.transpose(2, 3, 1, 0)}
        head = {"kernel": tree["embed"].weight.T}
        return {"mlp": mlp, "conv": conv, "depthwise": depthwise, "lm_head": head}

    tied = make(0.5, other=optax.sgd(2.0), overrides={"embed/weight": "lm_head"}, strict=True)
    (got,), (want,) = moves(tied, grads), moves(WITH_SGD, to_flax(grads))
    assert jax.tree.structure(got) == jax.tree.structure(grads)
    assert_close(to_flax(got), want, 1e-5)
    assert_equal(got["depthwise"].weight, -2 * grads["depthwise"].weight)
    np.testing.assert_allclose(got["embed"].weight.sum(axis=0), 0, atol=1e-5)
    assert got["mlp"]["gate"].bias is None


def test_fused_model_moves_as_the_separate_one():
    """Query, key and value of grouped heads cut from one kernel; gate and up cut or dealt out."""
    shapes = {"attention": {"qkv": (8, 16)}, "cut": {"gate_up": (8, 24)}, "dealt": {"up": (8, 24)}}
    grads = normal_like(jax.tree.map(np.zeros, shapes, is_leaf=lambda x: isinstance(x, tuple)))

    def separate(tree):
        """As the forward pass of such a model takes its kernels apart."""
        query, key, value = jnp.split(tree["attention"]["qkv"], (8, 12), axis=1)
        gate, up = jnp.split(tree["cut"]["gate_up"], 2, axis=1)
        dealt = tree["dealt"]["up"]
        return {
            "attention": {"query": query, "key": key, "value": value},
            "cut": {"gate": gate, "up": up},
            "dealt": {"gate": dealt[:, ::2], "up": dealt[:, 1::2]},
        }

    overrides = {
        "attention/qkv": MatrixSpec(1, 0, split=((8, 4, 4), 1)),
        "cut/gate_up": MatrixSpec(1, 0, split=((12, 12), 1)),
        "dealt/up": MatrixSpec(1, 0, interleave=2),
    }
    fused = make(0.5, other=optax.sgd(2.0), overrides=overrides, strict=True)
    (got,), (want,) = moves(fused, grads), moves(WITH_SGD, separate(grads))
    assert_close(separate(got), want, 1e-5)


def test_paired_gate_and_up_move_as_one_row_for_each_neuron():
    """Where a role normalizes rows, gate and up of a neuron share one norm, cut or dealt out."""
    names = ("gate", "up")
    gate, up = (
        normal_like({"x": np.zeros((8, 12))}, seed)["x"] * scale for seed, scale in ((0, 1), (1, 7))
    )
    overrides = {
        "cut/gate_up": MatrixSpec(1, 0, split=((12, 12), 1), pair=True),
        "dealt/gate_up": MatrixSpec(1, 0, interleave=2, pair=True),
    }
    roles = {"mlp_gate_up": {"rule": "row_norm", "row_floor": 0.0, "scale": "none"}}
    grads = {
        "cut": {"gate_up": jnp.concatenate([gate, up], axis=1)},
        "dealt": {"gate_up": jnp.stack([gate, up], axis=-1).reshape(8, 24)},
    }
    (got,) = moves(make(1.0, roles=roles, overrides=overrides), grads)
    norm = np.sqrt(np.sum(np.square(gate) + np.square(up), axis=0))
    cut = dict(zip(names, jnp.split(got["cut"]["gate_up"], 2, axis=1), strict=True))
    dealt = {name: got["dealt"]["gate_up"][:, i::2] for i, name in enumerate(names)}
    for parts in (cut, dealt):
        assert_close(parts, {"gate": -gate / norm, "up": -up / norm}, 1e-6)


def test_roles_of_the_same_options_share_their_batches():
    """All hidden kernels of one size are one batched product; other options take one away."""
    names = ("mix", "query", "up", "down")
    grads = {name: {"kernel": jnp.zeros((8, 12))} for name in names}
    for roles, count in ((None, 4), ({"mlp_down": {"b1": 0.9}}, 3)):
        tx = make(0.5, roles=roles)
        text = jax.jit(tx.update).lower(grads, tx.init(grads)).as_text()
        assert f"tensor<{count}x8x12xf32>" in text and f"tensor<{count + 1}x8x12" not in text


# The libraries around it.


class NnxModel(nnx.Module):
    """A SwiGLU and a mixture of experts, which both have a gate."""

    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.embed = nnx.Embed(9, 8, rngs=rngs)
        self.mlp = nnx.Dict(gate=linear(8, 12), up=linear(8, 12), down=linear(12, 8))
        self.moe = nnx.Dict(gate=linear(8, 3), experts=nnx.Param(jnp.zeros((3, 8, 8))))
        self.head = linear(8, 9)

    def __call__(self, ids):
        x = self.embed(ids)
        x = x + self.mlp.down(nnx.silu(self.mlp.gate(x)) * self.mlp.up(x))
        weights = nnx.softmax(self.moe.gate(x))
        return self.head(x + jnp.einsum("...d,edf,...e->...f", x, self.moe.experts[...], weights))


def test_trains_an_nnx_model_through_its_optimizer():
    """Both gates are told apart; the first step is that of the plain dict; the loss falls."""
    graph, shapes = nnx.split(nnx.eval_shape(lambda: NnxModel(nnx.Rngs(0))))
    model = nnx.merge(graph, small(shapes))
    tx = make(0.03, strict=True)
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    table = spectral.describe(nnx.state(model, nnx.Param))
    assert {row.path: row.role for row in table} == {
        "embed/embedding": "embedding",
        "mlp/gate/kernel": "mlp_gate_up",
        "mlp/up/kernel": "mlp_gate_up",
        "mlp/down/kernel": "mlp_down",
        "moe/gate/kernel": "router",
        "moe/experts": "hidden",
        "head/kernel": "lm_head",
    }
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    ids, below = (x[0] for x in pixels(1, 16))

    @nnx.jit
    def step(model, optimizer):
        loss, grads = nnx.value_and_grad(lambda model: nats(model(ids), below))(model)
        optimizer.update(model, grads)
        return loss, grads

    first, grads = step(model, optimizer)
    (updates,) = moves(tx, nnx.to_pure_dict(grads), params=params)
    want = optax.apply_updates(params, updates)
    assert_close(nnx.to_pure_dict(nnx.state(model, nnx.Param)), want, 1e-5)
    for _ in range(40):
        last, _ = step(model, optimizer)
    assert last < 0.8 * first


def test_trains_a_linen_transformer_through_the_joint():
    """train.fit with a schedule and decay: the loss on the rows of digits falls."""
    model = Transformer()
    tx = spectral.symmetry_compatible(optax.linear_schedule(0.03, 0.0, 40), weight_decay=0.01)

    def loss_fn(params, batch, key):
        return nats(model.apply({"params": params}, batch[0]), batch[1])

    params = small(params_of(model))
    step = train.make_step(train.backprop(loss_fn), tx)
    _, metrics = train.fit(step, train.create(params, tx, jax.random.key(0)), pixels(40, 16))
    assert metrics["loss"][-5:].mean() < 0.8 * metrics["loss"][0]


def test_frozen_and_masked_experts_leave_the_router_a_router():
    """In partition and masked the leaves that are left move as in the whole model."""
    grads = normal_like(MODEL)
    (want,) = moves(WITH_SGD, grads)
    labels = jax.tree.map(lambda _: "train", MODEL)
    labels["mlp"]["experts"] = "freeze"
    frozen = optax.partition({"train": WITH_SGD, "freeze": optax.set_to_zero()}, labels)
    masked = optax.masked(WITH_SGD, jax.tree.map(lambda label: label == "train", labels))
    for tx, factor in ((frozen, 0), (masked, 1)):
        (got,) = moves(tx, grads)
        experts = jax.tree.map(lambda x, factor=factor: factor * x, grads["mlp"]["experts"])
        assert_equal(got["mlp"].pop("experts"), experts)
        assert_close(got, want | {"mlp": {"gate": want["mlp"]["gate"]}}, 1e-6)


def test_a_clipped_gradient_moves_matrices_alike():
    """In a chain behind clipping only what goes to `other` is clipped."""
    grads = normal_like(MODEL)
    norm = optax.tree.norm(grads)
    (got,) = moves(optax.chain(optax.clip_by_global_norm(1e-3), WITH_SGD), grads)
    (want,) = moves(WITH_SGD, grads)
    want["mix"]["bias"] = want["mix"]["bias"] * (1e-3 / norm)
    assert_close(got, want, 1e-4)


def test_multi_steps_moves_by_the_mean_gradient():
    """Nothing moves in between, and the update is that of the mean of two gradients."""
    grads = [normal_like(MODEL, seed) for seed in range(2)]
    first, second = moves(optax.MultiSteps(WITH_SGD, 2), *grads)
    assert_equal(first, MODEL)
    (want,) = moves(WITH_SGD, jax.tree.map(lambda a, b: (a + b) / 2, *grads))
    assert_close(second, want, 1e-4)


def test_injected_numbers_change_the_next_step_without_compiling():
    """The rate doubles the update of every leaf, the default AdamW's too; decay adds its share."""
    grads, params = normal_like(MODEL), normal_like(MODEL, 1)
    injected = optax.inject_hyperparams(spectral.symmetry_compatible, static_args="steps")
    tx = injected(learning_rate=0.25, weight_decay=0.0, steps=2)
    state, traces = tx.init(params), []

    @jax.jit
    def step(state):
        traces.append(1)
        return tx.update(grads, state, params)[0]

    first = step(state)
    state.hyperparams["learning_rate"] = jnp.float32(0.5)
    doubled = step(state)
    assert_close(doubled, jax.tree.map(lambda x: 2 * x, first), 1e-6)
    state.hyperparams["weight_decay"] = jnp.float32(0.5)
    for path, decayed in by_path(step(state)).items():
        share = 0.25 if path in ("mix/kernel", "mlp/experts/up/kernel") else 0.0
        want = by_path(doubled)[path] - share * by_path(params)[path]
        assert_close(decayed, want, 1e-6)
    assert len(traces) == 1


def test_each_role_has_its_own_numbers_at_every_step():
    """A multiplier of a schedule, a momentum, a decay and a scale act on their role alone."""
    grads = [normal_like(MODEL, seed) for seed in range(3)]
    params = normal_like(MODEL, 3)
    schedule = optax.piecewise_constant_schedule(1.0, {1: 0.5, 2: 0.5})  # 1, 1/2, 1/4
    roles = {
        "embedding": {"multiplier": 0.5},
        "router": {"b1": 0.0},
        "lm_head": {"weight_decay": 0.125, "multiplier": 2.0},
        "mlp_gate_up": {"scale": "unit_rms"},
        "hidden": {"scale": "spectral"},
    }
    plain = moves(make(schedule), *grads, params=params)
    ruled = moves(make(schedule, roles=roles), *grads, params=params)
    at_one = make(1.0)
    for t, (old, new) in enumerate(zip(plain, ruled, strict=True)):
        rate = 0.5**t
        assert_equal(new["mix"]["bias"], old["mix"]["bias"])
        assert_close(new["embed"]["embedding"], 0.5 * old["embed"]["embedding"], 1e-6)
        (fresh,) = moves(at_one, {"router": grads[t]["mlp"]["gate"]})
        assert_close(new["mlp"]["gate"]["kernel"], rate * fresh["router"]["kernel"], 1e-5)
        head, weight = old["lm_head"]["kernel"], params["lm_head"]["kernel"]
        assert_close(new["lm_head"]["kernel"], 2 * (head - rate * 0.125 * weight), 1e-5)
        # The scale "rms" of (12, 8) is 0.2 sqrt(12), "unit_rms" sqrt(12), "spectral" sqrt(12 / 8).
        experts = jax.tree.map(lambda x: 5 * x, old["mlp"]["experts"])
        assert_close(new["mlp"]["experts"], experts, 1e-5)
        assert_close(new["mix"]["kernel"], 5 / np.sqrt(8) * old["mix"]["kernel"], 1e-5)
    assert (
        np.abs(ruled[1]["mlp"]["gate"]["kernel"] - plain[1]["mlp"]["gate"]["kernel"]).max() > 0.01
    )
