"""The kernel distance against all pairs in float64, and without bias."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import metrics

REAL, FAKE = contract.normal(24, 3), contract.normal(16, 3)
kid = jax.jit(metrics.kid, static_argnames=("num_blocks", "chunk"))

test_contract = contract.function(
    contract.Case(
        "kid",
        lambda: (lambda real, fake: metrics.kid(real=real, fake=fake, chunk=8), (REAL, FAKE)),
        dtypes=("float32", "float64"),
    ),
    contract.Case(
        "kid_blocks",
        lambda: (lambda real, fake: metrics.kid(real=real, fake=fake, num_blocks=2), (REAL, FAKE)),
        dtypes=("float32", "float64"),
        public="kid",
    ),
)


def _by_pairs(real, fake):
    """Returns the estimate from full matrices of the kernel in float64."""
    real, fake = np.float64(real), np.float64(fake)

    def kernel(x, y):
        return (x @ y.T / x.shape[1] + 1) ** 3

    def other(x):
        matrix = kernel(x, x)
        return (matrix.sum() - np.trace(matrix)) / (len(x) * (len(x) - 1))

    return other(real) + other(fake) - 2 * kernel(real, fake).mean()


@pytest.mark.parametrize("chunk", [5, 1024])
def test_it_is_the_sum_over_pairs(chunk):
    """For different sizes that are no multiple of the chunk."""
    for shift in (0.0, 1.0, 10.0):
        fake = FAKE + shift
        np.testing.assert_allclose(
            kid(real=REAL, fake=fake, chunk=chunk),
            _by_pairs(REAL, fake),
            rtol=1e-5,
            atol=1e-6 * (1 + shift) ** 6,
        )


def test_double_precision_is_double():
    """To 1e-12."""
    with jax.enable_x64(True):
        real, fake = np.float64(REAL), np.float64(FAKE)
        got = kid(real=real, fake=fake)
        np.testing.assert_allclose(got, _by_pairs(real, fake), rtol=1e-12)


def test_small_features_keep_their_digits():
    """The kernel is 1 within rounding, and still the value has its leading digits."""
    real, fake = 1e-4 * REAL, 1e-4 * FAKE + 1e-4
    np.testing.assert_allclose(kid(real=real, fake=fake), _by_pairs(real, fake), rtol=1e-4)


def test_blocks_are_estimates_of_disjoint_rows():
    """Each is the value of its own rows, in order; left-over rows do not count."""
    got = kid(real=REAL[:23], fake=FAKE, num_blocks=4)
    want = [_by_pairs(REAL[5 * i : 5 * i + 5], FAKE[4 * i : 4 * i + 4]) for i in range(4)]
    np.testing.assert_allclose(got, want, rtol=1e-4)


def test_it_has_no_bias():
    """The mean over 400 pairs of halves of one cloud is 0 within four standard errors."""
    x = jax.random.normal(jax.random.key(0), (400, 20, 3))
    values = jax.jit(jax.vmap(lambda x: metrics.kid(real=x[:12], fake=x[12:])))(x)
    assert abs(values.mean()) < 4 * values.std() / 20
    assert (values < 0).any()


def test_derivative_stores_no_pairs():
    """4096 x 4096 numbers would be 64 MiB."""
    rows = jax.ShapeDtypeStruct((4096, 8), jnp.float32)
    slope = jax.jit(jax.grad(lambda x, y: metrics.kid(real=x, fake=y, chunk=256)))
    assert slope.lower(rows, rows).compile().memory_analysis().temp_size_in_bytes < 2**23


def test_many_rows_take_bounded_memory():
    """50,000 by 50,000 rows, whose pairs do not fit an int32 either."""
    rows = jax.ShapeDtypeStruct((50_000, 64), jnp.float32)
    temp = kid.lower(real=rows, fake=rows).compile().memory_analysis().temp_size_in_bytes
    assert temp < 2**26


def test_bad_input_is_named():
    """Each message names the argument; under jit the value is NaN."""
    assert jnp.isnan(kid(real=REAL.at[0, 0].set(jnp.nan), fake=FAKE))
    for kwargs, error, match in (
        ({"real": REAL[:1]}, ValueError, "real must have at least 2 rows, got 1"),
        ({"num_blocks": 9}, ValueError, "fake must have at least 18 rows, got 16"),
        ({"num_blocks": 0}, ValueError, "num_blocks must be at least 1, got 0"),
        ({"chunk": 2.0}, TypeError, "chunk must be a static whole number"),
        ({"fake": FAKE[:, :2]}, ValueError, r"fake must have shape \[n, d\] with d=3"),
        ({"fake": FAKE.at[0].set(jnp.inf)}, ValueError, "fake must be finite, .* in 1 of 16"),
    ):
        with pytest.raises(error, match=match):
            metrics.kid(**{"real": REAL, "fake": FAKE, **kwargs})
