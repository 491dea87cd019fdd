"""The sliced Wasserstein distance: closed forms, scipy and POT on the same lines."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import metrics
from jaxkit.metrics import _sliced_wasserstein

KEY = jax.random.key(0)
REAL, FAKE = contract.normal(24, 3), contract.normal(16, 3)
OPTIONS = ("p", "num_directions", "chunk")
sliced = jax.jit(metrics.sliced_wasserstein, static_argnames=OPTIONS)

test_contract = contract.function(
    contract.Case(
        "sliced_wasserstein",
        lambda: (
            lambda key, real, fake: metrics.sliced_wasserstein(
                key, real=real, fake=fake, num_directions=8
            ),
            (KEY, REAL, FAKE),
        ),
        draws=True,
        dtypes=("float32", "float64"),
    )
)


@pytest.mark.parametrize(("n", "m"), [(5, 5), (4, 6), (7, 3), (1, 8), (12, 1)])
def test_on_the_line_it_is_exact_for_any_sizes(n, m):
    """In one dimension every direction is the line; scipy's W1, and W2 by POT."""
    stats, ot = pytest.importorskip("scipy.stats"), pytest.importorskip("ot")
    x, y = contract.normal(n, 1, seed=1), contract.normal(m, 1, seed=2) + 0.3
    flat = np.float64(x[:, 0]), np.float64(y[:, 0])
    got = [sliced(KEY, real=x, fake=y, p=p, num_directions=1) for p in (1, 2, 3)]
    want = [stats.wasserstein_distance(*flat)]
    want += [ot.wasserstein_1d(*flat, p=p).item() ** (1 / p) for p in (2, 3)]
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("chunk", [1, 16])
def test_on_the_same_directions_it_equals_pot(chunk):
    """POT gets the directions as its projections, in float64."""
    ot = pytest.importorskip("ot")
    lines = np.float64(_sliced_wasserstein._directions(KEY, 10, 3, jnp.float32))
    for p in (1, 2):
        want = ot.sliced_wasserstein_distance(
            np.float64(REAL), np.float64(FAKE), projections=lines.T, p=p
        )
        got = sliced(KEY, real=REAL, fake=FAKE, p=p, num_directions=10, chunk=chunk)
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize(("num", "d"), [(12, 4), (3, 8), (7, 3)])
def test_directions_are_orthogonal_in_groups(num, d):
    """Rows of unit length, as many as asked for; whole groups make a tight frame."""
    lines = np.float64(_sliced_wasserstein._directions(KEY, num, d, jnp.float32))
    assert lines.shape == (num, d)
    for group in np.split(lines, range(d, num, d)):
        np.testing.assert_allclose(group @ group.T, np.eye(len(group)), atol=1e-6)


def test_directions_are_uniform():
    """Over 2000 keys the mean of the outer product of one is I / d, within five errors."""
    keys = jax.random.split(KEY, 2000)
    lines = jax.vmap(lambda key: _sliced_wasserstein._directions(key, 1, 3, jnp.float32)[0])(keys)
    outer = jnp.einsum("li,lj->lij", lines, lines)
    error = outer.std(axis=0) / 2000**0.5
    assert (abs(outer.mean(axis=0) - jnp.eye(3) / 3) < 5 * error).all()


def test_translation_moves_it_by_the_root_of_the_dimension():
    """W2 is |t . theta| on a line, and with whole bases the mean square is |t|^2 / d."""
    move = jnp.array([[1.0, -2.0, 0.5]])
    got = sliced(KEY, real=REAL, fake=REAL + move, num_directions=6)
    np.testing.assert_allclose(got, jnp.linalg.norm(move) / 3**0.5, rtol=1e-5)


def test_order_and_swap_change_nothing_and_scale_comes_out():
    """And copies of all rows are the same distribution, at distance 0 from it."""
    want = sliced(KEY, real=REAL, fake=FAKE)
    np.testing.assert_allclose(sliced(KEY, real=REAL[::-1], fake=FAKE[::-1]), want, rtol=1e-6)
    np.testing.assert_allclose(sliced(KEY, real=FAKE, fake=REAL), want, rtol=1e-6)
    np.testing.assert_allclose(sliced(KEY, real=5 * REAL, fake=5 * FAKE), 5 * want, rtol=1e-5)
    twice = jnp.concatenate([REAL, REAL])
    assert sliced(KEY, real=REAL, fake=twice) == 0


def test_shares_of_quantiles_add_up():
    """For sizes with and without a common divisor, also large ones; each step counts once."""
    for n, m in ((4, 6), (7, 3), (50_000, 49_999)):
        rows, columns, widths = _sliced_wasserstein._coupling(n, m)
        np.testing.assert_allclose(np.bincount(rows, widths), 1 / n, rtol=1e-9)
        np.testing.assert_allclose(np.bincount(columns, widths), 1 / m, rtol=1e-9)
        assert len(widths) == n + m - np.gcd(n, m)


def test_derivative_at_equal_samples_is_zero():
    """The root has none there."""
    slope = jax.grad(lambda fake: sliced(KEY, real=REAL, fake=fake))
    np.testing.assert_array_equal(slope(REAL), 0)
    assert jnp.linalg.norm(slope(REAL + 1)) > 0


def test_bad_input_is_named():
    """Each message names the argument; under jit the value is not finite."""
    for bad in (jnp.nan, jnp.inf):
        assert not jnp.isfinite(sliced(KEY, real=REAL.at[0].set(bad), fake=FAKE))
    for kwargs, error, match in (
        ({"p": 0.5}, ValueError, r"p must be in \[1, inf\), got 0.5"),
        ({"p": "2"}, TypeError, "p must be a number, got '2'"),
        ({"num_directions": 0}, ValueError, "num_directions must be at least 1, got 0"),
        ({"chunk": 0}, ValueError, "chunk must be at least 1, got 0"),
        ({"fake": FAKE[:, :2]}, ValueError, r"fake must have shape \[n, d\] with d=3"),
        ({"fake": FAKE.at[0].set(jnp.nan)}, ValueError, "fake must be finite, .* in 1 of 16"),
    ):
        with pytest.raises(error, match=match):
            metrics.sliced_wasserstein(KEY, **{"real": REAL, "fake": FAKE, **kwargs})
