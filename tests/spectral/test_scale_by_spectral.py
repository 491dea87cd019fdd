"""The spectral transformation: momentum, scales, stacks and its rivals' directions."""

import math

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_close

from jaxkit import spectral
from jaxkit.spectral import MatrixSpec

test_contract = contract.transformation(
    contract.Case("scale_by_spectral", spectral.scale_by_spectral, params=contract.matrices),
    contract.Case(
        "all_options",
        lambda: spectral.scale_by_spectral(
            nesterov=True, bias_correction=True, alpha=1.0, scale="muon", method="eigh"
        ),
        params=contract.matrices,
        public="scale_by_spectral",
    ),
)


def _grads(steps=3, shapes=((16, 8), (8, 8), (4, 12)), seed=0):
    rng = np.random.default_rng(seed)
    return [
        {f"{i}": {"kernel": np.float32(rng.normal(size=s))} for i, s in enumerate(shapes)}
        for _ in range(steps)
    ]


def _run(tx, grads):
    """Returns the updates of every step."""
    state, out, update = tx.init(grads[0]), [], jax.jit(tx.update)
    for grad in grads:
        updates, state = update(grad, state, grad)
        out.append(updates)
    return out


@pytest.mark.parametrize("nesterov", [False, True])
def test_direction_is_that_of_optax_muon(nesterov):
    """With its table, scale and bias-corrected look-ahead every update is that of optax."""
    dims = optax.contrib.MuonDimensionNumbers()
    rival = optax.contrib.scale_by_muon(
        nesterov=nesterov,
        weight_dimension_numbers={f"{i}": {"kernel": dims} for i in range(3)},
    )
    ours = spectral.scale_by_spectral(
        nesterov=nesterov, bias_correction=True, scale="none", coefficients="jordan"
    )
    grads = _grads()
    with jax.numpy_dtype_promotion("standard"):
        wants = _run(rival, grads)
    for got, want in zip(_run(ours, grads), wants, strict=True):
        assert_close(got, want, 1e-5)


def test_plain_look_ahead_differs_from_the_corrected_one():
    """Without bias correction the look-ahead is another direction from the second step on."""
    plain, corrected = (
        _run(spectral.scale_by_spectral(nesterov=True, bias_correction=b, scale="none"), _grads())
        for b in (False, True)
    )
    assert_close(plain[0], corrected[0], 1e-5)
    assert np.abs(plain[1]["0"]["kernel"] - corrected[1]["0"]["kernel"]).max() > 1e-2


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_update_is_the_definition(alpha, nesterov):
    """s nu^alpha polar(N) with N from the momentum recursion, in float64."""
    tx = spectral.scale_by_spectral(
        b1=0.8, nesterov=nesterov, alpha=alpha, scale="spectral", method="qdwh"
    )
    grads = _grads()
    mu = 0.0
    for grad, got in zip(grads, _run(tx, grads), strict=True):
        g = np.float64(grad["0"]["kernel"])
        mu = 0.8 * mu + 0.2 * g
        u, s, vt = np.linalg.svd(0.8 * mu + 0.2 * g if nesterov else mu, full_matrices=False)
        want = math.sqrt(8 / 16) * s.sum() ** alpha * u @ vt
        np.testing.assert_allclose(got["0"]["kernel"], want, rtol=0, atol=1e-5 * abs(want).max())


def test_alpha_may_be_traced_and_vmapped():
    """A traced exponent gives the numbers of a static one, also where it is zero."""
    grads = _grads(1)

    def last(alpha):
        return _run(spectral.scale_by_spectral(alpha=alpha, eps=0.0), grads)[0]

    got = jax.vmap(last)(jnp.array([0.0, 0.5, 1.0]))
    for i, alpha in enumerate((0.0, 0.5, 1.0)):
        # Two programs, as in the contract: rounding grows in a square matrix's small directions.
        assert_close(jax.tree.map(lambda x, i=i: x[i], got), last(alpha), 1e-4)


