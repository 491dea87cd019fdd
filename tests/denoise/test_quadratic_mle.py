"""The most likely gradient: least squares by NumPy, leverages, limits, and degenerate points."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxkit import denoise

X, Y, AT = contract.normal(8, 4), contract.normal(8, 4, seed=1), contract.normal(4)
PRIOR = contract.normal(4, 4)
METHODS = ("gram", "hessian", "symmetric")


def _case(method, **options):
    fit = functools.partial(denoise.quadratic_mle, method=method, **options)
    return contract.Case(
        f"quadratic_mle_{method}", lambda: (fit, (X, Y, AT)), public="quadratic_mle"
    )


test_contract = contract.function(_case("gram"), _case("hessian"), _case("symmetric", ridge=0.1))


def problem(n, d, rank, seed=0):
    """Returns float64 points of a random walk in ``rank`` directions, and a symmetric Hessian."""
    rng = np.random.default_rng(seed)
    basis = np.linalg.qr(rng.normal(size=(d, rank)))[0]
    x = np.cumsum(rng.normal(size=(n, rank)), 0) @ basis.T + rng.normal(size=d)
    a = rng.normal(size=(d, d))
    return x, a + a.T, rng


@functools.partial(jax.jit, static_argnames=("method", "hvp_fn"))
def _jitted(x, y, at, **options):
    return denoise.quadratic_mle(x, y, at, **options)


def fit64(*args, **options):
    """Returns the fit in NumPy arrays; one program for each method and shape."""
    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, _jitted(*args, **options))


def least_squares(x, y, at, *, symmetric=False, ridge=0.0, prior=None):
    """Returns the gradient by one NumPy least squares over A and c, prior rows stacked below."""
    n, d = x.shape
    prior = np.zeros((d, d)) if prior is None else prior
    entries = [(i, j) for i in range(d) for j in range(d) if j >= i or not symmetric]
    basis = np.zeros((len(entries), d, d))
    for k, (i, j) in enumerate(entries):
        basis[k, i, j] = 1
        if symmetric:
            basis[k, j, i] = 1
    data = np.concatenate([basis @ x.T, np.tile(np.eye(d)[:, :, None], n)])
    rows = np.concatenate([data, np.sqrt(ridge) * np.pad(basis, ((0, d), (0, 0), (0, 0)))], 2)
    wanted = np.concatenate([(y - x @ prior.T).T, np.zeros((d, d))], 1)
    solution = np.linalg.lstsq(rows.reshape(len(rows), -1).T, wanted.ravel(), rcond=1e-10)[0]
    a = prior + np.tensordot(solution[:-d], basis, 1)
    return a @ at + solution[-d:], a


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("rank", [2, 4])
@pytest.mark.parametrize(("ridge", "with_prior"), [(0.0, False), (0.5, False), (0.5, True)])
def test_the_estimate_is_that_of_least_squares(symmetric, rank, ridge, with_prior):
    """Over Hessian and offset together, by NumPy, also where the points lie in a plane."""
    x, a, rng = problem(8, 4, rank)
    y, at = x @ a + rng.normal(size=(8, 4)), rng.normal(size=4)
    if ridge == 0:
        at = x[2] * 2 - x[5]  # elsewhere the least norm of A depends on where c is measured
    prior = a / 2 if with_prior else None
    want, want_a = least_squares(x, y, at, symmetric=symmetric, ridge=ridge, prior=prior)
    options = {"ridge": ridge, "hessian": prior}
    got = fit64(x, y, at, method="symmetric" if symmetric else "hessian", **options)
    np.testing.assert_allclose(got.gradient, want, rtol=1e-9, atol=1e-9)
    if ridge:
        np.testing.assert_allclose(got.hessian, want_a, rtol=1e-9, atol=1e-9)
    if not symmetric:
        got = fit64(x, y, at, **options)
        np.testing.assert_allclose(got.gradient, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("dtype", "tol"), [(np.float32, 2e-5), (np.float64, 1e-12)])
@pytest.mark.parametrize("method", METHODS)
def test_without_noise_every_method_is_exact(method, dtype, tol):
    """On a quadratic, at a point off the data, in float32 and float64."""
    x, a, rng = problem(12, 4, 4)
    at = rng.normal(size=4)
    got = fit64(*map(dtype, (x, x @ a + 1, at)), method=method).gradient
    assert got.dtype == dtype
    np.testing.assert_allclose(got, a @ at + 1, atol=tol * np.abs(a @ at).max() * 10)


def test_a_known_hessian_is_the_recursion_that_carries_each_gradient_along():
    """g <- (1 - 1/t) (g + A d) + y / t; as a matrix, a function, or with an infinite ridge."""
    x, a, rng = problem(10, 4, 4)
    y = x @ a + rng.normal(size=(10, 4))
    want = y[0]
    for t in range(2, 11):
        want = (1 - 1 / t) * (want + a @ (x[t - 1] - x[t - 2])) + y[t - 1] / t
    for options in (
        {"hessian": a},
        {"hvp_fn": lambda v: jnp.asarray(a) @ v},
        {"hessian": a, "ridge": np.inf},
        {"hessian": a, "method": "hessian"},
        {"hessian": a, "method": "symmetric"},
    ):
        got = fit64(x, y, x[-1], **options)
        np.testing.assert_allclose(got.gradient, want, rtol=1e-12, atol=1e-12)
        if got.weights is not None:
            np.testing.assert_allclose(got.weights, 0.1)


@pytest.mark.parametrize(("n", "d", "rank"), [(10, 5, 5), (10, 5, 2), (4, 5, 3), (10, 20, 6)])
def test_weights_are_leverages(n, d, rank):
    """h = 1/n + (x_i - mean) S^+ (x - mean) sums to 1; its trace over the points is 1 + rank."""
    x, _, rng = problem(n, d, rank)
    centered = x - x.mean(0)
    pinv = np.linalg.pinv(centered.T @ centered, hermitian=True, rcond=1e-10)
    want = 1 / n + centered @ pinv @ centered.T
    weights = np.stack([fit64(x, x, at).weights for at in x])
    np.testing.assert_allclose(weights, want, atol=1e-10)
    np.testing.assert_allclose(np.sum(weights, 1), 1, rtol=1e-12)
    assert np.trace(weights) == pytest.approx(1 + min(rank, n - 1), rel=1e-10)
    np.testing.assert_allclose(np.sum(np.square(weights), 1), np.diag(want), rtol=1e-9)


def test_few_points_are_interpolated():
    """With n <= rank + 1 the estimate at a point is its own gradient, noise and all."""
    x, _, rng = problem(6, 9, 5)
    y = rng.normal(size=(6, 9))
    for method in METHODS[:2]:
        got = fit64(x, y, x[3], method=method)
        np.testing.assert_allclose(got.gradient, y[3], atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_the_error_is_that_of_the_theory(method):
    """Mean squared error over 4,000 draws of noise, to four standard errors.

    For the symmetric case, with (u, l) of the scatter and v the way from the mean: 1/n plus the
    mean over i of sum_j v_j^2 (l_i + l_j) / (l_i + l_j + 2 ridge)^2, with 4 l_i v_i^2 in place of
    the diagonal's 2 l_i v_i^2.
    """
    n, d, draws = 12, 5, 4000
    x, a, _ = problem(n, d, d)
    v, values = x[-1] - x.mean(0), None
    values, vectors = np.linalg.eigh((x - x.mean(0)).T @ (x - x.mean(0)))
    v = vectors.T @ v
    sums = values[:, None] + values[None]
    parts = v[None] ** 2 / sums * (1 + np.eye(d))
    variance = 1 / n + (parts.sum() / d if method == "symmetric" else np.sum(v**2 / values))
    noise = jax.random.normal(jax.random.key(0), (draws, n, d))
    x32 = jnp.float32(x)
    fit = jax.vmap(lambda y: denoise.quadratic_mle(x32, y, x32[-1], method=method).gradient)
    errors = jnp.mean(
        jnp.square(jax.jit(fit)(jnp.float32(x @ a)[None] + noise) - jnp.float32(x[-1:] @ a)), 1
    )
    assert abs(jnp.mean(errors) - variance) < 4 * jnp.std(errors) / np.sqrt(draws)
    if method == "symmetric":
        assert variance < 0.95 * (1 / n + np.sum(v**2 / values))


def test_symmetry_helps_as_much_as_derived():
    """Error over that of a gradient at the end of random walks: 1.00, .87 and .10."""
    n, d, walks = 10, 20, 400
    rng = np.random.default_rng(0)
    bases = np.linalg.qr(rng.normal(size=(walks, d, 9)))[0]
    x = jnp.float32(np.cumsum(rng.normal(size=(walks, n, 9)), 1) @ bases.swapaxes(1, 2))
    y = jnp.float32(rng.normal(size=(walks, n, d)))  # A is 0, all of the estimate is error

    def errors(**options):
        fit = functools.partial(denoise.quadratic_mle, **options)
        gradients = jax.jit(jax.vmap(lambda x, y: fit(x, y, x[-1]).gradient))(x, y)
        return np.mean(np.square(gradients)), 4 * np.std(np.mean(np.square(gradients), 1)) / 20

    wanted = ((1.0, {}), (0.87, {"method": "symmetric"}), (0.1, {"hessian": jnp.zeros((d, d))}))
    for want, options in wanted:
        mean, bound = errors(**options)
        assert abs(mean - want) < bound + 0.01


@pytest.mark.parametrize("ridge", [0.0, 1e-3, 1.0, 1e3])
def test_the_gram_form_is_the_hessian_form_on_any_tree(ridge):
    """Weights sum to 1 for every ridge; leaves, scalars among them, count as one long vector."""
    x, _, rng = problem(8, 7, 5)
    y, at = rng.normal(size=(8, 7)), rng.normal(size=7)

    def tree(z):
        return {"w": z[..., :6].reshape(*z.shape[:-1], 2, 3), "b": (z[..., 6], None)}

    want = fit64(x, y, at, method="hessian", ridge=ridge).gradient
    got = fit64(tree(x), tree(y), tree(at), ridge=ridge)
    flat = np.append(got.gradient["w"].ravel(), got.gradient["b"][0])
    np.testing.assert_allclose(flat, want, rtol=1e-9, atol=1e-9)
    assert got.weights.sum() == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_the_ridge_goes_from_the_likelihood_to_the_mean(method):
    """At 0 all is learned from the data, at inf nothing: the plain mean, order 1 with gain 1/n."""
    x, a, rng = problem(10, 4, 4)
    y = x @ a + rng.normal(size=(10, 4))
    fit = functools.partial(fit64, x, y, x[-1], method=method)
    np.testing.assert_allclose(fit(ridge=1e-9).gradient, fit().gradient, rtol=1e-7)
    for ridge, tol in ((1e12, 1e-8), (np.inf, 1e-13)):
        np.testing.assert_allclose(fit(ridge=ridge).gradient, y.mean(0), rtol=tol, atol=tol)
    static = denoise.quadratic_mle(*map(jnp.float32, (x, y, x[-1])), method=method, ridge=0.3)
    np.testing.assert_allclose(static.gradient, fit(ridge=0.3).gradient, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("method", METHODS)
def test_shifts_and_turns_commute(method):
    """A linear term adds its slope; turned coordinates give the turned gradient."""
    x, a, rng = problem(10, 4, 4)
    y, at = x @ a + rng.normal(size=(10, 4)), rng.normal(size=4)
    turn = np.linalg.qr(rng.normal(size=(4, 4)))[0]
    want = fit64(x, y, at, method=method).gradient
    for got, expected in (
        (fit64(x, y + 3, at, method=method), want + 3),
        (fit64(x - 7, y, at - 7, method=method), want),
        (fit64(x @ turn, y @ turn, at @ turn, method=method), want @ turn),
        (fit64(x * 5, y * 2, at * 5, method=method), want * 2),
    ):
        np.testing.assert_allclose(got.gradient, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("count", [1, 5])
def test_equal_points_give_the_mean_and_finite_derivatives(method, count):
    """Also a single point: nothing is known of the Hessian, and nothing divides by zero."""
    x, y, at = jnp.ones((count, 4)), Y[:count], jnp.full(4, 2.0)

    def total(x, y, at, ridge):
        out = denoise.quadratic_mle(x, y, at, method=method, ridge=ridge)
        return sum(map(jnp.sum, jax.tree.leaves(out))), out

    slope = jax.jit(jax.grad(total, (0, 1, 2, 3), has_aux=True))
    for ridge in (0.0, 1.0):
        slopes, out = slope(x, y, at, jnp.float32(ridge))
        np.testing.assert_allclose(out.gradient, jnp.mean(y, 0), rtol=1e-6)
        assert all(jnp.isfinite(s).all() for s in slopes)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("where", [0, 1, 2])
def test_a_nan_is_not_hidden(method, where):
    """In a point, a gradient, or the point asked for: it comes out."""
    args = [X, Y, AT]
    args[where] = args[where].at[(1,) * args[where].ndim].set(jnp.nan)
    assert jnp.isnan(denoise.quadratic_mle(*args, method=method).gradient).any()


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_the_rank_is_found_in_float32_far_from_the_origin(rank):
    """Points around 30 with moves of about 1: the trace of the leverages is still 1 + rank."""
    x, _, _ = problem(20, 6, rank)
    x = jnp.float32(x + 30)
    y = jnp.eye(20)[:, :, None] * jnp.eye(6)[:1][None]  # 1 in one entry: reads off the weights

    @jax.jit
    def both(x):
        gram = jax.vmap(lambda at: denoise.quadratic_mle(x, x, at).weights)(x)
        fit = functools.partial(denoise.quadratic_mle, method="hessian")
        at_y = jax.vmap(lambda at, y: fit(x, y, at).gradient[0], (0, None))
        return gram, jax.vmap(at_y, (None, 0), 1)(x, y)

    for weights in both(x):
        assert jnp.trace(weights) == pytest.approx(1 + rank, abs=1e-3)


def test_the_gradient_at_the_point_is_the_hessian():
    """d gradient / d at is the fitted Hessian, also through the Gram form."""
    formed = denoise.quadratic_mle(X, Y, AT, method="hessian").hessian
    for method in METHODS[:2]:
        slope = jax.jacobian(
            lambda at, m=method: denoise.quadratic_mle(X, Y, at, method=m).gradient
        )
        np.testing.assert_allclose(slope(AT), formed, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_tree_that_is_split_over_devices_keeps_its_sharding(kind):
    """In both kinds of mesh, with the numbers of one device."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    trees = [
        {"w": contract.normal(5, 8, 6, seed=1), "b": contract.normal(5)},
        {"w": contract.normal(5, 8, 6, seed=2), "b": contract.normal(5, seed=3)},
        {"w": contract.normal(8, 6), "b": jnp.float32(0.3)},
    ]

    def put(z):
        split = P(*[None] * (z.ndim - 2), "data", "model") if z.ndim > 1 else P()
        return jax.device_put(z, NamedSharding(mesh, split))

    want = denoise.quadratic_mle(*trees)
    placed = jax.tree.map(put, trees)
    with jax.set_mesh(mesh):
        got = jax.jit(denoise.quadratic_mle)(*placed)
    for path, leaf in jax.tree.leaves_with_path(want):
        other = functools.reduce(
            lambda t, k: getattr(t, k.name) if hasattr(k, "name") else t[k.key], path, got
        )
        np.testing.assert_allclose(other, leaf, rtol=1e-5, atol=1e-5)
    assert got.gradient["w"].sharding.is_equivalent_to(placed[2]["w"].sharding, 2)


