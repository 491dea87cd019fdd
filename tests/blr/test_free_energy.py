"""The free energy: its discrepancy by quadrature, and where it is stationary."""

import blr_oracles
import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkit import blr

PARAMS = contract.small_tree()
OPTIONS = {"ess": 20.0, "weight_decay": 0.1, "hess_init": 0.7}


def _state(params, hess=None, **options):
    state = blr.gblr(0.1, **{**OPTIONS, **options}).init(params)
    return state if hess is None else state._replace(hess=hess)


test_contract = contract.function(
    contract.Case(
        "free_energy",
        lambda: (blr.free_energy, (jnp.float32(0.3), PARAMS, _state(PARAMS, alpha=1.5))),
        dtypes=("float32", "float64"),
    )
)

# Two coordinates, so that the sum is one of different terms.
MEANS, HESS, PRIOR = np.array([0.4, -0.3]), np.array([1.5, 0.2]), np.array([-0.2, 0.1])


def _discrepancy(alpha, unit=1.0):
    """Returns D by quadrature, in units of ``unit``."""
    natural = OPTIONS["ess"] * (HESS + OPTIONS["weight_decay"]) * unit**2
    prior = OPTIONS["ess"] * OPTIONS["weight_decay"] * unit**2
    return sum(
        blr_oracles.discrepancy(alpha, m / unit, s, p / unit, prior)
        for m, s, p in zip(MEANS, natural, PRIOR, strict=True)
    )


def _free_energy(**options):
    params, hess, prior = (jnp.float32(x) for x in (MEANS, HESS, PRIOR))
    return float(blr.free_energy(0.5, params, _state(params, hess, **options), prior_mean=prior))


@pytest.mark.parametrize("alpha", [0.7, 1.0, 2.0, 4.0])
def test_discrepancy_is_an_integral_at_every_reference(alpha):
    """At Lebesgue's as it is; at another as in the unit in which that one is Lebesgue's."""
    want = 10 + _discrepancy(alpha)
    assert _free_energy(alpha=alpha, reference="lebesgue") == pytest.approx(want, rel=3e-5)
    if alpha != 1:
        # sigma^2 = unit^2 C (S unit^2)^-gamma is 1 / S at the reference.
        gamma = 2 / (1 + alpha)
        constant = blr_oracles.density(alpha).mean(np.square)
        for reference, value in (("init", 20 * 0.8), (3.0, 3.0)):
            unit = np.sqrt(constant ** (-1 / (1 - gamma)) / value)
            want = 10 + _discrepancy(alpha, unit)
            got = _free_energy(alpha=alpha, reference=reference)
            assert got == pytest.approx(want, rel=3e-5)


def test_logdet_is_the_divergence_of_normals_whatever_the_noise():
    """(S0 / S - 1 - log(S0 / S) + S0 (mu - mu0)^2) / 2, at every alpha."""
    ratio = 0.1 / (HESS + 0.1)
    want = 10 + np.sum(ratio - 1 - np.log(ratio) + 2 * (MEANS - PRIOR) ** 2) / 2
    for alpha in (0.7, 1.0, 3.0):
        assert _free_energy(alpha=alpha, geometry="logdet") == pytest.approx(want, rel=1e-5)
    assert _free_energy(alpha=1.0) == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize("geometry", ["tsallis", "logdet"])
@pytest.mark.parametrize("alpha", [0.7, 1.0, 3.0])
def test_it_is_stationary_where_the_rule_stands_still(alpha, geometry):
    """For a loss c (theta - t)^2 / 2 that is h = c and the mean between t and the prior's."""
    curvature, target = jnp.float32([1.5, 0.2]), jnp.float32([2.0, -1.0])
    decay = OPTIONS["weight_decay"]
    mean = (curvature * target + decay * jnp.float32(PRIOR)) / (curvature + decay)

    def value(mean, hess):
        state = _state(mean, hess, alpha=alpha, geometry=geometry)
        from_mean = jnp.square(mean - target)
        theta, noise = blr.sample_posterior(jax.random.key(0), mean, state)
        width = (theta - mean) / noise
        loss = jnp.sum(curvature * (from_mean + jnp.square(width))) / 2
        return blr.free_energy(loss, mean, state, prior_mean=jnp.float32(PRIOR))

    slopes = jax.jit(jax.grad(value, (0, 1)))
    np.testing.assert_allclose(jnp.stack(slopes(mean, curvature)), 0, atol=2e-4)
    assert jnp.all(jnp.abs(jnp.stack(slopes(mean + 0.1, curvature * 1.1))) > 1e-2)


def test_several_states_add_up_and_other_leaves_do_not_count():
    """Each in proportion to the ess of the first."""
    params = {"a": jnp.float32(MEANS), "b": 2 * jnp.float32(MEANS), "c": jnp.ones(3)}
    rules = {
        "one": blr.gblr(0.1, **OPTIONS),
        "two": blr.gblr(0.1, **{**OPTIONS, "ess": 40.0}, alpha=2.0),
        "rest": optax.sgd(0.1),
    }
    tx = optax.partition(rules, {"a": "one", "b": "two", "c": "rest"})
    got = float(blr.free_energy(0.5, params, tx.init(params)))
    parts = [
        float(blr.free_energy(0.0, params[name], rules[rule].init(params[name])))
        for name, rule in (("a", "one"), ("b", "two"))
    ]
    assert got == pytest.approx(10 + parts[0] + parts[1] / 2, rel=1e-5)


def test_parameters_of_few_bits_count_with_their_master():
    """The mean of the posterior is in float32, where the parameter is rounded."""
    params = jnp.bfloat16(MEANS)
    state = _state(params)
    state = state._replace(master=state.master + 5e-4)
    wide = params.astype(jnp.float32) + 5e-4
    want = blr.free_energy(0.0, wide, _state(wide))
    got = blr.free_energy(0.0, params, state)
    assert got.dtype == jnp.float32
    assert float(got) == pytest.approx(float(want), rel=1e-6)


def test_without_weight_decay_it_is_nan():
    """The prior is improper then."""
    assert np.isnan(_free_energy(weight_decay=0.0))


def test_bad_input_is_named():
    """No posterior in the state, and trees of other shapes."""
    params = jnp.ones(2)
    with pytest.raises(ValueError, match="opt_state must hold a GBLRState, got none"):
        blr.free_energy(0.0, params, optax.sgd(0.1).init(params))
    with pytest.raises(ValueError, match=r"params must have the shapes .* wanted \(2,\)"):
        blr.free_energy(0.0, jnp.ones(3), _state(params))
    with pytest.raises(ValueError, match=r"prior_mean must have the shapes .* wanted \(2,\)"):
        blr.free_energy(0.0, params, _state(params), prior_mean=jnp.ones(3))
    with pytest.raises(ValueError, match="prior_mean must have the structure"):
        blr.free_energy(0.0, {"w": params}, _state({"w": params}), prior_mean=params)
