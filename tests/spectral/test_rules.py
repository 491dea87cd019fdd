"""The update rules: identities, symmetries, limits and closed values, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from spectral.directions import SPEC, direction, normal, orthogonal, polar, rows

from jaxkit import spectral
from jaxkit.spectral import MatrixSpec

POLAR = ("polar", "right_spectral", "left_spectral")
MIXED = ("row_then_polar", "polar_then_row", "normuon")
RULES = (*POLAR, *MIXED, "row_norm")
SCALE_FREE = {"eps": 0.0}  # the damping of the one-sided rules, and of NorMuon's roots
every_rule = pytest.mark.parametrize("rule", RULES)


# What each rule is.


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_undamped_one_sided_rules_are_the_polar_factor(shape):
    """For full rank and no damping right-spectral, left-spectral and polar are one matrix."""
    x = normal(*shape)
    for rule in POLAR:
        np.testing.assert_allclose(direction(rule, x, eps=0.0), polar(x), atol=1e-12)


@pytest.mark.parametrize("mode", ["relative", "absolute"])
@pytest.mark.parametrize("method", ["newton_schulz", "gram", "qdwh", "eigh"])
def test_damping_divides_by_the_root_of_square_plus_damping(method, mode):
    """Singular values s become s / sqrt(s^2 + d), d absolute or times the Gram matrix's norm."""
    x = normal(6, 4)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    damping = 0.3 * (np.linalg.norm(x @ x.T) if mode == "relative" else 1.0)
    exact = method in ("qdwh", "eigh")
    steps = {} if exact else {"coefficients": "polar_express", "steps": 12}
    for rule in POLAR[1:]:
        got = direction(rule, x, eps=0.3, eps_mode=mode, method=method, **steps)
        np.testing.assert_allclose(got, (u * (s / np.sqrt(s**2 + damping))) @ vt, atol=1e-12)


def test_damping_below_rounding_is_left_out_in_float32_alone():
    """A singular value of 1e-4 keeps its 1 / sqrt(2) of eps=1e-8 in float64; float32 is polar."""
    u, v = (np.linalg.qr(normal(4, 4))[0] for _ in range(2))
    x = (u * np.array([1, 0, 0, 1e-4])) @ v.T
    auto = {"method": "auto"}
    steps = auto | {"coefficients": "polar_express", "steps": 20}
    for rule in POLAR[1:]:
        got = direction(rule, x, **steps)
        np.testing.assert_allclose(u[:, 3] @ got @ v[:, 3], np.sqrt(0.5), atol=1e-6)
        low = normal(4, 4).astype(np.float32)
        np.testing.assert_array_equal(direction(rule, low, **auto), direction("polar", low, **auto))
        damped = direction(rule, low, eps=1e-6, **auto)
        assert np.any(damped != direction(rule, low, **auto))


def test_relative_damping_is_scale_free_and_absolute_damping_is_not():
    """At a Frobenius norm of 1e-4 the published 1e-8 takes most of a tall matrix away."""
    x = normal(512, 64)
    x = 1e-4 * x / np.linalg.norm(x)
    relative, absolute = (
        direction("right_spectral", x, eps_mode=m) for m in ("relative", "absolute")
    )
    assert np.linalg.norm(relative - polar(x)) < 1e-6 * np.linalg.norm(relative)
    assert np.linalg.norm(absolute - polar(x)) > 0.8 * np.linalg.norm(polar(x))


@pytest.mark.parametrize("floor", [0.0, 0.1, 0.7])
@pytest.mark.parametrize("centered", [False, True])
def test_row_rules_are_their_definitions(floor, centered):
    """Row-norm, both hybrids, with the relative floor; rows or columns; centered at each step."""
    x = normal(6, 4) * np.geomspace(1, 1e-3, 6)[:, None]
    center = (lambda y: y - y.mean(axis=0)) if centered else (lambda y: y)
    wants = {
        "row_norm": center(rows(center(x), floor)),
        "row_then_polar": center(polar(center(rows(center(x), floor)))),
        "polar_then_row": center(rows(polar(center(x)), floor)),
    }
    for rule, want in wants.items():
        got = direction(rule, x, row_floor=floor, centered=centered)
        np.testing.assert_allclose(got, want, atol=1e-12)
        columns = direction(rule, x.T, row_floor=floor, rows="feature", centered=centered)
        np.testing.assert_allclose(columns, want.T, atol=1e-12)


