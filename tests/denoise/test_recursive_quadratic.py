"""Recursive least squares: equal to the batch, weighted batches, transformations, bad input."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import denoise

X, Y, AT = contract.normal(8, 4), contract.normal(8, 4, seed=1), contract.normal(4)


def run(fit, x, y):
    """Returns the state after all rows."""

    def step(state, row):
        return fit.update(state, *row), None

    return jax.lax.scan(step, fit.init(x[0]), (x, y))[0]


def predicted(**options):
    def fun(x, y, at):
        fit = denoise.recursive_quadratic(**options)
        return fit.predict(run(fit, x, y), at)

    return fun


test_contract = contract.function(
    contract.Case("recursive_quadratic", lambda: (predicted(forgetting=0.9), (X, Y, AT))),
)


def data(n=12, d=4):
    rng = np.random.default_rng(n)
    return np.cumsum(rng.normal(size=(n, d)), 0), rng.normal(size=(n, d)), rng.normal(size=(d, d))


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("ridge", [None, 0.5])
@pytest.mark.parametrize("with_prior", [False, True])
def test_without_forgetting_it_is_the_batch(symmetric, ridge, with_prior):
    """After every step: gradient and Hessian of the points so far, in float64."""
    x, y, a = data()
    options = {"hessian": a + a.T if with_prior else None, "ridge": ridge}
    method = "symmetric" if symmetric else "hessian"
    fit = denoise.recursive_quadratic(symmetric=symmetric, **options)
    with jax.enable_x64(True):
        state = fit.init(jnp.asarray(x[0]))
        update, predict = jax.jit(fit.update), jax.jit(fit.predict)
        for t in range(len(x)):
            state = update(state, x[t], y[t])
            if t in (0, 2, 11):
                seen = x[: t + 1], y[: t + 1], x[t] + 1
                want = denoise.quadratic_mle(*seen, method=method, **options)
                got = predict(state, x[t] + 1)
                np.testing.assert_allclose(got.gradient, want.gradient, rtol=1e-8, atol=1e-8)
                np.testing.assert_allclose(got.hessian, want.hessian, rtol=1e-8, atol=1e-8)


def test_with_forgetting_it_holds_the_weighted_sums():
    """Weights rho**age: means, scatter and cross sums by NumPy; the weight tends to 1/(1 - rho)."""
    x, y, _ = data()
    rho = 0.8
    weights = rho ** np.arange(len(x))[::-1]
    with jax.enable_x64(True):
        fit = denoise.recursive_quadratic(forgetting=jnp.asarray(rho))
        state = jax.tree.map(np.asarray, run(fit, jnp.asarray(x), jnp.asarray(y)))
    means = [weights @ z / weights.sum() for z in (x, y)]
    dx, dy = (z - mean for z, mean in zip((x, y), means, strict=True))
    for got, want in (
        (state.weight, weights.sum()),
        (state.x_mean, means[0]),
        (state.y_mean, means[1]),
        (state.scatter, (weights[:, None] * dx).T @ dx),
        (state.cross, (weights[:, None] * dy).T @ dx),
    ):
        np.testing.assert_allclose(got, want, rtol=1e-11, atol=1e-11)


def test_forgetting_follows_a_hessian_that_changes():
    """After a change of A the weighted fit finds the new one, the unweighted one does not."""
    rng = np.random.default_rng(3)
    x = jnp.float32(rng.normal(size=(120, 3)))
    old, new = (jnp.float32(rng.normal(size=(3, 3))) for _ in range(2))
    y = jnp.concatenate([x[:60] @ old.T, x[60:] @ new.T])
    errors = [
        jnp.linalg.norm(predicted(forgetting=rho)(x, y, x[0]).hessian - new) for rho in (0.7, 1.0)
    ]
    assert errors[0] < 1e-4 * jnp.linalg.norm(new)
    assert errors[1] > 0.1 * jnp.linalg.norm(new)


def test_before_the_first_gradient_there_is_none():
    """The prediction is NaN; after one gradient it is that gradient, whatever the point."""
    fit = denoise.recursive_quadratic()
    state = fit.init(AT)
    assert jnp.isnan(fit.predict(state, AT).gradient).all()
    state = fit.update(state, X[0], Y[0])
    np.testing.assert_array_equal(fit.predict(state, AT).gradient, Y[0])


def test_the_state_may_be_donated_and_is_wide():
    """Its buffers are its own; it is float32 for bfloat16 points; predictions are bfloat16."""
    fit = denoise.recursive_quadratic()
    state = fit.init(jnp.bfloat16(AT))
    update = jax.jit(fit.update, donate_argnums=0)
    for x, y in zip(jnp.bfloat16(X[:3]), jnp.bfloat16(Y[:3]), strict=True):
        state = update(state, x, y)
    assert {leaf.dtype for leaf in state} == {jnp.dtype("float32")}
    assert fit.predict(state, jnp.bfloat16(AT)).gradient.dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"forgetting": 0.0}, ValueError, r"forgetting must be in \(0, 1\], got 0.0"),
        ({"forgetting": 1.01}, ValueError, r"forgetting must be in \(0, 1\], got 1.01"),
        ({"forgetting": "slow"}, TypeError, "forgetting must be a number"),
        ({"ridge": -0.1}, ValueError, r"ridge must be in \[0, inf\), got -0.1"),
        ({"hessian": jnp.ones((2, 3))}, ValueError, r"hessian must have shape \[d, d\]"),
    ],
)
def test_bad_options_are_named(kwargs, error, match):
    """At the call of the factory, with the value."""
    with pytest.raises(error, match=match):
        denoise.recursive_quadratic(**kwargs)


def test_bad_points_are_named():
    """Shapes and dtypes of what the three functions get."""
    fit = denoise.recursive_quadratic()
    state = fit.init(AT)
    with pytest.raises(ValueError, match=r"y must have shape \[d\] with d=4, got \(3,\)"):
        fit.update(state, AT, AT[:3])
    with pytest.raises(ValueError, match=r"at must have shape \[d\] with d=4, got \(4, 4\)"):
        fit.predict(state, jnp.ones((4, 4)))
    with pytest.raises(TypeError, match="point must be real floating, got int32"):
        fit.init(jnp.arange(3))
    with pytest.raises(
        ValueError, match=r"hessian must have shape \[d, d\] with d=4, got \(3, 3\)"
    ):
        denoise.recursive_quadratic(hessian=jnp.eye(3)).init(AT)
