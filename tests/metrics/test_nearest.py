"""Nearest neighbors against a k-d tree in float64, in bounded memory."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import metrics

X, Y = contract.normal(16, 3), contract.normal(24, 3)
nearest = jax.jit(metrics.nearest, static_argnames=("k", "exclude_self", "chunk"))

test_contract = contract.function(
    contract.Case(
        "nearest",
        lambda: (lambda x, y: metrics.nearest(x, y, k=2, chunk=8), (X, Y)),
        dtypes=("float32", "float64"),
    ),
    contract.Case(
        "nearest_other",
        lambda: (lambda x: metrics.nearest(x, x, exclude_self=True), (X,)),
        dtypes=("float32", "float64"),
        public="nearest",
    ),
)


def _tree(x, y, k):
    """Returns the answer of a k-d tree for the same float32 points, distances in float64."""
    spatial = pytest.importorskip("scipy.spatial")
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    return (z.reshape(len(x), k) for z in spatial.cKDTree(y).query(x, k))


def _assert_nearest(got, x, y, k, rtol=1e-6):
    distances, indices = _tree(x, y, k)
    np.testing.assert_array_equal(got.indices, indices)
    np.testing.assert_allclose(got.distances, distances, rtol)


@pytest.mark.parametrize(
    ("n", "m", "d", "k", "chunk"),
    [(37, 531, 3, 1, 512), (37, 531, 3, 5, 48), (9, 17, 2, 17, 1024), (150, 200, 64, 4, 33)],
)
def test_it_equals_a_tree(n, m, d, k, chunk):
    """Also where sizes are no multiple of a chunk or group, and where all rows are asked for."""
    x, y = contract.normal(n, d, seed=1), contract.normal(m, d, seed=2)
    _assert_nearest(nearest(x, y, k=k, chunk=chunk), x, y, k)


def test_it_equals_a_tree_on_digits():
    """Real features, in clusters."""
    digits = pytest.importorskip("sklearn.datasets").load_digits().data / 16
    x, y = jnp.asarray(digits[:300], jnp.float32), jnp.asarray(digits[300:800], jnp.float32)
    distances, _ = _tree(x, y, 3)
    np.testing.assert_allclose(nearest(x, y, k=3, chunk=128).distances, distances, 1e-6)


def test_double_precision_is_double():
    """Distances to 1e-14."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(20, 3)), rng.normal(size=(30, 3))
    with jax.enable_x64(True):
        _assert_nearest(nearest(jnp.asarray(x), jnp.asarray(y)), x, y, 1, 1e-14)


@pytest.mark.parametrize("chunk", [1, 7, 16, 1000])
def test_chunk_changes_nothing(chunk):
    """It is a matter of memory only."""
    y = contract.normal(200, 3)
    got, want = nearest(X, y, k=3, chunk=chunk), nearest(X, y, k=3)
    np.testing.assert_array_equal(got.indices, want.indices)
    np.testing.assert_allclose(got.distances, want.distances, 1e-6)


def test_a_copy_is_at_distance_zero_anywhere():
    """Far from the origin the product of the rows has lost all digits of the distance."""
    y = contract.normal(400, 5) + 10_000
    order = np.random.default_rng(0).permutation(400)
    got = nearest(y[order], y)
    np.testing.assert_array_equal(got.indices[:, 0], order)
    np.testing.assert_array_equal(got.distances, 0)
    _assert_nearest(nearest(y + 0.125, y), y + 0.125, y, 1)


def test_candidates_that_rounding_cannot_tell_apart_are_told_apart():
    """Five near one row and 1000 from the center, where scores are rounded to a sixteenth."""
    y = np.float32(contract.normal(96, 2)) - [1000, 0]
    y[::2, 0] += 2000
    near = [0, 18, 36, 54, 72]  # in five groups
    for gaps in (range(1, 6), range(5, 0, -1)):
        for place, gap in zip(near, gaps, strict=True):
            y[place] = 1000, 0.01 * gap
        x = jnp.array([[1000.0, 0.0]])
        got = nearest(x, jnp.asarray(y, jnp.float32))
        assert got.indices[0, 0] == near[list(gaps).index(1)]
        assert got.distances[0, 0] == pytest.approx(0.01, rel=1e-6)


