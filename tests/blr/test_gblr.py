"""The learning rule: IVON's formulas, positivity, invariances, options, bad input."""

import functools

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkit import blr
from jaxkit.blr import _state

KEY = jax.random.key(0)


PARAMS = {"b": jnp.ones(2), "w": jnp.full(2, 2.0)}
rule = functools.partial(blr.gblr, 0.2, ess=200.0, alpha=1.5, b2=0.9)


def hess_of(grads, params):
    return {"hess": jax.tree.map(lambda g: jnp.abs(g).astype(jnp.float32), grads)}


def _case(name, make, **kwargs):
    return contract.Case(name, make, extra=hess_of, **kwargs)


test_contract = contract.transformation(
    _case("gblr", lambda: blr.gblr(0.1, ess=100, alpha=1.5, b2=0.9)),
    _case("scale_by_gblr", lambda: blr.scale_by_gblr(ess=100, b2=0.9, reference="lebesgue")),
)


def ivon(params, grads, hessians, *, lr, ess, b1, b2, delta, h0):
    """Returns the mean after each step by the formulas of arXiv:2402.17641, in NumPy's float64."""
    m, h, means = np.zeros_like(params), np.full_like(params, h0), []
    for t, (g, hhat) in enumerate(zip(grads, hessians, strict=True), 1):
        m = b1 * m + (1 - b1) * g
        h = b2 * h + (1 - b2) * hhat + (1 - b2) ** 2 * (h - hhat) ** 2 / (h + delta) / 2
        params = params - lr * (h0 + delta) * (m / (1 - b1**t) + delta * params) / (h + delta)
        means.append(params)
    return np.array(means), 1 / np.sqrt(ess * (h + delta))


def test_twenty_steps_at_alpha_one_are_those_of_ivon():
    """On a loss that is not quadratic, asked at samples: means and widths to 1e-6."""
    settings = {"ess": 50.0, "b1": 0.9, "b2": 0.95}
    tx = blr.gblr(0.3, weight_decay=1e-2, hess_init=0.7, **settings)
    params = contract.normal(6)

    def loss_fn(params):
        return jnp.sum(jnp.log(jnp.cosh(params - 0.3)) + 0.1 * params**4)

    @jax.jit
    def step(key, params, state):
        theta, noise = blr.sample_posterior(key, params, state)
        width = (theta - params) / noise
        g = jax.grad(loss_fn)(theta)
        hess = g * noise / width
        updates, state = tx.update(g, state, params, hess=hess)
        return optax.apply_updates(params, updates), state, g, hess

    state, rows = tx.init(params), []
    start = params
    for i in range(20):
        params, state, g, hess = step(jax.random.fold_in(KEY, i), params, state)
        rows.append((np.float64(params), np.float64(g), np.float64(hess)))
    got, grads, hessians = (np.stack(column) for column in zip(*rows, strict=True))
    want, width = ivon(np.float64(start), grads, hessians, lr=0.3, delta=1e-2, h0=0.7, **settings)
    np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())
    got = _state.marginals(params, state)[0].stddev
    np.testing.assert_allclose(got, width, rtol=2e-6)


@pytest.mark.parametrize("alpha", [0.7, 1.0, 2.0, 9.0])
def test_the_precision_stays_positive(alpha):
    """A curvature of -1e6 leaves at least 2 / (3 + alpha) of h + delta; the worst leaves that."""
    delta, h0 = 0.25, 1.75
    worst = h0 - (h0 + delta) * 2 * (1 + alpha) / (3 + alpha)  # x = -1 / (2 kappa), rho = 1
    for hess, b2 in ((-1e6, 0.9), (-1e6, 0.0), (worst, 0.0)):
        tx = blr.gblr(0.1, ess=1.0, alpha=alpha, b2=b2, hess_init=h0, weight_decay=delta)
        params = jnp.zeros(1)
        _, state = tx.update(params, tx.init(params), params, hess=jnp.full(1, hess))
        share = (state.hess[0] + delta) / (h0 + delta)
        assert share >= 2 / (3 + alpha) * (1 - 1e-5)
    np.testing.assert_allclose(share, 2 / (3 + alpha), rtol=1e-5)
    assert state.exponent == pytest.approx(2 / (1 + alpha))


