"""The family of recursive estimators: exactness, noise, bias, invariances, trust radii, options."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from denoise_problems import follow, inverse, path, polynomial

from jaxkit import denoise

TAUS = {4: (1.0, 0.4, -0.5), 5: (1.0, 0.5, -0.3, -0.7)}


def rule(gain, order, **options):
    """Returns the rule of any order from 1 to 5."""
    return denoise.denoise(
        gain, **({"taus": TAUS[order]} if order > 3 else {"order": order}), **options
    )


def queried(grads, params):
    del grads, params
    return {"queried": True}


def _case(name, make, **kwargs):
    extra = kwargs.pop("extra", queried)
    return contract.Case(
        name, make, extra=extra, public="denoise", within=("chain", "multi_steps"), **kwargs
    )


test_contract = contract.transformation(
    _case("denoise", denoise.denoise),
    _case("order_3", lambda: rule(inverse(), 3, trust_radius=3.0)),
    _case(
        "auto",
        lambda: rule("auto", 1),
        extra=lambda grads, params: {"query_variance": jnp.float32(0.1)},
    ),
)


def errors(order, degree, dtype, gain=0.3):
    """Returns the largest error of the rule on a polynomial without noise, over its gradient's."""
    with jax.enable_x64(dtype == jnp.float64):
        points, gradient = jnp.asarray(path(50, 5), dtype), polynomial(degree, 5)
        got = follow(rule(gain, order), gradient, points)
        want = jax.vmap(gradient)(points)
        return float(jnp.abs(got - want).max() / jnp.abs(want).max())


@pytest.mark.parametrize(("dtype", "bound"), [(jnp.float32, 1e-5), (jnp.float64, 5e-15)])
@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_order_p_tracks_polynomials_of_degree_p_without_error(order, dtype, bound):
    """Over 50 steps of a random walk; and degree p + 1 it does not."""
    # Rounding grows by sum |w| / a, 3.5 at order 5 and these taus.
    assert errors(order, order, dtype) < bound * (1 if order < 4 else 8)
    assert errors(order, order + 1, dtype) > 1e-3


def test_order_one_is_exact_on_linear_losses_only():
    """A constant gradient stays as it is, that of a quadratic lags behind."""
    assert errors(1, 1, jnp.float32) < 1e-6 and errors(1, 2, jnp.float32) > 1e-2


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_gain_one_changes_nothing(order):
    """The update is the gradient at the parameters bit for bit, whatever the history."""
    points = jnp.asarray(path(20, 5), jnp.float32)
    np.testing.assert_array_equal(follow(rule(1.0, order), lambda x: 2 * x, points), 2 * points)


def test_order_two_with_gain_one_over_t_is_the_mean_of_transported_gradients():
    """For a quadratic it equals the maximum-likelihood mean of y_i + A (x_n - x_i), to 1e-12."""
    rng = np.random.default_rng(3)
    matrix = rng.normal(size=(5, 5))
    points, noise = path(40, 5), rng.normal(size=(40, 1, 5))
    with jax.enable_x64(True):
        a = jnp.asarray(matrix)
        got = follow(
            denoise.denoise(inverse(dtype=jnp.float64), order=2),
            lambda x: a @ x,
            jnp.asarray(points),
            jnp.asarray(noise),
        )
    # The noise is that of the query at z; at x_i the linear gradient with it is A x_i + noise.
    answers = points @ matrix.T + noise[:, 0]
    for n in (0, 7, 39):
        want = np.mean(answers[: n + 1] + (points[n] - points[: n + 1]) @ matrix.T, axis=0)
        np.testing.assert_allclose(got[n], want, atol=1e-12)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_stationary_variance(order):
    """At a constant gain it is sum w^2 / (1 - (1 - a)^2), within 5 % at 2e5 samples."""
    size, burn, num = 4000, 40, 50
    noise = jax.random.normal(jax.random.key(order), (burn + num, max(order - 1, 1), size))
    tx = rule(0.3, order)
    got = follow(tx, jnp.zeros_like, jnp.zeros((burn + num, size)), noise)
    state = tx.init(jnp.zeros(size))
    _, state = tx.update(jnp.zeros(size), state, jnp.zeros(size), queried=True)
    _, weights = denoise.query_points(state, jnp.zeros(size))
    weights = np.float64(weights)
    gain = 1 - np.prod(1 - 0.3 * np.array(TAUS[4])) if order == 4 else 0.3
    want = gain**2 * np.sum(weights**2) / (1 - (1 - gain) ** 2)
    np.testing.assert_allclose(np.var(got[burn:]), want, rtol=0.05)


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_bias_falls_with_the_order_as_a_power_of_the_speed(order):
    """Doubling the speed at a fixed gain multiplies the error by 2^p, within 0.15 in log2."""
    gain = 0.2

    def error(speed):
        # Along a line through a function all of whose derivatives are there.
        points = (1.0 + speed * (jnp.arange(60.0) - 59))[:, None]
        got = follow(rule(gain, order), lambda x: jnp.exp(x), points)
        return float(jnp.abs(got[-1] - jnp.exp(points[-1]))[0])

    with jax.enable_x64(True):
        slopes = np.diff(np.log2([error(1e-3 * 2.0**k) for k in range(3)]))
    np.testing.assert_allclose(slopes, order, atol=0.15)


