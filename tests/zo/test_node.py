"""Node perturbation: mean and variance, the proof of rows, and its memory."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from zo.tapped import PROBLEMS, normal, true_gradient

from jaxkit import zo
from jaxkit.zo._node import node_value_and_grad

KEY = jax.random.key(0)


def contract_case():
    def losses(p, x):
        return jnp.mean(jnp.tanh(x @ p["w"] + p["b"][None]) ** 2, 1)

    run = node_value_and_grad(losses, mu=0.1, per_example=True)
    return run, (KEY, {"w": normal(6, 3), "b": normal(3)}, normal(8, 6))


test_contract = contract.function(
    contract.Case(
        "node",
        contract_case,
        draws=True,
        dtypes=("float32", "float64"),  # the value is float32 or wider whatever the parameters are
    ),
)


def assert_mean(samples, want, num_errors=4.5):
    """Checks that samples, along the leading axis, have the mean ``want``."""
    for x, y in zip(jax.tree.leaves(samples), jax.tree.leaves(want), strict=True):
        x = np.asarray(x, np.float64)
        error = x.std(0) / len(x) ** 0.5
        np.testing.assert_array_less(np.abs(x.mean(0) - y), num_errors * error + 1e-5)


def samples_of(run, num, params, *args):
    keys = jax.random.split(KEY, num)
    return jax.jit(jax.vmap(lambda key: run(key, params, *args)[1]))(keys)


@pytest.mark.parametrize("name", ["mlp", "recurrent", "branches", "tied"])
def test_mean_is_the_gradient(name):
    """Over 4000 keys the per-example estimate is the gradient, in every entry of every leaf."""
    losses, params, *args = PROBLEMS[name]()
    run = node_value_and_grad(losses, mu=3e-3, per_example=True)
    found = samples_of(run, 4000, params, *args)
    want = jax.tree.map(lambda g: g / 3, true_gradient(name)[1])
    assert_mean(found, want)
    size = max(float(jnp.max(jnp.abs(x))) for x in jax.tree.leaves(want))
    worst = jax.tree.map(lambda x, y: float(jnp.max(jnp.abs(x.mean(0) - y))), found, want)
    assert max(jax.tree.leaves(worst)) < 0.3 * size


B, N, M = 4, 5, 3
X, C, W = normal(B, N), normal(B, M), normal(N, M)


def linear_losses(w, x):
    return jnp.sum(C * (x @ w), 1)


def squared_norms(loss_fn, params, *args, **options):
    grads = samples_of(node_value_and_grad(loss_fn, **options), 30000, params, *args)
    return sum(np.sum(np.asarray(x, np.float64) ** 2, tuple(range(1, x.ndim)))
               for x in jax.tree.leaves(grads))  # fmt: skip


def rows(x):
    return np.sum(np.asarray(x, np.float64) ** 2, -1)


def test_variance_for_the_total_loss():
    """One layer, normal noise: E|G|^2 = m |X|^2 |D|^2 + 2 |G|^2, D the slopes of the outputs."""
    found = squared_norms(lambda w, x: jnp.sum(linear_losses(w, x)), W, X, mu=0.1, noise="normal")
    gradient = rows((X.T @ C).reshape(-1))
    assert_mean(found, M * rows(X).sum() * rows(C).sum() + 2 * gradient)


@pytest.mark.parametrize("noise", ["normal", "rademacher"])
def test_variance_for_losses_of_examples(noise):
    """One layer: trace (m+1) sum |d|^2 |x|^2, or with signs (m-1) sum, each per B^2; unbiased."""
    found = squared_norms(linear_losses, W, X, mu=0.1, noise=noise, per_example=True)
    gradient = rows((X.T @ C).reshape(-1)) / B**2
    pairs = np.sum(rows(X) * rows(C)) / B**2
    trace = (M + 1) * pairs if noise == "normal" else (M - 1) * pairs
    assert_mean(found, trace + gradient)


def test_variance_for_one_example_grows_with_the_outputs():
    """B = 1: the trace of the covariance is (m + 1) |G|^2, however many inputs there are."""
    found = squared_norms(lambda w, x: jnp.sum(C[:1] * (x @ w)), W, X[:1], mu=0.1, noise="normal")
    assert_mean(found, (M + 2) * rows(X[:1]).sum() * rows(C[:1]).sum())


def test_variance_of_rows_that_share_a_slope():
    """A sequence: m |X_b|^2 |D_b|^2 + |G_b|^2 for each example, normal noise."""
    x, c = normal(B, 2, N), normal(B, 2, M)
    found = squared_norms(
        lambda w, x: jnp.sum(c * (x @ w), (1, 2)), W, x, mu=0.1, noise="normal", per_example=True
    )
    g = jnp.einsum("btn,btm->bnm", x, c)
    by_row = M * rows(x.reshape(B, -1)) * rows(c.reshape(B, -1)) + rows(g.reshape(B, -1))
    total = rows(jnp.sum(g, 0).reshape(-1))
    assert_mean(found, (by_row.sum() + total) / B**2)


def test_noise_of_other_sites_adds_to_the_slope():
    """Two layers with signs: |D_b|^2 counts the outputs of both, |X|^2 and G_b are the site's."""
    x2, c2 = normal(B, 2), normal(B, 4)

    def losses(p, x, x2):
        return jnp.sum(C * (x @ p["a"]), 1) + jnp.sum(c2 * (x2 @ p["b"]), 1)

    params = {"a": W, "b": normal(2, 4)}
    run = node_value_and_grad(losses, mu=0.1, per_example=True)
    grads = samples_of(run, 30000, params, X, x2)
    slopes = rows(C) + rows(c2)
    for name, inputs, outputs in ("a", X, C), ("b", x2, c2):
        found = np.sum(np.asarray(grads[name], np.float64) ** 2, (1, 2))
        own = rows(inputs) * rows(outputs)
        trace = outputs.shape[1] * slopes * rows(inputs) - own
        assert_mean(found, (trace.sum() + rows((inputs.T @ outputs).reshape(-1))) / B**2)