def test_size_is_bounded_below_by_eps():
    """nu = max(<M, polar(M)>, eps): a tiny gradient moves by eps at alpha = 1."""
    grads = {"kernel": 1e-6 * jnp.eye(4, 6)}
    tx = spectral.scale_by_spectral(b1=0.0, alpha=1.0, eps=1e-2, scale="none", method="eigh")
    updates, _ = tx.update(grads, tx.init(grads))
    np.testing.assert_allclose(updates["kernel"], 1e-2 * np.eye(4, 6), rtol=1e-6)


@pytest.mark.parametrize(
    ("scale", "factor"),
    [
        ("none", lambda out, into: 1.0),
        ("muon", lambda out, into: math.sqrt(max(1, out / into))),
        ("spectral", lambda out, into: math.sqrt(out / into)),
        ("rms", lambda out, into: 0.2 * math.sqrt(max(out, into))),
        ("unit_rms", lambda out, into: math.sqrt(max(out, into))),
    ],
)
def test_scales_go_by_units_and_features(scale, factor):
    """A kernel is (in, out), a weight (out, in); the factor depends on which is which."""
    x = contract.normal(6, 24)
    for name, out, into in (("kernel", 24, 6), ("weight", 6, 24)):
        tx = spectral.scale_by_spectral(b1=0.0, scale=scale, method="qdwh")
        updates, _ = tx.update({name: x}, tx.init({name: x}))
        got = np.linalg.svd(updates[name], compute_uv=False)
        np.testing.assert_allclose(got, factor(out, into), rtol=1e-5)


