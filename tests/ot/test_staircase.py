"""The paths through the matrix of a sorted pair: definitions, tie rules, the sort."""

import jax
import jax.numpy as jnp
import numpy as np
import ot_problems
import pytest

from jaxkit import ot
from jaxkit.ot import _staircase


def _stairs(problems, tol=None):
    def one(x, y, a, b):
        return _staircase.staircase(x, y, a, b, None, None, tol)

    return jax.jit(jax.vmap(one))(*map(jnp.asarray, problems))


def test_paths_are_the_north_west_corner_rule():
    """Columns and rows where rows and columns end, from the sums of weights, for both tie rules."""
    *problems, _ = ot_problems.hard(7, 5, 60)
    with jax.enable_x64(True):
        stairs = _stairs(problems)
    for k, (x, y, a, b) in enumerate(zip(*problems, strict=True)):
        # Equal points pool their weight at the first of them.
        tops, ends = (
            np.cumsum([w[z == v].sum() if first else 0.0 for v, first in _firsts(z)])
            for z, w in ((x, a), (y, b))
        )
        tol = 1e-12
        for path, ahead in ((0, -tol), (1, tol)):
            columns, rows = (z[k] for z in stairs.paths[path])
            for i, j in enumerate(np.asarray(columns)):
                fits = ends >= tops[i] - tol if path == 0 else ends > tops[i] + tol
                assert j == (np.argmax(fits) if fits.any() else 4)
            for j, i in enumerate(np.asarray(rows)):
                fits = tops + ahead > ends[j] if path == 0 else tops + ahead >= ends[j]
                assert i == (np.argmax(fits) if fits.any() else 6)


def _firsts(z):
    z = np.sort(z)
    return [(v, i == 0 or z[i - 1] != v) for i, v in enumerate(z)]


@pytest.mark.parametrize("rule", [0, 1])
def test_with_one_tie_rule_each_potential_answers_the_other(rule):
    """f is the c-transform of g at all atoms, and g that of f; for the mean it need not be."""
    *problems, p = ot_problems.hard(7, 5, 60)
    with jax.enable_x64(True):
        stairs = _stairs(problems)
        stairs = stairs._replace(paths=stairs.paths[rule : rule + 1])
        pairs = jax.vmap(lambda s, p: _staircase.potentials(s, lambda x, y: jnp.abs(x - y) ** p))(
            stairs, jnp.asarray(p)
        )
    for f, g, x, y, power in zip(*pairs, stairs.x, stairs.y, p, strict=True):
        c = ot_problems.cost_matrix(x, y, power)
        np.testing.assert_allclose(f, np.min(c - np.asarray(g), axis=1), atol=1e-12)
        np.testing.assert_allclose(g, np.min(c.T - np.asarray(f), axis=1), atol=1e-12)


def test_search_counts_what_comes_before():
    """It is numpy's searchsorted, at all sizes, with equal levels."""
    rng = np.random.default_rng(0)
    fun = jax.jit(
        lambda levels, q: tuple(
            _staircase.search(levels, q, before) for before in (jnp.less, jnp.less_equal)
        )
    )
    for size in (1, 2, 3, 7, 8, 9, 31, 100):
        levels = np.float32(np.sort(rng.integers(0, size, size)))
        q = np.float32(np.r_[-1.0, levels, levels + 0.5, np.inf])
        left, right = fun(levels, q)
        np.testing.assert_array_equal(left, np.searchsorted(levels, q, "left"))
        np.testing.assert_array_equal(right, np.searchsorted(levels, q, "right"))


def test_sort_is_numpys_and_its_places_hold_the_values():
    """Also for zeros of both signs, infinities and NaN, which comes first or last."""
    rng = np.random.default_rng(0)
    x = np.float32(np.r_[rng.normal(size=40).round(1), 0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45])
    got, rank = jax.jit(_staircase._sort)(x)
    np.testing.assert_array_equal(got, np.sort(x))
    np.testing.assert_array_equal(got[rank], x)
    for bad, place in ((np.nan, -1), (-np.nan, 0)):
        got, _ = _staircase._sort(jnp.float32(np.r_[x, np.copysign(np.nan, bad)]))
        assert np.isnan(got[place])
    with jax.enable_x64(True):
        wide = rng.normal(size=30)
        got, rank = _staircase._sort(jnp.asarray(wide))
        np.testing.assert_array_equal(got, np.sort(wide))
        np.testing.assert_array_equal(got[rank], wide)


def test_levels_never_fall():
    """A parallel sum in float32 may fall by its rounding where weights are tiny or zero."""
    rng = np.random.default_rng(0)
    for seed in range(20):
        weights = np.float32(rng.random(3000) ** 40)
        weights /= weights.sum()
        levels = jax.jit(_staircase._levels)(weights, np.arange(3000, dtype=np.int32))
        assert np.all(np.diff(levels) >= 0), seed


def test_sums_err_by_half_an_ulp_and_by_rounding_of_steps():
    """By u |sum| and, as Hoeffding has it, by 6 u of the root of the sum of squared steps.

    A far point changes nothing before it.
    """
    steps = np.abs(np.random.default_rng(0).normal(size=(8, 5000)).astype(np.float32))
    steps[:, 4000] = 1e12
    got = jax.jit(jax.vmap(_staircase._sums))(steps)
    steps = np.float64(steps)
    want, squares = np.cumsum(steps, axis=1), np.cumsum(steps**2, axis=1)
    bound = 1.01 * 2.0**-24 * (np.abs(want) + 6 * np.sqrt(squares))
    assert np.all(np.abs(np.float64(got) - want) <= bound)


def test_rise_of_the_squared_cost_keeps_its_digits_far_away():
    """From 1000 to the next float32 number, seen from -1000: two costs have no such digits."""
    low = np.float32(1000)
    high = np.nextafter(low, np.float32(np.inf))
    want = (np.float64(high) + 1000) ** 2 - 2000.0**2
    got = _staircase.rise(ot.squared, low, high, np.float32(-1000))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    by_hand = _staircase.rise(lambda x, y: (x - y) ** 2, low, high, np.float32(-1000))
    np.testing.assert_allclose(by_hand, want, atol=2 * 2000.0**2 * 2.0**-24)


def test_program_sorts_each_side_once_and_one_array_of_integers():
    """Equal weights need no search for the paths either: two searches for the places remain."""
    x, a = jnp.ones(16), jnp.full(16, 1 / 16)

    def count(*args):
        text = jax.jit(jax.vmap(ot.duals_1d)).lower(*(z[None] for z in args)).as_text()
        return text.count('"stablehlo.sort"'), text.count("stablehlo.while")

    assert count(x, x, a, a) == (2, 4)
    assert count(x, x) == (2, 2)