def test_order_three_stays_efficient_on_a_cubic_where_order_two_fails():
    """With gain c / t, t MSE is kappa c^2 / (2c - 1) at t = 100 and 400; orders 1 and 2 diverge."""
    c, ratio, num, size = 2.0, 0.5, 401, 6
    rng = np.random.default_rng(0)
    points = jnp.asarray(path(num, size, seed=5, scale=1.0), jnp.float32)

    def gradient(x):
        return x**2  # of sum x^3 / 3

    def scores(order, runs):
        tx = rule(inverse(c), order, **({"ratio": ratio} if order == 3 else {}))
        shape = (num, max(order - 1, 1), runs, size)
        noise = jnp.asarray(rng.normal(size=shape), jnp.float32)
        wide = jnp.broadcast_to(points[:, None], (num, runs, size))
        got = follow(tx, gradient, wide, noise)
        mse = jnp.mean(jnp.square(got - gradient(points)[:, None]), (1, 2))
        return {t: t * float(mse[t - 1]) for t in (100, 401)}

    kappa = (1 + ratio**4) / (1 - ratio**2) ** 2
    third = scores(3, runs=400)
    for t in third:
        np.testing.assert_allclose(third[t], kappa * c**2 / (2 * c - 1), rtol=0.12)
    for order in (1, 2):
        assert scores(order, runs=10)[401] > 1e3 * third[401]


@pytest.mark.parametrize("order", [1, 2, 3])
def test_equivariance(order):
    """A linear term adds itself, a rotation commutes, and a factor on the loss comes out."""
    points, gradient = jnp.asarray(path(20, 5), jnp.float32), polynomial(4, 5)
    noise = jax.random.normal(jax.random.key(0), (20, max(order - 1, 1), 5))
    tx = rule(0.2, order, trust_radius=2.0)
    plain = follow(tx, gradient, points, noise)
    term = jnp.arange(5.0)
    got = follow(tx, lambda x: gradient(x) + term, points, noise)
    scale = float(jnp.abs(plain).max())
    np.testing.assert_allclose(got, plain + term[None], atol=2e-5 * scale)
    got = follow(tx, lambda x: 4 * gradient(x), points, 4 * noise)
    np.testing.assert_allclose(got, 4 * plain, atol=1e-5 * scale)
    q = jnp.asarray(np.linalg.qr(np.random.default_rng(1).normal(size=(5, 5)))[0], jnp.float32)
    got = follow(tx, lambda x: q @ gradient(q.T @ x), points @ q.T, noise @ q.T)
    np.testing.assert_allclose(got, plain @ q.T, atol=1e-4 * scale)


def moved(tx, steps):
    """Returns the state of ``tx`` after ``steps`` updates at the origin of two leaves."""
    zeros = {"a": jnp.zeros(2), "b": jnp.zeros([])}
    state = tx.init(zeros)
    for _ in range(steps):
        _, state = tx.update(zeros, state, zeros, queried=True)
    return state


@pytest.mark.parametrize(
    ("length", "gain"), [(0.0, 0.1), (0.5, 0.1), (1.0, 0.2), (2.5, 0.5), (5.0, 1.0), (9.0, 1.0)]
)
def test_a_trust_radius_raises_the_gain_with_the_step(length, gain):
    """a = max(gain, min(1, |d| / delta)) over all leaves: the node lies (1 - a) / a steps ahead."""
    state = moved(denoise.denoise(0.1, trust_radius=5.0), 1)
    params = {"a": jnp.array([0.6, 0.0]) * length, "b": jnp.array(0.8) * length}
    points, _ = denoise.query_points(state, params)
    for name, x in params.items():
        np.testing.assert_allclose(points[name][0], x / gain, rtol=1e-6)
    ones = {"a": jnp.ones(2), "b": jnp.ones([])}
    for order in (1, 2, 3):
        tx = denoise.denoise(0.1, order=order, trust_radius=5.0)
        out, _ = tx.update(ones, moved(tx, 1), params, queried=True)
        np.testing.assert_allclose(out["a"], gain, rtol=1e-6)  # the estimate before was 0


