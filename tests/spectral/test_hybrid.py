"""The hybrids: sizes of normalized rows, and where alpha cancels."""

import contract
import numpy as np
from spectral.directions import direction, normal

from jaxkit import spectral

# The default for the rest has a derivative of 5e7 times its rate at a zero gradient, which has to
# fit float16; optax's adam mixes int32 and float32.
test_contract = contract.transformation(
    contract.Case(
        "hybrid",
        lambda: spectral.hybrid(
            0.1, alpha=1.0, method="eigh", rows="feature", other_learning_rate=1e-4
        ),
        promotion="standard",
    ),
)


def test_size_of_normalized_rows_lies_between_its_bounds():
    """sqrt(v) <= nu <= sqrt(v r) for v normalized rows of rank r; rank one meets the lower one."""
    v, r = 40, 6
    for x, most in ((normal(v, r), np.sqrt(v * r)), (normal(v, 1) @ normal(1, r), np.sqrt(v))):
        options = {"row_floor": 0.0}
        ratio = direction("row_then_polar", x, alpha=1.0, **options)
        nu = np.linalg.norm(ratio, 2) / np.linalg.norm(direction("row_then_polar", x, **options), 2)
        # Rank one meets the bound to the root of eps, since eigh squares the singular values.
        assert np.sqrt(v) * (1 - 1e-7) <= nu <= most * (1 + 1e-7)


def test_alpha_cancels_where_rows_are_normalized_last():
    """polar_then_row with alpha = 1 is the same matrix."""
    x = normal(6, 4)
    got = direction("polar_then_row", x, alpha=1.0)
    np.testing.assert_array_equal(got, direction("polar_then_row", x))


def test_alpha_one_on_a_tall_matrix_moves_it_by_the_root_of_its_width_more():
    """Why alpha = 0 is the default: row_then_polar with alpha = 1 has RMS about sqrt(d)."""
    x = normal(512, 64)
    got = direction("row_then_polar", x, alpha=1.0, row_floor=0.0)
    assert 0.9 * 8 < np.sqrt(np.mean(got**2)) < 1.1 * 8
    plain = direction("row_norm", x, row_floor=0.0)
    np.testing.assert_allclose(np.sqrt(np.mean(plain**2)), 1 / 8, rtol=1e-9)


def test_rows_that_an_absolute_floor_makes_tiny_have_their_polar_factor():
    """Rows of 1e-200, whose squares underflow: the hybrid is polar of them, by every method."""
    x = normal(6, 4)
    for method in ("newton_schulz", "gram", "eigh"):
        options = {"method": method, "eps": 1.0, "eps_mode": "absolute"}
        got = direction("row_then_polar", 1e-200 * x, **options)
        want = direction("polar", x, method=method)
        np.testing.assert_allclose(got, want, atol=1e-12)
