"""Denoisers inside what optax offers, in scans, under vmap, on several devices, and restarted."""

import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from problems import (
    assert_close,
    assert_equal,
    assert_same_layout,
    both_kinds,
    make_mesh,
    place,
    step_of,
)

from jaxkit import denoise, train

KEY = jax.random.key(0)
RNG = np.random.default_rng(0)
PARAMS = {"b": jnp.zeros(8), "w": jnp.asarray(0.3 * RNG.normal(size=(8, 8)), jnp.float32)}
BATCHES = np.float32(RNG.normal(size=(20, 16, 8)))


def loss_fn(params, batch, key):
    del key
    hidden = jnp.tanh(batch @ params["w"] + params["b"][None])
    return jnp.mean((hidden - 0.5 * batch) ** 2)


def scheduled(gain):
    return optax.chain(denoise.denoise(gain, order=3), optax.sgd(1.0))


PLACES = {
    "order_1": lambda: optax.chain(denoise.ema(0.3), optax.sgd(1.0)),
    "default": lambda: optax.chain(denoise.denoise(), optax.sgd(1.0)),
    "behind clip": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), denoise.igt(0.3), optax.adamw(0.02)
    ),
    "disk": lambda: optax.chain(denoise.disk(0.5), optax.sgd(1.0)),
    "storm": lambda: optax.chain(denoise.storm(0.5), optax.sgd(1.0)),
    "hvp": lambda: optax.chain(denoise.hvp(0.5), optax.sgd(1.0)),
    "auto": lambda: optax.chain(denoise.denoise("auto", order=1), optax.sgd(1.0)),
    "random": lambda: optax.chain(
        denoise.denoise(0.5, order=3, random_node=True, trust_radius=0.5), optax.sgd(0.5)
    ),
    "scheduled": lambda: optax.inject_hyperparams(scheduled)(
        gain=optax.linear_schedule(1.0, 0.3, 10)
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(
        optax.chain(denoise.denoise(0.3, order=3), optax.sgd(1.0)), 3
    ),
    "multi_steps": lambda: optax.MultiSteps(optax.chain(denoise.denoise(0.3), optax.sgd(1.0)), 2),
}


@pytest.mark.parametrize("name", sorted(set(PLACES) - {"disk", "order_1"}))
def test_it_trains_inside_what_optax_offers(name):
    """The loss falls, types stay, one program serves, and 12 + 8 steps are 20 bit for bit."""
    with jax.numpy_dtype_promotion("standard"):
        tx, traces = PLACES[name](), []
        estimator = denoise.gradient_estimator(train.backprop(loss_fn))

        def counted(*args):
            traces.append(1)
            return estimator(*args)

        step = train.make_step(counted, tx)
        start = train.create(PARAMS, tx, KEY)
        types = jax.tree.map(jax.typeof, start)
        whole, metrics = train.fit(step, jax.tree.map(jnp.copy, start), BATCHES)
        assert metrics["loss"][-4:].mean() < 0.8 * metrics["loss"][0]
        assert jax.tree.map(jax.typeof, whole) == types
        again, _ = train.fit(step, jax.tree.map(jnp.copy, start), BATCHES)
        assert len(traces) == 1
        assert_equal(again, whole)
        half, _ = train.fit(step, start, BATCHES[:12])
        rest, _ = train.fit(step, half, BATCHES[12:])
        assert_equal(rest, whole)


def test_a_scan_is_the_loop():
    """The pure triple in a scan gives the numbers of a jitted loop, state and all."""
    tx, grad_fn = denoise.denoise(0.3, order=3), jax.grad(loss_fn)

    def step(carry, batch):
        params, state = carry
        points, weights = denoise.query_points(state, params)
        grads = denoise.combine(lambda p: grad_fn(p, batch, KEY), points, weights)
        out, state = tx.update(grads, state, params, queried=True)
        return (jax.tree.map(lambda p, g: p - g, params, out), state), None

    start = PARAMS, tx.init(PARAMS)
    scanned, _ = jax.jit(lambda: jax.lax.scan(step, start, BATCHES))()
    looped, jitted = start, jax.jit(lambda carry, batch: step(carry, batch)[0])
    for batch in BATCHES:
        looped = jitted(looped, batch)
    assert_close(scanned, looped, 1e-5)


def test_vmap_over_seeds_and_gains_is_the_loop():
    """Three runs of other parameters and gains at once equal each alone."""

    def run(scale, gain):
        tx = denoise.denoise(gain, order=3, trust_radius=1.0)

        def step(carry, batch):
            params, state = carry
            points, weights = denoise.query_points(state, params)
            grads = denoise.combine(jax.grad(lambda p: loss_fn(p, batch, KEY)), points, weights)
            out, state = tx.update(grads, state, params, queried=True)
            return (jax.tree.map(lambda p, g: p - g, params, out), state), None

        params = jax.tree.map(lambda p: scale * p, PARAMS)
        return jax.lax.scan(step, (params, tx.init(params)), BATCHES)[0]

    scales, gains = jnp.array([0.5, 1.0, 2.0]), jnp.array([0.1, 0.3, 1.0])
    got = jax.jit(jax.vmap(run))(scales, gains)
    alone = jax.jit(run)
    for i in range(3):
        assert_close(step_of(got, i), alone(scales[i], gains[i]), 1e-5)