def test_absolute_floor_is_the_published_one():
    """With eps_mode="absolute" a row is divided by its norm plus eps."""
    x = normal(5, 3)
    norm = np.linalg.norm(x, axis=1, keepdims=True)
    got = direction("row_norm", x, eps=0.5, eps_mode="absolute")
    np.testing.assert_allclose(got, x / (norm + 0.5), atol=1e-12)


def test_sign_is_the_sign():
    """The rule for Scion's heads is coordinate-wise."""
    x = normal(5, 3)
    np.testing.assert_array_equal(direction("sign", x), np.sign(x))


# Sizes.


@pytest.mark.parametrize("rule", [*POLAR, "row_then_polar"])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_size_is_the_inner_product_with_the_direction(rule, alpha):
    """nu = <X, D(X)> of the normalized rows in the hybrid, of the matrix in the others."""
    x = normal(6, 4)
    plain = direction(rule, x)
    seen = rows(x, 0.1) if rule == "row_then_polar" else x
    nu = np.sum(seen * plain)
    np.testing.assert_allclose(direction(rule, x, alpha=alpha), nu**alpha * plain, rtol=1e-12)


# Symmetries.


@every_rule
@pytest.mark.parametrize("centered", [False, True])
def test_permuted_units_and_rotated_features(rule, centered):
    """F(P M) = P F(M) and F(M Q) = F(M) Q for every rule, centered or not."""
    x, order, q = normal(7, 4), np.random.default_rng(1).permutation(7), orthogonal(4)
    want = direction(rule, x, centered=centered)
    np.testing.assert_allclose(
        direction(rule, x[order], centered=centered), want[order], atol=1e-10
    )
    np.testing.assert_allclose(direction(rule, x @ q, centered=centered), want @ q, atol=1e-10)


def test_only_uncentered_polar_rules_commute_with_rotated_units():
    """F(O M) = O F(M) for polar, left- and right-spectral; rows, centering, Adam, sign fail."""
    x, o, q = normal(7, 4), orthogonal(7), orthogonal(4)

    def gap(rule, **options):
        return np.abs(direction(rule, o @ x, **options) - o @ direction(rule, x, **options)).max()

    for rule in RULES:
        assert (gap(rule) < 1e-10) == (rule in POLAR), rule
        assert gap(rule, centered=True) > 1e-3
    adam = optax.scale_by_adam()

    def adams(x):
        with jax.numpy_dtype_promotion("standard"):
            return np.asarray(adam.update(jnp.asarray(x), adam.init(jnp.asarray(x)))[0])

    for turned, turn in ((x @ q, lambda y: y @ q), (o @ x, lambda y: o @ y)):
        assert np.abs(adams(turned) - turn(adams(x))).max() > 0.1
        assert np.abs(direction("sign", turned) - turn(direction("sign", x))).max() > 0.1


@every_rule
def test_centered_rules_ignore_a_shared_row(rule):
    """The sum over units is zero, and adding one row to all of the gradient changes nothing."""
    x = normal(40, 12)
    got = direction(rule, x, centered=True)
    np.testing.assert_allclose(got.sum(axis=0), 0, atol=1e-12)
    shifted = direction(rule, x + normal(1, 12, seed=5), centered=True)
    np.testing.assert_allclose(shifted, got, atol=1e-9)
    assert np.abs(direction(rule, x).sum(axis=0)).max() > 1e-2


