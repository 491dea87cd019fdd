"""Muon for whole models: who gets which rule, and how it joins with the libraries around it."""

import dataclasses

import contract
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from problems import assert_close, cross_entropy, digits
from spectral.models import by_path, normal_like

from jaxkit import spectral, train

test_contract = contract.transformation(
    # Optax's adam mixes int32 and float32. Its derivative at a zero gradient is the learning rate
    # times 5e7, which has to fit float16.
    contract.Case(
        "muon",
        lambda: spectral.muon(0.1, weight_decay=0.1, other_learning_rate=1e-4),
        promotion="standard",
    ),
)

KEY = jax.random.key(0)


@pytest.fixture(autouse=True)
def standard_promotion():
    """Flax and optax need it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


class Block(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(11, 8, name="embed")(tokens)
        x = x + nn.MultiHeadDotProductAttention(num_heads=2)(nn.LayerNorm()(x))
        x = x + nn.Dense(8, name="down")(nn.silu(nn.Dense(16, name="up")(x)))
        return nn.Dense(11, name="lm_head")(x)


def _block():
    tokens = jnp.zeros((1, 3), jnp.int32)
    return Block().init(KEY, tokens)["params"]


def test_hidden_matrices_are_orthogonalized_and_the_rest_goes_to_adamw():
    """Every leaf of a transformer gets the rule that describe says it gets."""
    params = _block()
    grads = normal_like(params)
    tx = spectral.muon(0.5, scale="none", method="qdwh", other_learning_rate=0.01)
    adam = optax.nadam(0.01, b2=0.95)
    updates, wants = (
        by_path(jax.jit(t.update)(grads, t.init(params), params)[0]) for t in (tx, adam)
    )
    rules = {row.path: (row.rule, row.spec) for row in spectral.describe(params, optimizer="muon")}
    assert sorted(path for path, (rule, _) in rules.items() if rule == "polar") == [
        *(f"MultiHeadDotProductAttention_0/{k}/kernel" for k in ("key", "out", "query", "value")),
        "down/kernel",
        "up/kernel",
    ]
    for path, (rule, spec) in rules.items():
        if rule == "other":
            assert_close(updates[path], wants[path], 1e-5)
        else:
            axes = spec.batch + spec.unit + spec.feature
            matrices = np.asarray(updates[path]).transpose(axes)
            matrices = matrices if spec.batch else matrices[None]
            for matrix in matrices:
                s = np.linalg.svd(matrix, compute_uv=False)
                np.testing.assert_allclose(s, 0.5, rtol=1e-4)


def test_default_adamw_is_optax_in_float32_and_survives_16_bits():
    """A zero gradient in float16 gives a zero step, where optax's own adamw gives NaN."""
    params = {"bias": jnp.ones(4, jnp.float16)}
    grads = {"bias": jnp.zeros(4, jnp.float16)}
    ours, rival = spectral.muon(0.1), optax.adamw(0.1)
    updates, state = ours.update(grads, ours.init(params), params)
    np.testing.assert_array_equal(updates["bias"], 0)
    assert updates["bias"].dtype == jnp.float16
    floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype(jnp.float32)}
    assert np.isnan(rival.update(grads, rival.init(params), params)[0]["bias"]).all()


def test_weight_decay_is_decoupled_and_only_of_the_matrices():
    """The update of a matrix gains -lr * decay * W; a bias gains nothing."""
    params = normal_like(_block(), 1)
    grads = normal_like(params)
    plain, decayed = spectral.muon(0.1), spectral.muon(0.1, weight_decay=0.5)
    a = by_path(plain.update(grads, plain.init(params), params)[0])
    b = by_path(decayed.update(grads, decayed.init(params), params)[0])
    for path, leaf in by_path(params).items():
        change = -0.05 * leaf if path.endswith(("up/kernel", "down/kernel", "_0/kernel")) else None
        if "Attention" in path and path.endswith("kernel"):
            change = -0.05 * leaf
        change = jnp.zeros_like(leaf) if change is None else change
        np.testing.assert_allclose(b[path] - a[path], change, atol=1e-6)


def test_scanned_layers_keep_their_axes_behind_the_partition():
    """What a stacked kernel is shows in its neighbors; the part that sees only it is told."""
    params = {
        "layers": {"norm": {"scale": jnp.ones((3, 8))}, "q_proj": {"kernel": jnp.ones((3, 8, 8))}}
    }
    grads = normal_like(params)
    tx = spectral.muon(1.0, scale="none", method="qdwh")
    updates, _ = tx.update(grads, tx.init(params), params)
    s = np.linalg.svd(updates["layers"]["q_proj"]["kernel"], compute_uv=False)
    np.testing.assert_allclose(s, 1, rtol=1e-4)