def test_the_smaller_of_two_radii_counts_and_the_relative_one_grows_with_the_parameters():
    """With |x| = |d| = 4: radii 0.5 |x| and 20 give a gain of 4 / 2, capped; 2 |x| and 5: 4 / 5."""
    params = {"a": jnp.array([0.0, 4.0]), "b": jnp.array(0.0)}
    for relative, absolute, gain in ((2.0, 20.0, 0.5), (2.0, 5.0, 0.8), (0.5, 20.0, 1.0)):
        state = moved(
            denoise.denoise(0.1, trust_radius=absolute, relative_trust_radius=relative), 1
        )
        points, _ = denoise.query_points(state, params)
        np.testing.assert_allclose(points["a"][0, 1], 4 / gain, rtol=1e-6)


def test_at_the_origin_the_relative_radius_is_no_division_by_zero():
    """Without a step there the gain is its floor, after a step to the origin it is 1."""
    tx = denoise.denoise()
    zeros = {"a": jnp.zeros(2), "b": jnp.zeros([])}
    ones = jax.tree.map(jnp.ones_like, zeros)
    out, _ = tx.update(ones, moved(tx, 1), zeros, queried=True)
    np.testing.assert_allclose(out["a"], 0.02, rtol=1e-6)
    _, state = tx.update(zeros, tx.init(ones), ones, queried=True)
    out, _ = tx.update(ones, state, zeros, queried=True)
    np.testing.assert_array_equal(out["a"], 1)


@pytest.mark.parametrize("order", [2, 3, 4])
def test_exactness_survives_a_trust_radius(order):
    """The weights follow the gain, so the error on polynomials of degree p stays at rounding."""
    points, gradient = jnp.asarray(path(50, 5), jnp.float32), polynomial(order, 5)
    got = follow(rule(0.1, order, trust_radius=1.0), gradient, points)
    want = jax.vmap(gradient)(points)
    np.testing.assert_allclose(got, want, atol=5e-5 * float(jnp.abs(want).max()))


def test_a_radius_that_bounds_nothing_is_none():
    """An infinite radius gives the numbers of no radius, and keeps no copy for order 1."""
    assert moved(denoise.denoise(0.1, order=1, trust_radius=np.inf), 1).prev_params is None
    assert moved(denoise.denoise(0.1, order=1, trust_radius=2.0), 1).prev_params is not None


def test_the_default_is_a_floor_and_a_relative_radius():
    """Gain None is .02 with a relative radius of .05, which only a given one replaces."""
    state = moved(denoise.denoise(), 1)
    assert (state.gain, state.relative_trust_radius) == (np.float32(0.02), np.float32(0.05))
    assert state.trust_radius is None and state.order == 2
    state = moved(denoise.denoise(relative_trust_radius=0.1, trust_radius=3.0), 1)
    assert (state.relative_trust_radius, state.trust_radius) == (np.float32(0.1), 3)
    assert moved(denoise.denoise(0.02), 1).relative_trust_radius is None


def test_a_schedule_gives_the_gain_of_the_step_that_asks():
    """Step t asks and updates with gain(t), except step 0, whose gain is 1."""
    tx = denoise.denoise(inverse(0.5))
    assert [float(moved(tx, n).gain) for n in range(4)] == [1, 0.25, np.float32(0.5 / 3), 0.125]


def test_taus_of_the_user_are_multiples_of_the_gain():
    """The gain becomes 1 - prod(1 - gain taus), whatever the scale of the taus."""
    for factor in (1.0, 2.0):
        taus = tuple(factor * tau for tau in TAUS[4])
        tx = denoise.denoise(0.3 / factor, taus=taus)
        zeros, ones = jnp.zeros(2), jnp.ones(2)
        _, state = tx.update(zeros, tx.init(zeros), zeros, queried=True)
        out, _ = tx.update(ones, state, zeros, queried=True)
        np.testing.assert_allclose(out, 1 - np.prod(1 - 0.3 * np.array(TAUS[4])), rtol=1e-5)
    assert denoise.denoise(0.3, taus=(1.0,)).init(zeros).taus == 1


