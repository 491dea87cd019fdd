"""How the benchmarks of ot choose their problems, and count and judge solves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.ot import bench_duals, bench_iterations, problems
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
    """Judged as a start, the label has R2 1, the right cost after half a step, and no work left."""
    pairs, costs = problems.labelled(problems.digits(4, 2), 0.1)
    starts = jax.vmap(lambda pair: ot.to_ott(pair.f, pair.a, 0.1))(pairs)
    errors, r2, half = bench_iterations._evaluate(pairs, starts, 0.1)
    assert set(problems.iterations(errors).values()) == {1.0}
    np.testing.assert_allclose(r2, 1, atol=1e-6)
    np.testing.assert_allclose(half, costs, rtol=1e-3)


def test_violation_is_the_largest_excess_over_the_cost():
    """Potentials raised by a constant are infeasible by it; exact ones are not."""
    x, y = jnp.array([[0.0, 1.0]]), jnp.array([[0.0, 3.0]])
    exact = jax.vmap(ot.duals_1d)
    assert bench_duals._violation(exact, x, y) == 0
    raised = bench_duals._violation(lambda x, y: (exact(x, y)[0] + 0.25, exact(x, y)[1]), x, y)
    assert raised == 0.25


def _each(pairs):
    return [jax.tree.map(lambda x, i=i: x[i], pairs) for i in range(len(pairs.x))]
