"""Tests of denoise.dense_norms: equal to the norms of gradients that are formed one by one."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import denoise
from jaxkit.denoise import _clipping


def _batch_first(x, d, weights):
    # The contract splits leading axes over devices.
    return denoise.dense_norms(x.swapaxes(0, 1), d.swapaxes(0, 1), weights)


test_contract = contract.function(
    contract.Case(
        "dense_norms",
        lambda: (
            _batch_first,
            (contract.normal(8, 2, 3, 5), contract.normal(8, 2, 3, 4), jnp.array([1.5, -0.5])),
        ),
        dtypes=("float32", "float64"),  # a norm in less would break the clip
    )
)


def brute_force(inputs, cotangents, weights, bias):
    """Returns the squared norms of matrices that NumPy forms in float64, one example at a time."""
    x, d, w = (np.asarray(y, np.float64) for y in (inputs, cotangents, weights))
    if x.ndim == 3:
        x, d = x[:, :, None], d[:, :, None]
    if bias:
        x = np.concatenate([x, np.ones((*x.shape[:3], 1))], -1)
    return np.array([np.sum(np.einsum("j,jln,jlm->nm", w, x[:, i], d[:, i]) ** 2)
                     for i in range(x.shape[1])])  # fmt: skip


def draw(shape_x, shape_d, q):
    weights = np.random.default_rng(q).normal(size=q)
    return contract.normal(*shape_x), contract.normal(*shape_d, seed=1), weights / weights.sum()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("q", "positions", "n", "m", "is_gram"),
    [
        (1, (), 7, 3, True),
        (2, (), 6, 5, True),
        (3, (), 2, 2, False),
        (1, (5,), 9, 8, True),
        (2, (5,), 20, 30, True),
        (2, (9,), 3, 4, False),
        (4, (1,), 1, 1, False),
    ],
)
def test_norms_are_those_of_gradients_formed_by_a_loop(q, positions, n, m, is_gram, bias):
    """Both forms, any number of query points and positions, with and without a bias."""
    rows = q * int(np.prod(positions))
    assert (2 * rows**2 <= n * m) == is_gram
    x, d, weights = draw((q, 6, *positions, n), (q, 6, *positions, m), q)
    got = denoise.dense_norms(x, d, weights, bias=bias)
    np.testing.assert_allclose(got, brute_force(x, d, weights, bias), rtol=1e-5)


def test_the_product_form_of_single_rows_fails_for_sequences_and_the_double_sum_does_not():
    """With shared positions the products must be summed over pairs, not within a position."""
    x, d, _ = draw((1, 4, 6, 5), (1, 4, 6, 3), 1)
    wrong = jnp.sum((jnp.sum(x * x, (2, 3)) + 6) * jnp.sum(d * d, (2, 3)), 0)
    right = brute_force(x, d, [1.0], True)
    assert np.abs(wrong / right - 1).max() > 0.3
    np.testing.assert_allclose(denoise.dense_norms(x, d), right, rtol=1e-5)


@pytest.mark.parametrize("n", [40, 2])
def test_large_weights_of_both_signs_lose_no_digits(n):
    """At weights 1000 and -999 on nearby points float32 keeps 1e-3, which plain products do not."""
    weights = np.array([1000.0, -999.0])
    x, d = contract.normal(1, 5, 3, n), contract.normal(1, 5, 3, n, seed=1)
    x, d = (jnp.concatenate([y, y + 1e-3 * jnp.roll(y, 1, -1)]) for y in (x, d))
    right = brute_force(x, d, weights, True)
    got = denoise.dense_norms(x, d, weights)
    np.testing.assert_allclose(got, right, rtol=1e-3)
    pairs = jnp.einsum("jbln,kbpn->bjlkp", x, x) + 1, jnp.einsum("jbln,kbpn->bjlkp", d, d)
    w = jnp.float32(weights)
    plain = jnp.einsum("bjlkp,bjlkp,j,k->b", *pairs, w, w)
    assert np.abs(plain / right - 1).max() > 0.05


def test_weights_default_to_one_and_sums_are_in_float32():
    """None is a plain sum over points; bfloat16 rows have norms of float32."""
    x, d, _ = draw((2, 4, 5), (2, 4, 3), 2)
    want = denoise.dense_norms(x, d, jnp.ones(2))
    np.testing.assert_array_equal(denoise.dense_norms(x, d), want)
    got = denoise.dense_norms(x.astype(jnp.bfloat16), d.astype(jnp.bfloat16))
    assert got.dtype == jnp.float32
    exact = [np.asarray(y.astype(jnp.bfloat16), np.float64) for y in (x, d)]
    np.testing.assert_allclose(got, brute_force(*exact, [1, 1], True), rtol=1e-5)


def test_a_broken_example_breaks_its_own_norm_only():
    """NaN and inf in one row leave the norms of others, and show in its own."""
    x, d, weights = draw((2, 4, 3, 5), (2, 4, 3, 6), 2)
    want = denoise.dense_norms(x, d, weights)
    got = denoise.dense_norms(x.at[1, 1, 0, 0].set(jnp.nan).at[0, 2].set(jnp.inf), d, weights)
    assert not np.isfinite(got[1:3]).any()
    np.testing.assert_allclose(got[::3], want[::3], rtol=1e-6)


def test_the_smaller_form_is_chosen():
    """Long sequences of narrow layers form the matrix, wide layers products of rows."""
    for shape, wide, absent in (
        ((1, 2, 30, 3, 4), "3,4", "30,30"),
        ((1, 2, 3, 30, 40), "3,3", "30,40"),
    ):
        q, b, length, n, m = shape
        text = str(
            jax.make_jaxpr(denoise.dense_norms)(
                jnp.ones((q, b, length, n)), jnp.ones((q, b, length, m))
            )
        )
        assert f"f32[2,{wide}]" in text and f"f32[2,{absent}]" not in text


def test_matmuls_are_exact_on_accelerators_too():
    """Every product asks for the highest precision: the clip rests on it."""
    assert _clipping.EXACT == jax.lax.Precision.HIGHEST
    for n in (2, 50):
        x = jnp.ones((2, 2, 3, n))
        eqns = jax.make_jaxpr(denoise.dense_norms)(x, x).eqns
        found = [e.params["precision"] for e in eqns if e.primitive.name == "dot_general"]
        assert found and all(p == (_clipping.EXACT,) * 2 for p in found)


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (
            ((2, 4, 5), (2, 3, 6), None),
            r"cotangents must have shape \[q, B, m\] with q=2, B=4, got",
        ),
        (((2, 4, 3, 5), (2, 4, 6), None), r"cotangents must have shape \[q, B, L, m\] with q=2"),
        (((4, 5), (4, 6), None), r"inputs must have shape \[q, B, n\], got \(4, 5\)"),
        (((2, 4, 5), (2, 4, 6), (3,)), r"weights must have shape \[q\] with q=2, got \(3,\)"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, match):
    """The message has the argument, the wanted and the given shape."""
    x, d, w = (None if s is None else jnp.ones(s) for s in shapes)
    with pytest.raises(ValueError, match=match):
        denoise.dense_norms(x, d, w)


def test_whole_numbers_are_refused():
    """Token ids are no inputs of a dense layer."""
    with pytest.raises(
        TypeError, match="inputs must be a real floating dtype or None, got .*int32"
    ):
        denoise.dense_norms(jnp.ones((1, 2, 3), jnp.int32), jnp.ones((1, 2, 3)))
