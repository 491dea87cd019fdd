"""Checks of samples, and their blocks of rows."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit.metrics import _samples


@pytest.mark.parametrize("rows", [1, 3, 7, 8])
def test_blocks_hold_every_row_once_and_fill_the_rest(rows):
    """Cut and joined again, seven rows are the same; what is filled in lies at the end."""
    x = contract.normal(7, 2)
    blocks = _samples.per_block(x, rows, 9)
    assert blocks.shape == (-(-7 // min(rows, 7)), min(rows, 7), 2)
    np.testing.assert_array_equal(_samples.per_row(blocks, 7), x)
    np.testing.assert_array_equal(blocks.reshape(-1, 2)[7:], 9)


def test_the_widest_sample_sets_the_dtype_of_all():
    """Half precision goes to float32, and both to float64 if one is."""
    half, single = jnp.ones((2, 3), jnp.bfloat16), np.ones((2, 3), np.float32)
    assert [x.dtype for x in _samples.checked(x=half, y=half)] == [jnp.float32] * 2
    with jax.enable_x64(True):
        double = np.ones((2, 3))
        assert [x.dtype for x in _samples.checked(x=single, y=double)] == [jnp.float64] * 2


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_bad_rows_are_counted_where_values_are_known(bad):
    """Two rows, one of them with two bad entries; a traced array passes."""
    x = contract.normal(5, 3).at[jnp.array([1, 1, 4]), jnp.array([0, 2, 1])].set(bad)
    with pytest.raises(ValueError, match="fake must be finite, got NaN or inf in 2 of 5 rows"):
        _samples.checked(real=contract.normal(4, 3), fake=x)
    jax.jit(lambda x: _samples.checked(x=x))(x)
    jax.vmap(lambda x: _samples.checked(x=x)[0])(x[None])
    assert jnp.isnan(_samples.poison(contract.normal(2), x))
    assert _samples.poison(contract.normal(2), contract.normal(3)) == 0


@pytest.mark.parametrize(
    ("samples", "error", "match"),
    [
        ({"x": jnp.ones((3, 2), jnp.int32)}, TypeError, "x must be real floating, got int32"),
        ({"x": jnp.ones((3, 2), jnp.complex64)}, TypeError, "x must be real floating, got compl"),
        ({"x": jnp.ones(3)}, ValueError, r"x must have shape \[n, d\], got \(3,\)"),
        (
            {"x": jnp.ones((3, 2)), "y": jnp.ones((3, 4))},
            ValueError,
            r"y must have shape \[n, d\] with d=2, got \(3, 4\)",
        ),
        ({"x": jnp.ones((0, 2))}, ValueError, "x must have at least 1 rows, got 0"),
    ],
)
def test_bad_input_is_named(samples, error, match):
    """Each message names the sample and what it got."""
    with pytest.raises(error, match=match):
        _samples.checked(**samples)
