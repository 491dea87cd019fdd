"""Regression on potentials: normal equations in NumPy, scikit-learn, streams and devices."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxkit import ot
from jaxkit.ot import _fit_regression

NUM, N, M, D, L = 8, 9, 7, 2, 6
FEATURES = jax.jit(ot.sliced_potentials, static_argnames=("cost", "project"))


def _pairs(seed=0):
    """Returns a stack of pairs with zero weights and random labels, in NumPy float64."""
    rng = np.random.default_rng(seed)
    a, b = rng.dirichlet(np.ones(N), NUM), rng.dirichlet(np.ones(M), NUM)
    a[:, 1] += a[:, 0]
    a[:, 0] = 0
    x, y = rng.normal(size=(NUM, N, D)), rng.normal(size=(NUM, M, D)) + 0.5
    return ot.Pair(x, y, a, b, rng.normal(size=(NUM, N)))


PAIRS = _pairs()
SMALL = jax.tree.map(jnp.float32, PAIRS)
THETA = np.linalg.qr(np.random.default_rng(0).normal(size=(3, D, D)))[0].reshape(L, D)
PRIOR = ot.untrained(jnp.float32(THETA), 0.1, two_sided=True)


def _one(k, pairs=PAIRS):
    return jax.tree.map(lambda z: z[k], pairs)


@functools.cache
def _state():
    update = jax.jit(ot.update_regression)
    state = ot.regression_state(PRIOR)
    for k in range(NUM):
        state = update(state, PRIOR, _one(k, SMALL))
    return state


def _halved(args):
    """Returns other arguments; a rolled Gram matrix would be none."""
    return jax.tree.map(lambda z: z / 2 if jnp.issubdtype(z.dtype, jnp.floating) else z, args)


EIGHT = ot.untrained(jnp.concatenate([PRIOR.theta, PRIOR.theta[:2]]), 0.1)
MASKED = (EIGHT, *_one(0, SMALL)[:2], SMALL.f[0], jnp.arange(N) % 3 > 0)

test_contract = contract.function(
    contract.Case(
        "regression_state",
        lambda: (ot.regression_state, (EIGHT,)),
        dtypes=("float32", "float64"),  # sums are never narrower
    ),
    contract.Case(
        "update_regression",
        lambda: (
            lambda prior, x, y, f, m: ot.update_regression(
                ot.regression_state(prior), prior, ot.Pair(x, y, f=f, mask_x=m)
            ),
            MASKED,
        ),
        mask={4: (1, 3)},
        dtypes=("float32", "float64"),
    ),
    contract.Case(
        "merge_regression",
        lambda: (ot.merge_regression, (ot.regression_state(EIGHT), ot.regression_state(EIGHT))),
    ),
    contract.Case(
        "solve_regression",
        lambda: (ot.solve_regression, (_sharded(_state()), _sharded(PRIOR))),
        vary=_halved,
    ),
)


def _sharded(tree):
    """Returns a tree in which six directions are eight: two more that meet no data."""

    def grow(z):
        return jnp.pad(z, [(0, 2 if size == L else 0) for size in z.shape]) if z.ndim else z

    return jax.tree.map(grow, tree)


def _design(pairs, everywhere, cost=ot.squared):
    """Returns centered features, labels and the weights of rows, of all pairs, in float64."""
    rows = []
    for k in range(NUM):
        pair = _one(k, pairs)
        phi = np.asarray(FEATURES(pair.x, pair.y, pair.a, pair.b, THETA, cost=cost)[0])
        share = np.full(N, 1 / N) if everywhere else pair.a
        weights = np.ones(N) if everywhere else pair.a
        rows.append((phi - share @ phi, pair.f - share @ pair.f, weights))
    return tuple(map(np.concatenate, zip(*rows, strict=True)))


@pytest.mark.parametrize("prior", ["isotropic", "scale", "zero"])
def test_the_weights_solve_the_normal_equations(prior):
    """Of the weighted problem, pulled toward each prior, in NumPy."""
    with jax.enable_x64(True):
        phi, f, rows = _design(PAIRS, everywhere=False)
        got = ot.fit_regression(PAIRS, jnp.asarray(THETA), 0.1, ridge=0.01, prior=prior).weights
    gram, moment = phi.T @ (rows[:, None] * phi) / NUM, phi.T @ (rows * f) / NUM
    scale = {"isotropic": D / L, "zero": 0, "scale": moment.sum() / gram.sum()}[prior]
    w0 = np.full(L, scale)
    system = gram + 0.01 * np.trace(gram) / L * np.eye(L)
    want = w0 + np.linalg.solve(system, moment - gram @ w0)
    np.testing.assert_allclose(got, want, atol=1e-10)


def test_flags_give_the_setting_of_the_paper():
    """Rows alike, unweighted centers, ridge 1e-3 on the plain sums, no prior: scikit-learn's."""
    linear_model = pytest.importorskip("sklearn.linear_model")
    with jax.enable_x64(True):
        phi, f, _ = _design(PAIRS, everywhere=True)
        got = ot.fit_regression(
            PAIRS,
            jnp.asarray(THETA),
            0.1,
            ridge=1e-3,
            prior="zero",
            weights="atoms",
            absolute_ridge=True,
        ).weights
    rival = linear_model.Ridge(alpha=1e-3, fit_intercept=False, solver="cholesky").fit(phi, f)
    np.testing.assert_allclose(got, rival.coef_, atol=1e-8)