def test_schedules_and_injected_hyperparameters_change_the_rate():
    """A schedule is read at each step, and an injected rate may change without compiling again."""
    params = _block()
    grads = normal_like(params)
    tx = spectral.muon(lambda step: 1.0 / (1 + step))
    state, updates = tx.init(params), []
    for _ in range(2):
        update, state = tx.update(grads, state, params)
        updates.append(update)
    assert_close(updates[1]["up"]["kernel"], updates[0]["up"]["kernel"] / 2, 1e-3)

    injected = optax.inject_hyperparams(spectral.muon)(learning_rate=0.5, weight_decay=0.1)
    state, traces = injected.init(params), []

    @jax.jit
    def step(grads, state, params):
        traces.append(1)
        return injected.update(grads, state, params)

    first, _ = step(grads, state, params)
    state.hyperparams["learning_rate"] = jnp.float32(1.0)
    second, _ = step(grads, state, params)
    assert_close(second["up"]["kernel"], 2 * first["up"]["kernel"], 1e-5)
    assert len(traces) == 1


@pytest.mark.parametrize("nesterov", [False, True])
def test_matrices_move_by_minus_the_rate_times_scale_by_spectral(nesterov):
    """Over two steps, with options handed on, the update of a kernel is -lr times the rule's."""
    params = {"up": {"kernel": contract.normal(8, 16)}}
    options = {"nesterov": nesterov, "b1": 0.7, "scale": "muon", "coefficients": "you", "steps": 3}
    ours, rule = spectral.muon(0.1, **options), spectral.scale_by_spectral(**options)
    state, rule_state = ours.init(params), rule.init(params)
    for seed in range(2):
        grads = normal_like(params, seed)
        got, state = ours.update(grads, state, params)
        want, rule_state = rule.update(grads, rule_state)
        assert_close(got, jax.tree.map(lambda x: -0.1 * x, want), 1e-6)


