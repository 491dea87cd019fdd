"""How the benchmark of growth fits exponents, and that a regression in growth shows."""

import math
import types

import jax.numpy as jnp
import numpy as np
import pytest

import jaxkit
from benchmarks import harness, report
from benchmarks.scale import bench_growth

SIZES = [4, 8, 16, 32]
RNG = np.random.default_rng(0)
NOISY = np.exp(RNG.normal(size=(5, 4))) * np.array(SIZES)  # [rounds, sizes]


def context(form="smoke"):
    return harness.Context(form, {}, None, iter, print)


@pytest.mark.parametrize("p", [-1, 0, 0.5, 1, 2, 3])
def test_exponent_of_a_power_law_is_its_own(p):
    """c n^p has the exponent p, whatever c."""
    for c in (1e-6, 1.0, 7e9):
        assert abs(bench_growth.exponent(SIZES, c * np.array(SIZES) ** float(p)) - p) < 1e-12


def test_exponent_does_not_depend_on_units():
    """Milliseconds for seconds, or kilobytes of input for bytes, change nothing."""
    want = bench_growth.exponent(SIZES, NOISY)
    np.testing.assert_allclose(bench_growth.exponent(SIZES, 1e3 * NOISY), want, atol=1e-12)
    np.testing.assert_allclose(
        bench_growth.exponent(np.array(SIZES) / 1e3, NOISY), want, atol=1e-12
    )


def test_each_round_has_the_exponent_of_its_own_line():
    """The slopes are those that numpy's polynomial fit finds, round by round."""
    found = bench_growth.exponent(SIZES, NOISY)
    want = [np.polyfit(np.log(SIZES), np.log(values), 1)[0] for values in NOISY]
    assert np.ptp(want) > 0.1
    np.testing.assert_allclose(found, want, atol=1e-12)


def test_every_topic_has_a_curve():
    """A topic that jaxkit imports is one whose growth is measured, and the other way around."""
    topics = {
        name
        for name, value in vars(jaxkit).items()
        if isinstance(value, types.ModuleType) and not name.startswith("_")
    }
    assert len(topics) > 1
    assert {case.split(",")[0] for case in bench_growth.CURVES} == topics


@pytest.mark.parametrize("form", ["short", "full"])
def test_sizes_span_three_octaves(form):
    """From the smallest to the largest there are at least three doublings, with each between."""
    for growth in bench_growth.CURVES.values():
        sizes = np.array(bench_growth.doubled(growth.sizes[form][0], form))
        assert sizes[-1] >= 8 * sizes[0]
        assert np.array_equal(sizes[1:], 2 * sizes[:-1])


@pytest.mark.slow
def test_smoke_form_has_finite_rows_and_curves_on_log_axes(standard_promotion):
    """Each curve comes with a rival's, positive costs, and all four comparisons of the two."""
    items = list(bench_growth.run(context()))
    cases = list(dict.fromkeys(x.case for x in items))
    assert cases == [case for case in bench_growth.CURVES if case != "ot, slices"]
    for case in cases:
        rows, curves = (
            [x for x in items if isinstance(x, kind) and x.case == case]
            for kind in (harness.Row, harness.Curve)
        )
        methods = [curve.method for curve in curves]
        assert len(set(methods)) == len(methods) == 2
        for curve in curves:
            assert curve.scale == "log"
            assert curve.values.shape == (bench_growth.ROUNDS["smoke"], len(curve.x)) == (2, 2)
            assert np.all(curve.values > 0)
        assert all(np.isfinite(row.value) for row in rows)
        assert {row.method for row in rows} == set(methods)
        assert {row.rival for row in rows} == {methods[1]}
        assert len({row.metric for row in rows}) == 4


def linear(x):
    return jnp.sort(x)[0]


def between(x):
    return jnp.sort(x[:, None] * x[None, : math.isqrt(len(x))], axis=0)[0]


def quadratic(x):
    return jnp.sort(x[:, None] * x[None], axis=0)[0]


def rows_of(fun, monkeypatch):
    """Returns the rows of a benchmark whose only method is ``fun``, beside one without memory."""

    def calls(count, fixed):
        x = jnp.ones(count * fixed)
        return {"ours": (fun, x), "in place": (lambda x: x + 1, x)}

    growth = bench_growth.Growth("times {} numbers", {"smoke": (128, 2)}, calls)
    monkeypatch.setattr(bench_growth, "CURVES", {"topic, numbers": growth})
    items = bench_growth.run(context())
    return [x._asdict() | {"topic": "scale"} for x in items if isinstance(x, harness.Row)]


def value_of(rows, method, metric):
    (value,) = (row["value"] for row in rows if (row["method"], row["metric"]) == (method, metric))
    return value


@pytest.mark.parametrize(
    ("fun", "p"),
    # From 256 to 512 numbers: 256 x 16 to 512 x 22, 256 x 256 to 512 x 512.
    [(linear, 1), (between, 1 + math.log2(22 / 16)), (quadratic, 2)],
)
def test_regression_is_a_larger_exponent_and_a_change(fun, p, monkeypatch):
    """Memory of n^p has the exponent p, and ``--compare`` lists it if it was linear.

    None at all has the exponent 0. What is exact has one value, the time one a round.
    """
    old, new = (rows_of(x, monkeypatch) for x in (linear, fun))
    memory = "exponent of the temporary memory"
    assert abs(value_of(new, "ours", memory) - p) < 0.02
    assert value_of(new, "in place", memory) == 0
    found = {key: rest for key, *rest in report.changes(old, new)}
    case, size = "topic, numbers", "128 to 256 times 2 numbers"
    before, after, _, is_real = found["scale", case, "ours", size, memory, "1", "down"]
    assert abs(after - before - (p - 1)) < 0.02
    assert is_real == (fun is not linear)
    seeds = {row["metric"]: set() for row in new}
    for row in new:
        seeds[row["metric"]].add(row["seed"])
    rounds = set(range(bench_growth.ROUNDS["smoke"]))
    assert list(seeds.values()) == [rounds, {None}, {None}, rounds]
