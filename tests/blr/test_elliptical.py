"""The rule for joint posteriors: exact regression, its fixed points, positivity, and moments."""

import functools

import blr_oracles
import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import blr

KEY = jax.random.key(0)
PRIOR = {"prior_mean": jnp.zeros(8), "prior_precision": jnp.eye(8)}


def quadratic(theta, x, y):
    return jnp.sum(jnp.square(x @ theta - y)) / 2


def nodes(n, dtype=jnp.float32):
    """Returns points of covariance one that are exact up to degree 3."""
    eye = np.sqrt(n) * np.eye(n)
    return jnp.asarray(np.concatenate([eye, -eye]), dtype)


def _run(key, mean, x, y):
    init, step = blr.elliptical(quadratic, **PRIOR, alpha=1.5, num_samples=20)
    return step(key, init(mean), x, y)


test_contract = contract.function(
    contract.Case(
        "elliptical",
        lambda: (_run, (KEY, contract.normal(8), contract.normal(16, 8), contract.normal(16))),
        draws=True,
        dtypes=("float32",),
    )
)


@pytest.fixture(scope="module")
def diabetes():
    """Returns data of scikit-learn over the noise's deviation, the prior and the exact answer."""
    data = pytest.importorskip("sklearn.datasets").load_diabetes()
    ridge = pytest.importorskip("sklearn.linear_model").Ridge
    noise, prior = 0.7, 3.0
    x = data.data / data.data.std(0) / noise
    y = (data.target - data.target.mean()) / data.target.std() / noise
    mean = ridge(prior, fit_intercept=False, tol=1e-14, solver="cholesky").fit(x, y).coef_
    return x, y, prior, x.T @ x + prior * np.eye(10), mean


