"""The axes of a leaf: to matrices and back."""

import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxkit import spectral
from jaxkit.spectral import MatrixSpec
from jaxkit.spectral._matrix_spec import (
    from_matrices,
    matrix_shape,
    resolve_spec,
    to_matrices,
)


@st.composite
def leaf_and_spec(draw):
    """A small shape and a resolved spec for it, with a split and an interleave where they fit."""
    rank = draw(st.integers(2, 5))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank)))
    axes = draw(st.permutations(range(rank)))
    num_unit = draw(st.integers(1, rank - 1))
    num_feature = draw(st.integers(1, rank - num_unit))
    unit, feature = axes[:num_unit], axes[num_unit : num_unit + num_feature]
    batch = axes[num_unit + num_feature :]
    split = None
    if draw(st.booleans()):
        axis = draw(st.integers(0, rank - 1))
        cut = draw(st.integers(0, shape[axis] - 1))
        split = ((cut, shape[axis] - cut) if cut else (shape[axis],), axis)
    units = [
        math.prod(size if split and split[1] == axis else shape[axis] for axis in unit)
        for size in (split[0] if split else (1,))
    ]
    interleave = draw(
        st.sampled_from([k for k in range(1, 5) if all(size % k == 0 for size in units)])
    )
    spec = MatrixSpec(tuple(unit), tuple(feature), tuple(batch), split, interleave)
    return shape, resolve_spec(spec, shape, "leaf")


def place(index, shape, spec):
    """Says where one entry of the leaf goes, in plain index arithmetic: (part, matrix index)."""
    index, shape, part = list(index), list(shape), 0
    if spec.split is not None:
        sizes, axis = spec.split
        while index[axis] >= sizes[part]:
            index[axis] -= sizes[part]
            part += 1
        shape[axis] = sizes[part]
    unit = feature = 0
    for axis in spec.unit:
        unit = unit * shape[axis] + index[axis]
    for axis in spec.feature:
        feature = feature * shape[axis] + index[axis]
    batch = [index[axis] for axis in spec.batch]
    if spec.interleave > 1:
        batch.append(unit % spec.interleave)
        unit //= spec.interleave
    return part, (*batch, unit, feature)


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(leaf_and_spec())
def test_every_entry_goes_where_index_arithmetic_says_and_comes_back(case):
    """to_matrices equals a loop over entries, from_matrices undoes it, matrix_shape tells sizes."""
    shape, spec = case
    x = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    parts = to_matrices(x, spec)  # of numpy: nothing to compile where no split is
    seen = [np.asarray(part) for part in parts]
    for index in itertools.product(*map(range, shape)):
        part, at = place(index, shape, spec)
        assert seen[part][at] == x[index]
    assert sum(part.size for part in seen) == x.size
    assert [(math.prod(p.shape[:-2]), *p.shape[-2:]) for p in seen] == matrix_shape(spec, shape)
    np.testing.assert_array_equal(from_matrices(parts, spec, shape), x)


def test_heads_of_a_query_kernel_are_its_slices_transposed():
    """Kernel (d, heads, head_dim): matrix h has rows kernel[:, h, :].T; out is the mirror image."""
    x = jax.random.normal(jax.random.key(0), (6, 3, 4))
    (heads,) = to_matrices(x, resolve_spec(MatrixSpec(2, 0, 1), x.shape, "query"))
    np.testing.assert_array_equal(heads, jnp.einsum("dhk->hkd", x))
    (whole,) = to_matrices(x, resolve_spec(MatrixSpec((1, 2), 0), x.shape, "query"))
    np.testing.assert_array_equal(whole, heads.reshape(12, 6))


def test_a_convolution_is_its_matrix_times_the_patch():
    """With HWIO axes unit 3, feature (0, 1, 2), one output pixel is a matrix times its patch."""
    rng = np.random.default_rng(0)
    kernel, patch = rng.normal(size=(3, 2, 4, 5)), rng.normal(size=(3, 2, 4))
    spec = resolve_spec(MatrixSpec(-1, (0, 1, 2)), kernel.shape, "conv")
    (matrix,) = to_matrices(kernel, spec)
    pixel = sum(
        kernel[h, w, i] * patch[h, w, i] for h in range(3) for w in range(2) for i in range(4)
    )
    np.testing.assert_allclose(matrix @ patch.reshape(-1), pixel, rtol=1e-12)


def test_fused_layers_come_apart():
    """A split gives the concatenated kernels, an interleave every k-th unit."""
    q, k, v = (jnp.arange(6.0 * n).reshape(6, n) + n for n in (8, 2, 2))
    fused = jnp.concatenate([q, k, v], 1)
    spec = resolve_spec(MatrixSpec(1, 0, split=((8, 2, 2), 1)), fused.shape, "qkv")
    for part, kernel in zip(to_matrices(fused, spec), (q, k, v), strict=True):
        np.testing.assert_array_equal(part, kernel.T)
    assert matrix_shape(spec, fused.shape) == [(1, 8, 6), (1, 2, 6), (1, 2, 6)]
    spec = resolve_spec(MatrixSpec(0, 1, interleave=2), (8, 6), "gate_up")
    (pair,) = to_matrices(q.T, spec)
    np.testing.assert_array_equal(pair, [q.T[0::2], q.T[1::2]])
    assert matrix_shape(spec, (8, 6)) == [(2, 4, 6)]