def test_options_do_what_they_say():
    """Prior mean, clipping, rescaling and gradsq, by hand for one step."""
    params, g, hess = jnp.array([2.0, -1.0]), jnp.array([3.0, 0.5]), jnp.array([1.0, 3.0])
    common = {"ess": 5.0, "b1": 0.0, "b2": 0.0, "hess_init": 2.0, "weight_decay": 0.5}

    def new_h(hhat):
        return hhat + (hhat - 2) ** 2 / 2.5 / 2

    def updates(extra=None, **options):
        tx = blr.gblr(0.1, **common, **options)
        return tx.update(g, tx.init(params), params, **({"hess": hess} if extra is None else extra))

    newton = (g + 0.5 * params) / (new_h(hess) + 0.5)
    np.testing.assert_allclose(updates()[0], -0.1 * 2.5 * newton, rtol=1e-6)
    np.testing.assert_allclose(updates(rescale_lr=False)[0], -0.1 * newton, rtol=1e-6)
    got = updates(clip_radius=0.3)[0]
    np.testing.assert_allclose(got, -0.25 * np.clip(newton, -0.3, 0.3), rtol=1e-6)
    got = updates(prior_mean=jnp.array([4.0, -1.0]))[0]
    want = -0.25 * (g + 0.5 * (params - jnp.array([4.0, -1.0]))) / (new_h(hess) + 0.5)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    got = updates(extra={}, hessian="gradsq", batch_size=8)[0]
    np.testing.assert_allclose(got, -0.25 * (g + 0.5 * params) / (new_h(8 * g**2) + 0.5), rtol=1e-6)


def widths(params, **options):
    state = blr.gblr(0.1, ess=40.0, **options).init(params)
    return [marginal.stddev for marginal in _state.marginals(params, state)]


def test_scaling_the_parameters_scales_the_posterior_unless_the_reference_is_lebesgue():
    """Theta times c is curvature over c^2, and sigma times c; Lebesgue's is times c^gamma."""
    c, params = 3.0, jnp.zeros(1)
    for first, second, want in (
        ({"geometry": "logdet"}, {"geometry": "logdet"}, c),
        ({"reference": "init"}, {"reference": "init"}, c),
        ({"reference": 80.0}, {"reference": 80.0 / c**2}, c),
        ({"reference": "lebesgue"}, {"reference": "lebesgue"}, c ** (2 / 3)),
    ):
        before = widths(params, alpha=2.0, hess_init=2.0, weight_decay=0.0, **first)
        after = widths(params, alpha=2.0, hess_init=2.0 / c**2, weight_decay=0.0, **second)
        np.testing.assert_allclose(after[0] / before[0], want, rtol=1e-5)
    # sigma^2 = C S^-gamma with C_2 = 0.262074 in units of the parameters themselves.
    got = widths(params, alpha=2.0, hess_init=2.0, weight_decay=0.0, reference="lebesgue")
    np.testing.assert_allclose(got[0], np.sqrt(0.262074 * 80 ** (-2 / 3)), rtol=1e-5)


@pytest.mark.parametrize("alpha", [0.7, 1.0, 3.0])
def test_the_width_falls_with_the_precision_by_its_exponent(alpha):
    """The slope of log sigma on log S is -1 / (1 + alpha); -1/2 for logdet."""
    params, h = jnp.zeros(5), jnp.array([0.1, 1.0, 10.0, 100.0, 1e3])
    for options, slope in (
        ({}, -1 / (1 + alpha)),
        ({"reference": "lebesgue"}, -1 / (1 + alpha)),
        ({"geometry": "logdet"}, -0.5),
    ):
        tx = blr.gblr(0.1, ess=10.0, alpha=alpha, weight_decay=0.0, **options)
        state = tx.init(params)._replace(hess=h)
        width = _state.marginals(params, state)[0].stddev
        got = np.polyfit(np.log(h), np.log(width), 1)[0]
        np.testing.assert_allclose(got, slope, atol=1e-5)


def test_a_reference_per_leaf_sets_the_width_there():
    """With S at the reference, sigma is its root, whatever alpha; leaves may have one number."""
    params = {"a": jnp.zeros(2), "b": jnp.zeros(3)}
    got = widths(params, alpha=2.5, weight_decay=0.0, reference={"a": 40.0, "b": jnp.full(3, 40.0)})
    for width in got:
        np.testing.assert_allclose(width, 40**-0.5, rtol=1e-6)
    got = widths(params, alpha=2.5, weight_decay=0.0, reference={"a": 5.0, "b": 40.0})
    np.testing.assert_allclose(got[0], 5**-0.5 * 8 ** (-1 / 3.5), rtol=1e-5)


