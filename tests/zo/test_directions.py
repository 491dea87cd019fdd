"""The directions: exact moments of the estimates on a quadratic, and biases of third order."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import zo


def _draws(key, like):
    """Returns a draw of every direction; those that are mixed mix normal numbers."""
    kinds = zo.rademacher(), zo.sphere(), zo.orthogonal(), zo.low_rank(2)
    return [direction.draw(key, 0, like, ()) for direction in kinds]


test_contract = contract.function(
    contract.Case(
        "draws",
        lambda: (_draws, (jax.random.key(0), contract.normal(8, 4))),
        public=("rademacher", "sphere", "orthogonal", "low_rank"),
        draws=True,
        dtypes=("float32", "float64"),
    )
)

SIZE, MU = 4, 0.5
RNG = np.random.default_rng(0)
SLOPE = RNG.normal(size=SIZE)
HESSIAN = RNG.normal(size=(SIZE, SIZE))
HESSIAN = HESSIAN + HESSIAN.T
NORM = SLOPE @ SLOPE
TRACE, SQUARES, DIAGONAL = (
    np.trace(HESSIAN),
    np.sum(HESSIAN**2),
    np.sum(np.diag(HESSIAN) ** 2),
)
POINT = jnp.zeros((2, 2))


def quadratic(x, bump=0.0):
    """Returns g.x + x.H.x / 2 + bump, with the gradient g at the origin."""
    x = x.reshape(-1)
    return jnp.float32(SLOPE) @ x + x @ jnp.float32(HESSIAN) @ x / 2 + bump


def estimates(loss_fn, num, params=POINT, **options):
    """Returns ``num`` estimates at ``params``, ``[num, d]`` in float64."""
    run = zo.value_and_zo_grad(loss_fn, **options)
    keys = jax.random.split(jax.random.key(1), num)
    grads = jax.jit(jax.vmap(lambda key: run(key, params)[1]))(keys)
    return np.asarray(grads, np.float64).reshape(num, -1)


def assert_mean(samples, want):
    """Checks the mean of rows to 4.5 standard errors of each entry, plus what float32 rounds."""
    error = samples.std(0) / len(samples) ** 0.5
    np.testing.assert_array_less(np.abs(samples.mean(0) - want), 4.5 * error + 1e-5)


MOMENTS = {
    "gaussian": (SIZE + 1, (SIZE + 4) * (TRACE**2 + 2 * SQUARES)),
    "rademacher": (SIZE - 1, SIZE * (TRACE**2 + 2 * (SQUARES - DIAGONAL))),
    "sphere": (SIZE - 1, SIZE**2 * (TRACE**2 + 2 * SQUARES) / (SIZE + 2)),
}


@pytest.mark.parametrize("mode", ["two_sided", "one_sided"])
@pytest.mark.parametrize("name", MOMENTS)
def test_mean_and_variance_on_a_quadratic(name, mode):
    """The mean is the gradient, and the trace of the covariance the closed form."""
    plain, curvature = MOMENTS[name]
    samples = estimates(quadratic, 40_000, mode=mode, mu=MU, direction=getattr(zo, name)())
    assert_mean(samples, SLOPE)
    want = plain * NORM + (curvature * MU**2 / 4 if mode == "one_sided" else 0)
    assert_mean(np.sum((samples - SLOPE) ** 2, 1)[:, None], [want])


def test_full_covariance_of_two_sided_estimates():
    """It is |g|^2 I + g g' for normal entries, and 2 diag(g^2) less for signs."""
    base = NORM * np.eye(SIZE) + np.outer(SLOPE, SLOPE)
    for direction, want in (
        (zo.gaussian(), base),
        (zo.rademacher(), base - 2 * np.diag(SLOPE**2)),
    ):
        centered = estimates(quadratic, 40_000, mu=MU, direction=direction) - SLOPE
        products = centered[:, :, None] * centered[:, None, :]
        assert_mean(products.reshape(len(centered), -1), want.reshape(-1))


@pytest.mark.parametrize(
    ("name", "bias"),
    [("gaussian", 1 / 2), ("sphere", SIZE / (SIZE + 2) / 2), ("rademacher", 1 / 6)],
)
def test_bias_of_third_order(name, bias):
    """Of sum c_i x_i^3 / 6, whose Laplacian has gradient c: mu^2 c times 1/2, d/(d+2)/2 or 1/6."""
    direction = getattr(zo, name)()
    cube = lambda x: jnp.sum(jnp.float32(SLOPE) * x.reshape(-1) ** 3) / 6  # noqa: E731
    samples = estimates(cube, 40_000, mu=1.0, direction=direction)
    assert_mean(samples, bias * SLOPE)


