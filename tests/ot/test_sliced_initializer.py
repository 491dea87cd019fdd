"""Sinkhorn of ott from predicted potentials: the same plan as from nothing, in fewer steps."""

import subprocess
import sys

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import ot

pytest.importorskip("ott")
from ott.geometry import geometry, pointcloud  # noqa: E402
from ott.problems.linear import linear_problem  # noqa: E402
from ott.solvers.linear import sinkhorn  # noqa: E402

EPSILON = 0.05
X, Y = contract.normal(16, 2), 0.5 * contract.normal(8, 2) + 1
A, B = jnp.abs(contract.normal(16, seed=1)), jnp.abs(contract.normal(8, seed=1))
A, B = jnp.where(jnp.arange(16) == 3, 0, A), B / B.sum()
A = A / A.sum()
PARAMS = ot.untrained(ot.equispaced_frame(8), EPSILON)


@pytest.fixture(autouse=True)
def _promotion():
    """The code of ott promotes ranks and dtypes."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def _problem(x=X, y=Y, a=A, b=B, epsilon=EPSILON, **kwargs):
    geom = pointcloud.PointCloud(x, y, epsilon=epsilon)
    return linear_problem.LinearProblem(geom, a, b, **kwargs)


@jax.jit
def _solve(start):
    out = sinkhorn.Sinkhorn(threshold=1e-4, max_iterations=20_000)(_problem(), init=start)
    return out.matrix, out.f, out.converged, out.errors[0], out.kl_reg_cost


def test_every_start_converges_to_one_plan():
    """From nothing, from the prediction, from a wild potential; the prediction leads at first."""
    starts = {
        "cold": ot.warm_start(jnp.zeros(16), A, EPSILON, b=B),
        "warm": ot.SlicedInitializer(PARAMS)(_problem(), lse_mode=True),
        "wild": ot.warm_start(3 * contract.normal(16), A, EPSILON, b=B),
    }
    found = {name: _solve(start) for name, start in starts.items()}
    for plan, f, converged, _, _ in found.values():
        assert converged
        np.testing.assert_allclose(plan, found["cold"][0], atol=2e-4)
        # What ott returns is a potential of ours.
        f = ot.from_ott(f, A, EPSILON)
        np.testing.assert_allclose(ot.plan_from_f(f, X, Y, A, B, EPSILON), plan, atol=2e-4)
        assert ot.certificate(f, X, Y, A, B, EPSILON).marginal_error < 1e-3
    errors = {name: float(result[3]) for name, result in found.items()}
    assert errors["warm"] < 0.5 * min(errors["cold"], errors["wild"])
    # What the prediction proves lies around the cost that the solver reports.
    f = ot.predict_potential(PARAMS, ot.Pair(X, Y, A, B))
    bounds = ot.certificate(f, X, Y, A, B, EPSILON)
    cost = found["cold"][4]
    assert bounds.entropic_lower < cost < bounds.entropic_upper


def test_solver_takes_it_under_jit_and_vmap():
    """As ``Sinkhorn(initializer=...)``: the plans of a batch with n != m and weights are exact."""
    batch = [(s * X, Y, jnp.roll(A, k), B) for k, s in enumerate((1.0, 0.7))]

    @jax.jit
    def solve(initializer, *args):
        def one(x, y, a, b):
            solver = sinkhorn.Sinkhorn(initializer=initializer, threshold=1e-4)
            return solver(_problem(x, y, a, b, 0.5)).matrix

        return jax.vmap(one)(*args)

    initializer = ot.SlicedInitializer(ot.untrained(PARAMS.theta, 0.5), chunk=4)
    plans = solve(initializer, *(jnp.stack(z) for z in zip(*batch, strict=True)))
    for plan, (_, _, a, b) in zip(plans, batch, strict=True):
        np.testing.assert_allclose(plan.sum(1), a, atol=1e-4)
        np.testing.assert_allclose(plan.sum(0), b, atol=1e-4)


@pytest.mark.parametrize("a", [None, A], ids=["equal", "weights"])
def test_start_is_the_prediction_in_the_convention_of_ott(a):
    """Any sizes and weights, where the sorting initializer of ott takes neither."""
    problem = _problem(a=a, b=None)
    f = ot.predict_potential(PARAMS, ot.Pair(X, Y, a))
    want = ot.to_ott(f, a, EPSILON)
    initializer = ot.SlicedInitializer(PARAMS)
    fu, gv = initializer(problem, lse_mode=True)
    np.testing.assert_allclose(fu, want, rtol=1e-5)
    np.testing.assert_array_equal(gv, jnp.zeros(8))
    fu, gv = initializer(problem, lse_mode=False)
    np.testing.assert_allclose(fu, jnp.exp(want / EPSILON), rtol=1e-4)
    np.testing.assert_array_equal(gv, jnp.ones(8))


def test_it_is_a_tree_of_its_parameters():
    """It passes through transformations; the chunk is static."""
    initializer = ot.SlicedInitializer(PARAMS, chunk=3)
    leaves, treedef = jax.tree.flatten(initializer)
    assert len(leaves) == len(jax.tree.leaves(PARAMS))
    again = treedef.unflatten(leaves)
    assert (again.params, again.chunk) == (initializer.params, 3)


@pytest.mark.parametrize("taus", [{"tau_a": 0.9}, {"tau_b": 0.5}])
def test_unbalanced_problems_are_refused(taus):
    """There the potentials mean something else."""
    problem = _problem(**taus)
    with pytest.raises(NotImplementedError, match=r"balanced, got tau_a=\S+, tau_b=\S+\."):
        ot.SlicedInitializer(PARAMS)(problem, lse_mode=True)


def test_bad_problems_are_named():
    """A geometry without points; params that are none; another strength, which only warns."""
    costs = geometry.Geometry(jnp.ones((16, 8)), epsilon=EPSILON)
    problem = linear_problem.LinearProblem(costs)
    with pytest.raises(TypeError, match="must have the geometry of a PointCloud, got Geometry"):
        ot.SlicedInitializer(PARAMS)(problem, lse_mode=True)
    with pytest.raises(TypeError, match="params must be SlicedParams, got float"):
        ot.SlicedInitializer(0.1)(_problem(), lse_mode=True)
    with pytest.warns(UserWarning, match="should be that of params, 0.05, got 0.06"):
        ot.SlicedInitializer(PARAMS)(_problem(epsilon=0.06), lse_mode=True)


def test_topic_works_without_ott():
    """Only this name needs ott: it is listed, and its import fails with ott's name."""
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['ott', 'distrax']))\n"
        "import jax, jax.numpy as jnp\n"
        "from jaxkit import ot\n"
        "x = jnp.array([[0.0, 1.0], [2.0, 0.0], [1.0, 3.0]])\n"
        "pair = ot.Pair(x, x + 1.0)\n"
        "params = ot.untrained(ot.equispaced_frame(4), 0.1)\n"
        "f = ot.predict_potential(params, pair)\n"
        "bounds = ot.certificate(f, x, x + 1.0, None, None, 0.1)\n"
        "assert bounds.lower > 1.9, bounds\n"
        "ot.warm_start(f, None, 0.1, b=jnp.ones(3) / 3)\n"
        "assert 'SlicedInitializer' in dir(ot)\n"
        "try: ot.SlicedInitializer\n"
        "except ImportError as error: assert 'ott' in str(error), error\n"
        "else: raise AssertionError\n"
        "try: ot.Unknown\n"
        "except AttributeError: pass\n"
        "else: raise AssertionError\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
