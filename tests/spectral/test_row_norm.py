"""Row-norm: ghost steps and infinities."""

import contract
import numpy as np
from spectral.directions import direction, normal, run

from jaxkit import spectral

# The default for the rest has a derivative of 5e7 times its rate at a zero gradient, which has to
# fit float16; optax's adam mixes int32 and float32.
test_contract = contract.transformation(
    contract.Case(
        "row_norm",
        lambda: spectral.row_norm(0.1, centered=True, other_learning_rate=1e-4),
        promotion="standard",
    ),
)


def test_a_row_without_gradient_stops_under_the_relative_floor_and_not_under_the_absolute_one():
    """Ghost steps: after 100 empty steps momentum is 6e-3 of the others and still moves in full."""
    x, rest = normal(6, 4), normal(6, 4)
    rest[0] = 0.0
    steps = [x, *[rest] * 100]
    sizes = {
        mode: np.linalg.norm(run("row_norm", *steps, b1=0.95, eps_mode=mode)[0], axis=1)
        for mode in ("absolute", "relative")
    }
    np.testing.assert_allclose(sizes["absolute"], 1.0, rtol=1e-4)
    assert sizes["relative"][0] < 0.05 and np.all(sizes["relative"][1:] > 0.8)


def test_a_row_with_an_infinity_is_nan_and_no_other():
    """The direction of an infinite row is unknown, in every entry."""
    options = {"eps": 0.0, "eps_mode": "absolute"}
    got = direction("row_norm", np.array([[1.0, np.inf], [3.0, 4.0]]), **options)
    np.testing.assert_allclose(got, [[np.nan, np.nan], [0.6, 0.8]])


def test_rows_of_any_size_become_one_and_those_without_a_normal_reciprocal_nan():
    """Sizes from 1e-300 to 1e300 in one matrix; 5e307 in an entry, or in the norm alone."""
    sizes = 10.0 ** np.array([[-300], [-200], [0], [200], [300]])
    got = direction("row_norm", sizes * [[3.0, 4.0]], row_floor=0.0)
    np.testing.assert_allclose(got, [[0.6, 0.8]] * 5)
    x = np.array([[5e307, 0.0], [4e307, 4e307], [3e307, 0.0]])
    got = direction("row_norm", x, eps=0.0, eps_mode="absolute")
    np.testing.assert_allclose(got, [[np.nan, np.nan], [np.nan, np.nan], [1.0, 0.0]])