def test_independent_directions_divide_the_variance():
    """The trace of the covariance of K = 4 directions is a quarter."""
    samples = estimates(quadratic, 20_000, num_samples=4, mu=MU)
    assert_mean(np.sum((samples - SLOPE) ** 2, 1)[:, None], [(SIZE + 1) * NORM / 4])


@pytest.mark.parametrize("aggregate", ["mean", "project"])
@pytest.mark.parametrize("num_samples", [1, 3])
def test_orthogonal_directions_have_the_variance_and_the_cosine_of_a_random_plane(
    num_samples, aggregate
):
    """The trace is (d/K - 1) |g|^2 and the mean squared cosine K/d; projected, K/d times less."""
    samples = estimates(
        quadratic,
        20_000,
        num_samples=num_samples,
        mu=MU,
        direction=zo.orthogonal(),
        aggregate=aggregate,
    )
    if aggregate == "project":
        samples = samples * SIZE / num_samples
    assert_mean(samples, SLOPE)
    assert_mean(np.sum((samples - SLOPE) ** 2, 1)[:, None], [(SIZE / num_samples - 1) * NORM])
    cosine = (samples @ SLOPE) ** 2 / np.sum(samples**2, 1) / NORM
    assert_mean(cosine[:, None], [num_samples / SIZE])


@pytest.mark.parametrize("rank", [1, 3])
def test_second_moment_of_low_rank_estimates(rank):
    """E|g^|^2 = |G|^2 (mn + 2 + (2m + 2n + 2) / r) for the matrix of a linear loss."""
    m, n = 3, 2
    weights = RNG.normal(size=(m, n))
    loss_fn = lambda w: jnp.sum(jnp.float32(weights) * w)  # noqa: E731
    samples = estimates(loss_fn, 40_000, jnp.zeros((m, n)), direction=zo.low_rank(rank), mu=1.0)
    assert_mean(samples, weights.reshape(-1))
    want = np.sum(weights**2) * (m * n + 2 + (2 * m + 2 * n + 2) / rank)
    assert_mean(np.sum(samples**2, 1)[:, None], [want])


LEAVES = {"bias": jnp.zeros(5), "kernel": jnp.zeros((3, 2, 4)), "scalar": jnp.zeros(())}


@pytest.mark.parametrize("rank", [1, 2, 9])
def test_low_rank_matrices_have_their_rank_and_other_leaves_are_normal(rank):
    """A leaf [..., n] is a matrix [m, n] of rank r; vectors and scalars get normal numbers."""
    direction, key = zo.low_rank(rank), jax.random.key(0)
    u = direction.draw(key, 0, LEAVES["kernel"], ())
    assert np.linalg.matrix_rank(np.asarray(u).reshape(6, 4)) == min(rank, 4)
    for name in ("bias", "scalar"):
        want = jax.random.normal(key, LEAVES[name].shape)
        np.testing.assert_array_equal(direction.draw(key, 1, LEAVES[name], ()), want)


def test_low_rank_sum_in_one_product_is_the_sum_of_draws():
    """What the update adds for K directions is the sum of the K that perturbed."""
    direction = zo.low_rank(2)
    keys, coeffs = jax.random.split(jax.random.key(0), 3), jnp.array([1.0, -2.0, 0.5])
    like = LEAVES["kernel"]
    want = sum(c * direction.draw(k, 0, like, ()) for k, c in zip(keys, coeffs, strict=True))
    got = direction.combine(keys, coeffs, 0, like, ())
    np.testing.assert_allclose(got, want, atol=2e-6)
    assert direction.combine(keys, coeffs, 0, LEAVES["bias"], ()) is None


def test_equal_options_give_equal_directions():
    """Two calls of a factory compile nothing twice."""
    for make in (zo.gaussian, zo.rademacher, zo.sphere, zo.orthogonal, lambda: zo.low_rank(3)):
        assert make() == make() and hash(make()) == hash(make())
    assert zo.low_rank(1) != zo.low_rank(2) and zo.gaussian() != zo.rademacher()


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: zo.low_rank(0), ValueError, "rank must be at least 1, got 0"),
        (lambda: zo.low_rank(1.5), TypeError, "rank must be a static whole number, got 1.5"),
        (lambda: zo.low_rank(True), TypeError, "rank must be a static whole number, got True"),
    ],
)
def test_bad_options_are_named(make, error, match):
    """Each message names the option and its value."""
    with pytest.raises(error, match=match):
        make()
