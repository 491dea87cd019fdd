"""Value and gradient from evaluations: identities, limits, noise and refusals."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import zo

KEY = jax.random.key(0)
PARAMS = {"a": np.array([0.5, -1.0, 2.0]), "b": np.array([[1.0, 0.3]])}
POINT = np.array([0.5, -1.0, 2.0, 1.0, 0.3])


def flat(params):
    return jnp.concatenate([jnp.reshape(x, -1) for x in jax.tree.leaves(params)])


def cubic(params, scale):
    x = flat(params)
    return scale * jnp.sum(jnp.sin(x) + x**3)


def _case():
    run = zo.value_and_zo_grad(cubic, num_samples=2, mu=0.05)
    return run, (KEY, {"a": contract.normal(8, 2)}, jnp.float32(1.3))


test_contract = contract.function(
    contract.Case(
        "value_and_zo_grad",
        _case,
        public=("value_and_zo_grad", "gaussian"),
        rtol=1e-2,  # losses that round differently are divided by mu
        draws=True,
        dtypes=("float32", "float64"),
    ),
)


def in_float64(run, params=PARAMS, *args, key=KEY, **kwargs):
    """Returns value and gradient in float64, the gradient as one vector."""
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, params)
        out = jax.jit(run)(key, params, *args, **kwargs)
        return jax.tree.map(np.asarray, (out[0], flat(out[1])))


def normal_directions(num, params=PARAMS):
    """Returns ``[num, d]``: the directions that the documented keys give, in float64."""
    with jax.enable_x64(True):
        rows = []
        for k in range(num):
            key = jax.random.fold_in(KEY, k)
            leaves = jax.tree.leaves(params)
            rows.append(
                np.concatenate(
                    [
                        np.reshape(jax.random.normal(jax.random.fold_in(key, i), x.shape), -1)
                        for i, x in enumerate(leaves)
                    ]
                )
            )
        return np.stack(rows)


@pytest.mark.parametrize("mode", ["two_sided", "one_sided"])
def test_linear_loss_is_exact_for_every_radius(mode):
    """The estimate is the mean of <g, u_k> u_k, with u_k from the documented keys."""
    g = np.arange(1.0, 6.0)
    u = normal_directions(3)

    @jax.jit
    def run(key, params, mu):
        def loss_fn(p):
            return jnp.asarray(g) @ flat(p)

        return zo.value_and_zo_grad(loss_fn, num_samples=3, mu=mu, mode=mode)(key, params)

    for mu in (1e-3, 1.0, 100.0):
        value, got = in_float64(run, PARAMS, mu)
        np.testing.assert_allclose(got, (u @ g) @ u / 3, rtol=1e-9)
        np.testing.assert_allclose(value, g @ POINT, rtol=1e-9)


def test_even_loss_at_zero_has_slope_exactly_zero():
    """Both calls of a pair see the same numbers but for the sign."""
    run = zo.value_and_zo_grad(lambda x: jnp.sum(jnp.cos(x)) + jnp.sum(x**4), num_samples=3)
    grads = jax.jit(run)(KEY, jnp.zeros((3, 2)))[1]
    np.testing.assert_array_equal(grads, 0)


@pytest.mark.parametrize("name", ["sphere", "orthogonal"])
def test_small_radius_gives_forward_mode_with_error_of_second_order(name):
    """Halving mu quarters the distance to mode 'jvp', whose slopes are exact."""
    options = {"num_samples": 3, "direction": getattr(zo, name)()}

    def loss_fn(p):
        return cubic(p, 1.0)

    @jax.jit
    def two_sided(key, params, mu):
        return zo.value_and_zo_grad(loss_fn, mu=mu, **options)(key, params)

    value, want = in_float64(zo.value_and_zo_grad(loss_fn, mode="jvp", **options))
    errors = [np.linalg.norm(in_float64(two_sided, PARAMS, mu)[1] - want) for mu in (2e-2, 1e-2)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=1e-2)
    np.testing.assert_allclose(value, np.sum(np.sin(POINT) + POINT**3), rtol=1e-9)


def test_forward_mode_slopes_are_exact():
    """The estimate is the mean of <g, u_k> u_k with the gradient g in closed form."""
    u = normal_directions(3)
    run = zo.value_and_zo_grad(lambda p: cubic(p, 1.0), num_samples=3, mode="jvp")
    want = (u @ (np.cos(POINT) + 3 * POINT**2)) @ u / 3
    np.testing.assert_allclose(in_float64(run)[1], want, rtol=1e-9)


def test_coordinate_is_central_differences_of_each_entry():
    """Entry i is (F(x + mu e_i) - F(x - mu e_i)) / 2 mu, with no factor d; value is their mean."""
    mu = 1e-2
    run = zo.value_and_zo_grad(
        lambda p: (cubic(p, 1.0), {"first": flat(p)}), mode="coordinate", mu=mu, has_aux=True
    )
    with jax.enable_x64(True):
        params = jax.tree.map(jnp.asarray, PARAMS)
        (value, aux), grads = jax.jit(run)(KEY, params)
    f = lambda x: np.sum(np.sin(x) + x**3)  # noqa: E731
    steps = mu * np.eye(len(POINT))
    pairs = np.array([[f(POINT + e), f(POINT - e)] for e in steps])
    np.testing.assert_allclose(flat(grads), (pairs[:, 0] - pairs[:, 1]) / (2 * mu), rtol=1e-6)
    np.testing.assert_allclose(value, pairs.mean(), rtol=1e-6)
    np.testing.assert_allclose(aux["first"], POINT + steps[0], rtol=1e-6)
    assert grads["b"].shape == (1, 2)


def test_as_many_orthogonal_directions_as_parameters_give_the_gradient():
    """On a quadratic K = d two-sided orthogonal pairs are exact for any radius."""
    hessian = np.diag(np.arange(1.0, 6.0)) + 0.5
    run = zo.value_and_zo_grad(
        lambda p: flat(p) @ jnp.asarray(hessian) @ flat(p) / 2,
        num_samples=len(POINT),
        direction=zo.orthogonal(),
        mu=2.0,
    )
    np.testing.assert_allclose(in_float64(run)[1], hessian @ POINT, rtol=1e-9)


def test_vmap_is_map_is_a_loop():
    """Directions agree bit for bit, for losses without rounding, however the calls are batched."""
    g = jnp.array([1.0, 2.0, 4.0])
    loss_fn = lambda x: jnp.round(jnp.sum(g * x))  # noqa: E731

    def at(num_samples=3, key=KEY, **options):
        run = zo.value_and_zo_grad(loss_fn, num_samples=num_samples, mu=16.0, **options)
        return jax.jit(run)(key, jnp.zeros(3))[1]

    np.testing.assert_array_equal(at(batch="vmap"), at())
    # A second sample adds the direction of key 1 and changes none of the first.
    first, both = at(1), at(2)
    u = jax.random.normal(jax.random.fold_in(jax.random.fold_in(KEY, 1), 0), (3,))
    slope = (loss_fn(16 * u) - loss_fn(-16 * u)) / 32
    np.testing.assert_allclose(both, (first + slope * u) / 2, rtol=1e-6)


@pytest.mark.parametrize("kind", ["rbg", "unsafe_rbg"])
def test_rbg_keys_draw_the_same_directions_for_calls_and_sum(kind):
    """The estimate of a linear loss is sum_k <g, u_k> u_k: along g it is never negative."""
    key = jax.random.key(0, impl=kind)
    g = jnp.array([1.0, 2.0, 4.0])
    run = zo.probe(lambda x: jnp.sum(g * x), num_samples=4, mu=1.0)
    probe = jax.jit(run)(key, jnp.zeros(3))
    for k in range(4):
        u = jax.random.normal(jax.random.fold_in(jax.random.fold_in(key, k), 0), (3,))
        np.testing.assert_allclose(4 * probe.coeffs[k], jnp.sum(g * u), rtol=1e-5)
    with pytest.raises(ValueError, match=f"'threefry2x32', got '{kind}'"):
        zo.value_and_zo_grad(jnp.sum, batch="vmap")(key, jnp.zeros(3))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_value_and_difference_are_float32_and_grads_like_params(dtype):
    """A loss whose pair differs by less than half precision holds still has a slope."""
    g = jnp.array([1.0, -2.0, 4.0])
    loss_fn = lambda x: 300 + 1e-3 * jnp.sum(g * x.astype(jnp.float32))  # noqa: E731
    value, grads = jax.jit(zo.value_and_zo_grad(loss_fn, mu=0.5))(KEY, jnp.zeros(3, dtype))
    assert value.dtype == jnp.float32 and grads.dtype == dtype
    assert jnp.sum(g * grads.astype(jnp.float32)) > 0
    assert zo.probe(lambda x: jnp.sum(x))(KEY, jnp.zeros(3, dtype)).value.dtype == jnp.float32


# Noise. ------------------------------------------------------------------------------------------

SLOPE = np.array([1.0, -2.0, 0.5])


def noisy(x, key):
    """Returns a linear loss with additive noise of variance 4."""
    return jnp.float32(SLOPE) @ x + 2 * jax.random.normal(key)


def noisy_estimates(num, **options):
    run = zo.value_and_zo_grad(noisy, matched=False, **options)

    def one(key):
        key, oracle_key = jax.random.split(key)
        return run(key, jnp.zeros(3), oracle_key=oracle_key)[1]

    return np.asarray(jax.jit(jax.vmap(one))(jax.random.split(KEY, num)), np.float64)


@pytest.mark.parametrize(
    ("options", "added"),
    [
        ({"mu": 0.5}, 3 * 4 / (2 * 0.5**2)),
        ({"mu": 0.25}, 3 * 4 / (2 * 0.25**2)),
        ({"mu": 0.5, "num_samples": 4}, 3 * 4 / (2 * 0.5**2 * 4)),
        ({"mu": 0.5, "mode": "one_sided"}, 2 * 3 * 4 / 0.5**2),
        ({"mu": 0.5, "mode": "one_sided", "num_samples": 4}, 2 * 3 * 4 / (0.5**2 * 4)),
    ],
)
def test_mismatched_noise_adds_the_floor(options, added):
    """It adds d sigma^2 / 2 mu^2 K to the trace, two-sided, and 2 d sigma^2 / mu^2 K, one-sided."""
    samples = noisy_estimates(30_000, **options)
    plain = 4 * (SLOPE @ SLOPE) / options.get("num_samples", 1)
    squares = np.sum((samples - SLOPE) ** 2, 1)
    error = squares.std() / len(squares) ** 0.5
    assert abs(squares.mean() - plain - added) < 4.5 * error


@pytest.mark.parametrize("mode", ["two_sided", "one_sided"])
def test_matched_noise_cancels_exactly(mode):
    """A key among the args is the same in every call: additive noise leaves the estimate alone."""
    run = zo.value_and_zo_grad(noisy, num_samples=2, mode=mode, mu=0.5)
    plain = zo.value_and_zo_grad(lambda x: jnp.float32(SLOPE) @ x, num_samples=2, mode=mode, mu=0.5)
    got = jax.jit(run)(KEY, jnp.zeros(3), jax.random.key(7))[1]
    np.testing.assert_allclose(got, jax.jit(plain)(KEY, jnp.zeros(3))[1], rtol=1e-5)


def test_matched_and_mismatched_batches_have_their_variances():
    """Slopes: |g|^2 + tr S matched; |g|^2 + tr S / 2 + sigma^2 / 2 mu^2 with another batch."""
    mu, sigma, spread = 0.5, 1.5, 0.7

    def loss_fn(x, batch):
        return x @ (jnp.float32(SLOPE) + batch[:3]) + batch[3]

    def slope(key, matched):
        key, *data = jax.random.split(key, 3)
        scale = jnp.array([spread] * 3 + [sigma])
        plus, minus = (scale * jax.random.normal(k, (4,)) for k in data)
        run = zo.probe(loss_fn, mu=mu, matched=matched)
        extra = {} if matched else {"args_minus": (minus,)}
        return run(key, jnp.zeros(3), plus, **extra).coeffs[0]

    for matched, want in (
        (True, SLOPE @ SLOPE + 3 * spread**2),
        (False, SLOPE @ SLOPE + 3 * spread**2 / 2 + sigma**2 / (2 * mu**2)),
    ):
        keys = jax.random.split(KEY, 40_000)
        slopes = jax.jit(jax.vmap(lambda k, m=matched: slope(k, m)))(keys)
        squares = np.square(np.asarray(slopes, np.float64))
        assert abs(squares.mean() - want) < 4.5 * squares.std() / 200


def test_node_perturbation_is_reached_through_direction():
    """For rows of one entry a slope per example is exact, in the estimator too."""
    x = jnp.array([[1.0], [-2.0], [4.0]])

    def loss_fn(w, x):
        return 3 * (x @ w)

    options = {"direction": zo.node(), "per_example": True, "mu": 0.5}
    want = 3 * jnp.mean(x, 0)
    value, grads = zo.value_and_zo_grad(loss_fn, **options)(KEY, jnp.ones(1), x)
    np.testing.assert_allclose((value, grads[0]), (want[0], want[0]), rtol=1e-5)
    estimator = zo.gradient_estimator(lambda w, x, key: loss_fn(w, x), **options)
    np.testing.assert_allclose(estimator(KEY, jnp.ones(1), (), x).grads, want, rtol=1e-5)
    for refused in (
        lambda: zo.probe(loss_fn, direction=zo.node()),
        lambda: zo.zo_update(
            KEY, loss_fn, x, zo.zo_init(KEY), x, learning_rate=0.1, direction=zo.node()
        ),
    ):
        with pytest.raises(TypeError, match=r"got zo.node\(\), which goes with value_and_zo_grad"):
            refused()


# Refusals. ---------------------------------------------------------------------------------------


def call(params=PARAMS, *args, key=KEY, fun=lambda p: jnp.sum(flat(p)), kwargs=None, **options):
    params = jax.tree.map(jnp.asarray, params)
    return zo.value_and_zo_grad(fun, **options)(key, params, *args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"fun": 3}, TypeError, "loss_fn must be a function, got int"),
        ({"mu": 0.0}, ValueError, r"mu must be in \(0, inf\), got 0.0"),
        ({"mu": -1e-3}, ValueError, "mu must be in"),
        ({"mu": float("nan")}, ValueError, "mu must be in"),
        ({"mu": "small"}, TypeError, "mu must be a number"),
        ({"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
        ({"num_samples": 1.0}, TypeError, "num_samples must be a static whole number"),
        ({"direction": zo.gaussian}, TypeError, r"such as zo.gaussian\(\), got gaussian"),
        ({"direction": "normal"}, TypeError, "got str"),
        ({"mode": "forward"}, ValueError, "mode must be one of 'two_sided'.*got 'forward'"),
        ({"aggregate": "sum"}, ValueError, "aggregate must be one of"),
        ({"batch": "scan"}, ValueError, "batch must be one of"),
        ({"axis_directions": "all"}, ValueError, "axis_directions must be one of"),
        ({"axis_directions": "own"}, ValueError, "needs axis_name"),
        ({"aggregate": "rloo"}, ValueError, "needs mode='one_sided', got 'two_sided'"),
        ({"aggregate": "rloo", "mode": "one_sided"}, ValueError, "at least 2 for 'rloo', got 1"),
        (
            {"aggregate": "rloo", "mode": "one_sided", "matched": False},
            ValueError,
            "'rloo' needs matched=True",
        ),
        ({"mode": "jvp", "matched": False}, ValueError, "'jvp' needs matched=True"),
        ({"matched": False}, ValueError, "needs args_minus or oracle_key, got neither"),
        ({"kwargs": {"oracle_key": KEY}}, ValueError, "are for matched=False"),
        ({"kwargs": {"args_minus": ()}}, ValueError, "are for matched=False"),
        (
            {"matched": False, "kwargs": {"args_minus": (jnp.ones(2),)}},
            ValueError,
            "args_minus must have the types of args, wanted nothing at 0",
        ),
        (
            {"mode": "coordinate", "num_samples": 2},
            ValueError,
            "num_samples must be 1 for mode='coordinate', got 2",
        ),
        ({"mode": "coordinate", "direction": zo.sphere()}, ValueError, "direction must be Direct"),
        ({"direction": zo.node(), "mode": "jvp"}, ValueError, r"mode must be 'two_sided' for zo.n"),
        ({"direction": zo.node(), "batch": "vmap"}, ValueError, "batch must be 'map' for zo.node"),
        ({"mode": "coordinate", "mu": 0.0}, ValueError, "mu must be in"),
        (
            {"direction": zo.orthogonal(), "num_samples": 6},
            ValueError,
            "num_samples must be at most 5, the number of parameters.*got 6",
        ),
        ({"key": jnp.zeros(2, jnp.uint32)}, TypeError, r"a typed key of shape \[\], got uint32"),
        ({"key": jax.random.split(KEY)}, TypeError, r"got key<fry>\[2\]"),
        ({"params": {}}, ValueError, "params must hold at least one number"),
        ({"params": {"x": jnp.zeros((0, 3))}}, ValueError, "params must hold at least one number"),
        ({"params": {"x": {"n": jnp.arange(3)}}}, TypeError, "got int32 at x/n"),
        ({"params": {"x": jnp.ones(2, jnp.complex64)}}, TypeError, "got complex64 at x"),
        ({"fun": flat}, ValueError, r"the loss must have shape \[\], got \(5,\)"),
        ({"per_example": True}, ValueError, r"the loss must have shape \[B\], got \(\)"),
        ({"fun": lambda p: 3}, TypeError, "the loss must be real floating, got int32"),
        ({"fun": lambda p: (jnp.sum(flat(p)), 1)}, TypeError, "has_aux=False, got a tuple of len"),
        ({"has_aux": True}, TypeError, r"the tuple \(loss, aux\) with has_aux=True, got no tuple"),
    ],
)
def test_bad_input_is_named(options, error, match):
    """Each message names the argument or the path, what was wanted and what it got."""
    with pytest.raises(error, match=match):
        call(**options)