def test_only_transposes_and_reshapes_are_made():
    """There and back, no gather or arithmetic; a split adds slices and one concatenation."""

    def primitives(spec, shape):
        spec = resolve_spec(spec, shape, "leaf")
        jaxpr = jax.make_jaxpr(lambda x: from_matrices(to_matrices(x, spec), spec, shape))(
            jax.ShapeDtypeStruct(shape, jnp.float32)
        )
        return {str(eqn.primitive) for eqn in jaxpr.eqns}

    assert primitives(MatrixSpec(2, 0, (1, 3), interleave=2), (4, 3, 6, 2)) <= {
        "transpose",
        "reshape",
    }
    assert primitives(MatrixSpec(1, 0, split=((2, 4), 1)), (4, 6)) <= {
        *("transpose", "reshape", "slice", "split", "concatenate"),
    }


def test_axes_may_be_negative_and_the_spec_is_hashable():
    """Negative and non-negative axes resolve to the same spec, which is a key of a dict."""
    a = resolve_spec(MatrixSpec(-1, 0, [-2], (np.array([1, 2]), -1)), (4, 5, 3), "x")
    b = resolve_spec(spectral.MatrixSpec((2,), (0,), (1,), ((1, 2), 2)), (4, 5, 3), "x")
    assert a == b and len({a: 0, b: 1}) == 1
    assert resolve_spec(a, (4, 5, 3), "x") == a
    assert str(a) == "unit 2; feature 0; batch 1; split 1,2 on 2"
    assert str(MatrixSpec(0, (1, 2), interleave=2)) == "unit 0; feature 1,2; interleave 2"


@pytest.mark.parametrize(
    ("spec", "shape", "message"),
    [
        (MatrixSpec(0, 0), (4, 5), "axis 0 as unit and as feature"),
        (MatrixSpec((1, -1), 0), (4, 5), "axis 1 as unit and as unit"),
        (MatrixSpec(1, 2), (4, 5), "feature axes from -2 to 1, got 2"),
        (MatrixSpec(-3, 0), (4, 5), "unit axes from -2 to 1, got -3"),
        (MatrixSpec(1, 0), (4, 5, 6), "axes [2] are left out"),
        (MatrixSpec(1, (), 0), (4, 5), "at least one feature axis, got ()"),
        (MatrixSpec(0, ()), (4,), "at least 2 axes, got 1"),
        (MatrixSpec(1, 0), (4, 0), "axis 1 has 0"),
        (MatrixSpec(1, 0, split=((2, 2), 1)), (4, 5), "add up to 5, the size of axis 1"),
        (MatrixSpec(1, 0, split=((5, 0), 1)), (4, 5), "at least 1 that add up to 5"),
        (MatrixSpec(1, 0, split=((), 1)), (4, 5), "got () with sum 0"),
        (MatrixSpec(1, 0, split=((5,), 2)), (4, 5), "split axes from -2 to 1, got 2"),
        (MatrixSpec(1, 0, interleave=2), (4, 5), "divides its 5 units, got 2"),
        (MatrixSpec(1, 0, split=((2, 3), 1), interleave=2), (4, 5), "its 3 units, got 2"),
        (MatrixSpec(1, 0, interleave=0), (4, 5), "interleave of at least 1, got 0"),
    ],
)
def test_a_spec_that_does_not_fit_names_leaf_and_values(spec, shape, message):
    """The error has the path and the shape of the leaf, what is wanted and what was given."""
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        resolve_spec(spec, shape, "mlp/up/kernel")
    assert f"MatrixSpec for 'mlp/up/kernel' of shape {shape}" in str(error.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (MatrixSpec(1.0, 0), "unit axes, got 1.0"),
        (MatrixSpec("1", 0), "unit axes, got '1'"),
        (MatrixSpec(1, 0, split=(2, 3)), "(sizes, axis), got (2, 3)"),
        (MatrixSpec(1, 0, split=3), "(sizes, axis), got 3"),
        (MatrixSpec(1, 0, split=((2.5, 2.5), 1)), "split sizes, got 2.5"),
        (MatrixSpec(1, 0, interleave=1.5), "interleave, got 1.5"),
    ],
)
def test_fields_of_the_wrong_kind_are_a_type_error(spec, message):
    """Axes, sizes and interleave are static whole numbers."""
    with pytest.raises(TypeError, match=re.escape(message)):
        resolve_spec(spec, (4, 5), "w")
