"""Weights of slices by regression on known potentials (RA-OT)."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxkit import _check, _numerics
from jaxkit.ot import _pair, _pairs
from jaxkit.ot._costs import sqeuclidean, squared
from jaxkit.ot._half_steps import soft_g
from jaxkit.ot._projections import linear
from jaxkit.ot._sliced_params import untrained
from jaxkit.ot._sliced_potentials import features


class RegressionState(NamedTuple):
    """The sums of a regression over pairs; states add up, in any order and over devices.

    Attributes:
      gram: ``[L, L]`` float32 or wider, sum of the products of the features.
      moment: ``[L]``, sum of the products of the features with what the prior leaves of f.
      gram_g: ``[L, L]``, as ``gram`` for the target's side; None if not fitted.
      moment_g: ``[L]``, as ``moment`` for g; None if not fitted.
      num_pairs: ``[]`` int32.
    """

    gram: jax.Array
    moment: jax.Array
    gram_g: jax.Array | None
    moment_g: jax.Array | None
    num_pairs: jax.Array


def fit_regression(
    pairs,
    theta,
    epsilon,
    *,
    ridge=1e-3,
    prior="isotropic",
    weights="measure",
    two_sided=False,
    absolute_ridge=False,
    slice_cost=squared,
    project=linear,
    cost=None,
    chunk=None,
):
    r"""Returns the weights of slices that predict known potentials best, L numbers for all pairs.

    With features and labels centered within each pair, and :math:`D_k` the diagonal matrix of the
    weights of its atoms, they minimize over w

    .. math:: \frac1M \sum_k |f_k - \Phi_k w|^2_{D_k} + \lambda\, \frac{\mathrm{tr} H}{L}
        |w - w_0|^2, \qquad H = \frac1M \sum_k \Phi_k^\top D_k \Phi_k.

    The penalty pulls toward the prior, which is close to the best for squared Euclidean cost.
    For another cost take ``prior="scale"``. The paper's setting is ``prior="zero"``,
    ``weights="atoms"``, ``absolute_ridge=True``, in float64, with ``ridge=0.05`` for the sphere.

    The pairs are taken one after the other. To spread them over devices or over time, use
    :func:`update_regression`, :func:`merge_regression` and :func:`solve_regression`.

    Args:
      pairs: :class:`Pair`, one or stacked, or a list of such, which may differ in size; with
        ``f`` of a solver, in the product convention, at least where ``a`` is positive.
      theta: directions ``[L, k]``, unit vectors.
      epsilon: entropic strength of the known potentials, 0 for exact ones.
      ridge: strength of the penalty, not negative. Features depend on each other, so 0 works for
        few directions only.
      prior: w_0, static. "isotropic": the weights of :func:`untrained`. "scale": the best equal
        weights. "zero".
      weights: "measure" to weigh atoms by a (and b), "atoms" for all alike; static.
      two_sided: whether to fit weights for g too, on the answers :func:`soft_g` to ``f``; static.
      absolute_ridge: whether ``ridge`` stands alone before the penalty, and the sum over pairs is
        no mean; static.
      slice_cost: convex cost of two numbers, elementwise, static.
      project: ``(points[n, d], theta[L, k]) -> [n, L]``, static.
      cost: function of two points ``[d]`` for the labels of g, static; None for
        :func:`sqeuclidean`, and if not ``two_sided``.
      chunk: number of directions at a time, static; None for all at once.

    Returns:
      :class:`SlicedParams` in the dtype of ``theta``.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: there is no pair, a shape does not fit, an option is not as above. If the values
        are known, also: ``f`` or a point is not finite, weights are negative or not of sum 1
        (within 1e-4), a direction is no unit vector, or the solution is not finite.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import ot
      >>> x, theta = jax.random.normal(jax.random.key(0), (9, 2)), ot.equispaced_frame(4)
      >>> pair = ot.Pair(x, 2 * x, f=-jnp.sum(x**2, axis=1))  # of x -> 2 x, exact
      >>> params = ot.fit_regression(pair, theta, 0.0)
      >>> print(params.weights.round(3))
      [0.5 0.5 0.5 0.5]

    Source: arXiv:2604.15114. Differs: the prior, the weights of atoms, the relative ridge.

    Cost: O(sum over pairs of n L (d + log n + L), and L^3); memory of one pair's features.
    """
    _check.choice("prior", prior, ("isotropic", "scale", "zero"))
    _check.choice("weights", weights, ("measure", "atoms"))
    _check.between("ridge", ridge, 0, float("inf"))
    base = untrained(theta, epsilon, two_sided=two_sided, slice_cost=slice_cost, project=project)
    _pairs.check_directions(theta)
    items = _pairs.stacks(pairs, labels=weights)
    if prior != "isotropic":
        none = jnp.zeros_like(base.weights)
        base = dataclasses.replace(base, weights=none, weights_g=none if two_sided else None)
    state = regression_state(base)
    for item in items:
        state = _update(state, base, item, weights=weights, cost=cost, chunk=chunk)
    if prior == "scale":
        state, base = _scaled(state, base)
    params = solve_regression(state, base, ridge=ridge, absolute=absolute_ridge)
    _pairs.check_solution(jax.tree.leaves((params.weights, params.weights_g)), ridge)
    return params


def regression_state(params):
    """Returns the sums over no pair, to start from.

    Args:
      params: :class:`SlicedParams`, the prior: such as :func:`untrained`, or an earlier fit.

    Returns:
      :class:`RegressionState` of zeros in float32 or wider; with sums for g if the prior has
      weights for it.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> state = ot.regression_state(ot.untrained(jnp.eye(2), 0.1))
      >>> print(state.gram.shape, state.moment.shape, state.num_pairs)
      (2, 2) (2,) 0

    Source: derived here.

    Cost: O(L^2).
    """
    dtype = _numerics.wide(params.weights.dtype)
    size = len(params.weights)
    gram, moment = jnp.zeros((size, size), dtype), jnp.zeros(size, dtype)
    on_g = (None, None) if params.weights_g is None else (gram, moment)
    return RegressionState(gram, moment, *on_g, jnp.zeros([], jnp.int32))


def update_regression(state, params, pairs, *, weights="measure", cost=None, chunk=None):
    """Returns the sums with more pairs.

    Inside ``jax.shard_map`` each device takes its own share of the pairs, and
    ``jax.lax.psum(state, axis_name)`` adds up: L^2 numbers cross the network.

    Args:
      state: :class:`RegressionState`.
      params: the prior, the same for all pairs and for :func:`solve_regression`.
      pairs: one :class:`Pair` with its potential ``f``, or a stack, taken one after the other.
      weights: "measure" or "atoms", as of :func:`fit_regression`, static.
      cost: function of two points, for the labels of g, static; None for :func:`sqeuclidean`, and
        if ``params`` has no weights for g.
      chunk: number of directions at a time, static; None for all at once.

    Returns:
      :class:`RegressionState` in the dtypes of ``state``.

    Raises:
      TypeError: an argument is of the wrong kind.
      ValueError: a shape does not fit, ``f`` is missing, or ``cost`` is given and not read.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> x, prior = jnp.array([[0.0], [1.0]]), ot.untrained(jnp.ones((1, 1)), 0.0)
      >>> pair = ot.Pair(x, x + 2, f=jnp.array([2.0, -2.0]))
      >>> state = ot.update_regression(ot.regression_state(prior), prior, pair)
      >>> print(state.gram, state.moment, state.num_pairs)
      [[4.]] [0.] 1

    Source: arXiv:2604.15114. Derived here: sums relative to the prior, which stay small.

    Cost: O(n L (d + log n + L)) time for each pair, O(n L + L^2) memory.
    """
    _check.choice("weights", weights, ("measure", "atoms"))
    _pair.check("pairs", pairs)
    if pairs.f is None:
        raise ValueError("pairs must hold known potentials f, got None.")
    if cost is not None and params.weights_g is None:
        raise ValueError(f"cost must be None for params without weights_g, got {cost!r}.")

    def update(state, pair):
        one = _sums_of(params, pair, weights == "measure", cost, chunk)
        one = jax.tree.map(lambda z, old: z.astype(old.dtype), one, state)
        return merge_regression(state, one), None

    if jnp.ndim(pairs.x) == 2:
        return update(state, pairs)[0]
    _check.leading_axis("pairs", pairs)
    # Inside shard_map a scan wants a start that varies over devices as the data do.
    zero = sum(jnp.sum(z != z) * 0 for z in jax.tree.leaves(pairs))
    start = jax.tree.map(lambda z: z + zero.astype(z.dtype), state)
    return lax.scan(update, start, pairs)[0]


def merge_regression(state, other):
    """Returns the sums over the pairs of both states.

    Between devices ``jax.lax.psum(state, axis_name)`` does the same.

    Args:
      state: :class:`RegressionState`.
      other: :class:`RegressionState` with the same prior.

    Returns:
      :class:`RegressionState`.

    Raises:
      ValueError: the states differ in their shapes or dtypes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> state = ot.regression_state(ot.untrained(jnp.eye(2), 0.1))
      >>> print(ot.merge_regression(state, state).num_pairs)
      0

    Source: derived here.

    Cost: O(L^2).
    """
    _check.same_types("other", other, "state", state)
    return jax.tree.map(jnp.add, state, other)


def solve_regression(state, params, *, ridge=1e-3, absolute=False):
    """Returns the prior with the weights that the sums over pairs call for.

    Args:
      state: :class:`RegressionState`.
      params: the prior, as of :func:`update_regression`; with no pair it comes back.
      ridge: strength of the pull toward the prior, not negative; may be traced.
      absolute: as ``absolute_ridge`` of :func:`fit_regression`, static.

    Returns:
      :class:`SlicedParams` in the dtypes of ``params``. NaN weights if ``ridge`` is too small for
      features that depend on each other.

    Raises:
      TypeError: ``ridge`` is not a number.
      ValueError: ``ridge`` is negative.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import ot
      >>> x, prior = jnp.array([[0.0], [1.0]]), ot.untrained(jnp.ones((1, 1)), 0.0)
      >>> pair = ot.Pair(x, x + 2, f=jnp.array([3.0, -3.0]))
      >>> state = ot.update_regression(ot.regression_state(prior), prior, pair)
      >>> print(ot.solve_regression(state, prior, ridge=0.0).weights)
      [1.5]

    Source: arXiv:2604.15114.

    Cost: a Cholesky factor, O(L^3), and one step of iterative refinement.
    """
    _check.between("ridge", ridge, 0, float("inf"))
    new = {"weights": _solve(params.weights, state.gram, state.moment, ridge, absolute)}
    if params.weights_g is not None:
        new["weights_g"] = _solve(params.weights_g, state.gram_g, state.moment_g, ridge, absolute)
    return dataclasses.replace(params, **new)


@functools.partial(jax.jit, static_argnames=("weights", "cost", "chunk"))
def _update(state, params, pairs, *, weights, cost, chunk):
    return update_regression(state, params, pairs, weights=weights, cost=cost, chunk=chunk)


def _sums_of(params, pair, by_measure, cost, chunk):
    """Returns the :class:`RegressionState` of one pair."""
    full = _pair.fill(pair)
    rows = features(
        full.x,
        full.y,
        pair.a,
        pair.b,
        pair.mask_x,
        pair.mask_y,
        params.theta,
        params.slice_cost,
        params.project,
        chunk,
    )
    on_x, on_y = (full.a, full.b) if by_measure else (full.mask_x, full.mask_y)
    # Solvers return no finite potential where there is no weight.
    f = jnp.where(full.a > 0, full.f, 0) if by_measure else full.f
    sums = [*_sums(rows[0], f, params.weights, on_x), None, None]
    if params.weights_g is not None:
        g = soft_g(
            f,
            pair.x,
            pair.y,
            pair.a,
            params.epsilon,
            cost=sqeuclidean if cost is None else cost,
            mask_x=pair.mask_x,
            mask_y=pair.mask_y,
        )
        sums[2:] = _sums(rows[1], g, params.weights_g, on_y)
    return RegressionState(*sums, jnp.ones([], jnp.int32))


def _sums(rows, label, prior, weights):
    """Returns the sums of one side; ``rows[L, n]`` are its features."""
    weights = weights.astype(rows.dtype)
    share = weights / jnp.sum(weights)
    rows = rows - _dot(rows, share)[:, None]
    rest = label - _dot(prior.astype(rows.dtype), rows)  # centered features see no constant
    weighted = rows * weights[None]
    return _dot(weighted, rows.T), _dot(weighted, rest)


def _dot(x, y):
    return jnp.matmul(x, y, precision=lax.Precision.HIGHEST)


def _solve(prior, gram, moment, ridge, absolute):
    """Returns the weights of one side."""
    dtype = _numerics.wide(gram.dtype)
    gram, moment, ridge = (jnp.asarray(z, dtype) for z in (gram, moment, ridge))
    scale = jnp.trace(gram) / len(moment)
    scale = jnp.where(scale == 0, 1, scale)
    ridge = jnp.where(ridge >= 0, ridge, jnp.nan) / (scale if absolute else 1)
    system = gram / scale + ridge * jnp.eye(len(moment), dtype=dtype)
    factor = jax.scipy.linalg.cho_factor(system)
    step = jax.scipy.linalg.cho_solve(factor, moment / scale)
    step += jax.scipy.linalg.cho_solve(factor, moment / scale - _dot(system, step))
    return (prior.astype(step.dtype) + step).astype(prior.dtype)


def _scaled(state, params):
    """Returns the sums, taken with a prior of zero, and the prior for the best equal weights."""

    def one(gram, moment):
        top = jnp.sum(gram)
        scale = jnp.where(top == 0, 0, jnp.sum(moment) / jnp.where(top == 0, 1, top))
        weights = jnp.full_like(params.weights, scale)
        return moment - _dot(gram, weights.astype(gram.dtype)), weights

    moment, weights = one(state.gram, state.moment)
    state, new = state._replace(moment=moment), {"weights": weights}
    if params.weights_g is not None:
        moment, new["weights_g"] = one(state.gram_g, state.moment_g)
        state = state._replace(moment_g=moment)
    return state, dataclasses.replace(params, **new)