@every_rule
def test_scale_free_in_float32(rule):
    """c M has the direction of M for c from 1e-30 to 1e30, by powers of two.

    Rounding of the input grows by the slope of the polynomials at zero, 1e3 at most.
    """
    with jax.enable_x64(False):
        tx = spectral.scale_by_spectral(rule, b1=0.0, overrides=SPEC, **SCALE_FREE)
        x = jnp.asarray(normal(6, 9), jnp.float32)
        update = jax.jit(lambda x: tx.update({"x": x}, tx.init({"x": x}))[0]["x"])
        want = update(x)
        for power in (-100, -60, 60, 100):
            np.testing.assert_allclose(update(x * 2.0**power), want, rtol=0, atol=1e-4)


@every_rule
@pytest.mark.parametrize("centered", [False, True])
def test_zero_stays_zero_and_nan_stays_visible(rule, centered):
    """In a stack each matrix answers for itself; a row of zeros is one."""
    x = np.stack([normal(3, 4)] * 3)
    x[1] = 0
    x[2, 0, 0] = np.nan
    spec = {"x": MatrixSpec(unit=1, feature=2, batch=0)}
    got = direction(rule, x, centered=centered, spec=spec)
    np.testing.assert_allclose(got[0], direction(rule, x[0], centered=centered), atol=1e-12)
    np.testing.assert_array_equal(got[1], 0)
    assert np.isnan(got[2]).any()


@pytest.mark.parametrize("rule", ["row_norm", "polar_then_row"])
def test_one_column_and_diagonals_are_signs(rule):
    """Without a floor a row of one number becomes its sign, and so do the entries of a diagonal."""
    x = normal(6, 1)
    np.testing.assert_allclose(direction(rule, x, row_floor=0.0), np.sign(x), atol=1e-12)
    x = np.diag([3.0, -2.0, 0.5])
    np.testing.assert_allclose(direction(rule, x, row_floor=0.0), np.sign(x), atol=1e-12)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"rule": "row_norm", "alpha": 1.0}, "alpha must be 0 for rule='row_norm'"),
        ({"rule": "polar", "row_floor": 0.1}, "row_floor belongs to row rules"),
        ({"rule": "row_norm", "row_floor": 0.1, "eps_mode": "absolute"}, "eps_mode='absolute'"),
        ({"rule": "row_norm", "row_floor": -0.1}, r"row_floor must be in \[0.0, inf\), got -0.1"),
        ({"rule": "polar", "rows": "feature"}, "rows='feature' needs a rule with rows, .*'polar'"),
        ({"rule": "polar", "b2": 0.9}, "b2 belongs to rule='normuon', got 0.9 with rule='polar'"),
        ({"rule": "normuon", "b2": 1.0}, r"b2 must be in \[0.0, 1.0\), got 1.0"),
        ({"rule": "sign", "noise_damping": 1.0}, "noise_damping belongs to rules polar"),
        ({"noise_damping": -1.0}, r"noise_damping must be in \[0.0, inf\), got -1.0"),
        ({"rows": "row"}, "rows must be one of 'unit', 'feature', got 'row'"),
        ({"eps_mode": "abs"}, "eps_mode must be one of 'relative', 'absolute', got 'abs'"),
    ],
)
def test_options_of_another_rule_are_refused(options, match):
    """No option is accepted and then ignored."""
    with pytest.raises(ValueError, match=match):
        spectral.scale_by_spectral(**options)


def test_scales_make_the_entries_of_their_size():
    """unit_rms gives root mean square 1 for full rank, spread rows and signs; rms a fifth of it."""
    x = normal(40, 8)
    for rule in (*RULES, "sign"):
        floor = {"row_floor": 0.0} if "row" in rule else {}
        for side in ("unit", "feature") if "row" in rule or rule == "normuon" else ("unit",):
            got = direction(rule, x, scale="unit_rms", rows=side, **floor)
            np.testing.assert_allclose(np.sqrt(np.mean(got**2)), 1.0, rtol=1e-6)
            fifth = direction(rule, x, scale="rms", rows=side, **floor)
            np.testing.assert_allclose(5 * fifth, got, rtol=1e-12)
    got = direction("polar", x, scale=lambda units, features: units + features / 100)
    np.testing.assert_allclose(got, 40.08 * polar(x), rtol=1e-9)