def test_one_output_with_signs_is_exact():
    """A logistic regression, one output an example: the sign cancels and the gradient is exact."""
    y = jnp.array([0.0, 1.0, 1.0, 0.0])

    def losses(p, x):
        z = (x @ p["w"] + p["b"][None])[:, 0]
        return jax.nn.softplus(z) - y * z

    params = {"w": W[:, :1], "b": jnp.array([0.3])}
    value, grads = jax.jit(node_value_and_grad(losses, per_example=True))(KEY, params, X)
    want_value, want = jax.value_and_grad(lambda p: jnp.mean(losses(p, X)))(params)
    np.testing.assert_allclose(value, want_value, 1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-4), grads, want)


def test_error_falls_as_the_square_of_mu():
    """Halving mu, which may be traced, divides the distance from the exact slopes by four."""

    def run(mu, w, x):
        losses = lambda w, x: jnp.sum(jnp.sin(x @ w), 1)  # noqa: E731
        return node_value_and_grad(losses, mu=mu, per_example=True)(KEY, w, x)[1]

    with jax.enable_x64(True):
        wide = W.astype(jnp.float64), X.astype(jnp.float64)
        limit, near, far = (jax.jit(run)(mu, *wide) for mu in (1e-4, 0.02, 0.04))
    ratio = np.linalg.norm(far - limit) / np.linalg.norm(near - limit)
    np.testing.assert_allclose(ratio, 4, rtol=0.02)


def test_samples_are_averaged():
    """Four samples have a quarter of the variance of one."""
    one = squared_norms(linear_losses, W, X, mu=0.1, per_example=True)
    four = squared_norms(linear_losses, W, X, mu=0.1, per_example=True, num_samples=4)
    gradient = rows((X.T @ C).reshape(-1)) / B**2
    error = (one.std() / 4 + four.std()) / len(one) ** 0.5
    assert abs((one.mean() - gradient) / 4 - (four.mean() - gradient)) < 4.5 * error


def test_term_of_params_alone_is_exact_if_added_last():
    """Weight decay adds its own gradient to the estimate, and no noise to it."""

    def plain(w, x):
        return jnp.mean(linear_losses(w, x))

    def decayed(w, x):
        return -(-plain(w, x).astype(jnp.float32) - 0.1 * jnp.sum(w**2))

    value, grads = jax.jit(node_value_and_grad(plain))(KEY, W, X)
    with_decay, more = jax.jit(node_value_and_grad(decayed))(KEY, W, X)
    np.testing.assert_allclose(with_decay - value, 0.1 * jnp.sum(W**2), 1e-5)
    np.testing.assert_allclose(more - grads, 0.2 * W, 1e-3, 1e-3)