def test_one_random_node_has_the_mean_of_all():
    """Its weight and place average to those of the rule, and it is chosen by |w| / sum |w|."""
    tx = denoise.denoise(0.3, order=3, random_node=True)
    state = moved(tx, 1)
    params = {"a": jnp.array([1.0, -2.0]), "b": jnp.array(3.0)}
    keys = jax.random.split(jax.random.key(0), 20_000)
    ask = jax.jit(jax.vmap(lambda key: denoise.query_points(state, params, key)))
    points, weights = ask(keys)
    assert points["a"].shape == (20_000, 1, 2) and weights.shape == (20_000, 1)
    want = denoise.query_points(moved(denoise.denoise(0.3, order=3), 1), params)
    size = float(jnp.abs(want[1]).sum())
    np.testing.assert_allclose(jnp.abs(weights), size, rtol=1e-6)
    # Of a linear function, the mean over draws is the combination of all nodes.
    terms = np.float64(weights[:, 0, None] * points["a"][:, 0])
    mean, error = terms.mean(0), terms.std(0) / np.sqrt(len(terms))
    np.testing.assert_array_less(np.abs(mean - want[1] @ want[0]["a"]), 4 * error)
    share = float(jnp.mean(weights > 0))
    chance = float(want[1][0]) / size
    assert abs(share - chance) < 4 * np.sqrt(chance * (1 - chance) / 20_000)
    first, weight = denoise.query_points(moved(tx, 0), params, jax.random.key(1))
    np.testing.assert_array_equal(first["a"][0], params["a"])
    assert weight == 1


def test_the_noise_variance_is_kept_as_given():
    """The state holds what the last update was given, 0 if nothing."""
    tx, x = denoise.ema(0.5), jnp.zeros(2)
    state = tx.init(x)
    assert state.noise_variance == 0
    _, state = tx.update(x, state, x, noise_variance=0.25)
    assert state.noise_variance == 0.25
    assert tx.update(x, state, x)[1].noise_variance == 0


def test_the_automatic_gain_works_leaf_by_leaf():
    """A leaf without noise follows at once, one of noise alone is averaged most strongly."""
    tx = denoise.denoise("auto", order=1)
    params = {"clean": jnp.zeros(50), "noisy": jnp.zeros(50)}
    noise = jax.random.normal(jax.random.key(0), (200, 50))

    def step(state, xs):
        t, error = xs
        grads = {"clean": jnp.full(50, jnp.sin(t)), "noisy": error}
        out, state = tx.update(
            grads, state, params, query_variance={"clean": jnp.zeros([]), "noisy": jnp.ones([])}
        )
        return state, out

    _, out = jax.lax.scan(step, tx.init(params), (jnp.arange(200.0), noise))
    np.testing.assert_allclose(
        out["clean"], jnp.sin(jnp.arange(200.0))[:, None] + jnp.zeros(50)[None], atol=1e-6
    )
    # While K, whose floor is .02, stays below .1, the gain is below .32, the variance below .19.
    assert jnp.var(out["noisy"][100:]) < 0.19


@pytest.mark.parametrize(
    ("gain", "options", "error", "match"),
    [
        (0.1, {"order": 4}, ValueError, "order must be one of 1, 2, 3, got 4"),
        (0.1, {"order": 0}, ValueError, "order must be one of 1, 2, 3, got 0"),
        (None, {"order": 3}, ValueError, "gain must be given for order 3, got None"),
        (None, {"order": 1}, ValueError, "gain must be given for order 1, got None"),
        (None, {"taus": (1.0, -0.3)}, ValueError, "gain must be given with taus, got None"),
        (0.1, {"order": 3, "ratio": 0.0}, ValueError, r"ratio must be in \(0, 1\), got 0.0"),
        (0.1, {"order": 3, "ratio": 1.0}, ValueError, r"ratio must be in \(0, 1\), got 1.0"),
        (0.1, {"ratio": "small"}, TypeError, "ratio must be a number, got 'small'"),
        (0.1, {"taus": (1.0, 1.0)}, ValueError, "taus must be finite, distinct and not zero"),
        (0.1, {"taus": (1.0, -0.2), "order": 1}, ValueError, "order must be left out with taus"),
        (0.1, {"random_node": True}, ValueError, "random_node must come with order 3 or at least"),
        ("fast", {"order": 1}, ValueError, "gain must be one of 'auto', got 'fast'"),
        ("auto", {}, ValueError, "gain='auto' must come with order=1 and no other option"),
        ("auto", {"order": 1, "trust_radius": 1.0}, ValueError, "gain='auto' must come with"),
        ("auto", {"order": 1, "accumulator_dtype": jnp.float32}, ValueError, "gain='auto' must"),
    ],
)
def test_bad_options_are_named(gain, options, error, match):
    """Each message names the option and its value."""
    with pytest.raises(error, match=match):
        denoise.denoise(gain, **options)
