"""Bootstrap intervals: closed forms of the mean, coverage, and trees of samples."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import metrics

KEY = jax.random.key(0)

test_contract = contract.function(
    contract.Case(
        "bootstrap",
        lambda: (
            lambda key, x: metrics.bootstrap(key, jnp.mean, x, num_samples=20),
            (KEY, contract.normal(16)),
        ),
        draws=True,
    )
)


def test_the_interval_of_a_mean_is_the_normal_one():
    """Mean plus and minus 1.96 std / sqrt(n), at other levels other quantiles; no bias."""
    stats = pytest.importorskip("scipy.stats")
    x = contract.normal(300)
    mean, error = float(x.mean()), float(x.std()) / 300**0.5
    for level in (0.5, 0.95):
        got = metrics.bootstrap(KEY, jnp.mean, x, num_samples=2000, level=level)
        assert got.value == pytest.approx(mean, abs=1e-6)
        # Four errors of 2000 draws: of a deviation, of a mean, of an outer quantile.
        assert got.std_error == pytest.approx(error, rel=0.065)
        assert abs(got.bias) < 0.09 * error
        half = stats.norm.ppf((1 + level) / 2) * error
        assert abs(got.low - (mean - half)) < 0.25 * error
        assert abs(got.high - (mean + half)) < 0.25 * error


def test_most_intervals_hold_the_true_value():
    """Of 400 samples of 50, at level 0.9: within four errors of 0.9, a little less for small n."""
    x = jax.random.normal(KEY, (400, 50))
    keys = jax.random.split(jax.random.key(1), 400)
    run = jax.vmap(lambda key, x: metrics.bootstrap(key, jnp.mean, x, num_samples=200, level=0.9))
    got = jax.jit(run)(keys, x)
    share = jnp.mean((got.low < 0) & (got.high > 0))
    assert abs(share - 0.885) < 4 * (0.9 * 0.1 / 400) ** 0.5


def test_arrays_of_a_sample_stay_together_and_samples_do_not():
    """Of equal arrays the difference is always 0 in one sample, and varies between two."""
    x = contract.normal(30)
    one = metrics.bootstrap(KEY, lambda s: jnp.mean(s["a"] - s["b"]), {"a": x, "b": x})
    assert one.low == one.high == one.std_error == 0
    two = metrics.bootstrap(KEY, lambda a, b: a.mean() - b.mean(), x, x)
    assert two.std_error == pytest.approx((2 * float(x.var()) / 30) ** 0.5, rel=0.15)


def test_trees_of_values_come_back_as_trees():
    """A field of the interval is like the value."""
    x, y = contract.normal(20), contract.normal(10, 2)
    out = metrics.bootstrap(KEY, lambda x, y: {"x": x.mean(), "y": y.mean(0)}, x, y)
    for field in out:
        assert jax.tree.map(jnp.shape, field) == {"x": (), "y": (2,)}
    np.testing.assert_allclose(out.value["y"], y.mean(0), rtol=1e-6)


def test_no_neighbor_is_searched_again():
    """Values per point of a metric, here of fakes of which a tenth are off."""
    real = contract.normal(40, 2)
    fake = jnp.concatenate([real[:36], real[:4] + 100])
    points = metrics.precision_recall(real=real, fake=fake, per_point=True)
    got = metrics.bootstrap(KEY, jnp.mean, points.precision)
    assert got.value == pytest.approx(0.9)
    assert got.std_error == pytest.approx((0.9 * 0.1 / 40) ** 0.5, rel=0.1)


def test_features_can_be_resampled_where_no_neighbor_counts():
    """The Frechet distance of two halves is biased up, by about as much again when resampled."""
    first, second = contract.normal(60, 4), contract.normal(60, 4, seed=1)
    out = metrics.bootstrap(
        KEY, lambda r, f: metrics.frechet_distance(real=r, fake=f), first, second, num_samples=100
    )
    assert 0 < out.value < out.low + out.bias
    assert out.bias > 0


def test_integers_may_be_samples_but_not_values():
    """Such as labels; a value needs quantiles."""
    labels = jnp.arange(10)
    assert metrics.bootstrap(KEY, lambda x: jnp.mean(x < 5), labels).value == 0.5
    with pytest.raises(TypeError, match="fun must return real floating arrays, got int32"):
        metrics.bootstrap(KEY, jnp.max, labels)


def test_bad_input_is_named():
    """Each message names the argument and what it got; NaN values stay visible."""
    x = contract.normal(4)
    assert jnp.isnan(metrics.bootstrap(KEY, jnp.mean, x.at[0].set(jnp.nan)).low)
    for args, kwargs, error, match in (
        ((), {}, ValueError, "samples must hold at least one sample, got none"),
        ((jnp.ones(()),), {}, ValueError, r"samples must have a leading axis .* got \[\]"),
        (((x, x[:3]),), {}, ValueError, "samples must have the same leading axis"),
        ((x,), {"level": 1.0}, ValueError, r"level must be in \(0, 1\), got 1.0"),
        ((x,), {"num_samples": 0}, ValueError, "num_samples must be at least 1, got 0"),
    ):
        with pytest.raises(error, match=match):
            metrics.bootstrap(KEY, jnp.mean, *args, **kwargs)
    with pytest.raises(TypeError, match="fun must be a function, got float"):
        metrics.bootstrap(KEY, 1.0, x)