def test_rms_scales_give_entries_of_that_size():
    """A full-rank update has root mean square 0.2 under "rms" and 1 under "unit_rms"."""
    x = {"kernel": contract.normal(6, 24)}
    for scale, size in (("rms", 0.2), ("unit_rms", 1.0)):
        tx = spectral.scale_by_spectral(b1=0.0, scale=scale, method="qdwh")
        updates, _ = tx.update(x, tx.init(x))
        assert float(jnp.sqrt(jnp.mean(updates["kernel"] ** 2))) == pytest.approx(size, rel=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize(
    "spec",
    [
        MatrixSpec(unit=2, feature=1, batch=0),
        MatrixSpec(unit=0, feature=1, batch=2),
        MatrixSpec(unit=0, feature=2, batch=1),
    ],
)
def test_stack_is_separate_leaves(spec, alpha):
    """A leaf of stacked matrices gets the updates of as many leaves, on whatever axis."""
    x = np.float32(contract.normal(5, 6, 7)) * np.float32([1, 2, 3, 4, 5, 6, 7])
    tx = spectral.scale_by_spectral(b1=0.0, alpha=alpha, scale="muon", overrides={"*": spec})
    got, _ = tx.update({"x": x}, tx.init({"x": x}))
    axes = {axis: name for axis, name in zip(spec[:3], ("unit", "feature", "batch"), strict=True)}
    rest = [axes[axis] for axis in range(3) if axis != spec.batch]
    plain = MatrixSpec(unit=rest.index("unit"), feature=rest.index("feature"))
    one = spectral.scale_by_spectral(b1=0.0, alpha=alpha, scale="muon", overrides={"*": plain})
    for i in range(x.shape[spec.batch]):
        leaf = {"x": jnp.asarray(np.take(x, i, spec.batch))}
        want, _ = one.update(leaf, one.init(leaf))
        assert_close(np.take(np.asarray(got["x"]), i, spec.batch), want["x"], 1e-5)


def test_bucket_is_leaf_by_leaf():
    """Leaves of one shape and its transpose share a call and get what they get alone."""
    grads = _grads(1, [(16, 8), (8, 16), (16, 8), (3, 16, 8), (8, 8)])[0]
    grads["3"] = {"experts": grads.pop("3")}
    tx = spectral.scale_by_spectral(alpha=1.0)
    got, _ = tx.update(grads, tx.init(grads))
    for name, leaf in grads.items():
        want, _ = tx.update({name: leaf}, tx.init({name: leaf}))
        assert_close(got[name], want[name], 1e-5)
    text = jax.jit(tx.update).lower(grads, tx.init(grads)).as_text()
    assert "tensor<6x8x16xf32>" in text  # three leaves and a stack of three in one batch


def test_fused_leaf_is_its_parts():
    """A fused kernel gets the updates, scales included, of its parts as leaves of their own."""
    x = contract.normal(6, 20)
    fused = spectral.scale_by_spectral(
        scale="muon", overrides={"x": MatrixSpec(unit=1, feature=0, split=((4, 16), 1))}
    )
    parts = {"a": {"kernel": x[:, :4]}, "b": {"kernel": x[:, 4:]}}
    one = spectral.scale_by_spectral(scale="muon")
    got, _ = fused.update({"x": x}, fused.init({"x": x}))
    want, _ = one.update(parts, one.init(parts))
    assert_close(got["x"][:, :4], want["a"]["kernel"], 1e-5)
    assert_close(got["x"][:, 4:], want["b"]["kernel"], 1e-5)


def test_attention_heads_are_their_own_matrices():
    """Every head of a query kernel (d, heads, head_dim) is orthogonalized alone."""
    x = {"query": {"kernel": contract.normal(12, 3, 4)}}
    tx = spectral.scale_by_spectral(b1=0.0, scale="none", method="qdwh")
    updates, _ = tx.update(x, tx.init(x))
    for head in range(3):
        s = np.linalg.svd(updates["query"]["kernel"][:, head], compute_uv=False)
        np.testing.assert_allclose(s, 1, rtol=1e-5)


def test_momentum_is_float32_and_updates_keep_their_dtype():
    """16-bit gradients give 16-bit updates from a float32 momentum; mu_dtype changes that."""
    grads = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), _grads(1)[0])
    for mu_dtype, want in ((None, jnp.float32), (jnp.bfloat16, jnp.bfloat16)):
        tx = spectral.scale_by_spectral(mu_dtype=mu_dtype)
        updates, state = tx.update(grads, tx.init(grads))
        assert {x.dtype for x in jax.tree.leaves(state.mu)} == {jnp.dtype(want)}
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_narrow_products_do_not_lose_a_small_gradient(dtype):
    """The momentum is normalized before it is cast to a dtype of smaller range."""
    with jax.enable_x64(True):
        grads = {"kernel": jnp.asarray(np.float64(contract.normal(4, 6)) * 1e-60)}
        tx = spectral.scale_by_spectral(b1=0.0, dtype=dtype, scale="none")
        updates, _ = tx.update(grads, tx.init(grads))
        want, _ = spectral.scale_by_spectral(b1=0.0, scale="none").update(grads, tx.init(grads))
        # A lost gradient is off by all of its norm, 16-bit products by less than a tenth.
        error = np.linalg.norm(updates["kernel"] - want["kernel"])
        assert error <= 0.1 * np.linalg.norm(want["kernel"])


def test_momentum_does_not_freeze_in_bfloat16():
    """After 100 equal gradients of 1 the momentum is 1 - b1^100, which bfloat16 sums miss."""
    grads = {"kernel": jnp.ones((2, 2), jnp.bfloat16)}
    tx = spectral.scale_by_spectral(b1=0.99)
    state = jax.lax.fori_loop(0, 100, lambda _, s: tx.update(grads, s)[1], tx.init(grads))
    np.testing.assert_allclose(state.mu["kernel"], 1 - 0.99**100, rtol=1e-5)
    assert int(state.step) == 100


