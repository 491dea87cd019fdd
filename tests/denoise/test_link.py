"""The transformation behind all denoisers: its numbers, dtypes, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxkit import denoise

PARAMS = {"layer": {"b": jnp.zeros(2), "w": jnp.ones((2, 3))}, "none": None, "scale": jnp.ones([])}
ONES = jax.tree.map(jnp.ones_like, PARAMS)
MEMBERS = {
    "ema": lambda **options: denoise.ema(0.3, **options),
    "igt": lambda **options: denoise.igt(0.3, **options),
    "order_3": lambda **options: denoise.denoise(0.3, order=3, **options),
    "disk": lambda **options: denoise.disk(**options),
    "storm": lambda **options: denoise.storm(0.3, **options),
    "hvp": lambda **options: denoise.hvp(0.3, **options),
}
each_member = pytest.mark.parametrize("name", MEMBERS)


def update(tx, grads, state, params):
    return tx.update(grads, state, params, queried=True, hvp=grads)


@each_member
def test_the_first_gradient_comes_back(name):
    """Step 0 returns its gradient bit for bit, None leaves and scalars too, and counts one."""
    grads = jax.tree.map(lambda x: x * 0.3, ONES)
    out, state = update(MEMBERS[name](), grads, MEMBERS[name]().init(PARAMS), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, out, grads)
    jax.tree.map(np.testing.assert_array_equal, state.estimate, grads)
    assert state.step == 1 and state.step.dtype == jnp.int32 and out["none"] is None


@each_member
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_has_a_float32_estimate(name, dtype):
    """Updates and prev_params have the dtype of the parameters, the estimate has float32."""
    params = jax.tree.map(lambda x: x.astype(dtype), PARAMS)
    out, state = update(MEMBERS[name](), params, MEMBERS[name]().init(params), params)
    assert {x.dtype for x in jax.tree.leaves((out, state.prev_params))} == {jnp.dtype(dtype)}
    assert {x.dtype for x in jax.tree.leaves(state.estimate)} == {jnp.dtype(jnp.float32)}
    assert state.gain.dtype == jnp.float32


@each_member
def test_the_estimate_may_be_narrow_but_not_the_parameters(name):
    """``accumulator_dtype`` is that of the estimate, and of nothing else; updates keep theirs."""
    tx = MEMBERS[name](accumulator_dtype=jnp.bfloat16)
    out, state = update(tx, ONES, tx.init(PARAMS), PARAMS)
    assert {x.dtype for x in jax.tree.leaves(state.estimate)} == {jnp.dtype(jnp.bfloat16)}
    assert {x.dtype for x in jax.tree.leaves((out, state.prev_params))} == {jnp.dtype(jnp.float32)}


def test_averages_of_half_precision_do_not_stall():
    """At a gain of 1e-3 a bfloat16 average of ones from zero gets to .63 in 1000 steps."""
    tx, x = denoise.ema(1e-3), jnp.zeros(2, jnp.bfloat16)

    def step(state, grads):
        out, state = tx.update(grads, state, x)
        return state, out

    grads = jnp.ones((1001, 2), jnp.bfloat16).at[0].set(0)
    _, out = jax.jit(lambda: jax.lax.scan(step, tx.init(x), grads))()
    np.testing.assert_allclose(out[-1].astype(jnp.float32), 1 - 0.999**1000, rtol=5e-3)


@each_member
def test_float32_and_float64_leaves_stand_side_by_side(name):
    """Each leaf keeps its dtype through query, combination and update; numbers are float64."""
    with jax.enable_x64(True):
        params = {"a": jnp.ones(2, jnp.float32), "b": jnp.ones(3, jnp.float64)}
        dtypes = jax.tree.map(lambda x: x.dtype, params)
        tx = MEMBERS[name]()
        points, weights = denoise.query_points(tx.init(params), params)
        grads = denoise.combine(lambda x: x, points, weights)
        out, state = update(tx, grads, tx.init(params), params)
        for tree in (points, grads, out, state.estimate):
            assert jax.tree.map(lambda x: x.dtype, tree) == dtypes
        assert weights.dtype == state.gain.dtype == jnp.float64


@each_member
def test_an_empty_tree_passes(name):
    """There is nothing to do, and it is done."""
    tx = MEMBERS[name]()
    assert update(tx, {}, tx.init({}), {})[0] == {}


@each_member
def test_the_state_is_two_copies_at_most(name):
    """Beside numbers it holds the estimate and, unless asked at the parameters, those before."""
    params = {"w": jnp.zeros((100, 100))}
    state = MEMBERS[name]().init(params)
    floats = sum(x.size for x in jax.tree.leaves(state))
    assert floats - 10_000 * (1 if name == "ema" else 2) < 12


@each_member
def test_gradients_that_are_not_finite_pass_through(name):
    """Inf and NaN arrive where they came from, for a guard around the chain to see."""
    bad = {**ONES, "scale": jnp.array(jnp.nan)}
    out, _ = update(MEMBERS[name](), bad, MEMBERS[name]().init(PARAMS), PARAMS)
    assert jnp.isnan(out["scale"]) and np.isfinite(out["layer"]["w"]).all()


@pytest.mark.parametrize("gain", [0, -0.1, 1.5, float("nan")])
@pytest.mark.parametrize("make", [denoise.denoise, denoise.ema, denoise.storm, denoise.hvp])
def test_gains_outside_0_1_are_refused(make, gain):
    """The message has the value."""
    with pytest.raises(ValueError, match=rf"gain must be in \(0, 1\], got {gain}"):
        make(gain)


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: denoise.disk(0.0), ValueError, r"kappa must be in \(0, 1\], got 0.0"),
        (lambda: denoise.disk(gamma=0.0), ValueError, r"gamma must be in \(0, inf\), got 0.0"),
        (lambda: denoise.storm("auto"), TypeError, "gain must be a number, got 'auto'"),
        (lambda: denoise.igt(jnp.ones(2)), ValueError, r"gain must have shape \[\], got \(2,\)"),
        (
            lambda: denoise.denoise(0.1, trust_radius=0.0),
            ValueError,
            r"trust_radius must be in \(0, inf\), got 0.0",
        ),
        (
            lambda: denoise.denoise(0.1, relative_trust_radius=-1.0),
            ValueError,
            r"relative_trust_radius must be in \(0, inf\), got -1.0",
        ),
        (
            lambda: denoise.igt(0.1, accumulator_dtype=jnp.int32),
            TypeError,
            "accumulator_dtype must be a real floating dtype or None",
        ),
    ],
)
def test_bad_numbers_are_named(make, error, match):
    """Each message names the argument as the function calls it."""
    with pytest.raises(error, match=match):
        make()


def test_bad_updates_are_named():
    """Missing arguments and trees that are not alike raise errors that say what and where."""
    tx = denoise.igt(0.3)
    state = tx.init(PARAMS)
    wrong = {**ONES, "layer": {"b": jnp.ones(3), "w": jnp.ones((2, 3))}}
    for args, extra, match in (
        ((ONES, state), {"queried": True}, "params must be given to update, got None"),
        ((ONES, state, PARAMS), {}, "queried must be given to update: ask for gradients at"),
        (
            (wrong, state, PARAMS),
            {"queried": True},
            r"updates must have the shapes of params, wanted \[2\] at layer/b, got \[3\]",
        ),
        (
            ({**ONES, "more": jnp.ones(1)}, state, PARAMS),
            {"queried": True},
            r"updates must have the shapes of params, wanted nothing at more, got \[1\]",
        ),
        (
            (wrong, state, wrong),
            {"queried": True},
            r"params must have the shapes of the denoiser's state, wanted \[2\] at layer/b, got",
        ),
        (
            (ONES, state, PARAMS),
            {"queried": True, "noise_variance": jnp.ones(2)},
            r"noise_variance must have shape \[\], got \(2,\)",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            tx.update(*args, **extra)
    tx = denoise.hvp(0.3)
    with pytest.raises(ValueError, match="hvp must be given to update, the Hessian"):
        tx.update(ONES, tx.init(PARAMS), PARAMS)
    with pytest.raises(ValueError, match=r"hvp must have the shapes of params, .*at layer/b"):
        tx.update(ONES, tx.init(PARAMS), PARAMS, hvp=wrong)
    tx = denoise.denoise("auto", order=1)
    with pytest.raises(ValueError, match="query_variance must be given to update for gain='auto'"):
        tx.update(ONES, tx.init(PARAMS), PARAMS)
    for variance in (ONES, jnp.ones(2)):
        with pytest.raises(
            ValueError, match=r"query_variance must have .*wanted \[\] at layer/b, got \[2\]"
        ):
            tx.update(ONES, tx.init(PARAMS), PARAMS, query_variance=variance)


def test_a_traced_mark_counts_as_given():
    """``queried`` is compared with None, never by its value."""
    tx = denoise.igt(0.3)
    ask = jax.jit(lambda mark: tx.update(ONES, tx.init(PARAMS), PARAMS, queried=mark)[0])
    jax.tree.map(np.testing.assert_array_equal, ask(jnp.float32(0)), ONES)


@each_member
def test_only_real_floating_parameters_are_taken(name):
    """Whole numbers and complex ones are named by their path."""
    for bad, dtype in ((jnp.arange(2), "int32"), (jnp.ones(2, jnp.complex64), "complex64")):
        with pytest.raises(TypeError, match=f"params must be real floating, got {dtype} at a/0"):
            MEMBERS[name]().init({"a": [bad]})


@each_member
def test_a_part_of_the_parameters_is_refused(name):
    """Inside masked and partition the masked part is named, since points move all parameters."""
    mask = {"layer": {"b": False, "w": True}, "none": None, "scale": True}
    labels = {"layer": "own", "none": None, "scale": "other"}
    whole = optax.masked(MEMBERS[name](), True)
    whole.init(PARAMS)
    with pytest.raises(ValueError, match="params must be whole for a denoiser.*at layer/b"):
        optax.masked(MEMBERS[name](), mask).init(PARAMS)
    parts = {"own": MEMBERS[name](), "other": optax.sgd(0.1)}
    with pytest.raises(ValueError, match="got a masked part at scale; take it out of optax.masked"):
        optax.partition(parts, labels).init(PARAMS)
