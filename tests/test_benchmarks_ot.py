"""How the benchmarks of ot choose their problems, and count and judge solves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ot import bench_duals, bench_iterations, bench_solve, network, problems
from jaxkit import ot

as_ott_needs = pytest.mark.usefixtures("promotion")


@pytest.fixture
def promotion():
    """ott's own code relies on JAX's default promotion."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def test_pairs_are_what_they_say():
    """Digits are weights on one grid, colors lie in the unit cube, images have variance about 1."""
    digits = problems.digits(1, 3)
    np.testing.assert_allclose(digits.a.sum(1), 1, rtol=1e-5)
    assert jnp.array_equal(digits.x[0], digits.y[2]) and digits.x.shape == (3, 64, 2)
    colors = problems.colors(1, 2, 50)
    assert colors.x.shape == (2, 50, 3) and 0 <= colors.x.min() <= colors.x.max() <= 1
    # The temple stands before a bright sky, the flower before dark leaves.
    assert colors.x[..., 2].mean() > colors.y[..., 2].mean()
    noise = problems.noise_to_digits(1, 2, 100)
    np.testing.assert_allclose(noise.y.var(), 1, rtol=0.1)


def test_mean_cost_is_the_mean_over_all_pairs_of_points():
    """Without a matrix of costs, the same number."""
    pairs = problems.colors(2, 3, 20)
    squares = jnp.square(pairs.x[:, :, None] - pairs.y[:, None]).sum(-1)
    np.testing.assert_allclose(problems.mean_cost(pairs), squares.mean(), rtol=1e-5)


def test_iterations_are_counted_to_the_first_error_that_fits():
    """An error after the first iteration counts 1; -1 stands for what was not computed."""
    errors = np.array([[0.09, 0.02, 0.01, 1e-3], [0.5, 0.009, 9e-4, -1]])
    assert problems.iterations(errors) == {1e-1: 1.5, 1e-2: 2.5, 1e-3: 3.5}
    with pytest.raises(RuntimeError, match="0.01 "):
        problems.iterations(errors[:, :2])


@as_ott_needs
def test_labels_are_potentials_of_the_plan_that_ott_finds():
    """From a label one half step gives both marginals, at atoms without weight too."""
    pairs, costs = problems.labelled(problems.digits(3, 2), 0.1)
    assert jnp.isfinite(pairs.f).all() and (pairs.a == 0).any()
    for pair, cost in zip(_each(pairs), costs, strict=True):
        plan = ot.plan_from_f(pair.f, pair.x, pair.y, pair.a, pair.b, 0.1)
        assert jnp.abs(plan.sum(1) - pair.a).sum() < 2 * problems.LABEL
        squares = jnp.square(pair.x[:, None] - pair.y).sum(-1)
        np.testing.assert_allclose(jnp.sum(plan * squares), cost, rtol=1e-3)


@as_ott_needs
def test_known_potential_needs_one_iteration():
    """The label as a start leaves no squares and no work, and the right cost after half a step."""
    pairs, costs = problems.labelled(problems.digits(4, 2), 0.1)
    starts = jax.vmap(lambda pair: ot.to_ott(pair.f, pair.a, 0.1))(pairs)
    errors, (left, total), half = bench_iterations._evaluate(pairs, starts, 0.1)
    assert set(problems.iterations(errors).values()) == {1.0}
    assert np.all(left <= 1e-6 * total)
    np.testing.assert_allclose(half, costs, rtol=1e-3)


def test_colors_weigh_alike_and_epsilon_is_a_share_of_their_mean_cost():
    """16 pixels weigh 1 / 16 each, in the space of three colors."""
    case = bench_iterations._colors(1, 2, 16, 6)
    pairs, epsilon = bench_iterations._pairs(case, 0)
    x, y = np.float64(pairs.x), np.float64(pairs.y)
    mean = np.mean(np.sum((x[:, :, None] - y[:, None]) ** 2, -1))
    np.testing.assert_allclose(epsilon, case.epsilon * mean, rtol=1e-5)
    assert pairs.x.shape == (3, 16, 3) and np.all(pairs.a == 1 / 16) and np.all(pairs.b == 1 / 16)


def test_violation_is_the_largest_excess_over_the_cost():
    """Potentials raised by a constant are infeasible by it, in the largest cost; exact ones not."""
    x, y = jnp.array([[0.0, 1.0]]), jnp.array([[0.0, 4.0]])
    exact = jax.vmap(ot.duals_1d)
    assert bench_duals._violation(exact, x, y) == 0
    raised = bench_duals._violation(lambda x, y: (exact(x, y)[0] + 0.25, exact(x, y)[1]), x, y)
    assert raised == 0.25 / 16


def test_other_digits_are_of_no_pair_to_test():
    """Of the pairs to test no side is among them; of pairs to fit some are, without repetition."""
    pairs = problems.digits(5, 40)
    others = np.asarray(problems.other_digits(5, 40, 10, 1700))
    assert len(np.unique(others, axis=0)) == len(others)
    known = {tuple(x) for x in others}
    assert not any(tuple(x) in known for side in (pairs.a, pairs.b) for x in np.asarray(side)[10:])
    assert any(tuple(x) in known for x in np.asarray(pairs.a)[:10])


@as_ott_needs
def test_network_learns_the_potentials_of_its_pairs():
    """The semi-dual values of its predictions are near those of Sinkhorn's, and none is above."""
    pairs = problems.digits(6, 16)
    known, _ = problems.labelled(pairs, 0.1)
    one = (x[None] for x in (pairs.a, pairs.b))
    params = network.train(jnp.array([0]), *one, pairs.x[0], jnp.array([0.1]), steps=60)
    params = jax.tree.map(lambda x: x[0], params)

    def value(f):
        g = jax.vmap(ot.soft_g, (0, 0, 0, 0, None))(f, pairs.x, pairs.y, pairs.a, 0.1)
        return jnp.sum(pairs.a * f + pairs.b * g, axis=1)

    best, none = value(known.f), value(0 * known.f)
    got = value(network.predict(params, pairs.a, pairs.b))
    assert jnp.all(got <= best + 1e-5)
    assert jnp.mean(best - got) < 0.1 * jnp.mean(best - none)


def test_plans_of_slices_cost_what_their_matrices_say():
    """The best slice is the cheapest of the sorted matchings, the mean plan their mean."""
    x, y = np.random.default_rng(0).normal(size=(2, 8, 2))
    pair = ot.Pair(jnp.float32(x), jnp.float32(y))
    theta = np.array([[0.6, 0.8], [-0.8, 0.6]])
    params = ot.untrained(jnp.float32(theta), 0.1)
    matchings = [
        np.mean(np.sum((x[np.argsort(x @ line)] - y[np.argsort(y @ line)]) ** 2, axis=1))
        for line in theta
    ]
    best, mean = (
        bench_solve.SOLVERS[name](params, pair)
        for name in (bench_solve.BEST_SLICE, bench_solve.MEAN_PLAN)
    )
    np.testing.assert_allclose((best, mean), (min(matchings), np.mean(matchings)), rtol=1e-5)


def _each(pairs):
    return [jax.tree.map(lambda x, i=i: x[i], pairs) for i in range(len(pairs.x))]