@pytest.mark.parametrize("alpha", [0.95, 1.0, 2.0])
def test_diabetes_regression_is_exact_in_one_step(diabetes, alpha):
    """From any start, at rate 1, in float64 to 1e-9: S = X'X / s2 + d I and its mean; at rate 0.3
    each step leaves 0.7 of the error."""
    x, y, prior, precision, mean = diabetes
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        start = rng.normal(size=10), np.diag(rng.uniform(1, 50, 10))
        make = functools.partial(
            blr.elliptical,
            quadratic,
            prior_mean=jnp.zeros(10),
            prior_precision=prior * jnp.eye(10),
            alpha=alpha,
            nodes=nodes(10, jnp.float64),
            positive=False,
        )
        init, step = make(learning_rate=1.0)
        state, info = jax.jit(step)(KEY, init(*start), x, y)
        np.testing.assert_allclose(
            state.precision, precision, rtol=1e-9, atol=1e-9 * precision.max()
        )
        np.testing.assert_allclose(state.mean, mean, rtol=1e-9, atol=1e-10)
        np.testing.assert_allclose(info.grad, x.T @ (x @ start[0] - y), rtol=1e-9)
        init, step = make(learning_rate=0.3)
        state, error, jitted = init(*start), start[1] - precision, jax.jit(step)
        for _ in range(2):
            state, _ = jitted(KEY, state, x, y)
            error = 0.7 * error
            np.testing.assert_allclose(state.precision - precision, error, rtol=1e-8, atol=1e-8)
        # lambda = (S mu, -S / 2) moves on a straight line, so S mu does.
        linear = precision @ mean + 0.49 * (start[1] @ start[0] - precision @ mean)
        np.testing.assert_allclose(state.precision @ state.mean, linear, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("shape", [(10,), ()])
def test_other_shapes_take_the_diagonal_or_its_mean(diabetes, shape):
    """Of the same curvature, in one step, at any alpha."""
    x, y, prior, precision, _ = diabetes
    init, step = blr.elliptical(
        quadratic,
        prior_mean=jnp.zeros(10),
        prior_precision=jnp.full(shape, prior),
        alpha=1.3,
        learning_rate=1.0,
        nodes=nodes(10),
        positive=False,
    )
    state, info = jax.jit(step)(KEY, init(jnp.ones(10)), jnp.float32(x), jnp.float32(y))
    diagonal = np.diag(precision)
    want = diagonal if shape else diagonal.mean()
    np.testing.assert_allclose(state.precision, want, rtol=1e-5)
    assert info.hess.shape == shape
    pull = x.T @ (x @ np.ones(10) - y) + prior
    np.testing.assert_allclose(state.mean, 1 - pull / want, rtol=1e-4, atol=1e-4)


def _rule(alpha):
    z, weights = blr_oracles.rule(alpha)
    return {"nodes": jnp.asarray(z)[:, None], "weights": jnp.asarray(weights)}


@pytest.mark.parametrize("alpha", [0.6, 1.0, 2.0])
def test_curvature_is_the_mean_of_the_hessian_under_another_density(alpha):
    """Under the weight (R2 - r2)(n + a + 2) / ((a + 2) R2) of q, which is not q for alpha != 1;
    and twice the derivative of the expected loss in the variance."""

    def loss(theta):
        return jnp.sum(jnp.tanh(2 * theta) + 0.2 * theta**2)

    with jax.enable_x64(True):
        init, step = blr.elliptical(
            loss, prior_mean=jnp.zeros(1), prior_precision=jnp.eye(1), alpha=alpha, **_rule(alpha)
        )
        _, info = jax.jit(step)(KEY, init(jnp.array([0.3]), jnp.array([[1.7]])))
        grid = blr_oracles.density(alpha, 1.7)
        variance = grid.mean(np.square)

        def hessian(x):
            return -8 * np.tanh(2 * x) / np.cosh(2 * np.clip(x, -100, 100)) ** 2 + 0.4

        z2 = np.square(grid.x) / variance
        weight = (3 * alpha - 1 - (alpha - 1) * z2) / (2 * alpha)
        weighted = grid.integral(grid.p * weight * hessian(grid.x + 0.3))
        assert float(info.hess[0, 0]) == pytest.approx(weighted, rel=1e-6)
        assert grid.integral(grid.p * weight) == pytest.approx(1, rel=1e-6)
        plain = grid.mean(lambda x: hessian(x + 0.3))
        assert (plain == pytest.approx(weighted, rel=1e-3)) == (alpha == 1)

        def expected(v):
            scaled = grid.x * np.sqrt(v / variance) + 0.3
            return grid.integral(grid.p * (np.tanh(2 * scaled) + 0.2 * scaled**2))

        step_size = 1e-4 * variance
        slope = (expected(variance + step_size) - expected(variance - step_size)) / step_size
        assert float(info.hess[0, 0]) == pytest.approx(slope, rel=1e-5)
        if alpha == 2:
            np.testing.assert_allclose([weighted, plain], [-0.72524, -0.36985], atol=5e-6)


X, Y = np.array([1, 2, -1, 0.5, 3]), np.array([1, 1, -1, -1, 1])


def logistic(theta):
    return jnp.sum(jnp.logaddexp(0.0, -jnp.asarray(X * Y) * theta[0]))


@pytest.mark.parametrize(
    ("alpha", "mean", "precision"),
    [
        (0.6, 1.575766, 1.393520),
        (0.8, 1.330010, 1.723689),
        (1.5, 1.107788, 1.835064),
        (2.0, 1.067685, 1.826583),
        (4.0, 1.028452, 1.819587),
    ],
)
def test_fixed_point_is_the_minimum_of_the_free_energy(alpha, mean, precision):
    """Of logistic regression by quadrature: the rule goes where a general optimizer goes."""
    optimize = pytest.importorskip("scipy.optimize")
    with jax.enable_x64(True):
        init, step = blr.elliptical(
            logistic,
            prior_mean=jnp.array([-0.3]),
            prior_precision=jnp.array([[0.5]]),
            alpha=alpha,
            learning_rate=0.2,
            positive=False,
            **_rule(alpha),
        )

        @jax.jit
        def run(state):
            return jax.lax.scan(lambda state, _: step(KEY, state), state, length=150)

        state, infos = run(init(jnp.zeros(1)))
        got = float(state.mean[0]), float(state.precision[0, 0])
    np.testing.assert_allclose(got, [mean, precision], atol=2e-6)
    unit = blr_oracles.density(alpha)
    z, weights = unit.x, unit.dx * unit.p

    def free_energy(position):
        mean, precision = position[0], np.exp(position[1])
        # The deviation follows S by the power -1 / (1 + alpha).
        theta = mean + precision ** (-1 / (1 + alpha)) * z
        loss = np.sum(weights * np.logaddexp(0, -np.outer(X * Y, theta)).sum(0))
        return loss + blr_oracles.discrepancy(alpha, mean, precision, -0.3, 0.5)

    best = optimize.minimize(
        free_energy, [1.0, 0.5], method="Nelder-Mead", options={"xatol": 1e-5, "fatol": 1e-11}
    )
    np.testing.assert_allclose([best.x[0], np.exp(best.x[1])], [mean, precision], atol=1e-4)
    # What the step reports is this free energy.
    reported = infos.loss[-1] + infos.discrepancy[-1]
    assert float(reported) == pytest.approx(best.fun, rel=1e-6)
    energies = np.asarray(infos.loss + infos.discrepancy)
    assert np.all(np.diff(energies) < 1e-7)


@pytest.mark.parametrize("shape", [(8, 8), (8,), ()])
def test_precision_stays_positive(shape):
    """Whatever the curvature: at least half of it is left, in every direction."""

    def concave(theta):
        return -1e6 * jnp.sum(jnp.square(theta)) - 50 * theta[0] * theta[1]

    prior = jnp.eye(8) if shape == (8, 8) else jnp.ones(shape)
    make = functools.partial(
        blr.elliptical, concave, prior_mean=jnp.zeros(8), prior_precision=prior, nodes=nodes(8)
    )
    for rate in (1e-7, 5e-7, 0.1, 1.0):
        init, step = make(learning_rate=rate)
        state, _ = jax.jit(step)(KEY, init(jnp.ones(8)))
        precision = np.float64(state.precision)
        least = np.linalg.eigvalsh(precision)[0] if shape == (8, 8) else precision.min()
        assert least > 0.5 * (1 - 1e-4) if rate < 1 else least > 0
    init, step = make(learning_rate=0.1, positive=False)
    state, _ = jax.jit(step)(KEY, init(jnp.ones(8)))
    assert np.diag(state.precision).min() < 0 if shape == (8, 8) else state.precision.min() < 0


def test_second_order_term_is_half_of_g_s_g():
    """S + rho G + rho^2 G S^-1 G / 2 with G = S_0 + H - S, by NumPy."""
    x, y = contract.normal(16, 8), contract.normal(16)
    start = 3 * np.eye(8) + 0.5
    init, step = blr.elliptical(quadratic, **PRIOR, learning_rate=0.4, nodes=nodes(8))
    state, info = jax.jit(step)(KEY, init(jnp.ones(8), start), x, y)
    np.testing.assert_allclose(info.hess, x.T @ x, rtol=1e-4, atol=1e-4)
    change = 0.4 * (np.eye(8) + np.float64(x).T @ np.float64(x) - start)
    want = start + change + change @ np.linalg.solve(start, change) / 2
    np.testing.assert_allclose(state.precision, want, rtol=1e-4, atol=1e-4)


def test_samples_learn_the_posterior_of_a_small_regression():
    """With drawn points and bounded support the run ends near the exact answer."""
    x, y = contract.normal(64, 8), contract.normal(64)
    init, step = blr.elliptical(quadratic, **PRIOR, alpha=1.2, learning_rate=0.05, num_samples=40)

    def run(key):
        keys = jax.random.split(key, 300)
        return jax.lax.scan(lambda state, key: step(key, state, x, y), init(jnp.zeros(8)), keys)

    state, infos = jax.jit(run)(KEY)
    # One draw of the curvature is not symmetric by itself.
    np.testing.assert_array_equal(infos.hess, jnp.swapaxes(infos.hess, 1, 2))
    precision = np.float64(x).T @ np.float64(x) + np.eye(8)
    mean = np.linalg.solve(precision, np.float64(x).T @ np.float64(y))
    np.testing.assert_allclose(state.mean, mean, atol=0.01)
    assert np.linalg.norm(state.precision - precision) < 0.1 * np.linalg.norm(precision)
    assert state.step == 300


def test_state_is_the_natural_parameter_of_the_distribution():
    """The discrepancy that a step reports is that of the two distributions."""
    pytest.importorskip("distrax")
    start = jnp.eye(8) * 3 + 0.5
    init, step = blr.elliptical(quadratic, **PRIOR, alpha=1.4, nodes=nodes(8))
    state = init(jnp.ones(8), start)
    _, info = jax.jit(step)(KEY, state, contract.normal(16, 8), contract.normal(16))
    q = blr.MultivariateQGaussian.from_natural(state.mean, state.precision, 1.4)
    p = blr.MultivariateQGaussian.from_natural(PRIOR["prior_mean"], PRIOR["prior_precision"], 1.4)
    assert float(info.discrepancy) == pytest.approx(float(q.fenchel_young(p)), rel=1e-4)
    for shape in ((8,), ()):
        prior = jnp.ones(shape)
        init, step = blr.elliptical(
            quadratic, prior_mean=jnp.zeros(8), prior_precision=prior, alpha=1.4, nodes=nodes(8)
        )
        _, info = step(
            KEY, init(jnp.ones(8), 3 * prior), contract.normal(16, 8), contract.normal(16)
        )
        q = blr.MultivariateQGaussian.from_natural(jnp.ones(8), 3 * jnp.eye(8), 1.4)
        assert float(info.discrepancy) == pytest.approx(float(q.fenchel_young(p)), rel=1e-4)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"alpha": 0.8}, ValueError, r"alpha must be in \(0.8, inf\), got 0.8"),
        ({"learning_rate": 0.0}, ValueError, "learning_rate must be in .*, got 0.0"),
        ({"learning_rate": 1.5}, ValueError, r"learning_rate must be in \(0, 1\], got 1.5"),
        ({"num_samples": 0}, ValueError, "num_samples must be at least 2, got 0"),
        ({"num_samples": 3}, ValueError, "num_samples must be even, got 3"),
        ({"weights": jnp.ones(2)}, ValueError, "weights must be None without nodes"),
        ({"nodes": jnp.ones((2, 7))}, ValueError, r"nodes must have shape \[m, n\] with n=8"),
        (
            {"nodes": jnp.ones((2, 8)), "weights": jnp.ones(3)},
            ValueError,
            r"weights must have shape \[m\] with m=2, got \(3,\)",
        ),
        ({"prior_mean": jnp.zeros((2, 4))}, ValueError, r"prior_mean must have shape \[n\]"),
        ({"prior_precision": jnp.ones(7)}, ValueError, r"prior_precision must have .* got \(7,\)"),
        ({"loss_fn": 3}, TypeError, "loss_fn must be a function, got int"),
    ],
)
def test_bad_input_is_named(options, error, match):
    """Each message names the argument and what it got."""
    options = {"loss_fn": quadratic, **PRIOR, **options}
    with pytest.raises(error, match=match):
        blr.elliptical(**options)


def test_bad_starts_are_named():
    """The mean and the precision have the shapes of the prior's."""
    init, _ = blr.elliptical(quadratic, **PRIOR)
    with pytest.raises(ValueError, match=r"mean must have shape \[n\] with n=8, got \(7,\)"):
        init(jnp.zeros(7))
    with pytest.raises(ValueError, match=r"precision must have shape \(8, 8\), got \(8,\)"):
        init(jnp.zeros(8), jnp.ones(8))