def test_a_step_is_continuous_in_alpha():
    """At 1 +- 1e-5 parameters and widths are within 1e-3 of those at 1."""

    @jax.jit
    def after(alpha):
        tx = blr.gblr(0.1, ess=100.0, alpha=alpha, b2=0.9, reference="lebesgue")
        params, state = contract.normal(8), tx.init(contract.normal(8))
        run = blr.gblr_value_and_grad(lambda p: jnp.sum(p**2 + jnp.sin(p)))
        for i in range(2):
            _, grads, hess = run(jax.random.fold_in(KEY, i), params, state)
            updates, state = tx.update(grads, state, params, hess=hess)
            params = optax.apply_updates(params, updates)
        return params, state.hess

    want = after(1.0)
    for alpha in (1 - 1e-5, 1 + 1e-5):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3), after(alpha), want
        )


def test_bfloat16_parameters_follow_a_float32_mean():
    """Updates far below a unit in the last place add up, and h moves at b2 = 0.99999."""
    tx = blr.gblr(1e-4, ess=1e6, b1=0.0)
    params = {"w": jnp.full(4, 1.5, jnp.bfloat16)}
    state = tx.init(params)
    update = jax.jit(tx.update)
    ones = {"w": jnp.ones(4, jnp.bfloat16)}
    for _ in range(200):
        updates, state = update(ones, state, params, hess={"w": jnp.full(4, 50.0)})
        params = optax.apply_updates(params, updates)
    wide = blr.gblr(1e-4, ess=1e6, b1=0.0, weight_decay=1e-4)
    mean, other = {"w": jnp.full(4, 1.5)}, wide.init({"w": jnp.full(4, 1.5)})
    for _ in range(200):
        updates, other = jax.jit(wide.update)(
            {"w": jnp.ones(4)}, other, mean, hess={"w": jnp.full(4, 50.0)}
        )
        mean = optax.apply_updates(mean, updates)
    np.testing.assert_allclose(state.master["w"], mean["w"], rtol=1e-6)
    np.testing.assert_array_equal(params["w"], state.master["w"].astype(jnp.bfloat16))
    assert params["w"].dtype == jnp.bfloat16 and params["w"][0] < 1.49
    np.testing.assert_allclose(state.hess["w"], 1 + 49 * (1 - 0.99999**200), rtol=1e-3)


def test_parameters_changed_from_outside_count():
    """A master that no longer rounds to its parameter gives way to it."""
    tx = blr.gblr(0.1, ess=1.0, b1=0.0, b2=0.0, weight_decay=0.0)
    state = tx.init({"w": jnp.full(2, 1.5, jnp.bfloat16)})
    changed = {"w": jnp.array([1.5, 3.0], jnp.bfloat16)}
    state = state._replace(master={"w": jnp.array([1.501, 1.501])})
    zeros = {"w": jnp.zeros(2, jnp.bfloat16)}
    _, after = tx.update(zeros, state, changed, hess={"w": jnp.ones(2)})
    np.testing.assert_allclose(after.master["w"], [1.501, 3.0])


def test_whole_numbers_and_none_pass_through():
    """Leaves that are not floating keep their update, and have no state."""
    params = {"n": jnp.arange(3), "none": None, "w": jnp.ones(2)}
    tx = rule()
    state = tx.init(params)
    assert state.hess["n"] is None and state.hess["none"] is None
    run = blr.gblr_value_and_grad(lambda p: jnp.sum(p["w"] ** 2 * p["n"].astype(jnp.float32)[1:]))
    _, grads, hess = run(KEY, params, state)
    updates, _ = tx.update(grads, state, params, hess=hess)
    new = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(new["n"], params["n"])
    assert new["none"] is None and (new["w"] != 1).all()