def test_labels_from_known_weights_are_recovered():
    """As the ridge goes to 0, in float64 the weights and in float32 what they predict.

    A large constant in the labels does no harm.
    """
    truth = np.array([0.9, -0.2, 0.5, 0.1, 1.5, 0.3])
    phi, _ = jax.jit(jax.vmap(ot.sliced_potentials, (0, 0, 0, 0, None)))(*SMALL[:4], THETA)
    params = ot.fit_regression(
        SMALL._replace(f=phi @ jnp.float32(truth) + 1000), jnp.float32(THETA), 0.1, ridge=1e-6
    )
    error = _center(phi @ (params.weights - truth), SMALL.a)
    assert jnp.max(jnp.abs(error)) < 1e-3 * jnp.max(jnp.abs(phi))
    with jax.enable_x64(True):
        phi, _ = jax.jit(jax.vmap(ot.sliced_potentials, (0, 0, 0, 0, None)))(*PAIRS[:4], THETA)
        params = ot.fit_regression(
            PAIRS._replace(f=phi @ truth), jnp.asarray(THETA), 0.1, ridge=1e-13
        )
        np.testing.assert_allclose(params.weights, truth, atol=1e-6)


def _center(f, a):
    return f - jnp.sum(a * f, axis=1, keepdims=True)


def test_a_strong_ridge_returns_the_prior():
    """So does a set in which no feature moves."""
    theta = jnp.float32(THETA)
    for prior, want in (("isotropic", D / L), ("zero", 0.0)):
        got = ot.fit_regression(SMALL, theta, 0.1, ridge=1e9, prior=prior).weights
        np.testing.assert_allclose(got, want, atol=1e-6)
    still = SMALL._replace(x=jnp.ones_like(SMALL.x), y=jnp.ones_like(SMALL.y))
    for prior, want in (("isotropic", D / L), ("scale", 0.0)):
        got = ot.fit_regression(still, theta, 0.1, prior=prior).weights
        np.testing.assert_array_equal(got, jnp.full(L, want, jnp.float32))


