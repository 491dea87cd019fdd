"""The index from degrees of freedom, from q and from the support."""

import contract
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import blr

POSITIVE = jnp.abs(contract.normal(8)) + 2.5

test_contract = contract.function(
    contract.Case("alpha_from_df", lambda: (blr.alpha_from_df, (POSITIVE,))),
    contract.Case("alpha_from_q", lambda: (blr.alpha_from_q, (POSITIVE / 4,))),
    contract.Case("alpha_from_support", lambda: (blr.alpha_from_support, (POSITIVE,))),
)


def test_degrees_of_freedom_are_those_of_the_formula():
    """df = (1 + alpha) / (1 - alpha) in one dimension and 2 / (1 - alpha) - n in n."""
    for df in (2.5, 3.0, 10.0, 1e6):
        alpha = blr.alpha_from_df(df)
        assert (1 + alpha) / (1 - alpha) == pytest.approx(df)
        assert 2 / (1 - blr.alpha_from_df(df, n=5)) - 5 == pytest.approx(df)


def test_q_is_that_of_the_same_distribution():
    """q = 1 is the Gaussian, and Student's t has q = (df + 3) / (df + 1)."""
    assert blr.alpha_from_q(1) == 1
    assert blr.alpha_from_q((3.0 + 3) / (3 + 1)) == pytest.approx(blr.alpha_from_df(3.0))


@pytest.mark.parametrize(
    ("half_width", "alpha"), [(2.6457513, 1.5), (2.2360680, 2.0), (2.0, 3.0), (1.8708287, 5.0)]
)
def test_half_widths_of_known_indices(half_width, alpha):
    """r = sqrt((3 alpha - 1) / (alpha - 1)), solved for alpha."""
    assert blr.alpha_from_support(half_width) == pytest.approx(alpha, rel=1e-6)


def test_a_narrow_support_is_exact_in_float32():
    """Near sqrt 3, where r**2 - 3 would lose digits, the error is that of r alone."""
    r = jnp.float32(1.7321)
    want = (np.float64(r) ** 2 - 1) / (np.float64(r) ** 2 - 3)
    # The slope in r is 2 r / (r**2 - 3)**2, and sqrt 3 itself is rounded.
    bound = 4 * np.float64(r) / (np.float64(r) ** 2 - 3) * np.finfo(np.float32).eps
    np.testing.assert_allclose(blr.alpha_from_support(r), want, rtol=bound)


def test_numbers_stay_numbers():
    """So that a static alpha is checked where it is used."""
    values = blr.alpha_from_df(4), blr.alpha_from_q(0.5), blr.alpha_from_support(2.0)
    assert all(isinstance(x, float) for x in values)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda: blr.alpha_from_df(2.0), ValueError, r"df must be in \(2, inf\), got 2.0"),
        (lambda: blr.alpha_from_df("3"), TypeError, "df must be a number, got '3'"),
        (lambda: blr.alpha_from_df(3.0, n=0), ValueError, "n must be at least 1, got 0"),
        (lambda: blr.alpha_from_q(1.7), ValueError, "q must be in .*, got 1.7"),
        (lambda: blr.alpha_from_support(1.7), ValueError, "half_width must be in .*, got 1.7"),
    ],
)
def test_bad_input_is_named(call, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        call()
