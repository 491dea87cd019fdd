"""Tests of the clipped sums: a loop in float64, both forms, what one example can do."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import denoise
from jaxkit.denoise import _clipping

CLIP = 0.7
# Plain descent; two nodes; nodes far apart whose weights nearly cancel, as of storm at a = .02.
WEIGHTS = {"one": [1.0], "two": [1.25, -0.25], "far": [50.0, -49.0], "three": [2.0, -1.5, 0.5]}
SIZE = 6


def problem(q, spread=0.05):
    """Returns query points of a network with two dense layers, and examples."""
    params = {
        "first": {"kernel": contract.normal(5, 4), "bias": contract.normal(4)},
        "second": {"kernel": contract.normal(4, 3), "bias": contract.normal(3)},
    }

    def around(p):
        steps = spread * contract.normal(q, *p.shape, seed=1)
        return p[None] + steps.at[0].set(0)

    points = jax.tree.map(around, params)
    examples = {"x": contract.normal(SIZE, 5, seed=2), "y": contract.normal(SIZE, 3, seed=3)}
    # The first example's gradient lies below the clip, those of the others above.
    return points, jax.tree.map(lambda x: x.at[0].mul(0.02), examples)


def forward(params, example, key, taps=(0.0, 0.0)):
    """Returns the error, and the inputs of the two layers, with dropout on the hidden layer."""
    x = example["x"]
    hidden = jnp.tanh(x @ params["first"]["kernel"] + params["first"]["bias"][None] + taps[0])
    hidden *= jax.random.bernoulli(key, 0.8, hidden.shape).astype(hidden.dtype)
    out = hidden @ params["second"]["kernel"] + params["second"]["bias"][None] + taps[1]
    return out - example["y"], (x, hidden)


def loss_fn(params, example, key):
    error, _ = forward(params, example, key)
    return jnp.mean(jnp.sum(error**2, -1)) / 2, {"error": jnp.mean(error), "big": error[0, 0] > 0}


def norms_fn(points, weights, examples, keys):
    """Returns the squared norms from inputs and cotangents of both layers."""

    def one(params, example, key):
        example = jax.tree.map(lambda x: x[None], example)

        def loss(taps):
            error, inputs = forward(params, example, key, taps)
            return jnp.sum(error**2) / 2, inputs

        deltas, inputs = jax.grad(loss, has_aux=True)((jnp.zeros((1, 4)), jnp.zeros((1, 3))))
        return [(x[0], d[0]) for x, d in zip(inputs, deltas, strict=True)]

    over_examples = jax.vmap(one, (None, 0, 0))
    layers = jax.vmap(over_examples, (0, None, None))(points, examples, keys)
    return sum(denoise.dense_norms(x, d, weights) for x, d in layers)


FORMS = {"vmap": None, "norms": norms_fn}
both_forms = pytest.mark.parametrize("form", FORMS)


@functools.partial(jax.jit, static_argnums=0)
def _sums(form, points, weights, examples, keys, mask):
    shift = jax.tree.map(lambda z: jnp.zeros(z.shape[1:]), points)
    return _clipping.clipped_sums(
        loss_fn, points, weights, examples, keys, mask, shift,
        l2_clip_norm=CLIP, norms_fn=FORMS[form],
    )  # fmt: skip


def sums(form, points, weights, examples, mask=None):
    keys = jax.random.split(jax.random.key(5), SIZE)
    mask = jnp.ones(SIZE, jnp.bool) if mask is None else mask
    return _sums(form, points, jnp.float32(weights), examples, keys, mask)


def by_loop(points, weights, examples):
    """Returns clipped gradients, losses and aux of each example, in NumPy's float64."""
    run = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))
    rows = []
    for i, key in enumerate(jax.random.split(jax.random.key(5), SIZE)):
        example = jax.tree.map(lambda x, i=i: x[i][None], examples)
        at = [
            run(jax.tree.map(lambda z, j=j: z[j], points), example, key)
            for j in range(len(weights))
        ]
        grad = sum(w * flat(g) for w, (_, g) in zip(weights, at, strict=True))
        loss = sum(w * float(value) for w, ((value, _), _) in zip(weights, at, strict=True))
        rows.append((grad * min(1, CLIP / np.linalg.norm(grad)), loss, at[0][0][1]))
    return zip(*rows, strict=True)


def flat(tree):
    return np.concatenate([np.asarray(x, np.float64).ravel() for x in jax.tree.leaves(tree)])


@both_forms
@pytest.mark.parametrize("name", WEIGHTS)
def test_sums_are_those_of_a_loop_over_examples(name, form):
    """Combine, clip, add up: gradient, loss and the aux of the first point, by hand."""
    weights = WEIGHTS[name]
    points, examples = problem(len(weights), spread=1e-3 if name == "far" else 0.05)
    grads, losses, aux = by_loop(points, weights, examples)
    got = sums(form, points, weights, examples)
    np.testing.assert_allclose(flat(got.grads), sum(grads), rtol=1e-4, atol=2e-4 * CLIP)
    np.testing.assert_allclose(got.loss, sum(losses), rtol=1e-4)
    np.testing.assert_allclose(got.aux["error"], sum(a["error"] for a in aux), rtol=1e-4)
    assert got.aux["big"] == sum(bool(a["big"]) for a in aux) and got.number == SIZE