def test_a_rate_that_is_an_array_keeps_16_bits():
    """Updates have the dtype of their gradient, whatever the rate and the decay are."""
    params = {"kernel": jnp.ones((4, 6), jnp.bfloat16), "bias": jnp.ones(6, jnp.bfloat16)}
    tx = spectral.muon(jnp.float32(0.1), weight_decay=jnp.float32(0.1))
    updates, _ = tx.update(params, tx.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    weight: jax.Array
    bias: jax.Array

    def __call__(self, x):
        return x @ self.weight.T + self.bias


def test_a_model_that_can_be_called_is_a_tree_like_others():
    """Labels of a callable model are callable too, and yet no function of the params."""
    model = Linear(contract.normal(4, 8), contract.normal(4))
    plain = {"weight": model.weight, "bias": model.bias}
    tx = spectral.muon(0.1, weight_decay=0.1)
    got, _ = tx.update(model, tx.init(model), model)
    want, _ = tx.update(plain, tx.init(plain), plain)
    assert_close([got.weight, got.bias], [want["weight"], want["bias"]], 1e-6)


def test_overrides_move_a_leaf():
    """A tied embedding or a head can be handed to the rule, and a matrix to the rest."""
    params = _block()
    grads = normal_like(params)
    tx = spectral.muon(
        1.0,
        scale="none",
        method="qdwh",
        other=optax.sgd(1.0),
        overrides={"lm_head/kernel": "hidden", "up/kernel": "other"},
    )
    updates, _ = tx.update(grads, tx.init(params), params)
    np.testing.assert_allclose(
        np.linalg.svd(updates["lm_head"]["kernel"], compute_uv=False), 1, rtol=1e-4
    )
    np.testing.assert_array_equal(updates["up"]["kernel"], -grads["up"]["kernel"])


def test_works_as_an_nnx_optimizer():
    """nnx.Optimizer trains a model of Linear, Conv and MultiHeadAttention; the loss falls."""
    images, labels = digits(1, 256)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Conv(1, 8, (3, 3), rngs=rngs)
            self.second = nnx.Conv(8, 8, (3, 3), rngs=rngs)
            self.mix = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
            self.head = nnx.Linear(512, 10, rngs=rngs)

        def __call__(self, x):
            x = nnx.relu(self.second(nnx.relu(self.first(x.reshape(-1, 8, 8, 1)))))
            x = x.reshape(-1, 64, 8)
            return self.head((x + self.mix(x)).reshape(-1, 512))

    net = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(net, spectral.muon(0.02), wrt=nnx.Param)
    table = spectral.describe(nnx.state(net, nnx.Param))
    # A convolution with one input channel cannot be told from a depthwise one.
    assert {row.path: row.role for row in table if row.rule == "polar"} == {
        "second/kernel": "conv",
        "mix/query/kernel": "attention_in",
        "mix/key/kernel": "attention_in",
        "mix/value/kernel": "attention_in",
        "mix/out/kernel": "attention_out",
    }

    @nnx.jit
    def step(net, optimizer):
        loss, grads = nnx.value_and_grad(lambda net: cross_entropy(net(images[0]), labels[0]))(net)
        optimizer.update(net, grads)
        return loss

    losses = [float(step(net, optimizer)) for _ in range(10)]
    assert losses[-1] < 0.7 * losses[0]


def test_holds_where_optax_muon_does_not():
    """Gradients of any size, and the kernels of heads and convolutions, are orthogonalized.

    Optax loses updates at 1e-20 and 1e20, and gives kernels of more than two axes to Adam.
    """
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    ours = spectral.muon(1.0, scale="none", method="qdwh")
    grads = {"kernel": draw(6, 4)}
    for power in (-70, 70):
        scaled = jax.tree.map(lambda x, power=power: x * 2.0**power, grads)
        sizes = [
            float(jnp.linalg.norm(tx.update(scaled, tx.init(grads), grads)[0]["kernel"]))
            for tx in (ours, optax.contrib.muon(1.0))
        ]
        np.testing.assert_allclose(sizes[0], 2.0, rtol=1e-5)
        assert sizes[1] < 1e-3
    grads = {"query": {"kernel": draw(8, 2, 4)}, "conv": {"kernel": draw(3, 3, 4, 8)}}
    for tx, holds in ((ours, True), (optax.contrib.muon(1.0), False)):
        updates, _ = tx.update(grads, tx.init(grads), grads)
        head, conv = updates["query"]["kernel"][:, 0], updates["conv"]["kernel"].reshape(36, 8)
        for x in (head, conv):
            values = np.linalg.svd(np.asarray(x), compute_uv=False)
            assert (np.abs(values - 1).max() < 1e-5) == holds


def test_trains_digits_through_the_joint():
    """Through train.make_step a net with one hidden layer learns the digits."""
    batches = digits(60, 64)

    def loss_fn(params, batch, key):
        images, labels = batch
        hidden = jax.nn.relu(images @ params["up"]["kernel"])
        return cross_entropy(hidden @ params["down"]["kernel"], labels)

    rng = np.random.default_rng(0)
    params = {
        "up": {"kernel": np.float32(rng.normal(size=(64, 32)) / 8)},
        "down": {"kernel": np.float32(rng.normal(size=(32, 10)) / 6)},
    }
    tx = spectral.muon(0.05)
    state = train.create(params, tx, KEY)
    state, metrics = train.fit(train.make_step(train.backprop(loss_fn), tx), state, batches)
    assert metrics["loss"][-10:].mean() < 0.3 * metrics["loss"][0]


def test_bad_options_are_named():
    """The rate of a default that is not used, a bad rule option and an unknown pattern raise."""
    with pytest.raises(ValueError, match="other_learning_rate.*got 0.1 together with other"):
        spectral.muon(1.0, other=optax.sgd(1.0), other_learning_rate=0.1)
    with pytest.raises(ValueError, match="scale must be one of"):
        spectral.muon(1.0, scale="big")
    with pytest.raises(ValueError, match="'uq/kernel'"):
        spectral.muon(1.0, overrides={"uq/kernel": "other"}).init(_block())
    for rates in ({"learning_rate": None}, {"learning_rate": 1.0, "other_learning_rate": "0.1"}):
        with pytest.raises(TypeError, match="learning_rate must be a number, got"):
            spectral.muon(**rates)
    for options, match in (
        ({"other": 0.1}, "other must be an optax transformation, got float"),
        ({"weight_decay": "0.1"}, "weight_decay must be a number, got '0.1'"),
    ):
        with pytest.raises(TypeError, match=match):
            spectral.muon(1.0, **options)
    for options in ({"overrides": ["kernel"]}, {"rules": ["kernel"]}):
        with pytest.raises(TypeError, match=r"must be a mapping, got \['kernel'\]"):
            spectral.muon(1.0, **options).init(_block())
    with pytest.raises(TypeError, match="rows/ids must be real floating.*got int32"):
        spectral.muon(1.0).init({"rows": {"ids": jnp.ones(3, jnp.int32)}})
    with pytest.raises(ValueError, match="'x'"):
        spectral.muon(1.0, strict=True).init({"x": jnp.ones((2, 3, 4, 5, 6))})
