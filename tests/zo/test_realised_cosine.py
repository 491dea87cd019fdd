"""What half precision leaves of a perturbation."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import zo

KEY = jax.random.key(0)

test_contract = contract.function(
    contract.Case(
        "realised_cosine",
        lambda: (lambda key, x: zo.realised_cosine(key, x, 1.0), (KEY, contract.normal(8, 4))),
        draws=True,
        dtypes=("float32", "float64"),
    )
)


@pytest.mark.parametrize(
    ("mu", "low", "high"), [(1e-2, 0.9995, 1.0001), (1e-3, 0.994, 0.999), (1e-4, 0.78, 0.83)]
)
def test_bfloat16_parameters_lose_small_perturbations(mu, low, high):
    """At entries of size 0.05 the cosine is 1.000, 0.997 and 0.807 at mu = 1e-2, 1e-3, 1e-4."""
    params = (0.05 * jax.random.normal(KEY, (200, 300))).astype(jnp.bfloat16)
    assert low < jax.jit(zo.realised_cosine)(jax.random.key(1), params, mu) < high


def test_the_cosine_is_that_of_the_difference_of_the_pair():
    """It agrees with rounding in NumPy, over all leaves together."""
    params = {"a": jnp.linspace(-1, 1, 40).astype(jnp.float16), "b": jnp.full(30, 3.0, jnp.float16)}
    mu = 1e-3
    seen, meant = [], []
    for i, x in enumerate(params.values()):
        key = jax.random.fold_in(jax.random.fold_in(KEY, 0), i)
        u = np.asarray(jax.random.normal(key, x.shape))
        plus, minus = (np.float32(x) + np.float32(s * mu) * u for s in (1, -1))
        seen.append(np.float64(plus.astype(np.float16)) - np.float64(minus.astype(np.float16)))
        meant.append(np.float64(u))
    seen, meant = np.concatenate(seen), np.concatenate(meant)
    want = seen @ meant / np.sqrt((seen @ seen) * (meant @ meant))
    np.testing.assert_allclose(zo.realised_cosine(KEY, params, mu, minimum=-1), want, rtol=1e-5)


def test_it_warns_below_the_minimum_and_only_outside_of_jit():
    """A cosine of 0.8 is reported where values are known."""
    params = (0.05 * jax.random.normal(KEY, (100, 100))).astype(jnp.bfloat16)
    with pytest.warns(UserWarning, match=r"mu=0.0001 rounding leaves a cosine of 0\.8\d+, wanted"):
        zo.realised_cosine(KEY, params, 1e-4)
    zo.realised_cosine(KEY, params, 1e-4, minimum=0.5)
    with pytest.warns(UserWarning, match="a cosine of nan"):
        zo.realised_cosine(KEY, jnp.ones(3, jnp.bfloat16), 1e-6)


@pytest.mark.parametrize(
    ("args", "kwargs", "error", "match"),
    [
        ((jnp.ones(3), 0.0), {}, ValueError, "mu must be in"),
        ((jnp.ones(3),), {"minimum": 2.0}, ValueError, "minimum must be in"),
        (({"n": jnp.arange(3)},), {}, TypeError, "got int32 at n"),
        (((),), {}, ValueError, "params must hold at least one number"),
    ],
)
def test_bad_input_is_named(args, kwargs, error, match):
    """Each message names the argument."""
    with pytest.raises(error, match=match):
        zo.realised_cosine(KEY, *args, **kwargs)
