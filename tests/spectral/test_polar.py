"""The polar factor against its definition, its invariances and LAPACK in float64."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import spectral
from jaxkit.spectral import _coefficients

METHODS = ("newton_schulz", "gram", "qdwh", "eigh")
ITERATIVE = METHODS[:2]


def _case(method):
    return contract.Case(
        method,
        lambda: (lambda x: spectral.polar(x, method), (contract.normal(8, 6, 10),)),
        public="polar",
    )


test_contract = contract.function(*map(_case, METHODS))


def _matrix(m, n, *, condition=None, rank=None, seed=0):
    """Returns a float64 matrix: Gaussian, or with singular values from 1 to 1/condition."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(m, n))
    if condition is None and rank is None:
        return x
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    if condition is not None:
        s = np.geomspace(1, 1 / condition, len(s))
    if rank is not None:
        s[rank:] = 0
    return (u * s) @ vt


def _oracle(x):
    """Returns the polar factor in float64, singular values under 1e-9 of the largest dropped."""
    u, s, vt = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    keep = s > 1e-9 * s[0]
    return u[:, keep] @ vt[keep]


def _distance(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def _polar64(x, *args, **kwargs):
    with jax.enable_x64(True):
        fun = jax.jit(lambda x: spectral.polar(x, *args, **kwargs))
        return np.asarray(fun(jnp.asarray(x, jnp.float64)))


@pytest.mark.parametrize("form", ITERATIVE)
@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("name", _coefficients.TABLES)
def test_singular_values_follow_the_polynomials_exactly(name, steps, form):
    """U diag(s) V^T becomes U diag(p(s / cushion / |s|)) V^T."""
    x = _matrix(5, 9)
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    rows, cushion = _coefficients.resolve(name, steps, False)
    s = s / (cushion * np.linalg.norm(s))
    for a, b, c in rows:
        s = a * s + b * s**3 + c * s**5
    got = _polar64(x, form, name, steps)
    np.testing.assert_allclose(got, (u * s) @ vt, atol=1e-12)


# The distances that the table of the spectral methods' accuracy gives for float32 on a CPU: a
# square Gaussian matrix, a tall one, and a tall one of condition 1e3. The matrices here are other
# draws of the same kind, hence the room of a tenth, and of a third for the square one, whose
# distance is that of its few smallest singular values.
@pytest.mark.parametrize(
    ("coefficients", "steps", "method", "square", "tall", "ill"),
    [
        ("jordan", 5, "newton_schulz", 0.189, 0.145, 0.400),
        ("you", 5, "newton_schulz", 0.105, 0.018, 0.370),
        ("polar_express_5", 5, "newton_schulz", 0.118, 0.092, 0.270),
        ("polar_express_5", 5, "gram", 0.118, 0.092, 0.270),
        ("polar_express", 8, "newton_schulz", 0.036, 5e-6, 0.009),
        ("polar_express", 8, "gram", 0.036, 5e-6, 0.009),
        ("polar_express", 10, "newton_schulz", 0.016, 5e-6, 3e-5),
        ("polar_express_5", None, "qdwh", 8e-7, 5e-7, 1.5e-5),
        # 3e-3 and 0.016 in the table; they go by the inverse square of the smallest value.
        ("polar_express_5", None, "eigh", 5e-3, 1.2e-6, 0.017),
    ],
)
def test_accuracy_in_float32(coefficients, steps, method, square, tall, ill):
    """Distances to the factor stay within the known table."""
    fun = jax.jit(lambda x: spectral.polar(x, method, coefficients, steps))
    for x, bound in (
        (_matrix(512, 512), 4 / 3 * square),
        (_matrix(2048, 256), 1.1 * tall),
        (_matrix(2048, 256, condition=1e3), 1.1 * ill),
    ):
        assert _distance(fun(jnp.asarray(x, jnp.float32)), _oracle(x)) <= bound


@pytest.mark.parametrize("form", ITERATIVE)
@pytest.mark.parametrize(
    ("kind", "bound"), [({}, 0.111), ({"condition": 1e3}, 0.296), ({"rank": 128}, 0.29)]
)
def test_accuracy_in_bfloat16(kind, bound, form):
    """Distances stay within the known table, and no singular value passes 1.2."""
    x = _matrix(2048, 256, **kind)
    got = jax.jit(lambda x: spectral.polar(x, form))(jnp.asarray(x, jnp.bfloat16))
    assert got.dtype == jnp.bfloat16
    assert np.linalg.norm(np.asarray(got, np.float64), 2) <= 1.2
    assert _distance(got, _oracle(x)) <= 1.1 * bound


@pytest.mark.parametrize("shape", [(7, 7), (5, 12), (12, 5)])
def test_gram_form_is_newton_schulz(shape):
    """Both forms apply the same polynomials: equal in float64 to 1e-12."""
    x = _matrix(*shape)
    for name in _coefficients.TABLES:
        np.testing.assert_allclose(
            _polar64(x, "gram", name), _polar64(x, "newton_schulz", name), atol=1e-12
        )


@pytest.mark.parametrize("method", METHODS)
def test_inner_product_with_the_factor_is_the_nuclear_norm(method):
    """<X, polar(X)> = sum of singular values, |polar(X)|_2 = 1, |polar(X)|_F^2 = rank."""
    x = _matrix(6, 9, condition=5)
    kwargs = {"coefficients": "polar_express", "steps": 12} if method in ITERATIVE else {}
    got = _polar64(x, method, **kwargs)
    assert np.sum(x * got) == pytest.approx(np.linalg.norm(x, "nuc"), rel=1e-12)
    assert np.linalg.norm(got, 2) == pytest.approx(1, rel=1e-12)
    assert np.linalg.norm(got) ** 2 == pytest.approx(6, rel=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_orthogonal_equivariance(method):
    """polar(P X Q) = P polar(X) Q for orthogonal P and Q."""
    x = _matrix(6, 9)
    p, q = np.linalg.qr(_matrix(6, 6, seed=1))[0], np.linalg.qr(_matrix(9, 9, seed=2))[0]
    np.testing.assert_allclose(_polar64(p @ x @ q, method), p @ _polar64(x, method) @ q, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_closed_forms(method):
    """Diagonal gives signs, a vector its direction, rank one u v^T / |u| |v|, orthogonal itself."""
    kwargs = {"coefficients": "polar_express", "steps": 14} if method in ITERATIVE else {}
    signs = np.diag([1.0, -1.0, 1.0])
    np.testing.assert_allclose(
        _polar64(signs * np.array([3.0, 0.1, 1.0]), method, **kwargs), signs, atol=1e-12
    )
    v = _matrix(5, 1)
    for x in (v, v.T):
        np.testing.assert_allclose(_polar64(x, method, **kwargs), x / np.linalg.norm(x), atol=1e-12)
    orthogonal = np.linalg.qr(_matrix(4, 4))[0]
    np.testing.assert_allclose(_polar64(orthogonal, method, **kwargs), orthogonal, atol=1e-12)


@pytest.mark.parametrize("method", [*ITERATIVE, "eigh"])
def test_rank_one_is_only_scaled(method):
    """The null space of a rank-deficient matrix stays empty."""
    x = _matrix(6, 1) @ _matrix(1, 4, seed=1)
    kwargs = {"coefficients": "polar_express", "steps": 14} if method in ITERATIVE else {}
    # eigh keeps null directions that rounding lifts over its floor, up to sqrt(eps).
    atol = 3e-8 if method == "eigh" else 1e-12
    np.testing.assert_allclose(_polar64(x, method, **kwargs), x / np.linalg.norm(x), atol=atol)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("method", METHODS)
def test_scale_free_from_tiny_to_huge(method, dtype):
    """c X has the factor of X for c from 2e-35 to 4e37, powers of two so that nothing rounds.

    Near the largest float the divisor is another one, and the quotient rounds differently.
    """
    x = jnp.asarray(_matrix(6, 9), dtype)
    fun = jax.jit(lambda x: spectral.polar(x, method))
    want = fun(x)
    for power in (-115, -60, 60, 90, 125):
        got = fun(x * jnp.asarray(2.0**power, dtype))
        atol = 0 if power < 96 else 1e3 * float(jnp.finfo(jnp.float32).eps)  # slope of p at zero
        np.testing.assert_allclose(got.astype(float), want.astype(float), rtol=0, atol=atol)


@pytest.mark.parametrize("method", METHODS)
def test_zero_gives_zero_and_nan_stays_visible(method):
    """In a stack each matrix answers for itself: zero is zero, NaN and inf make NaN."""
    x = jnp.asarray(np.stack([_matrix(3, 4)] * 4), jnp.float32)
    x = x.at[1].set(0).at[2, 0, 1].set(jnp.nan).at[3, 2, 3].set(jnp.inf)
    row = jnp.array([[1.0, 2.0, jnp.inf]])
    assert np.all(np.isnan(spectral.polar(row, method)))
    assert spectral.polar(jnp.zeros((0, 3, 4)), method).shape == (0, 3, 4)
    got = jax.jit(lambda x: spectral.polar(x, method))(x)
    assert np.all(np.isfinite(got[0]))
    np.testing.assert_array_equal(got[1], 0)
    assert np.all(np.isnan(got[2:]))


@pytest.mark.parametrize("shape", [(3, 8, 5), (2, 2, 5, 8), (20, 128, 256), (5, 600, 700)])
def test_stack_is_a_loop(shape):
    """Every matrix of a stack has its own norm; in pieces for a CPU's cache or at once."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)
    x = x * (1 + jnp.arange(shape[0], dtype=x.dtype)).reshape(-1, *[1] * (x.ndim - 1))
    got = jax.jit(spectral.polar)(x)
    one = jax.jit(spectral.polar)
    for i in np.ndindex(*shape[:-2]):
        np.testing.assert_allclose(got[i], one(x[i]), atol=2e-5)


def test_auto_takes_the_gram_form_from_an_aspect_ratio_of_one_and_a_half():
    """Under 1.5 the plain form has fewer operations."""
    for shape, method in (((8, 11), "newton_schulz"), ((8, 12), "gram"), ((12, 8), "gram")):
        x = jnp.asarray(_matrix(*shape), jnp.float32)
        np.testing.assert_array_equal(spectral.polar(x), spectral.polar(x, method))


@pytest.mark.parametrize("method", ["qdwh", "eigh"])
@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (5, 3)])
def test_derivative_of_the_exact_methods(shape, method):
    """The derivative in the eigenbasis agrees with central differences in float64."""
    x, dx = _matrix(*shape), _matrix(*shape, seed=1)
    with jax.enable_x64(True):
        fun = jax.jit(lambda x: spectral.polar(x, method))
        _, got = jax.jvp(fun, (jnp.asarray(x),), (jnp.asarray(dx),))
        h = 1e-6
        want = (_oracle(x + h * dx) - _oracle(x - h * dx)) / (2 * h)
        np.testing.assert_allclose(got, want, atol=1e-7)
        back = jax.vjp(fun, jnp.asarray(x))[1](jnp.asarray(want))[0]
        assert float(jnp.sum(back * dx)) == pytest.approx(float(np.sum(want * want)), rel=1e-7)


def test_derivative_at_equal_singular_values_is_finite():
    """An orthogonal matrix has one eigenvalue n times; the derivative is the skew part."""
    dx = _matrix(3, 3)
    with jax.enable_x64(True):
        for method in ("qdwh", "eigh"):
            _, got = jax.jvp(
                lambda x, method=method: spectral.polar(x, method),
                (jnp.eye(3),),
                (jnp.asarray(dx),),
            )
            np.testing.assert_allclose(got, (dx - dx.T) / 2, atol=1e-12)


def test_products_keep_the_requested_dtype_on_the_wire():
    """dtype= sets the dtype of the products with x, not that of the result."""
    x = jnp.asarray(_matrix(6, 16), jnp.float32)
    text = jax.jit(lambda x: spectral.polar(x, dtype=jnp.bfloat16)).lower(x).as_text()
    assert "tensor<6x16xbf16>" in text
    assert spectral.polar(x, dtype=jnp.bfloat16).dtype == jnp.float32
    assert "bf16" not in jax.jit(spectral.polar).lower(x).as_text()


def test_small_products_of_the_gram_form_are_at_the_highest_precision():
    """An accelerator's default rounds float32 factors, and the Gram form diverges in 16 bits."""
    x = jnp.asarray(_matrix(6, 16), jnp.float32)
    for precision in (None, jax.lax.Precision.HIGHEST):
        fun = jax.jit(lambda x, precision=precision: spectral.polar(x, "gram", precision=precision))
        dots = [line for line in fun.lower(x).as_text().splitlines() if "dot_general" in line]
        small = [line for line in dots if "6x16" not in line]
        assert len(small) == 14 and len(dots) == 18
        assert all("HIGHEST" in line for line in small)
        assert all(("HIGHEST" in line) == (precision is not None) for line in set(dots) - {*small})


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((jnp.ones(3),), {}, ValueError, r"x must have shape \[..., m, n\].*got \(3,\)"),
        ((jnp.ones((2, 0)),), {}, ValueError, r"got \(2, 0\)"),
        ((jnp.ones((2, 2), jnp.int32),), {}, TypeError, "x must be real floating, got int32"),
        ((jnp.ones((2, 2), jnp.complex64),), {}, TypeError, "got complex64"),
        ((jnp.ones((2, 2)), "svd"), {}, ValueError, "method must be one of 'auto'.*got 'svd'"),
        ((jnp.ones((2, 2)), "qdwh", "you"), {}, ValueError, "coefficients='you'.*method='qdwh'"),
        ((jnp.ones((2, 2)), "eigh", np.ones((2, 3))), {}, ValueError, "coefficients=array"),
        ((jnp.ones((2, 2)), "eigh"), {"steps": 3}, ValueError, "steps=3 with method='eigh'"),
        ((jnp.ones((2, 2)), "eigh"), {"dtype": jnp.bfloat16}, ValueError, "dtype=.*bfloat16"),
        ((jnp.ones((2, 2)), "qdwh"), {"precision": "highest"}, ValueError, "precision='highest'"),
        ((jnp.ones((2, 2)),), {"dtype": jnp.int8}, TypeError, "dtype must be a real floating"),
        ((jnp.ones((2, 2)),), {"steps": 0}, ValueError, "steps must be at least 1, got 0"),
    ],
)
def test_bad_input_is_named(args, kwargs, error, match):
    """Each message names the argument and what it got."""
    with pytest.raises(error, match=match):
        spectral.polar(*args, **kwargs)
