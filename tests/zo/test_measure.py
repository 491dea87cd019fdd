"""Slopes, their combination and what is returned beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxkit import zo

KEY = jax.random.key(0)
SIZE = 5
SLOPE = np.arange(1.0, 6.0)


def measured(loss_fn, **options):
    """Returns the probe, the estimate and aux in float64, compiled."""
    with jax.enable_x64(True):

        def run(key, params):
            out = zo.probe(loss_fn, **options)(key, params)
            probe, aux = out if options.get("has_aux") else (out, {})
            if "key" in aux:
                aux["key"] = jax.random.key_data(aux["key"])[-1]
            return probe.value, probe.coeffs, zo.materialize(probe, params), aux

        return jax.tree.map(np.asarray, jax.jit(run)(KEY, jnp.zeros(SIZE)))


def directions(num):
    """Returns the rows ``u_k`` of normal directions from the documented keys, in float64."""
    with jax.enable_x64(True):
        keys = [jax.random.fold_in(jax.random.fold_in(KEY, k), 0) for k in range(num)]
        return np.stack([jax.random.normal(key, (SIZE,)) for key in keys])


def quartic(x):
    return jnp.sum(jnp.asarray(SLOPE) * x) + jnp.sum((x + 0.5) ** 4)


def quartic_at(x):
    return np.sum(SLOPE * x, -1) + np.sum((x + 0.5) ** 4, -1)


@pytest.mark.parametrize("mode", ["two_sided", "one_sided"])
def test_projection_has_the_measured_slopes(mode):
    """<u_k, g^> = s_k for each direction, whatever the loss."""
    mu, u = 0.3, directions(3)
    if mode == "two_sided":
        want = (quartic_at(mu * u) - quartic_at(-mu * u)) / (2 * mu)
    else:
        want = (quartic_at(mu * u) - quartic_at(np.zeros(SIZE))) / mu
    _, _, got, _ = measured(quartic, num_samples=3, mu=mu, mode=mode, aggregate="project")
    np.testing.assert_allclose(u @ got, want, rtol=1e-9)


@pytest.mark.parametrize("num_samples", [3, SIZE + 2])
def test_projection_does_not_change_when_directions_are_mixed(num_samples):
    """Sphere and orthogonal directions mix the same draws: one and the same projection of g."""
    u = directions(num_samples)
    want = np.linalg.pinv(u) @ u @ SLOPE
    for make in (zo.gaussian, zo.sphere, zo.orthogonal):
        if make is zo.orthogonal and num_samples > SIZE:
            continue
        _, _, got, _ = measured(
            lambda x: jnp.sum(jnp.asarray(SLOPE) * x),
            num_samples=num_samples,
            direction=make(),
            aggregate="project",
            mu=1.0,
        )
        np.testing.assert_allclose(got, want, rtol=1e-7)
    if num_samples >= SIZE:
        np.testing.assert_allclose(want, SLOPE, rtol=1e-9)


def test_leave_one_out_measures_against_the_mean_of_the_others():
    """s_k = (F_k - mean of F_j, j != k) / mu from K calls, whose mean is the value."""
    mu, num = 0.3, 4
    u = directions(num)
    losses = quartic_at(mu * u)
    others = (losses.sum() - losses) / (num - 1)
    value, coeffs, grads, _ = measured(
        quartic, num_samples=num, mu=mu, mode="one_sided", aggregate="rloo"
    )
    slopes = (losses - others) / mu
    np.testing.assert_allclose(coeffs, slopes / num, rtol=1e-9)
    np.testing.assert_allclose(grads, slopes @ u / num, rtol=1e-9)
    assert value == pytest.approx(losses.mean(), rel=1e-9)


CALLS = {"two_sided": [1, -1, 1, -1, 1, -1], "one_sided": [0, 1, 1, 1]}


@pytest.mark.parametrize("batch", ["map", "vmap"])
@pytest.mark.parametrize("mode", CALLS)
def test_aux_is_that_of_the_first_call_and_value_the_documented_mean(mode, batch):
    """Labels in aux are never averaged; the value is the mean of all calls, or that of the base."""
    mu, u = 0.3, directions(3)
    signs = np.array(CALLS[mode])[:, None]
    order = np.repeat(u, 2, 0) if mode == "two_sided" else np.concatenate([u[:1], u])
    points = mu * signs * order

    def loss_fn(x):
        labels = {"label": jnp.int32(x[0] > 0), "size": 3, "key": jax.random.key(7, impl="rbg")}
        return quartic(x), {"x": x, **labels, "nothing": None}

    value, _, _, aux = measured(loss_fn, num_samples=3, mu=mu, mode=mode, batch=batch, has_aux=True)
    np.testing.assert_allclose(aux["x"], points[0], rtol=1e-9)
    assert aux["size"] == 3 and aux["key"] == 7 and aux["nothing"] is None
    assert aux["label"] == (points[0][0] > 0) and aux["label"].dtype == np.int32
    want = quartic_at(points).mean() if mode == "two_sided" else quartic_at(np.zeros(SIZE))
    assert value == pytest.approx(want, rel=1e-9)


def test_a_slope_that_is_not_finite_makes_the_gradient_so_or_is_skipped():
    """By default NaN reaches every entry; skipped, the other directions count alone."""
    mu, num = 1.0, 6
    u = directions(num)

    def loss_fn(x):
        return jnp.where(x[0] > 0.5, jnp.nan, jnp.sum(jnp.asarray(SLOPE) * x))

    bad = np.abs(u[:, 0]) > 0.5
    assert 0 < bad.sum() < num
    value, _, grads, _ = measured(loss_fn, num_samples=num, mu=mu)
    assert np.isnan(grads).all() and np.isnan(value)
    value, coeffs, grads, _ = measured(loss_fn, num_samples=num, mu=mu, skip_nonfinite=True)
    slopes = np.where(bad, 0, u @ SLOPE)
    np.testing.assert_allclose(coeffs, slopes / num, rtol=1e-9)
    np.testing.assert_allclose(grads, slopes @ u / num, rtol=1e-9)
    points = np.concatenate([u, -u])
    assert value == pytest.approx((points @ SLOPE)[points[:, 0] <= 0.5].mean(), rel=1e-9)


def test_per_example_losses_are_averaged():
    """For directions of parameters the losses of the examples give no more than their mean."""
    scale = np.array([1.0, -2.0, 4.0])

    def losses(x):
        return jnp.asarray(scale) * quartic(x)

    got = measured(losses, num_samples=2, per_example=True)[:3]
    want = measured(lambda x: jnp.mean(losses(x)), num_samples=2)[:3]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), got, want)


def test_the_loss_is_traced_once():
    """Signs and directions share one trace, and a new key makes no other."""
    traces = []

    def loss_fn(x):
        traces.append(1)
        return jnp.sum(x**2)

    run = jax.jit(zo.value_and_zo_grad(loss_fn, num_samples=5))
    for seed in range(3):
        run(jax.random.key(seed), jnp.ones(3))
    assert len(traces) == 1


def test_a_corrected_direction_is_not_projected():
    """A direction that enters the gradient differently than it perturbs has no projection."""
    plain = zo.gaussian()
    corrected = plain._replace(estimate=lambda *args: 2 * plain.draw(*args))
    with pytest.raises(ValueError, match="aggregate='project' needs a direction that enters"):
        zo.probe(jnp.sum, direction=corrected, aggregate="project")
    got = measured(quartic, num_samples=2, direction=corrected)[2]
    np.testing.assert_allclose(got, 2 * measured(quartic, num_samples=2)[2], rtol=1e-12)


def test_a_direction_may_look_at_the_model_and_evaluate_by_itself():
    """The basis that ``prepare`` returns reaches every draw, and ``loss_at`` replaces the copy."""
    plain, seen = zo.gaussian(), []

    def prepare(loss_fn, params, args):
        return {"scale": jnp.abs(loss_fn(params, *args)) + 2}

    def draw(key, leaf_index, like, basis):
        return basis["scale"].astype(like.dtype) * plain.draw(key, leaf_index, like, ())

    def loss_at(loss_fn):
        def at(params, scale, key, basis, *args):
            seen.append(1)
            u = draw(jax.random.fold_in(key, 0), 0, params, basis)
            return loss_fn(params + scale * u, *args)

        return at

    u = directions(2)
    factor = abs(quartic_at(np.zeros(SIZE))) + 2
    mu = 0.3
    slopes = (quartic_at(mu * factor * u) - quartic_at(-mu * factor * u)) / (2 * mu)
    for at in (None, loss_at):
        direction = zo.Direction(prepare, draw, loss_at=at)
        got = measured(quartic, num_samples=2, mu=mu, direction=direction)[2]
        np.testing.assert_allclose(got, slopes @ (factor * u) / 2, rtol=1e-9)
    assert len(seen) == 1
    with pytest.raises(ValueError, match="axis_name needs a direction without a basis"):
        measured(quartic, direction=direction, axis_name="data")
