"""Weights of slices that maximize the semi-dual objective, with no potentials as labels (OA-OT)."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxkit import _check
from jaxkit.ot import _half_steps, _pairs
from jaxkit.ot._costs import sqeuclidean, squared
from jaxkit.ot._pair import Pair
from jaxkit.ot._projections import linear
from jaxkit.ot._sliced_params import untrained
from jaxkit.ot._sliced_potentials import features


class ObjectiveInfo(NamedTuple):
    """How a fit of :func:`fit_objective` went.

    Attributes:
      values: ``[num_steps + 1]``, the objective before each step and at the end, in the unit of the
        cost; NaN after an early stop. With Adam all but the last are of the one pair of that step.
      grad_norm: ``[]``, norm of the gradient at the end, in the unit of ``tol``.
      converged: ``[]`` bool, whether it is at most ``tol``.
      num_steps: ``[]`` int32, number of steps taken.
    """

    values: jax.Array
    grad_norm: jax.Array
    converged: jax.Array
    num_steps: jax.Array


def fit_objective(
    pairs,
    theta,
    epsilon,
    *,
    solver="lbfgs",
    key=None,
    num_steps=None,
    learning_rate=None,
    start=None,
    proximal=1e-8,
    tol=1e-3,
    cost=sqeuclidean,
    slice_cost=squared,
    project=linear,
    chunk=None,
):
    r"""Returns the weights that maximize the mean semi-dual objective of pairs, and how it went.

    With :math:`f = \Phi w` the objective of a pair is

    .. math:: J(w) = \langle a, \Phi w\rangle + \langle b, g(w)\rangle,

    where g is the answer :func:`soft_g` to f. It is concave, needs no solved pair, and at every w
    it is a lower bound of the entropic transport cost. Its gradient is :math:`\Phi^\top (a - P 1)`:
    the error of the plan's rows, seen through the slices.

    Maximized is the mean of J minus ``proximal`` times :math:`s |w - w_0|^2`, where w_0 are the
    weights of :func:`untrained`, and s, the root mean square of the features, makes the weights
    independent of the unit of length. L-BFGS sees all pairs at each step, and stops when no step
    improves. Adam sees one random pair a step, with gradients clipped to norm 1 and a rate that
    falls to 1 % along a cosine; this is the paper's way, with ``start=jnp.zeros(L)``,
    ``proximal=0.0``.

    Args:
      pairs: :class:`Pair`, one or stacked, or a list of such, which may differ in size; ``f`` is
        not read.
      theta: directions ``[L, k]``, unit vectors.
      epsilon: entropic strength, positive, in the unit of the cost.
      solver: "lbfgs" or "adam", static.
      key: typed random key, for Adam only.
      num_steps: largest number of steps, static; None for 60, or 5,000 with Adam.
      learning_rate: first rate, for Adam only; None for 1e-3.
      start: ``[L]`` weights to start from; None for those of :func:`untrained`.
      proximal: strength of the pull toward the untrained weights, not negative.
      tol: norm of the gradient at which to stop, or with Adam to count as converged; in whitened
        features, where it is a relative error of the rows of the plans.
      cost: function of two points ``[d]``, returns ``[]``; static.
      slice_cost: convex cost of two numbers, elementwise, static.
      project: ``(points[n, d], theta[L, k]) -> [n, L]``, static.
      chunk: number of points of y at a time, static; None for all at once.

    Returns:
      ``(params, info)``: :class:`SlicedParams` in the dtype of ``theta``, and
      :class:`ObjectiveInfo`.

    Raises:
      TypeError: an argument is of the wrong kind, or Adam has no ``key``.
      ValueError: a shape does not fit, a number is out of its range, ``key`` or ``learning_rate``
        go with L-BFGS; and outside of ``jit`` a weight, a direction or ``epsilon`` is not valid.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import ot
      >>> x, theta = jax.random.normal(jax.random.key(0), (9, 2)), ot.equispaced_frame(4)
      >>> params, info = ot.fit_objective(ot.Pair(x, 2 * x), theta, 0.1)
      >>> print(info.converged, bool(info.values[0] <= jnp.nanmax(info.values)))
      True True

    Source: arXiv:2604.15114. Differs: L-BFGS, whitened; the proximal term; the start.

    Cost: for each of K pairs and each evaluation n m costs and exponentials, twice. L-BFGS takes
    about one evaluation a step. Memory O(K n (m + L)), with ``chunk`` O(K n (chunk + L)).
    """
    _check.choice("solver", solver, ("lbfgs", "adam"))
    uses_adam = solver == "adam"
    if uses_adam and key is None:
        raise TypeError("key must be a random key with solver='adam', got None.")
    for name, value in (("key", key), ("learning_rate", learning_rate)):
        if not uses_adam and value is not None:
            raise ValueError(f"{name} must be None with solver='lbfgs', got {value!r}.")
    if num_steps is None:
        num_steps = 5000 if uses_adam else 60
    _check.count("num_steps", num_steps)
    learning_rate = 1e-3 if learning_rate is None else learning_rate
    for name, value in (("learning_rate", learning_rate), ("proximal", proximal), ("tol", tol)):
        _check.between(name, value, 0, float("inf"))
    _check.between("epsilon", epsilon, 0, float("inf"), closed=False)
    params = untrained(theta, epsilon, slice_cost=slice_cost, project=project)
    _pairs.check_directions(theta)
    stacks = _pairs.stacks(pairs)
    start = params.weights if start is None else start
    _check.shape("start", start, "L", L=len(params.weights))
    numbers = learning_rate, proximal, tol
    how = {"cost": cost, "chunk": chunk, "num_steps": num_steps}
    weights, info = _solve(stacks, params, start, numbers, key, **how)
    return dataclasses.replace(params, weights=weights.astype(params.weights.dtype)), info


@functools.partial(jax.jit, static_argnames=("cost", "chunk", "num_steps"))
def _solve(stacks, params, start, numbers, key, *, cost, chunk, num_steps):
    """Returns the weights and the :class:`ObjectiveInfo`; a ``key`` stands for Adam."""
    stacks = [jax.vmap(functools.partial(_problem, params, cost, chunk))(x) for x in stacks]
    num_pairs = sum(len(stack.phi) for stack in stacks)
    dtype = stacks[0].phi.dtype
    learning_rate, proximal, tol = (jnp.asarray(number, dtype) for number in numbers)
    origin, start = jnp.asarray(params.weights, dtype), jnp.asarray(start, dtype)
    epsilon = _half_steps.strength(params.epsilon, origin, closed=False)
    mix, unmix, scale = _whitening(stacks, num_pairs, proximal)

    def loss(w, problem):
        distance = jnp.sum(jnp.square(w - origin))
        return -_objective(w, problem, epsilon, cost, chunk) / scale + proximal * distance

    def mean_loss(u):
        w = origin + _times(mix, u)
        return sum(jnp.sum(jax.vmap(loss, (None, 0))(w, stack)) for stack in stacks) / num_pairs

    if key is None:
        u, grad, losses, step = _lbfgs(mean_loss, _times(unmix, start - origin), num_steps, tol)
        w = origin + _times(mix, u)
    else:
        w, losses = _adam(loss, stacks, start, scale, learning_rate, num_steps, key)
        last, grad = jax.value_and_grad(mean_loss)(_times(unmix, w - origin))
        losses, step = jnp.append(losses, last), jnp.asarray(num_steps, jnp.int32)
    grad_norm = jnp.linalg.norm(grad)
    return w, ObjectiveInfo(-losses * scale, grad_norm, grad_norm <= tol, step)


def _whitening(stacks, num_pairs, proximal):
    """Returns the matrices ``(mix, unmix)`` of weights w = mix u, and the size of the features.

    In u the potentials of all pairs have the variance ``scale ** 2`` in all directions, but for
    those in which features cancel, or the proximal term outweighs them. Slices depend on each
    other so much that L-BFGS in w is far from the maximum after 60 steps; in u it takes 10 to 30.
    """
    gram = sum(
        jnp.einsum("kn,kln,kmn->lm", stack.pair.a, stack.phi, stack.phi, precision="highest")
        for stack in stacks
    )
    values, vectors = jnp.linalg.eigh(gram / num_pairs)
    total = jnp.sum(values)
    total = jnp.where(total == 0, 1, total)
    scale = jnp.sqrt(total / len(gram))
    values = jnp.maximum(values, 0) + 1e-6 * total
    sizes = jnp.sqrt(values / jnp.square(scale) + proximal)
    return vectors / sizes[None], (vectors * sizes[None]).T, scale


def _times(matrix, vector):
    return jnp.matmul(matrix, vector, precision=jax.lax.Precision.HIGHEST)


class _Problem(NamedTuple):
    """One pair, ready for evaluations: its features, and its costs unless they are too many."""

    pair: Pair
    phi: jax.Array  # [L, n], centered
    prices: jax.Array | None  # [m, n]


def _problem(params, cost, chunk, pair):
    pair = _half_steps.fill(*pair[:4], pair.mask_x, pair.mask_y, cost)
    how = params.slice_cost, params.project
    phi, _ = features(*pair[:4], pair.mask_x, pair.mask_y, params.theta, *how, None)
    phi = phi - jnp.sum(pair.a[None] * phi, 1, keepdims=True)
    return _Problem(pair, phi, _half_steps.price_matrix(cost, pair) if chunk is None else None)


def _objective(w, problem, epsilon, cost, chunk):
    """Returns J of one pair."""
    pair = problem.pair
    f = _times(w, problem.phi)

    def answer(price):
        return _half_steps.soft(f, pair.a, price, epsilon)[0]

    if problem.prices is None:
        prices = functools.partial(_half_steps.prices, cost, pair.x)
        g = _half_steps.over_points(lambda y_j: answer(prices(y_j)), pair.y, chunk)
    else:
        g = jax.vmap(answer)(problem.prices)
    return jnp.sum(pair.a * f) + jnp.sum(pair.b * g)


def _lbfgs(loss, start, num_steps, tol):
    """Returns the last weights, the gradient there, the losses and the number of steps."""
    optimizer = optax.lbfgs()
    value, grad = jax.value_and_grad(loss)(start)
    losses = jnp.full(num_steps + 1, jnp.nan, value.dtype).at[0].set(value)

    def goes_on(carry):
        _, _, _, grad, _, step, failures = carry
        return (step < num_steps) & (jnp.linalg.norm(grad) > tol) & (failures < 2)

    def advance(carry):
        w, state, value, grad, losses, step, failures = carry
        with _optax_promotes():
            updates, new_state = optimizer.update(
                grad, state, w, value=value, grad=grad, value_fn=loss
            )
        new = (
            optax.apply_updates(w, updates),
            new_state,
            optax.tree.get(new_state, "value"),
            optax.tree.get(new_state, "grad"),
        )
        # The line search lets the loss rise by its rounding. Then the next step is one along the
        # gradient, since the memory may be at fault, and if that does not help, this is the end.
        better = new[2] < value
        w, state, value, grad = jax.tree.map(
            functools.partial(jnp.where, better), new, (w, optimizer.init(w), value, grad)
        )
        step = step + better.astype(step.dtype)
        failures = jnp.where(better, 0, failures + 1)
        return w, state, value, grad, losses.at[step].set(value), step, failures

    zero = jnp.zeros([], jnp.int32)
    carry = start, optimizer.init(start), value, grad, losses, zero, zero
    w, _, _, grad, losses, step, _ = jax.lax.while_loop(goes_on, advance, carry)
    return w, grad, losses, step


def _adam(loss, stacks, start, scale, learning_rate, num_steps, key):
    """Returns the last weights, and at each step the loss of the pair that was drawn."""
    schedule = optax.cosine_decay_schedule(learning_rate, num_steps, alpha=0.01)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))
    ends = np.cumsum([len(stack.phi) for stack in stacks])

    def branch(stack, end):
        def run(w, one):
            problem = jax.tree.map(lambda z: z[one - end], stack)
            return jax.value_and_grad(loss)(w, problem)

        return run

    branches = [branch(stack, end) for stack, end in zip(stacks, ends, strict=True)]

    def advance(carry, key):
        w, state = carry
        one = jax.random.randint(key, (), 0, ends[-1])
        which = jnp.sum(one >= jnp.asarray(ends), dtype=jnp.int32)
        value, grad = jax.lax.switch(which, branches, w, one)
        with _optax_promotes():  # the clip is of the gradient in the unit of the cost
            updates, state = optimizer.update(scale * grad, state, w)
        return (optax.apply_updates(w, updates), state), value

    keys = jax.random.split(key, num_steps)
    (w, _), losses = jax.lax.scan(advance, (start, optimizer.init(start)), keys)
    return w, losses


def _optax_promotes():
    """Returns the context in which optax's own code runs where promotion of dtypes is strict."""
    return jax.numpy_dtype_promotion("standard")