def test_an_injected_gain_acts_from_the_next_step_without_compiling():
    """Changed by hand between steps it is in the next state, and reaches the query after that."""
    tx = optax.inject_hyperparams(denoise.denoise, static_args=("order", "accumulator_dtype"))(
        gain=0.5, order=3, trust_radius=8.0, accumulator_dtype=jnp.float32
    )
    state, update = tx.init(PARAMS), jax.jit(lambda s: tx.update(PARAMS, s, PARAMS, queried=True))
    _, state = update(state)
    assert state.inner_state.gain == 0.5
    state.hyperparams["gain"] = jnp.float32(0.25)
    state.hyperparams["trust_radius"] = jnp.float32(4.0)
    _, state = update(state)
    assert (state.inner_state.gain, state.inner_state.trust_radius) == (0.25, 4)
    assert update._cache_size() == 1


def test_slices_under_multi_steps_are_the_batch():
    """Points are read through the wrapper and stay while slices are averaged: two halves a step."""
    tx = optax.chain(denoise.denoise(0.3, order=3), optax.sgd(1.0))
    multi = optax.MultiSteps(tx, 2)

    def run(tx, batches):
        def step(carry, batch):
            params, state = carry
            points, weights = denoise.query_points(state, params)
            grads = denoise.combine(jax.grad(lambda p: loss_fn(p, batch, KEY)), points, weights)
            updates, state = tx.update(grads, state, params, queried=True)
            return (optax.apply_updates(params, updates), state), None

        return jax.jit(lambda: jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), batches)[0][0])()

    with jax.numpy_dtype_promotion("standard"):
        whole = run(tx, BATCHES)
        assert_close(run(multi, BATCHES.reshape(40, 8, 8)), whole, 1e-5)


@pytest.mark.parametrize("name", ["order_1", "default", "disk", "hvp", "auto"])
def test_a_gradient_that_is_not_finite_leaves_the_state_alone(name):
    """With apply_if_finite around the chain neither prev_params nor the estimate advances."""
    with jax.numpy_dtype_promotion("standard"):
        tx = optax.apply_if_finite(PLACES[name](), 5)
        update = jax.jit(tx.update)
        extra = {"queried": 1.0, "hvp": PARAMS, "query_variance": 0.1}
        _, state = update(PARAMS, tx.init(PARAMS), PARAMS, **extra)
        moved = jax.tree.map(lambda p: p + 1, PARAMS)
        bad = {**PARAMS, "b": jnp.full(8, jnp.nan)}
        updates, after = update(bad, state, moved, **extra)
        assert not any(u.any() for u in jax.tree.leaves(updates))
        assert_equal(after.inner_state, state.inner_state)
        _, after = update(PARAMS, after, moved, **extra)
        found = after.inner_state[0]
        assert found.step == 2 and all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_a_run_restarted_from_bytes_goes_on_as_it_would():
    """Saved after 12 steps and read into a fresh state, the rest is equal bit for bit."""
    tx = PLACES["default"]()
    step = jax.jit(train.make_step(denoise.gradient_estimator(train.backprop(loss_fn)), tx))
    state = train.create(PARAMS, tx, KEY)
    for batch in BATCHES[:12]:
        state, _ = step(state, batch)
    file = io.BytesIO()
    np.savez(file, *map(np.asarray, jax.tree.leaves((state.params, state.opt_state))))
    file.seek(0)
    fresh = train.create(PARAMS, tx, KEY)
    treedef = jax.tree.structure((fresh.params, fresh.opt_state))
    with np.load(file) as saved:
        params, opt_state = treedef.unflatten(jnp.asarray(saved[name]) for name in saved.files)
    fresh = fresh._replace(step=state.step, params=params, opt_state=opt_state)
    for batch in BATCHES[12:]:
        state, _ = step(state, batch)
        fresh, _ = step(fresh, batch)
    assert_equal(fresh, state)


def test_params_and_state_may_be_donated():
    """A step gives both back in the buffers that it was given."""
    tx = denoise.denoise(0.3)

    def step(params, state, batch):
        points, weights = denoise.query_points(state, params)
        grads = denoise.combine(jax.grad(lambda p: loss_fn(p, batch, KEY)), points, weights)
        out, state = tx.update(grads, state, params, queried=True)
        return jax.tree.map(lambda p, g: p - g, params, out), state

    params = jax.tree.map(jnp.copy, PARAMS)
    state = jax.jit(tx.init)(params)
    start = params, state
    want = jax.jit(step)(params, state, BATCHES[0])
    got = jax.jit(step, donate_argnums=(0, 1))(params, state, BATCHES[0])
    assert_equal(got, want)
    assert start[0]["w"].is_deleted() and start[1].estimate["w"].is_deleted()


