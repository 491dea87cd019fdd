"""Coefficient tables: what they do to singular values, and how steps are counted."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import spectral
from jaxkit.spectral import _coefficients, _polar


def _largest_error(rows, low):
    s = np.geomspace(low, 1, 200_001)
    for a, b, c in rows:
        s = a * s + b * s**3 + c * s**5
    return np.abs(s - 1).max()


@pytest.mark.parametrize(("steps", "error"), [(5, 0.124), (6, 1.2e-3), (7, 1.0e-9), (8, 2e-15)])
def test_polar_express_converges_as_its_paper_says(steps, error):
    """The raw list maps [1e-3, 1] to 1 within the known error after each number of steps."""
    raw = _coefficients.TABLES["polar_express"].rows
    assert _largest_error(raw[:steps], 1e-3) <= 1.05 * error  # known to two digits


@pytest.mark.parametrize(
    ("name", "low", "error"),
    [("jordan", 1e-3, 0.53), ("jordan", 1e-2, 0.32), ("you", 1e-3, 0.53), ("you", 1e-2, 0.032)],
)
def test_five_steps_reach_their_known_error(name, low, error):
    """The lists that do not converge end as far from 1 as is known of them."""
    rows, _ = _coefficients.resolve(name, None, False)
    assert len(rows) == 5
    assert _largest_error(rows, low) == pytest.approx(error, rel=0.03)


def test_safety_shrinks_every_row_but_the_last():
    """Dividing by q, q^3, q^5 is the same as shrinking the singular value by q first."""
    rows, cushion = _coefficients.resolve("polar_express", 6, False)
    raw = _coefficients.TABLES["polar_express"].rows
    s = np.linspace(0, 1, 7)
    for (a, b, c), (x, y, z) in zip(rows[:-1], raw, strict=False):
        t = s / 1.01
        np.testing.assert_allclose(
            a * s + b * s**3 + c * s**5, x * t + y * t**3 + z * t**5, rtol=1e-12, atol=1e-14
        )
    assert rows[-1] == raw[5]
    assert cushion == 1.01


def test_more_steps_repeat_the_last_row_and_fewer_take_the_first():
    """A list is read from its start, whatever the number of steps."""
    own = ((1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    assert _coefficients.resolve(own, 4, False)[0] == own + own[-1:] * 2
    assert _coefficients.resolve(own, 1, False)[0] == own[:1]
    assert _coefficients.resolve(own, None, False) == (own, 1.0)
    assert _coefficients.resolve(own[0], None, False)[0] == own[:1] * 5
    assert _coefficients.resolve("you", 2, False)[0] == _coefficients.TABLES["you"].rows[:2]


def test_own_coefficients_keep_their_digits_also_under_jit():
    """Static numbers are read in float64 whether or not anything is traced around them."""
    own = [[1.875 + 1e-9, -1.25, 0.375]]
    seen = []

    def fun(x):
        seen.append(_polar.make_settings("gram", own, None, None, None).coefficients)
        return spectral.polar(x, coefficients=own, steps=2)

    jax.jit(fun)(jnp.eye(2))
    assert seen == [((1.875 + 1e-9, -1.25, 0.375),)]


def test_polar_express_takes_eight_steps_in_float32_and_five_in_16_bits():
    """More steps would amplify rounding in null directions; other tables always take five."""
    assert len(_coefficients.resolve("polar_express", None, False)[0]) == 8
    assert len(_coefficients.resolve("polar_express", None, True)[0]) == 5
    assert len(_coefficients.resolve("polar_express_5", None, False)[0]) == 5


@pytest.mark.parametrize(
    ("coefficients", "steps", "error", "match"),
    [
        ("muon", None, ValueError, "'jordan', 'you', 'polar_express', 'polar_express_5', got 'mu"),
        ((1.0, 2.0), None, ValueError, r"shape \[3\] or \[k, 3\], got \(2,\)"),
        (np.zeros((0, 3)), None, ValueError, r"got \(0, 3\)"),
        (np.zeros((1, 2, 3)), None, ValueError, r"got \(1, 2, 3\)"),
        (((1.0, 2.0, 3.0), (1.0,)), None, TypeError, "static numbers of shape"),
        ("jordan", 0, ValueError, "steps must be at least 1, got 0"),
        ("jordan", 2.5, TypeError, "steps must be a static whole number, got 2.5"),
    ],
)
def test_bad_coefficients_are_named(coefficients, steps, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        _coefficients.resolve(coefficients, steps, False)
