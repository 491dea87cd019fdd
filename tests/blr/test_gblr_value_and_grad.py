"""Gradient and curvature at samples: means, variances, modes, devices."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxkit import blr
from jaxkit.blr import _geometry

KEY = jax.random.key(0)


def _case():
    params = contract.normal(8, 3)

    def loss_fn(params, x):
        return jnp.mean(jnp.tanh(x @ params) ** 2)

    state = blr.gblr(0.1, ess=50.0, alpha=1.5).init(params)
    run = blr.gblr_value_and_grad(loss_fn, num_samples=2)
    return run, (KEY, params, state, contract.normal(8, 8))


test_contract = contract.function(
    contract.Case(
        "gblr_value_and_grad",
        _case,
        draws=True,
        vary=lambda args: (contract.vary(args[0]), contract.vary(args[1]), *args[2:]),
        dtypes=("float32",),
        rtol=1e-3,
    )
)


def quadratic(params, c=2.0, b=0.5):
    return jnp.sum(c * params**2 / 2 + b * params)


@pytest.mark.parametrize("alpha", [0.8, 1.0, 2.0])
def test_the_variance_of_the_curvature_is_the_formula(alpha):
    """c^2 (kurtosis - 1) + b^2 / sigma^2 for a sample, of mean c; a pair has half the first."""
    n, c, b, sigma = 200_000, 2.0, 0.5, 0.5
    params = jnp.zeros(n)
    state = blr.gblr(0.1, ess=1 / sigma**2, alpha=alpha, weight_decay=0.0).init(params)
    kurtosis = float(_geometry.kurtosis(alpha))
    first, second = c**2 * (kurtosis - 1), b**2 / sigma**2
    for options, want in (
        ({}, first + second),
        ({"num_samples": 2, "hessian": "antithetic"}, first),
    ):
        _, grads, hess = jax.jit(blr.gblr_value_and_grad(quadratic, **options))(KEY, params, state)
        assert abs(jnp.mean(hess) - c) < 4 * np.sqrt(want / n)
        if alpha > 0.9:  # else the fourth power of the noise is too wild to average
            np.testing.assert_allclose(jnp.var(hess), want, rtol=0.05)
        if options:
            np.testing.assert_allclose(grads, b, atol=1e-5)


def test_all_estimators_mean_the_curvature_of_the_rule():
    """2 dE_q[l] / d sigma^2 by quadrature, not the mean Hessian, for a loss beyond quadratics."""
    scipy = pytest.importorskip("scipy.integrate")
    alpha, mu, width, n = 2.0, 0.3, 0.8, 100_000
    r = 5**0.5

    def mean(fun):
        """Returns E[fun(z)] under the unit-variance density at alpha 2, 3 (1 - z^2 / 5) / (4 r)."""
        return scipy.quad(lambda z: fun(z) * 3 * (1 - z * z / 5) / (4 * r), -r, r)[0]

    def second(t):
        return -2 * np.tanh(2 * t) * 4 / np.cosh(2 * t) ** 2 + 0.4

    eps = 1e-4

    def energy(variance):
        return mean(
            lambda z: np.tanh(2 * (mu + variance**0.5 * z)) + 0.2 * (mu + variance**0.5 * z) ** 2
        )

    want = 2 * (energy(width**2 + eps) - energy(width**2 - eps)) / (2 * eps)
    plain = mean(lambda z: second(mu + width * z))
    assert abs(want - plain) > 0.05
    params = jnp.full(n, mu)
    state = blr.gblr(0.1, ess=1 / width**2, alpha=alpha, weight_decay=0.0).init(params)

    def loss_fn(params):
        return jnp.sum(jnp.tanh(2 * params) + 0.2 * params**2)

    for hessian in ("reparam", "antithetic", "hutchinson"):
        run = jax.jit(blr.gblr_value_and_grad(loss_fn, num_samples=2, hessian=hessian))
        _, _, hess = run(KEY, params, state)
        assert abs(jnp.mean(hess) - want) < 4.5 * jnp.std(hess) / n**0.5, hessian
    assert abs(jnp.mean(hess) - plain) > 10 * jnp.std(hess) / n**0.5


def test_hutchinson_is_the_diagonal_when_the_hessian_is():
    """Also with several leaves, aux and two samples; and u H u is right for a full one."""
    params = {"a": contract.normal(3), "b": contract.normal(2)}
    state = blr.gblr(0.1, ess=10.0).init(params)

    def loss_fn(params):
        return jnp.sum(params["a"] ** 2) + 2 * jnp.sum(params["b"] ** 2), {"size": 3}

    run = blr.gblr_value_and_grad(loss_fn, num_samples=2, hessian="hutchinson", has_aux=True)
    (_, aux), _, hess = jax.jit(run)(KEY, params, state)
    np.testing.assert_allclose(hess["a"], 2, rtol=1e-6)
    np.testing.assert_allclose(hess["b"], 4, rtol=1e-6)
    assert aux["size"] == 3
    full = jnp.array([[2.0, 1.0], [1.0, 3.0]])
    state = blr.gblr(0.1, ess=10.0).init(jnp.zeros(2))
    run = jax.jit(
        blr.gblr_value_and_grad(
            lambda p: p @ full @ p / 2, num_samples=400, hessian="hutchinson", mode="vmap"
        )
    )
    hess = run(KEY, jnp.zeros(2), state)[2]
    np.testing.assert_allclose(hess, [2, 3], atol=4 / 20)


def test_gradsq_is_the_batch_size_times_the_squared_gradient():
    """Of each sample, then the mean."""
    params = jnp.ones(3)
    state = blr.gblr(0.1, ess=1e12).init(params)
    run = blr.gblr_value_and_grad(quadratic, hessian="gradsq", batch_size=16, num_samples=2)
    _, grads, hess = run(KEY, params, state)
    np.testing.assert_allclose(hess, 16 * 2.5**2, rtol=1e-4)
    np.testing.assert_allclose(grads, 2.5, rtol=1e-4)


@pytest.mark.parametrize("hessian", ["reparam", "antithetic"])
def test_scan_and_vmap_are_the_same_and_their_parts_can_be_made_by_hand(hessian):
    """Sample m draws with fold_in(key, m); all but aux, which is the first, are means."""
    params = {"a": contract.normal(3), "b": contract.normal(3, seed=1)}
    state = blr.gblr(0.1, ess=10.0, alpha=1.5).init(params)

    def loss_fn(params, shift):
        value = jnp.sum(jnp.sin(params["a"] + shift)) + jnp.sum(params["b"] ** 4)
        return value, params["a"]

    outs = []
    for mode in ("scan", "vmap"):
        run = blr.gblr_value_and_grad(
            loss_fn, num_samples=4, mode=mode, hessian=hessian, has_aux=True
        )
        outs.append(jax.jit(run)(KEY, params, state, 0.3))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), *outs)

    @jax.jit
    def by_hand():
        rows = []
        for m in range(2 if hessian == "antithetic" else 4):
            key = jax.random.fold_in(KEY, m)
            theta, z = blr.sample_posterior(key, params, state)
            width = jax.tree.map(lambda t, p, z: (t - p) / z, theta, params, z)
            (value, aux), g = jax.value_and_grad(loss_fn, has_aux=True)(theta, 0.3)
            hess = jax.tree.map(lambda g, z, w: g * z / w, g, z, width)
            if hessian == "antithetic":
                other = jax.tree.map(lambda t, p: 2 * p - t, theta, params)
                (value2, _), g2 = jax.value_and_grad(loss_fn, has_aux=True)(other, 0.3)
                hess = jax.tree.map(lambda g, o, z, w: z * (g - o) / (2 * w), g, g2, z, width)
                value, g = jax.tree.map(lambda x, y: (x + y) / 2, (value, g), (value2, g2))
            rows.append(((value, g, hess), aux))
        mean = jax.tree.map(lambda *xs: sum(xs) / len(xs), *(row for row, _ in rows))
        return mean, rows[0][1]

    (value, grads, hess), aux = by_hand()
    got = outs[0]
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3),
        got,
        ((value, aux), grads, hess),
    )


def test_bfloat16_parameters_have_an_unbiased_curvature():
    """E[hess] is c at a width of an eighth of a unit in the last place, where the grid hides it."""
    n, unit = 100_000, 2.0**-7
    params = {"w": jnp.ones(n, jnp.bfloat16)}
    tx = blr.gblr(0.1, ess=(8 / unit) ** 2, weight_decay=0.0)
    state = tx.init(params)
    for shift in (0.0, 0.4):
        state = state._replace(master={"w": jnp.full(n, 1 + shift * unit)})

        def loss_fn(params):
            return jnp.sum((params["w"] - 1) ** 2)

        run = blr.gblr_value_and_grad(loss_fn, num_samples=2, hessian="antithetic")
        _, grads, hess = jax.jit(run)(KEY, params, state)
        assert grads["w"].dtype == jnp.bfloat16 and hess["w"].dtype == jnp.float32
        # bfloat16 gradients of a parabola are exact here: 2 (theta - 1) is on the grid.
        assert abs(jnp.mean(hess["w"]) - 2) < 4.5 * jnp.std(hess["w"]) / n**0.5
        assert jnp.std(hess["w"]) / n**0.5 < 0.1


def test_eight_devices_are_the_mean_of_eight_runs():
    """Device i draws with fold_in(key, i); gradients, curvatures and values are averaged."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    params = {"w": contract.normal(4), "n": jnp.arange(2), "frozen": contract.normal(3)}
    rule = blr.gblr(0.1, ess=4.0, alpha=1.5)
    # A mask by hand: the rule does not own the frozen leaf.
    state = rule.init({"w": params["w"], "n": params["n"], "frozen": None})
    state = state._replace(hess={**state.hess, "frozen": None})
    x = contract.normal(16, 4)

    def loss_fn(params, x):
        value = jnp.mean(jnp.sin(x @ params["w"])) + jnp.mean(x) * jnp.sum(params["frozen"] ** 2)
        return value, jnp.max(x)

    def run(key, params, state, x, axis_name=None):
        fun = blr.gblr_value_and_grad(loss_fn, num_samples=2, has_aux=True, axis_name=axis_name)
        (value, aux), grads, hess = fun(key, params, state, x)
        return (value, grads, hess), aux[None]

    sharded = jax.shard_map(
        lambda *args: run(*args, axis_name="data"),
        mesh=mesh,
        in_specs=(P(), P(), P(), P("data")),
        out_specs=((P(), P(), P()), P("data")),
    )
    got, aux = jax.jit(sharded)(KEY, params, state, x)
    assert aux.shape == (8,)
    one = jax.jit(run)
    parts = [
        one(jax.random.fold_in(KEY, i), params, state, x[2 * i : 2 * i + 2])[0] for i in range(8)
    ]
    want = jax.tree.map(lambda *xs: np.mean(np.stack(xs), 0), *parts)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
        ({"num_samples": 1.5}, TypeError, "num_samples must be a static whole number, got 1.5"),
        ({"num_samples": 3, "hessian": "antithetic"}, ValueError, "num_samples must be even .* 3"),
        ({"mode": "loop"}, ValueError, "mode must be one of 'scan', 'vmap', got 'loop'"),
        ({"hessian": "exact"}, ValueError, "hessian must be one of 'reparam', .*got 'exact'"),
        ({"hessian": "gradsq"}, ValueError, "batch_size must be given with hessian='gradsq'"),
        ({"batch_size": 4}, ValueError, "batch_size must be None with hessian='reparam', got 4"),
    ],
)
def test_bad_options_are_named(options, error, match):
    """Each message names the option and its value."""
    with pytest.raises(error, match=match):
        blr.gblr_value_and_grad(quadratic, **options)


def test_bad_calls_are_named():
    """No function, no state, a loss that is none, aux where none is expected."""
    params = jnp.ones(2)
    state = blr.gblr(0.1, ess=1.0).init(params)
    with pytest.raises(TypeError, match="loss_fn must be a function, got None"):
        blr.gblr_value_and_grad(None)
    for loss_fn, opt_state, error, match in (
        (quadratic, (), ValueError, "opt_state must hold a GBLRState, got none"),
        (lambda p: p, state, ValueError, r"the loss must have shape \[\], got \(2,\)"),
        (lambda p: (p[0], p), state, TypeError, "must return the loss alone with has_aux=False"),
    ):
        with pytest.raises(error, match=match):
            jax.eval_shape(blr.gblr_value_and_grad(loss_fn), KEY, params, opt_state)