def test_heavy_tails_warn_of_an_infinite_variance():
    """At and below 0.6, where the fourth moment ends; not with gradsq, which does not use it."""
    with pytest.warns(UserWarning, match="alpha=0.6 is at most 0.6"):
        blr.gblr(0.1, ess=1.0, alpha=0.6)
    with pytest.warns(UserWarning, match="alpha=0.5 is at most 0.6"):
        blr.scale_by_gblr(ess=1.0, alpha=0.5)
    blr.gblr(0.1, ess=1.0, alpha=0.5, hessian="gradsq", batch_size=2)
    blr.gblr(0.1, ess=1.0, alpha=0.61)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"ess": 0}, ValueError, r"ess must be in \(0, inf\), got 0"),
        ({"ess": "many"}, TypeError, "ess must be a number, got 'many'"),
        ({"alpha": 1 / 3}, ValueError, r"alpha must be in \(0.333\d*, inf\), got 0.333"),
        ({"geometry": "euclid"}, ValueError, "geometry must be one of 'tsallis', 'logdet', got 'e"),
        ({"reference": "flat"}, ValueError, "reference must be one of 'init', 'lebesgue', got 'fl"),
        ({"reference": 0.0}, ValueError, r"reference must be in \(0, inf\), got 0.0"),
        ({"reference": {"w": -1.0}}, ValueError, r"reference at w must be in \(0, inf\), got -1.0"),
        ({"reference": np.zeros(3)}, ValueError, "reference must be positive, got 0.0"),
        ({"reference": 2.0, "geometry": "logdet"}, ValueError, "reference must be 'init' with"),
        ({"hess_init": 0.0}, ValueError, r"hess_init must be in \(0, inf\), got 0.0"),
        ({"hess_init": -1.0, "weight_decay": 1.0}, ValueError, r"hess_init must be in .*got -1.0"),
        ({"weight_decay": -1e-3}, ValueError, r"weight_decay must be in \[0, inf\), got -0.001"),
        ({"b1": 1.0}, ValueError, r"b1 must be in \[0, 1\), got 1.0"),
        ({"b2": -0.1}, ValueError, r"b2 must be in \[0, 1\), got -0.1"),
        ({"clip_radius": 0.0}, ValueError, r"clip_radius must be in \(0, inf\), got 0.0"),
        ({"clip_radius": -np.inf}, ValueError, r"clip_radius must be in .*got -inf"),
        ({"learning_rate": -0.1}, ValueError, r"learning_rate must be in \[0, inf\), got -0.1"),
        ({"hessian": "reparam"}, ValueError, "hessian must be one of 'given', 'gradsq', got 're"),
        ({"hessian": "gradsq"}, ValueError, "batch_size must be given with hessian='gradsq'"),
        ({"batch_size": 8}, ValueError, "batch_size must be None with hessian='given', got 8"),
        ({"hessian": "gradsq", "batch_size": 0}, ValueError, r"batch_size must be in .*got 0"),
    ],
)
def test_bad_options_are_named(options, error, match):
    """Each message names the option and its value."""
    with pytest.raises(error, match=match):
        blr.gblr(**{"learning_rate": 0.1, "ess": 1.0, **options})


def test_bad_updates_are_named():
    """Missing params and hess, other structures and shapes, and hess where none is wanted."""
    tx, ones = rule(), jax.tree.map(jnp.ones_like, PARAMS)
    state = tx.init(PARAMS)
    for args, hess, error, match in (
        ((ones, state), ones, ValueError, "params must be given to update, got None"),
        ((ones, state, PARAMS), None, ValueError, "hess is required; get it from blr.gblr_value"),
        ((ones, state, PARAMS), {"w": 1.0}, ValueError, "hess must have the structure"),
        (
            (ones, state, PARAMS),
            {**ones, "b": jnp.ones(3)},
            ValueError,
            r"hess must have the shapes of params, wanted \(2,\) at b, got \(3,\)",
        ),
        ((ones, state, PARAMS), {**ones, "b": "no"}, TypeError, "hess at b must hold arrays only"),
    ):
        with pytest.raises(error, match=match):
            tx.update(*args, hess=hess)
    gradsq = blr.gblr(0.1, ess=1.0, hessian="gradsq", batch_size=4)
    with pytest.raises(ValueError, match="hess must be left out with hessian='gradsq'"):
        gradsq.update(ones, gradsq.init(PARAMS), PARAMS, hess=ones)
    for options, match in (
        ({"reference": {"w": 1.0}}, "reference must have the structure"),
        (
            {"reference": {"b": np.ones(3), "w": 1.0}},
            r"reference must have the shapes of params, wanted \(2,\) at b, got \(3,\)",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            rule(**options).init(PARAMS)
    prior = rule(prior_mean={"w": 1.0})
    with pytest.raises(ValueError, match="prior_mean must have the structure"):
        prior.update(ones, prior.init(PARAMS), PARAMS, hess=ones)