@both_kinds
@pytest.mark.parametrize("name", ["default", "disk", "hvp"])
def test_sharded_parameters_train_as_whole_ones_and_stay_where_they_are(name, kind):
    """On 8 devices, batch and weights split; init keeps the sharding under jit too."""
    tx = PLACES[name]()
    run = jax.jit(steps_of(tx, loss_fn))
    want = run(PARAMS, tx.init(PARAMS), BATCHES[:5])
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        params, named = place(mesh, PARAMS, {"b": P(), "w": P(None, "model")})
        batches = jax.device_put(BATCHES[:5], NamedSharding(mesh, P(None, "data")))
        state = jax.jit(tx.init)(params)
        assert_same_layout((state[0].estimate, state[0].prev_params), (named, named))
        got = run(params, state, batches)
    assert_close(got, want, 1e-5)
    (after, state), _ = got
    if kind == "explicit":  # in Auto meshes the compiler places the results of a scan
        assert_same_layout((after, state[0].estimate, state[0].prev_params), (named,) * 3)


@both_kinds
@pytest.mark.parametrize("name", ["default", "random", "hvp", "auto"])
def test_a_loss_that_is_averaged_in_a_shard_map_is_that_of_one_device(name, kind):
    """Each of 8 devices sees its part of the batch, and the loss function takes the mean."""
    mesh, tx = make_mesh(kind, (8,), ("data",)), PLACES[name]()

    def averaged(*args):
        return jax.lax.pmean(loss_fn(*args), "data")

    want = jax.jit(steps_of(tx, loss_fn))(PARAMS, tx.init(PARAMS), BATCHES[:6])
    assert_close(over_devices(mesh, tx, averaged), want, 1e-5)


@pytest.mark.parametrize("name", ["default", "storm"])
def test_estimates_that_are_averaged_unchecked_are_those_of_one_device(name):
    """Without the check of what varies the mean is taken of value, gradient and extras."""
    mesh, tx = make_mesh("auto", (8,), ("data",)), PLACES[name]()
    want = jax.jit(steps_of(tx, loss_fn))(PARAMS, tx.init(PARAMS), BATCHES[:6])
    assert_close(over_devices(mesh, tx, loss_fn, axis_name="data"), want, 1e-5)


def test_what_varies_between_devices_is_combined_as_it_is():
    """Parameters of the device's own, two points in a scan: each gets its own gradient."""
    mesh = make_mesh("auto", (8,), ("data",))
    tx = denoise.denoise(0.3, order=3)
    estimator = denoise.gradient_estimator(train.backprop(loss_fn))

    def body(params, batch):
        params = jax.lax.pcast(params, "data", to="varying")
        value, grads, _, _ = estimator(KEY, params, tx.init(params), batch)
        return jax.tree.map(lambda x: x[None], (value, grads))

    run = jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))
    value, grads = jax.jit(run)(PARAMS, BATCHES[0])
    for i in range(8):
        want = jax.value_and_grad(loss_fn)(PARAMS, BATCHES[0, 2 * i : 2 * i + 2], KEY)
        assert_close((value[i], step_of(grads, i)), want, 1e-5)


def steps_of(tx, loss, axis_name=None):
    """Returns the function that trains over batches, in one scan."""
    estimator = denoise.gradient_estimator(train.backprop(loss))

    def step(carry, xs):
        params, state = carry
        index, batch = xs
        estimate = estimator(jax.random.fold_in(KEY, index), params, state, batch)
        if axis_name is not None:
            estimate = jax.lax.pmean(estimate, axis_name)
        updates, state = tx.update(estimate.grads, state, params, **estimate.extras)
        return (optax.apply_updates(params, updates), state), estimate.value

    def run(params, state, batches):
        indices = jnp.arange(len(batches), dtype=jnp.int32)
        return jax.lax.scan(step, (params, state), (indices, batches))

    return run


def over_devices(mesh, tx, loss, axis_name=None):
    """Returns what six steps give with the batch split over the devices of a shard_map."""
    split = NamedSharding(mesh, P(None, "data"))
    run = jax.shard_map(
        steps_of(tx, loss, axis_name),
        mesh=mesh,
        in_specs=(P(), P(), split.spec),
        out_specs=P(),
        check_vma=axis_name is None,
    )
    params, state = jax.device_put((PARAMS, tx.init(PARAMS)), NamedSharding(mesh, P()))
    return jax.jit(run)(params, state, jax.device_put(BATCHES[:6], split))
