"""Chamfer distances: closed forms, invariance, and what each option changes."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import metrics

REAL, FAKE = contract.normal(24, 3), contract.normal(16, 3)
chamfer = metrics.chamfer  # not jitted, so that all options share one search of neighbors

test_contract = contract.function(
    contract.Case(
        "chamfer",
        lambda: (lambda real, fake: metrics.chamfer(real=real, fake=fake), (REAL, FAKE)),
        dtypes=("float32", "float64"),
    ),
    contract.Case(
        "chamfer_all",
        lambda: (
            lambda real, fake: metrics.chamfer(
                real=real, fake=fake, k=2, mean_over_k=True, normalize="real", trim=0.2, chunk=8
            ),
            (REAL, FAKE),
        ),
        dtypes=("float32", "float64"),
        public="chamfer",
    ),
    contract.Case(
        "halves",
        lambda: (metrics.halves, (jax.random.key(0), REAL)),
        draws=True,
    ),
)


def _pairs(x, y):
    x, y = np.float64(x), np.float64(y)
    return np.sqrt(np.sum((x[:, None] - y[None]) ** 2, axis=-1))


def _assert_close(got, want, rtol=1e-5):
    np.testing.assert_allclose(got, want, rtol, atol=1e-6)


def test_it_is_the_mean_of_the_nearest_distances():
    """By the full matrix of distances in float64."""
    pairs = _pairs(REAL, FAKE)
    fidelity, coverage = pairs.min(0).mean(), pairs.min(1).mean()
    _assert_close(chamfer(real=REAL, fake=FAKE), (fidelity, coverage, fidelity + coverage))


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("mean_over_k", [False, True])
def test_k_neighbors_and_squares(squared, mean_over_k):
    """The third smallest distance of a row, or the mean of three, squared before the mean."""
    pairs = np.sort(_pairs(REAL, FAKE) ** (2 if squared else 1), axis=0)
    across = np.sort(_pairs(FAKE, REAL) ** (2 if squared else 1), axis=0)
    want = [(p[:3].mean(0) if mean_over_k else p[2]).mean() for p in (pairs, across)]
    got = chamfer(real=REAL, fake=FAKE, k=3, squared=squared, mean_over_k=mean_over_k)
    _assert_close(got[:2], want)


def test_fakes_among_the_real_have_fidelity_zero():
    """And a real sample among the fakes has coverage zero, exactly."""
    got = chamfer(real=REAL, fake=REAL[3:19])
    assert got.fidelity == 0 and got.coverage > 0
    got = chamfer(real=REAL[3:19], fake=REAL)
    assert got.coverage == 0 and got.fidelity > 0


def test_the_two_sides_swap_with_the_samples():
    """Fidelity of the one is coverage of the other."""
    got, swapped = chamfer(real=REAL, fake=FAKE), chamfer(real=FAKE, fake=REAL)
    _assert_close((swapped.coverage, swapped.fidelity), got[:2])


def test_motions_change_nothing_and_scale_comes_out():
    """Order, translation and rotation; a factor 5 is one of each distance, 25 squared."""
    want = np.array(chamfer(real=REAL, fake=FAKE))
    squares = np.array(chamfer(real=REAL, fake=FAKE, squared=True))
    turn = jnp.asarray(np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0], jnp.float32)
    for move in (lambda x: x[::-1], lambda x: x + 7, lambda x: x @ turn):
        _assert_close(chamfer(real=move(REAL), fake=move(FAKE)), want)
    _assert_close(chamfer(real=5 * REAL, fake=5 * FAKE), 5 * want)
    _assert_close(chamfer(real=5 * REAL, fake=5 * FAKE, squared=True), 25 * squares)
    scaled = chamfer(real=5 * REAL, fake=5 * FAKE, normalize="real")
    _assert_close(scaled, chamfer(real=REAL, fake=FAKE, normalize="real"))


def test_copies_of_fakes_change_no_coverage():
    """A model that repeats itself gains nothing."""
    twice = jnp.concatenate([FAKE, FAKE, FAKE[:5]])
    assert chamfer(real=REAL, fake=twice).coverage == pytest.approx(
        float(chamfer(real=REAL, fake=FAKE).coverage), rel=1e-6
    )


def test_normalized_by_the_distances_inside_the_real():
    """Divided by the mean distance of a real row to the nearest other one."""
    inside = _pairs(REAL, REAL)
    np.fill_diagonal(inside, np.inf)
    want = np.array(chamfer(real=REAL, fake=FAKE)) / inside.min(1).mean()
    _assert_close(chamfer(real=REAL, fake=FAKE, normalize="real"), want)
    median = np.array(chamfer(real=REAL, fake=FAKE, median=True))[:2] / np.median(inside.min(1))
    _assert_close(chamfer(real=REAL, fake=FAKE, normalize="real", median=True)[:2], median)
    same = jnp.ones((4, 3))
    assert not jnp.isfinite(chamfer(real=same, fake=FAKE, normalize="real").total)


def test_trim_and_median_do_not_feel_a_few_outliers():
    """Three of twenty fakes gone far away move the mean only."""
    fake = jnp.concatenate([REAL[:17] + 0.01, REAL[:3] + 1000])
    distances = _pairs(fake, REAL).min(1)
    assert chamfer(real=REAL, fake=fake).fidelity > 100
    trimmed, median = (
        chamfer(real=REAL, fake=fake, trim=0.15),
        chamfer(real=REAL, fake=fake, median=True),
    )
    _assert_close(trimmed.fidelity, np.sort(distances)[:17].mean(), 1e-4)
    _assert_close(median.fidelity, np.median(distances), 1e-4)
    _assert_close(median.coverage, np.median(_pairs(REAL, fake).min(1)), 1e-4)


def test_trim_leaves_out_whole_rows():
    """0.29 of 100 is 29, though the product in floating point is below."""
    fake = jnp.zeros((100, 1)).at[71:].set(1.0)
    real = jnp.zeros((1, 1))
    assert chamfer(real=real, fake=fake, trim=0.29).fidelity == 0
    assert chamfer(real=real, fake=fake, trim=0.28).fidelity > 0


def test_values_per_point_have_the_means():
    """And no total, since the sides have different numbers of points."""
    for options in ({}, {"normalize": "real", "k": 2}):
        got = chamfer(real=REAL, fake=FAKE, per_point=True, **options)
        assert (got.fidelity.shape, got.coverage.shape, got.total) == ((16,), (24,), None)
        want = chamfer(real=REAL, fake=FAKE, **options)
        _assert_close((got.fidelity.mean(), got.coverage.mean()), want[:2])


def test_halves_share_no_row():
    """Together they hold each row once but an odd one, whatever its dtype."""
    x = jnp.arange(21, dtype=jnp.float16)[:, None]
    first, second = metrics.halves(jax.random.key(1), x)
    assert first.shape == second.shape == (10, 1) and first.dtype == x.dtype
    assert len(np.union1d(first, second)) == 20


def test_two_halves_of_the_real_are_the_baseline():
    """Real rows with a little noise are nearer than a fresh sample, too wide a sample is not."""
    first, second = metrics.halves(jax.random.key(0), contract.normal(200, 64))
    memorized, fresh, wide = (
        chamfer(real=first, fake=fake).fidelity
        for fake in (first + 0.1 * second, second, 2 * second)
    )
    assert memorized < fresh < wide


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf])
def test_bad_values_stay_visible_under_jit(bad):
    """Neither side is finite, whichever sample they are in; no summary leaves them out."""
    jitted = jax.jit(chamfer, static_argnames=("trim", "median"))
    for options in ({}, {"trim": 0.2}, {"median": True}):
        for side in ("real", "fake"):
            samples = {"real": REAL, "fake": FAKE}
            samples[side] = samples[side].at[2, 0].set(bad)
            got = jitted(**samples, **options)
            spoiled = got if not options.get("median") else [got.total]  # of one row it is sound
            assert not jnp.isfinite(jnp.array(spoiled)).any()


def test_samples_are_named():
    """A swap of the two is the classic mistake, so no position is accepted."""
    for fun in (metrics.chamfer, metrics.frechet_distance, metrics.kid, metrics.density_coverage):
        with pytest.raises(TypeError, match="positional argument"):
            fun(REAL, FAKE)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"k": 17}, ValueError, "fake must have at least 17 rows, got 16"),
        ({"real": REAL[:2], "k": 2, "normalize": "real"}, ValueError, "real must have at least 3"),
        ({"normalize": "fake"}, ValueError, "normalize must be one of None, 'real', got 'fake'"),
        ({"trim": 1.0}, ValueError, r"trim must be in \[0, 1\), got 1.0"),
        ({"trim": 0.1, "median": True}, ValueError, "trim must be 0 with median, got 0.1"),
        ({"median": True, "per_point": True}, ValueError, "per_point must be False with trim or"),
        ({"fake": FAKE[:, :2]}, ValueError, r"fake must have shape \[n, d\] with d=3"),
        ({"fake": FAKE.astype(int)}, TypeError, "fake must be real floating, got int32"),
        ({"fake": FAKE.at[0, 0].set(jnp.nan)}, ValueError, "fake must be finite, .* 1 of 16 rows"),
    ],
)
def test_bad_input_is_named(kwargs, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        metrics.chamfer(**{"real": REAL, "fake": FAKE, **kwargs})
    with pytest.raises(ValueError, match="x must have at least 2 rows, got 1"):
        metrics.halves(jax.random.key(0), REAL[:1])