def test_value_and_aux_are_those_at_the_parameters():
    """The last call has no noise: its loss, its aux and its model state come back."""

    def losses(w, x, key):
        y = x @ w
        return jnp.mean(y**2, 1) + jax.random.normal(key, (B,)), {"y": y, "n": jnp.int32(1)}

    run = node_value_and_grad(losses, has_aux=True, per_example=True)
    (value, aux), grads = run(KEY, W, X, jax.random.key(1))
    want, want_aux = losses(W, X, jax.random.key(1))
    np.testing.assert_allclose(value, want.mean(), 1e-6)
    jax.tree.map(np.testing.assert_array_equal, aux, want_aux)
    # The key of the loss is among args, so that its noise cancels exactly.
    quiet = node_value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2, 1), per_example=True)
    np.testing.assert_allclose(grads, quiet(KEY, W, X)[1], 1e-3, 1e-3)


def test_bfloat16_model_gets_bfloat16_gradients():
    """Gradients have the dtype of the leaves; loss and slopes are as wide as the loss function."""
    half = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)  # noqa: E731

    def losses(w, x):
        return jnp.mean((x @ w).astype(jnp.float32) ** 2, 1)

    run = jax.jit(node_value_and_grad(losses, mu=0.1, per_example=True, num_samples=20))
    value, grads = run(KEY, half(W), half(X))
    assert (value.dtype, grads.dtype) == (jnp.float32, jnp.bfloat16)
    want = run(KEY, W, X)[1]
    gap = jnp.linalg.norm(grads.astype(jnp.float32) - want) / jnp.linalg.norm(want)
    assert gap < 0.1