def test_stacks_lists_padding_and_merged_streams_agree():
    """However the pairs come, the sums are the same."""
    theta = jnp.float32(THETA)
    want = ot.fit_regression(SMALL, theta, 0.1)
    halves = [jax.tree.map(lambda z, s=s: z[s], SMALL) for s in (slice(4), slice(4, None))]
    # The first atom of every pair has no weight.
    short = halves[0]._replace(**{k: getattr(halves[0], k)[:, 1:] for k in ("x", "a", "f")})
    padded = SMALL._replace(
        x=jnp.pad(SMALL.x, ((0, 0), (0, 2), (0, 0)), constant_values=jnp.nan),
        a=jnp.pad(SMALL.a, ((0, 0), (0, 2)), constant_values=1.0),
        f=jnp.pad(SMALL.f, ((0, 0), (0, 2)), constant_values=jnp.nan),
        mask_x=jnp.broadcast_to(jnp.arange(N + 2) < N, (NUM, N + 2)),
    )
    prior = ot.untrained(theta, 0.1)
    update = functools.partial(_fit_regression._update, weights="measure", cost=None, chunk=None)
    states = [update(ot.regression_state(prior), prior, half) for half in reversed(halves)]
    merged = ot.merge_regression(*states)
    assert merged.num_pairs == NUM
    for got in (
        ot.fit_regression([short, halves[1]], theta, 0.1),
        ot.fit_regression(padded, theta, 0.1),
        ot.solve_regression(merged, prior),
    ):
        np.testing.assert_allclose(got.weights, want.weights, atol=2e-4)


def test_eight_devices_are_one():
    """Each sums over its own pairs; psum of the states is their merge."""
    mesh = jax.make_mesh((8,), ("pairs",), axis_types=(jax.sharding.AxisType.Auto,))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("pairs")), out_specs=P())
    def total(prior, pairs):
        state = ot.update_regression(ot.regression_state(prior), prior, pairs)
        return jax.lax.psum(state, "pairs")

    twice = jax.tree.map(lambda z: jnp.concatenate([z, z]), SMALL)
    for got, want in zip(total(PRIOR, twice), _state(), strict=True):
        want = 2 * want
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * float(jnp.max(jnp.abs(want))))


def test_two_sides_are_one_side_of_the_exchanged_pairs():
    """The label of g is the soft c-transform of f, here by NumPy."""
    epsilon = 0.3
    labels = []
    for k in range(NUM):
        x, y, a, _, f = _one(k)[:5]
        c = np.sum(np.square(x[:, None] - y[None]), axis=2)
        labels.append(-epsilon * np.log(a @ np.exp((f[:, None] - c) / epsilon)))
    with jax.enable_x64(True):
        theta = jnp.asarray(THETA)
        got = ot.fit_regression(PAIRS, theta, epsilon, two_sided=True)
        flipped = ot.Pair(PAIRS.y, PAIRS.x, PAIRS.b, PAIRS.a, np.array(labels))
        want = ot.fit_regression(flipped, theta, epsilon)
        np.testing.assert_allclose(got.weights_g, want.weights, atol=1e-9)
        alone = ot.fit_regression(PAIRS, theta, epsilon)
        np.testing.assert_allclose(got.weights, alone.weights, atol=1e-12)
        assert alone.weights_g is None


def test_labels_where_there_is_no_weight_do_not_count():
    """Solvers return infinite or no potentials there."""
    wild = SMALL._replace(f=SMALL.f.at[:, 0].set(-jnp.inf).at[2, 0].set(jnp.nan))
    kwargs = {"theta": jnp.float32(THETA), "epsilon": 0.1, "two_sided": True}
    got, want = ot.fit_regression(wild, **kwargs), ot.fit_regression(SMALL, **kwargs)
    np.testing.assert_array_equal(got.weights, want.weights)
    np.testing.assert_array_equal(got.weights_g, want.weights_g)


def _sinkhorn(c, a, b, epsilon):
    """Returns f of the entropic problem, in NumPy float64."""
    kernel, v = np.exp(-c / epsilon), np.ones(len(b))
    for _ in range(500):
        u = 1 / (kernel @ (b * v))
        v = 1 / (kernel.T @ (a * u))
    return epsilon * np.log(u)