@both_forms
@pytest.mark.parametrize("name", WEIGHTS)
def test_one_example_moves_the_sum_by_the_clip_at_most(name, form):
    """Left out: at most C, and C for a large gradient. Replaced: at most 2 C, and more than C."""
    points, examples = problem(len(WEIGHTS[name]), spread=1e-3 if name == "far" else 0.3)
    whole = flat(sums(form, points, WEIGHTS[name], examples).grads)
    moved = []
    for i in range(SIZE):
        left = sums(form, points, WEIGHTS[name], examples, jnp.arange(SIZE) != i)
        assert left.number == SIZE - 1
        moved.append(np.linalg.norm(whole - flat(left.grads)))
    assert max(moved) <= CLIP * (1 + 1e-4) and max(moved) > CLIP * (1 - 1e-4)
    assert min(moved) > 0
    # Its own gradient again with the other sign, by labels on the other side of the output.
    other = (
        {**examples, "y": examples["y"].at[1].add(1e3)},
        {**examples, "y": examples["y"].at[1].add(-1e3)},
    )
    first, second = (flat(sums(form, points, WEIGHTS[name], x).grads) for x in other)
    assert 1.2 * CLIP < np.linalg.norm(first - second) <= 2 * CLIP * (1 + 1e-4)


@both_forms
def test_what_does_not_count_leaves_no_trace(form):
    """Masked rows, and those without a finite gradient, change no bit of the sums."""
    weights = WEIGHTS["two"]
    points, examples = problem(2)
    mask = jnp.arange(SIZE) < 4
    want = sums(form, points, weights, examples, mask)
    assert want.number == 4
    for rows, value, where in (
        (slice(4, None), jnp.nan, mask),
        (slice(4, None), jnp.inf, mask),
        (slice(4, None), jnp.nan, None),
        (slice(4, None), 1e30, None),  # finite, and its square is not
    ):
        broken = {**examples, "x": examples["x"].at[rows].set(value)}
        broken = {**broken, "y": broken["y"].at[rows].set(value)}
        jax.tree.map(
            np.testing.assert_array_equal, sums(form, points, weights, broken, where), want
        )


@both_forms
def test_no_example_at_all_is_a_sum_of_zero(form):
    """An empty batch, and one of NaN alone, give zeros and the number 0."""
    points, examples = problem(2)
    nan = jax.tree.map(lambda x: x * jnp.nan, examples)
    for batch, mask in ((examples, jnp.zeros(SIZE, jnp.bool)), (nan, None)):
        got = sums(form, points, WEIGHTS["two"], batch, mask)
        assert not flat(got).any()


def test_factors_are_the_closed_form():
    """min(1, C / norm), 0 for what is not finite or masked; rounding below zero is no NaN."""
    squared = jnp.array([0.0, -1e-9, CLIP**2 / 4, 4 * CLIP**2, jnp.nan, jnp.inf, 1.0])
    factors, counts = _clipping.clip_factors(squared, CLIP, jnp.arange(7) < 6)
    np.testing.assert_allclose(factors, [1, 1, 1, 0.5, 0, 0, 0], rtol=1e-6)
    np.testing.assert_array_equal(counts, [True] * 4 + [False] * 3)


def shapes_in(form):
    """Returns the shapes of all arrays of a program that sums clipped gradients."""
    points, examples = problem(2)
    args = form, points, jnp.ones(2), examples, jax.random.split(jax.random.key(5), SIZE)
    found = set()

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            found.update(v.aval.shape for v in eqn.outvars)
            for sub in jax.tree.leaves(
                list(eqn.params.values()),
                is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr"),
            ):
                sub = getattr(sub, "jaxpr", sub)
                if hasattr(sub, "eqns"):
                    visit(sub)

    visit(jax.make_jaxpr(_sums, static_argnums=0)(*args, jnp.ones(SIZE, jnp.bool)).jaxpr)
    return found


def test_norms_leave_no_gradient_of_a_single_example():
    """The program of the other form has matrices [B, n, m], that with norms none."""
    kernel = (SIZE, 5, 4)
    assert kernel in shapes_in("vmap") and kernel not in shapes_in("norms")


def test_bfloat16_gradients_are_clipped_in_float32():
    """The norm of bfloat16 gradients is exact, and their sum has the digits of float32."""
    points = {"w": jnp.ones((1, 300), jnp.bfloat16)}
    x = jnp.full((4, 300), 0.1, jnp.bfloat16)
    got = _clipping.clipped_sums(
        lambda p, e, k: (jnp.sum(p["w"] * e[0]), None), points, jnp.ones(1), x,
        jax.random.split(jax.random.key(0), 4), jnp.ones(4, jnp.bool), {"w": jnp.zeros(300)},
        l2_clip_norm=1.0, norms_fn=None,
    )  # fmt: skip
    assert got.grads["w"].dtype == jnp.float32 and got.loss.dtype == jnp.float32
    np.testing.assert_allclose(got.grads["w"], 4 / np.sqrt(300), rtol=1e-6)


def test_aux_that_has_no_mean_is_refused():
    """Keys cannot be averaged, nor are complex numbers; the message has the path."""
    _clipping.check_aux({"a": jnp.ones(2), "b": jnp.array([True]), "c": jnp.int32(1), "d": None})
    for leaf, dtype in ((jax.random.key(0), "key<fry>"), (jnp.complex64(1j), "complex64")):
        with pytest.raises(TypeError, match=f"aux must hold real numbers only, got {dtype} at a/0"):
            _clipping.check_aux({"a": [leaf]})