def test_a_row_is_left_out_by_its_number_not_by_its_distance():
    """A copy of it counts; others are as the k-d tree has them behind the row itself."""
    x = contract.normal(300, 3)
    got = nearest(x, x, k=3, exclude_self=True, chunk=32)
    distances, indices = _tree(x, x, 4)
    np.testing.assert_array_equal(got.indices, indices[:, 1:])
    np.testing.assert_allclose(got.distances, distances[:, 1:], 1e-6)
    twice = jnp.concatenate([x, x])
    got = nearest(twice, twice, exclude_self=True)
    np.testing.assert_array_equal(got.indices[:, 0], np.roll(np.arange(600), 300))
    np.testing.assert_array_equal(got.distances, 0)


@pytest.mark.parametrize("derivative", [False, True])
def test_memory_is_bounded(derivative):
    """50,000 by 50,000 rows of 64 take 8 MiB beside a few arrays of that many rows."""
    rows = jax.ShapeDtypeStruct((50_000, 64), jnp.float32)

    def total(x, y):
        return metrics.nearest(x, y, k=5).distances.sum()

    fun = jax.jit(jax.grad(total, argnums=(0, 1)) if derivative else metrics.nearest)
    temp = fun.lower(rows, rows).compile().memory_analysis().temp_size_in_bytes
    size = 4 * 50_000 * 64
    assert temp < 2**23 + (12 if derivative else 3) * size


def test_half_precision_is_computed_in_single():
    """Distances come back in float32, those of the rounded rows."""
    x, y = X.astype(jnp.bfloat16), Y.astype(jnp.float16)
    got = nearest(x, y)
    assert got.distances.dtype == jnp.float32
    _assert_nearest(got, np.float32(x), np.float32(y), 1)


def test_derivative_points_away_from_the_neighbor():
    """It is the unit vector from it, and zero where both coincide."""
    x = jnp.concatenate([X, Y[:1]])
    slope = jax.grad(lambda x: nearest(x, Y).distances.sum())(x)
    gap = x - Y[nearest(x, Y).indices[:, 0]]
    want = gap[:-1] / jnp.linalg.norm(gap[:-1], axis=1, keepdims=True)
    np.testing.assert_allclose(slope[:-1], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(slope[-1], 0)


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_bad_values_stay_visible_under_jit(bad):
    """In x they spoil their row, in y all rows; outside of jit they are an error."""
    distances = nearest(X.at[3, 1].set(bad), Y).distances[:, 0]
    np.testing.assert_array_equal(jnp.isfinite(distances), jnp.arange(16) != 3)
    assert jnp.isnan(nearest(X, Y.at[20, 0].set(bad)).distances).all()
    with pytest.raises(ValueError, match="x must be finite, got NaN or inf in 1 of 16 rows"):
        metrics.nearest(X.at[3, 1].set(bad), Y)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((X, Y[:, :2]), {}, ValueError, r"y must have shape \[n, d\] with d=3, got \(24, 2\)"),
        ((X, Y[:2]), {"k": 3}, ValueError, "y must have at least 3 rows, got 2"),
        ((Y[:3], Y[:3]), {"k": 3, "exclude_self": True}, ValueError, "at least 4 rows, got 3"),
        ((X, Y), {"exclude_self": True}, ValueError, "y must be x with exclude_self"),
        ((X, Y), {"k": 0}, ValueError, "k must be at least 1, got 0"),
        ((X, Y), {"k": 1.5}, TypeError, "k must be a static whole number, got 1.5"),
        ((X, Y), {"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ((X.astype(int), Y), {}, TypeError, "x must be real floating, got int32"),
    ],
)
def test_bad_input_is_named(args, kwargs, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        metrics.nearest(*args, **kwargs)