def test_a_function_for_the_hessian_sees_a_tree_like_the_point():
    """In the dtypes of the point, bfloat16 here; the gradient has those of the gradients."""
    x = {"w": jnp.bfloat16(contract.normal(3, 2, 2))}
    y = jax.tree.map(jnp.float32, x)
    at = {"w": jnp.ones((2, 2), jnp.bfloat16)}

    def hvp_fn(v):
        assert v["w"].dtype == jnp.bfloat16
        return jax.tree.map(lambda z: 2 * z, v)

    fit = denoise.quadratic_mle(x, y, at, hvp_fn=hvp_fn)
    want = np.mean(y["w"], 0) + 2 * (1 - np.mean(y["w"], 0))
    assert (fit.gradient["w"].dtype, fit.weights.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose(fit.gradient["w"], want, atol=2e-2)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        (
            (X, Y[:, :3], AT),
            {},
            ValueError,
            r"y must have the shapes of x, wanted \[8, 4\] at <root>",
        ),
        ((X, Y[:7], AT), {}, ValueError, "y must have the shapes of x"),
        ((X, Y, AT[:3]), {}, ValueError, r"at must have the shapes of a point of x, wanted \[4\]"),
        ((X[:0], Y[:0], AT), {}, ValueError, "x must hold at least one point, got none"),
        ((X, Y, AT), {"ridge": -1.0}, ValueError, r"ridge must be in \[0, inf\), got -1.0"),
        ((X, Y, AT), {"ridge": "big"}, TypeError, "ridge must be a number"),
        ((X, Y, AT), {"method": "exact"}, ValueError, "method must be one of 'gram', 'hessian'"),
        ((X, Y, jnp.arange(4)), {}, TypeError, "at must be real floating, got int32 at <root>"),
        (({"w": X}, {"w": Y}, {"w": AT}), {"method": "hessian"}, ValueError, "x must be one array"),
        (({"w": X}, {"w": Y}, {"w": AT}), {"hessian": PRIOR}, ValueError, "x must be one array"),
        (
            (X, Y, AT),
            {"hessian": PRIOR[:3]},
            ValueError,
            r"hessian must have shape \[d, d\] with d=4",
        ),
        ((X, Y, AT), {"hvp_fn": 3}, TypeError, "hvp_fn must be a function"),
        ((X, Y, AT), {"hvp_fn": jnp.sin, "hessian": PRIOR}, ValueError, "hvp_fn must come without"),
        (
            (X, Y, AT),
            {"hvp_fn": jnp.sin, "method": "hessian"},
            ValueError,
            "hvp_fn must come without",
        ),
        (
            (X, Y, AT),
            {"hvp_fn": jnp.sum},
            ValueError,
            "the result of hvp_fn must have the types of at",
        ),
    ],
)
def test_bad_input_is_named(args, kwargs, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        denoise.quadratic_mle(*args, **kwargs)