def test_state_does_not_depend_on_buckets():
    """Two states of the same leaves have the same tree, whatever shares a call with them."""
    grads = _grads(1)[0]
    tx = spectral.scale_by_spectral()
    state = tx.init(grads)
    assert jax.tree.structure(state.mu) == jax.tree.structure(grads)
    assert [x.shape for x in jax.tree.leaves(state.mu)] == [x.shape for x in jax.tree.leaves(grads)]
    assert spectral.ScaleBySpectralState._fields == ("step", "mu", "nu_unit")


def test_what_does_not_fit_a_rule_is_named():
    """Leaves that are no matrices raise with their path, at init already."""
    tx = spectral.scale_by_spectral()
    for leaf, error, match in (
        (jnp.ones(3), ValueError, r"a/x must be a matrix.*got shape \(3,\)"),
        (jnp.ones((3, 3), jnp.int32), TypeError, "a/x must be real floating, got int32"),
        (jnp.ones((3, 3), jnp.complex64), TypeError, "a/x must be real floating, got complex64"),
        (jnp.ones((0, 3)), ValueError, r"'a/x' of shape \(0, 3\)"),
        (jnp.ones((2, 3, 4, 5)), ValueError, r"a/x of shape \(2, 3, 4, 5\).*MatrixSpec"),
    ):
        with pytest.raises(error, match=match):
            tx.init({"a": {"x": leaf}})


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"rule": "polr"}, ValueError, "rule must be one of 'polar', 'right_.*got 'polr'"),
        ({"scale": "rsm"}, ValueError, "scale must be one of 'none', 'muon'.*got 'rsm'"),
        ({"method": "svd"}, ValueError, "method must be one of"),
        ({"coefficients": "dion"}, ValueError, "coefficients must be one of"),
        ({"steps": 0}, ValueError, "steps must be at least 1, got 0"),
        ({"b1": 1.0}, ValueError, r"b1 must be in \[0.0, 1.0\), got 1.0"),
        ({"b1": -0.1}, ValueError, "got -0.1"),
        ({"b1": "0.9"}, TypeError, "b1 must be a number, got '0.9'"),
        ({"eps": -1.0}, ValueError, r"eps must be in \[0.0, inf\), got -1.0"),
        (
            {"alpha": 1.0, "scale": "unit_rms"},
            ValueError,
            "needs alpha=None or a static 0, got alpha=1.0",
        ),
        ({"alpha": "1"}, TypeError, "alpha must be a number, got '1'"),
        ({"mu_dtype": jnp.int8}, TypeError, "mu_dtype must be a real floating dtype or None"),
        ({"mu_dtype": "wide"}, TypeError, "mu_dtype must be .*, got 'wide'"),
        ({"distribute": ("a", "a")}, ValueError, r"each mesh axis once, got \('a', 'a'\)"),
        ({"sharding": {"x": 3}}, TypeError, "sharding at x must be a NamedSharding.*got int"),
    ],
)
def test_bad_options_are_named(kwargs, error, match):
    """Static arguments are checked by the factory."""
    with pytest.raises(error, match=match):
        spectral.scale_by_spectral(**kwargs)


def test_gradients_must_be_shaped_like_the_params():
    """What could be broadcast to the momentum is an error that names the leaf and both shapes."""
    tx = spectral.scale_by_spectral()
    state = tx.init({"w": jnp.ones((3, 4))})
    with pytest.raises(ValueError, match=r"wanted \(3, 4\) at w, got \(1, 4\)"):
        tx.update({"w": jnp.ones((1, 4))}, state)


def test_an_array_as_eps_meets_float64():
    """A hyperparameter takes the dtype of what it meets, also under strict promotion."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        grads = {"w": jnp.asarray(np.diag([3.0, 1.0]))}
        tx = spectral.scale_by_spectral(alpha=1.0, eps=jnp.float32(1e-8), b1=0.0, scale="none")
        update, _ = tx.update(grads, tx.init(grads))
    assert update["w"].dtype == jnp.float64
