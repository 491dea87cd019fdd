"""The objective's gradient and optimum, its bounds, both solvers, and what changes nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import ot

EPSILON = 0.1
THETA = ot.equispaced_frame(12)  # so many that each is nearly a sum of others


def _pairs(num=4, n=14, m=10, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(num, n, 2))
    y = rng.normal(size=(num, m, 2)) @ [[1.0, 0.4], [0.0, 0.5]] + 1
    a = rng.dirichlet(np.ones(n), size=num)
    a[:, 2] = 0
    a = a / a.sum(1, keepdims=True)
    return ot.Pair(*(jnp.asarray(z, jnp.float32) for z in (x, y, a)))


PAIRS = _pairs()
FIT = functools.partial(ot.fit_objective, PAIRS, THETA, EPSILON)


def _double(tree):
    return jax.tree.map(lambda z: jnp.asarray(z, jnp.float64), tree)


def _objective(w, pair, theta=THETA, epsilon=EPSILON):
    """Returns J by its definition from public parts."""
    phi, _ = ot.sliced_potentials(*pair[:4], theta)
    f = phi @ w
    b = jnp.full(len(pair.y), 1 / len(pair.y), f.dtype)
    return pair.a @ f / pair.a.sum() + b @ ot.soft_g(f, pair.x, pair.y, pair.a, epsilon)


def _stacks():
    """Returns the pairs as a list: the first alone, the others padded."""

    def pad(z, size):
        widths = [(0, 0), (0, size)] + [(0, 0)] * (z.ndim - 2)
        return jnp.pad(z[1:], widths, constant_values=jnp.nan)

    padded = ot.Pair(
        pad(PAIRS.x, 3),
        pad(PAIRS.y, 2),
        pad(PAIRS.a, 3),
        mask_x=jnp.broadcast_to(jnp.arange(17) < 14, (3, 17)),
        mask_y=jnp.broadcast_to(jnp.arange(12) < 10, (3, 12)),
    )
    return [jax.tree.map(lambda z: z[0], PAIRS), padded]


@functools.cache
def _fit64(start=None):
    """Returns a tight fit in float64; the proximal term is off."""
    with jax.enable_x64(True):
        pairs, theta = _double(PAIRS), _double(THETA)
        theta = theta / jnp.linalg.norm(theta, axis=1, keepdims=True)
        start = None if start is None else jnp.full(12, start)
        return ot.fit_objective(
            pairs, theta, EPSILON, start=start, proximal=0.0, tol=1e-7, num_steps=200
        )


def test_gradient_is_the_defect_of_the_rows_seen_through_the_slices():
    """By automatic differentiation it is Phi^T (a - P 1) of the plan after one half step."""

    def both(w, pair, theta):
        phi, _ = ot.sliced_potentials(*pair[:4], theta)
        plan = ot.plan_from_f(phi @ w, *pair[:4], EPSILON)
        return jax.grad(_objective)(w, pair, theta), phi.T @ (pair.a / pair.a.sum() - plan.sum(1))

    with jax.enable_x64(True):
        pair = jax.tree.map(lambda z: z[0], _double(PAIRS))
        got, want = jax.jit(both)(jnp.linspace(-0.5, 1.0, 12), pair, _double(THETA))
        np.testing.assert_allclose(got, want, atol=1e-12)


def test_at_the_optimum_that_gradient_is_zero():
    """The mean over all pairs, from public parts in float64, where the fit says it converged."""
    params, info = _fit64()
    assert info.converged

    def mean(w):
        return jnp.mean(jax.vmap(lambda pair: _objective(w, pair, params.theta))(_double(PAIRS)))

    with jax.enable_x64(True):
        value, slope = jax.jit(jax.value_and_grad(mean))(params.weights)
        assert jnp.linalg.norm(slope) < 1e-6
        last = np.asarray(info.values)[int(info.num_steps)]
        assert value == pytest.approx(last, abs=1e-12)


def test_objective_never_falls_and_any_two_starts_end_alike():
    """It is concave: in float64 to 1e-10, in float32 to rounding, by L-BFGS within 60 steps."""
    mean = jax.jit(lambda w: jax.vmap(functools.partial(_objective, w))(PAIRS).mean())
    ends = []
    for start in (None, 0.0, -2.0):
        params, info = _fit64(start)
        values = np.asarray(info.values)[: int(info.num_steps) + 1]
        assert np.all(np.diff(values) > 0) and np.isnan(info.values[len(values) :]).all()
        ends.append(values[-1])
    assert np.ptp(ends) < 1e-10
    for start in (None, jnp.zeros(12), jnp.linspace(-3.0, 3.0, 12)):
        params, info = FIT(start=start)
        values = np.asarray(info.values)[: int(info.num_steps) + 1]
        assert np.all(np.diff(values) > 0)
        assert info.converged or start is not None  # from far away float32 has too few digits
        first = jnp.full(12, 2 / 12) if start is None else start
        assert values[0] == pytest.approx(float(mean(first)), rel=1e-4)
        assert values[-1] == pytest.approx(ends[0], abs=1e-4)
    # With no tolerance rounding ends it: no step is taken that does not improve.
    _, info = FIT(tol=0.0)
    values = np.asarray(info.values)[: int(info.num_steps) + 1]
    assert not info.converged and info.num_steps < 60 and np.all(np.diff(values) > 0)


def test_objective_is_a_lower_bound_of_the_entropic_cost():
    """On every pair, against converged half steps; the fit is better than the untrained weights."""
    params, info = FIT()
    assert info.values[0] < np.nanmax(info.values)

    def bounds(pair):
        f = ot.predict_potential(params, pair)
        lower = ot.certificate(f, *pair[:4], EPSILON).entropic_lower

        def step(f, _):
            g = ot.soft_g(f, *pair[:3], EPSILON)
            return ot.soft_f(g, pair.x, pair.y, None, EPSILON), None

        f, _ = jax.lax.scan(step, f, length=300)
        return lower, ot.certificate(f, *pair[:4], EPSILON)

    lower, best = jax.jit(jax.vmap(bounds))(PAIRS)
    assert jnp.max(best.marginal_error) < 1e-4
    assert jnp.all(lower <= best.entropic_lower + 1e-5)
    assert jnp.mean(lower) == pytest.approx(float(np.nanmax(info.values)), abs=1e-4)


def test_one_slice_of_the_line_is_exact():
    """For d = 1 the best weight of the one slice is 1 as epsilon goes to 0.

    Here a derivative through the maximum of the scores was infinite: recomputed with another
    rounding, none of them equals it.
    """
    x = jnp.linspace(0.0, 1.0, 12)[:, None]
    pair = ot.Pair(x, jnp.square(x) + 0.3)
    params, info = ot.fit_objective(pair, jnp.ones((1, 1)), 1e-3, start=jnp.zeros(1))
    assert params.weights[0] == pytest.approx(1, abs=0.05)


def test_unit_of_length_and_proximal_term():
    """Lengths times 5 and epsilon times 25 leave the weights; a strong pull gives the untrained."""
    params, _ = FIT()
    big = PAIRS._replace(x=5 * PAIRS.x, y=5 * PAIRS.y)
    scaled, info = ot.fit_objective(big, THETA, 25 * EPSILON)
    predict = jax.jit(ot.predict_potential)
    f, g = (predict(p, ot.Pair(PAIRS.x[0], PAIRS.y[0])) for p in (params, scaled))
    np.testing.assert_allclose(f, g, atol=2e-2)
    pulled, _ = FIT(proximal=1e6, start=jnp.zeros(12))
    np.testing.assert_allclose(pulled.weights, jnp.full(12, 2 / 12), atol=1e-3)


def test_chunks_padding_and_lists_change_nothing():
    """A pair alone, and three padded with NaN under masks, in chunks of y."""
    want = np.nanmax(FIT()[1].values)
    _, info = ot.fit_objective(_stacks(), THETA, EPSILON, chunk=5)
    assert np.nanmax(info.values) == pytest.approx(want, abs=1e-5)


def test_adam_goes_to_the_same_optimum():
    """The paper's way; its values are of the pair drawn, of any size, and at the end of all."""
    _, best = _fit64()
    how = {"solver": "adam", "num_steps": 600, "start": jnp.zeros(12), "proximal": 0.0}
    adam = functools.partial(ot.fit_objective, _stacks(), THETA, EPSILON, **how)
    params, info = adam(key=jax.random.key(0), learning_rate=0.03)
    assert (info.num_steps, info.values.shape) == (600, (601,))
    end = np.asarray(best.values)[int(best.num_steps)]
    assert end - 0.02 < info.values[-1] <= end + 1e-5
    again, _ = adam(key=jax.random.key(0), learning_rate=0.03)
    other, _ = adam(key=jax.random.key(1), learning_rate=0.03)
    np.testing.assert_array_equal(again.weights, params.weights)
    assert not np.array_equal(other.weights, params.weights)
    # Standing at f = 0, it draws each pair, alike within 4.5 standard errors.
    _, info = adam(key=jax.random.key(0), learning_rate=0.0)
    zeros = jax.jit(jax.vmap(functools.partial(_objective, jnp.zeros(12))))(PAIRS)
    drawn = jnp.abs(info.values[:-1, None] - zeros[None]) < 1e-5
    assert drawn.any(1).all()
    np.testing.assert_allclose(drawn.sum(0), 150, atol=4.5 * np.sqrt(600 * 0.25 * 0.75))
    assert info.values[-1] == pytest.approx(float(zeros.mean()), abs=1e-5)


