"""The estimate as keys and scalars: what is made of it again."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import assert_equal

from jaxkit import zo

KEY = jax.random.key(0)
PARAMS = {"a": jnp.array([0.5, -1.0, 2.0]), "b": [jnp.array([[1.0, 0.3]]), None], "c": {}}


def loss_fn(params):
    return sum(jnp.sum(jnp.sin(x) + x**3) for x in jax.tree.leaves(params))


def _case():
    def run(key, params, rate):
        probe = zo.probe(loss_fn, num_samples=2, mu=0.05, direction=zo.rademacher())(key, params)
        return probe, zo.materialize(probe, params), zo.apply_probe(params, probe, rate)

    return run, (KEY, {"w": contract.normal(8, 2)}, jnp.float32(0.1))


test_contract = contract.function(
    contract.Case(
        "probe",
        _case,
        public=("probe", "materialize", "apply_probe"),
        rtol=1e-2,  # losses that round differently are divided by mu
        draws=True,
        dtypes=("float32", "float64"),
    )
)

DIRECTIONS = {
    "gaussian": zo.gaussian(),
    "low_rank": zo.low_rank(1),
}


@pytest.mark.parametrize("name", DIRECTIONS)
def test_the_estimate_is_materialized_bit_for_bit_and_applied_to_rounding(name):
    """materialize gives the bits of value_and_zo_grad; apply_probe is params - rate * that."""
    options = {"num_samples": 3, "mu": 0.1, "direction": DIRECTIONS[name]}
    value, grads = jax.jit(zo.value_and_zo_grad(loss_fn, **options))(KEY, PARAMS)
    probe = jax.jit(zo.probe(loss_fn, **options))(KEY, PARAMS)
    assert probe.keys.shape == probe.coeffs.shape == (3,) and probe.basis == ()
    assert_equal((probe.value, jax.jit(zo.materialize)(probe, PARAMS)), (value, grads))
    got = jax.jit(zo.apply_probe)(PARAMS, probe, 0.3)
    want = jax.tree.map(lambda p, g: p - 0.3 * g, PARAMS, grads)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), got, want)


def test_bfloat16_steps_that_rounding_loses_arrive_on_average_with_stochastic_rounding():
    """A hundred steps of a fiftieth of a spacing move nothing, or two spacings, give or take."""
    params = jnp.ones(4000, jnp.bfloat16)
    step = 2.0**-7 / 50
    still, moving = params, params
    run = jax.jit(zo.apply_probe, static_argnames="rounding")
    ones = zo.gaussian()._replace(draw=lambda key, i, like, basis: jnp.ones(like.shape))
    for key in jax.random.split(KEY, 100):
        probe = zo.ZOProbe(key[None], jnp.ones(1), jnp.float32(0), (), ones)
        still = run(still, probe, -step)
        moving = run(moving, probe, -step, rounding="stochastic")
    assert (still == 1).all()
    moved = np.float64(moving) - 1
    assert abs(moved.mean() - 100 * step) < 4.5 * moved.std() / 4000**0.5


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda p: zo.materialize(p.coeffs, PARAMS), TypeError, "must be a ZOProbe, got Array"),
        (lambda p: zo.materialize(p, {}), ValueError, "params must hold at least one number"),
        (lambda p: zo.apply_probe(p, p, 0.1), TypeError, "params must be real floating, got key"),
        (lambda p: zo.apply_probe(PARAMS, PARAMS, 0.1), TypeError, "must be a ZOProbe, got dict"),
        (lambda p: zo.apply_probe(PARAMS, p, None), TypeError, "learning_rate must be a number"),
        (
            lambda p: zo.apply_probe(PARAMS, p, 0.1, rounding="up"),
            ValueError,
            "rounding must be one of 'nearest', 'stochastic', got 'up'",
        ),
    ],
)
def test_bad_input_is_named(call, error, match):
    """Each message names the argument and what it got."""
    probe = zo.ZOProbe(KEY[None], jnp.ones(1), jnp.float32(0), (), zo.gaussian())
    with pytest.raises(error, match=match):
        call(probe)