def test_on_the_sphere_chords_predict_where_the_map_of_the_plane_does_not():
    """R^2 of f over unseen pairs: above 0.75 for chords with a fitted scale, twice the other's."""
    rng = np.random.default_rng(0)
    pairs = []
    for _ in range(20):
        x, y = (z / np.linalg.norm(z, axis=1, keepdims=True) for z in rng.normal(size=(2, 40, 3)))
        a, b = (np.exp(3 * z @ (z[0] + 0.5 * z[1])) for z in (x, y))
        a, b = a / a.sum(), b / b.sum()
        f = _sinkhorn(np.arccos(np.clip(x @ y.T, -1, 1)), a, b, 0.1)
        pairs.append(ot.Pair(*map(jnp.float32, (x, y, a, b, f))))
    pairs = jax.tree.map(lambda *z: jnp.stack(z), *pairs)
    train, test = (jax.tree.map(lambda z, s=s: z[s], pairs) for s in (slice(12), slice(12, None)))

    def r2(theta, project):
        params = ot.fit_regression(train, theta, 0.1, prior="scale", project=project)
        got = jax.jit(jax.vmap(ot.predict_potential, (None, 0)))(params, test)
        f = _center(test.f, test.a)
        return float(1 - jnp.sum(test.a * (got - f) ** 2) / jnp.sum(test.a * f**2))

    chordal = r2(ot.tight_frame(jax.random.key(0), 30, 3), ot.linear)
    plane = r2(ot.equispaced_frame(30), ot.stereographic)
    assert chordal > 0.75
    assert chordal > 2 * plane


@pytest.mark.parametrize(
    ("changes", "kwargs", "error", "match"),
    [
        ({}, {"ridge": -1.0}, ValueError, r"ridge must be in \[0, inf\), got -1.0"),
        ({}, {"prior": "flat"}, ValueError, "prior must be one of 'isotropic', 'scale', 'zero'"),
        ({}, {"weights": "a"}, ValueError, "weights must be one of 'measure', 'atoms'"),
        ({}, {"epsilon": -0.1}, ValueError, r"epsilon must be in \[0, inf\), got -0.1"),
        ({}, {"theta": 2 * THETA}, ValueError, "theta must have rows of norm 1"),
        ({}, {"theta": THETA[:0]}, ValueError, "number of directions in theta must be at least 1"),
        ({}, {"cost": ot.geodesic}, ValueError, "cost must be None for params without weights_g"),
        ({}, {"pairs": []}, ValueError, "pairs must hold at least one Pair"),
        ({"f": None}, {}, ValueError, "pairs must hold known potentials f"),
        ({"a": 2 * SMALL.a}, {}, ValueError, "a must sum to 1, got 2 in pairs, pair 0"),
        ({"y": SMALL.y[..., :1]}, {}, ValueError, r"y must have shape \[m, d\] with d=2"),
        (
            {"x": jnp.tile(SMALL.x[..., :1], 2)},
            {"ridge": 0.0, "theta": np.array([[0.6, 0.8], [0.6, 0.8]])},
            ValueError,
            "ridge must be larger for features that are so dependent, got 0.0",
        ),
    ],
)
def test_bad_input_is_named(changes, kwargs, error, match):
    """Each message names the argument and what it got."""
    call = {"pairs": SMALL._replace(**changes), "theta": jnp.float32(THETA), "epsilon": 0.1}
    call |= kwargs
    call["theta"] = jnp.float32(call["theta"])
    with pytest.raises(error, match=match):
        ot.fit_regression(**call)


def test_under_jit_bad_values_give_nan():
    """Weights without sum 1, and a negative ridge."""
    fit = jax.jit(lambda pairs, ridge: ot.fit_regression(pairs, PRIOR.theta, 0.1, ridge=ridge))
    assert jnp.isfinite(fit(SMALL, 1e-3).weights).all()
    assert jnp.isnan(fit(SMALL._replace(a=2 * SMALL.a), 1e-3).weights).all()
    assert jnp.isnan(fit(SMALL, -1e-6).weights).all()
    with pytest.raises(ValueError, match="pairs must hold known potentials f, got None"):
        ot.update_regression(_state(), PRIOR, _one(0, SMALL)._replace(f=None))
    with pytest.raises(ValueError, match="other must have the types of state"):
        ot.merge_regression(_state(), ot.regression_state(EIGHT))