@pytest.mark.parametrize(
    ("noise", "axis_type"),
    [
        ("rademacher", AxisType.Auto),
        ("rademacher", AxisType.Explicit),
        ("normal", AxisType.Explicit),
    ],
)
def test_eight_devices_give_the_numbers_of_one(noise, axis_type):
    """Examples over four devices and columns over two: the estimate is that of one device."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
    params, x = {"w": normal(6, 8), "v": normal(8, 4)}, normal(8, 6)

    def losses(p, x):
        return jnp.mean(jnp.tanh(x @ p["w"]) @ p["v"], 1)

    run = jax.jit(node_value_and_grad(losses, num_samples=2, per_example=True, noise=noise))
    want = run(KEY, params, x)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    split = {"w": put(params["w"], None, "model"), "v": put(params["v"], None, None)}
    with jax.set_mesh(mesh):
        got = run(KEY, split, put(x, "data", None))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-3, 1e-4), got, want)


def transformer(is_scanned, layers=3, width=64, heads=4, vocabulary=256, length=64):
    """Returns losses, parameters, and how many numbers the largest output of a site has."""
    params = {
        "embed": normal(vocabulary, width) / 8,
        "layers": {
            "norm": jnp.ones((layers, 1, 1, width)),
            "qkv": normal(layers, width, 3, heads, width // heads) / 8,
            "out": normal(layers, heads, width // heads, width) / 8,
            "up": normal(layers, width, 4 * width) / 8,
            "down": normal(layers, 4 * width, width) / 8,
        },
        "head": normal(width, vocabulary) / 8,
    }
    ids = jnp.asarray(np.random.default_rng(0).integers(0, vocabulary, (16, length)))

    def block(x, p):
        h = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["norm"]
        q, k, v = jnp.einsum("btd,dchk->cbthk", h, p["qkv"])
        x += jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v), p["out"])
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    def losses(p, ids):
        x = p["embed"][ids]
        if is_scanned:
            x, _ = jax.lax.scan(block, x, p["layers"])
        else:
            for i in range(layers):
                x, _ = block(x, jax.tree.map(lambda x, i=i: x[i], p["layers"]))
        log_probs = jax.nn.log_softmax(x @ p["head"])
        return -jnp.mean(jnp.take_along_axis(log_probs, ids[..., None], -1), (1, 2))

    return losses, params, ids, ids.size * max(4 * width, vocabulary)


@pytest.mark.parametrize(
    ("is_scanned", "options"),
    [
        (True, {}),
        pytest.param(True, {"num_samples": 4}, marks=pytest.mark.slow),
        pytest.param(True, {"noise": "normal"}, marks=pytest.mark.slow),
        pytest.param(False, {}, marks=pytest.mark.slow),
        pytest.param(False, {"num_samples": 4}, marks=pytest.mark.slow),
        pytest.param(False, {"noise": "normal"}, marks=pytest.mark.slow),
    ],
)
def test_memory_is_that_of_inference_and_a_few_outputs(is_scanned, options):
    """No activation of a transformer is kept, and no noise is drawn ahead of its use."""
    losses, params, ids, size = transformer(is_scanned)

    def temp(fun, *args):
        return jax.jit(fun).lower(*args).compile().memory_analysis().temp_size_in_bytes

    total = lambda p, ids: jnp.mean(losses(p, ids))  # noqa: E731
    inference = temp(total, params, ids)
    weights = 4 * sum(x.size for x in jax.tree.leaves(params))
    found = temp(node_value_and_grad(losses, per_example=True, **options), KEY, params, ids)
    assert found <= inference + 3 * 4 * size + weights
    if not is_scanned:
        assert temp(jax.grad(total), params, ids) > 2 * found


def mixed(loss_fn, *args, **options):
    node_value_and_grad(loss_fn, per_example=True, **options)(KEY, W, X, *args)


def test_losses_that_mix_examples_are_refused():
    """Batch norm and a contrastive loss raise, with the primitive and the line that mixes."""
    with pytest.raises(ValueError, match=r"reduce_sum at test_node.py:\d+ mixes them"):
        mixed(lambda w, x: jnp.sum((x @ w) - jnp.mean(x @ w, 0, keepdims=True), 1))
    with pytest.raises(ValueError, match=r"dot_general at test_node.py:\d+ mixes them"):
        mixed(lambda w, x: jnp.sum((x @ w) @ (x @ w).T, 1))
    with pytest.raises(ValueError, match="gather at .* use jnp.take_along_axis mixes them"):
        mixed(lambda w, x: (x @ w)[jnp.arange(B), jnp.zeros(B, jnp.int32)])
    with pytest.raises(ValueError, match="it has no axis of them"):
        mixed(lambda w, x: jnp.sum(w * 1.0) * jnp.ones(B) * x[0, 0])


def test_losses_of_another_shape_are_refused():
    """Per example the loss is [B], else []; what it depends on alone must not be params."""
    with pytest.raises(ValueError, match=r"must have shape \[B\], got \(\)"):
        mixed(lambda w, x: jnp.sum(x @ w))
    with pytest.raises(ValueError, match=r"must have shape \[\], got \(4,\)"):
        node_value_and_grad(linear_losses)(KEY, W, X)
    with pytest.raises(ValueError, match="must depend on data, got one of the parameters alone"):
        node_value_and_grad(lambda w, x: jnp.sum(w))(KEY, W, X)
    with pytest.raises(TypeError, match="must be real floating, got int32"):
        node_value_and_grad(lambda w, x: jnp.int32(1))(KEY, W, X)


def test_aux_is_announced():
    """A tuple without ``has_aux``, and ``has_aux`` without a tuple, raise."""
    with pytest.raises(TypeError, match="the loss alone with has_aux=False"):
        node_value_and_grad(lambda w, x: (jnp.sum(x @ w), 1))(KEY, W, X)
    with pytest.raises(TypeError, match=r"the tuple \(loss, aux\) with has_aux=True"):
        node_value_and_grad(lambda w, x: jnp.sum(x @ w), has_aux=True)(KEY, W, X)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mu": 0.0}, r"mu must be in \(0, inf\), got 0.0"),
        ({"num_samples": 0}, "num_samples must be at least 1, got 0"),
        ({"noise": "uniform"}, "noise must be one of 'rademacher', 'normal', got 'uniform'"),
    ],
)
def test_options_out_of_range_are_refused(options, message):
    """A radius, a count and a kind of noise that mean nothing."""
    with pytest.raises(ValueError, match=message):
        node_value_and_grad(linear_losses, **options)
    if "noise" in options:
        with pytest.raises(ValueError, match=message):
            zo.node(**options)


def test_leaf_that_is_no_number_is_refused():
    """Integer parameters raise with their path."""
    with pytest.raises(TypeError, match="params must be real floating, got int32 at n"):
        node_value_and_grad(lambda p, x: jnp.sum(x))(KEY, {"n": jnp.int32(1)}, X)
    with pytest.raises(ValueError, match="at least one number, got an empty tree"):
        node_value_and_grad(lambda p, x: jnp.sum(x))(KEY, {}, X)


def test_slope_that_is_not_finite():
    """It makes the gradient NaN, unless it is skipped: then the other example alone counts."""

    def losses(w, x):
        return jnp.where(jnp.arange(2) == 0, jnp.inf, 1) * (x @ w)[:, 0]

    x, w = jnp.array([[1.0, 2.0], [3.0, -4.0]]), jnp.ones((2, 1))
    loud = jax.jit(node_value_and_grad(losses, per_example=True))
    assert not np.isfinite(loud(KEY, w, x)[1]).any()
    quiet = jax.jit(node_value_and_grad(losses, per_example=True, skip_nonfinite=True))
    np.testing.assert_allclose(quiet(KEY, w, x)[1], x[1:].T / 2, 1e-3)
