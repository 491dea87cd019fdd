"""Combining: weighted sums in float32, one trace, and what is refused."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import denoise


def shifted(x):
    return {"a": jnp.tanh(x), "b": jnp.sum(x**3)}


test_contract = contract.function(
    contract.Case(
        "combine",
        lambda: (
            lambda points, weights: denoise.combine(shifted, points, weights),
            (contract.normal(8, 4), contract.normal(8)),
        ),
    )
)


@pytest.mark.parametrize("num", [1, 2, 5])
def test_a_combination_is_the_weighted_sum(num):
    """Equal to NumPy's sum over the points, of gradients and of losses beside them."""
    rng = np.random.default_rng(num)
    points = {"x": rng.normal(size=(num, 3)).astype(np.float32)}
    weights = rng.normal(size=num).astype(np.float32)
    fun = jax.value_and_grad(lambda p: jnp.sum(jnp.sin(p["x"])))
    value, grads = jax.jit(lambda p, w: denoise.combine(fun, p, w))(points, weights)
    np.testing.assert_allclose(value, weights @ np.sin(points["x"]).sum(1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(grads["x"], weights @ np.cos(points["x"]), rtol=1e-5, atol=1e-6)


def test_half_precision_is_summed_in_float32():
    """256 + 1 - 256 is 1, which bfloat16 sums lose; the result is bfloat16 again."""
    points = jnp.array([256.0, 1.0, 256.0], jnp.bfloat16)
    total = denoise.combine(lambda x: x, points, jnp.array([1.0, 1.0, -1.0]))
    assert total == 1 and total.dtype == jnp.bfloat16


def test_the_function_is_traced_once():
    """Whatever the number of points; one evaluation stands in the program."""
    traces = []

    def counted(x):
        traces.append(1)
        return jnp.sin(x)

    program = jax.jit(lambda p, w: denoise.combine(counted, p, w)).lower(
        jnp.ones((4, 3)), jnp.ones(4)
    )
    assert len(traces) == 1 and program.as_text().count("stablehlo.sine") == 1


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        ((3, jnp.ones((2, 3)), jnp.ones(2)), TypeError, "grad_fn must be a function, got int"),
        (
            (jnp.sin, jnp.ones((2, 3)), jnp.ones((2, 1))),
            ValueError,
            r"weights must have shape \[q\]",
        ),
        (
            (jnp.sin, jnp.ones((3, 3)), jnp.ones(2)),
            ValueError,
            "the leading axis of weights, 2, in",
        ),
        (
            (jnp.sin, {"a": jnp.ones(2), "b": jnp.ones(3)}, jnp.ones(2)),
            ValueError,
            "got 2 at a and 3",
        ),
        (
            (jnp.sign, jnp.ones((2, 3), int), jnp.ones(2)),
            TypeError,
            "what grad_fn returns must be re",
        ),
    ],
)
def test_bad_input_is_named(args, error, match):
    """Each message names the argument and what it was."""
    with pytest.raises(error, match=match):
        denoise.combine(*args)