def test_features_of_zero_are_no_nan():
    """Of one point on either side all features vanish: nothing is to be learned."""
    point = PAIRS._replace(x=jnp.ones_like(PAIRS.x), y=jnp.zeros_like(PAIRS.y))
    params, info = ot.fit_objective(point, THETA, EPSILON)
    np.testing.assert_allclose(params.weights, jnp.full(12, 2 / 12), rtol=1e-6)
    assert info.converged and info.num_steps == 0
    assert info.values[0] == pytest.approx(2)


def test_other_costs_and_projections():
    """On the sphere, by chordal slices, the fit finds the scale that the prior lacks."""
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=(3, 12, 3)) + shift for shift in ([0, 0, 1], [1, 0, 0]))
    x, y = (jnp.float32(z / np.linalg.norm(z, axis=-1, keepdims=True)) for z in (x, y))
    params, info = ot.fit_objective(ot.Pair(x, y), jnp.eye(3), 0.1, cost=ot.geodesic)
    assert np.nanmax(info.values) > info.values[0] + 0.01
    assert params.project is ot.linear and params.slice_cost is ot.squared


def test_runs_under_jit_where_bad_values_give_nan():
    """A traced fit is the eager one; weights that do not sum to 1 leave no weights.

    After few steps: at the end rounding, which differs, decides on the last step.
    """

    @jax.jit
    def fit(pairs):
        return ot.fit_objective(pairs, THETA, EPSILON, num_steps=4)[0].weights

    np.testing.assert_allclose(fit(PAIRS), FIT(num_steps=4)[0].weights, rtol=1e-3, atol=1e-3)
    assert jnp.isnan(fit(PAIRS._replace(a=2 * PAIRS.a))).all()


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"solver": "sgd"}, ValueError, "solver must be one of 'lbfgs', 'adam', got 'sgd'"),
        ({"solver": "adam"}, TypeError, "key must be a random key with solver='adam', got None"),
        ({"learning_rate": 0.1}, ValueError, "learning_rate must be None with solver='lbfgs'"),
        ({"key": 1}, ValueError, "key must be None with solver='lbfgs', got 1"),
        ({"num_steps": 0}, ValueError, "num_steps must be at least 1, got 0"),
        ({"epsilon": 0.0}, ValueError, r"epsilon must be in \(0, inf\), got 0.0"),
        ({"proximal": -1.0}, ValueError, r"proximal must be in \[0, inf\), got -1.0"),
        ({"tol": "small"}, TypeError, "tol must be a number, got 'small'"),
        ({"start": jnp.ones(3)}, ValueError, r"start must have shape \[L\] with L=12, got \(3,\)"),
        ({"theta": 2 * THETA}, ValueError, "theta must have rows of norm 1, got a row of norm 2"),
        ({"theta": jnp.eye(3)}, ValueError, "theta must have shape"),
        ({"cost": 1}, TypeError, "cost must be a function, got int"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ({"pairs": []}, ValueError, "pairs must hold at least one Pair"),
        ({"pairs": PAIRS._replace(a=2 * PAIRS.a)}, ValueError, "a must sum to 1, got 2"),
        ({"pairs": PAIRS._replace(a=-PAIRS.a)}, ValueError, "a must not be negative"),
        ({"pairs": PAIRS._replace(y=PAIRS.y[..., :1])}, ValueError, "y must have shape"),
        ({"pairs": PAIRS.x}, TypeError, "must be a Pair"),
    ],
)
def test_bad_input_is_named(change, error, match):
    """Each message names the argument and what it got."""
    args = {"pairs": PAIRS, "theta": THETA, "epsilon": EPSILON, **change}
    with pytest.raises(error, match=match):
        ot.fit_objective(args.pop("pairs"), args.pop("theta"), args.pop("epsilon"), **args)
