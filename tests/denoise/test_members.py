"""The members: each is its formula, and exactness tells them apart."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from denoise_problems import follow, path, polynomial

from jaxkit import denoise


def queried(grads, params):
    del grads, params
    return {"queried": True}


def _case(name, make, extra=queried):
    return contract.Case(name, make, extra=extra, within=("chain", "multi_steps"))


test_contract = contract.transformation(
    _case("ema", lambda: denoise.ema(0.3)),
    _case("igt", lambda: denoise.igt(0.3)),
    _case("disk", denoise.disk),
    _case("storm", lambda: denoise.storm(0.3)),
    _case("hvp", lambda: denoise.hvp(0.3), extra=lambda grads, params: {"hvp": params}),
)

POINTS = path(30, 5)
GRADIENT = polynomial(4, 5)


def run(tx, gradient=GRADIENT, noise=None, hessian=None, points=POINTS):
    """Returns the estimates along the points in float64, and the gradients."""
    with jax.enable_x64(True):
        points = jnp.asarray(points)
        noise = None if noise is None else jnp.asarray(noise)
        got = follow(tx, gradient, points, noise, hessian)
        return np.asarray(got), np.asarray(jax.vmap(gradient)(points))


def test_ema_is_that_of_optax_started_from_the_first_gradient():
    """Equal to ``optax.ema`` without debias and with the first gradient in its state."""
    got, grads = run(denoise.ema(0.3))
    tx = optax.ema(0.7, debias=False)
    state = tx.init(jnp.zeros(5))._replace(ema=jnp.asarray(grads[0], jnp.float32))
    for g, want in zip(grads[1:], got[1:], strict=True):
        out, state = tx.update(jnp.asarray(g, jnp.float32), state)
        np.testing.assert_allclose(out, want, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("kappa", [0.1, 0.7])
def test_disk_with_the_probe_of_igt_is_igt(kappa):
    """At gamma = (1 - kappa) / kappa all weight is on igt's query."""
    got, _ = run(denoise.disk(kappa, gamma=(1 - kappa) / kappa))
    np.testing.assert_allclose(got, run(denoise.igt(kappa))[0], rtol=1e-10)


def answers_at(gradient, points, offsets):
    """Returns the gradients at ``x + offset * d`` of each step, NumPy float64."""
    steps = np.diff(points, axis=0, prepend=points[:1])
    with jax.enable_x64(True):
        return [np.asarray(jax.vmap(gradient)(jnp.asarray(points + o * steps))) for o in offsets]


def test_disk_is_its_formula():
    """g <- (1 - kappa) g + kappa (c y(x + gamma d) + (1 - c) y(x)), noise included."""
    kappa, gamma = 0.7, 0.5
    c = (1 - kappa) / (kappa * gamma)
    noise = np.random.default_rng(0).normal(size=(30, 2, 5))
    here, ahead = answers_at(GRADIENT, POINTS, (0, gamma))
    want = [here[0] + noise[0, 0]]  # at step 0 all weight is on the parameters
    for t in range(1, 30):
        u = c * (ahead[t] + noise[t, 1]) + (1 - c) * (here[t] + noise[t, 0])
        want.append((1 - kappa) * want[-1] + kappa * u)
    np.testing.assert_allclose(
        run(denoise.disk(kappa, gamma=gamma), noise=noise)[0], want, rtol=1e-10
    )


def test_storm_is_its_formula():
    """g <- y(x) + (1 - a) (g - y(x_prev)), noise included."""
    noise = np.random.default_rng(0).normal(size=(30, 2, 5))
    here, before = answers_at(GRADIENT, POINTS, (0, -1))
    want = [here[0] + noise[0, 0]]
    for t in range(1, 30):
        want.append(here[t] + noise[t, 0] + 0.8 * (want[-1] - before[t] - noise[t, 1]))
    np.testing.assert_allclose(run(denoise.storm(0.2), noise=noise)[0], want, rtol=1e-9)


@pytest.mark.parametrize(
    ("name", "make", "exact", "fails"),
    [
        ("ema", denoise.ema, 1, 2),
        ("igt", denoise.igt, 2, 3),
        ("disk", lambda gain: denoise.disk(gain), 2, 3),
        ("storm", denoise.storm, 5, None),
        ("hvp", denoise.hvp, 3, 4),
    ],
)
def test_exactness_tells_the_members_apart(name, make, exact, fails):
    """Without noise each tracks polynomials up to its degree, and the next one not; storm all."""
    for degree, is_exact in ((exact, True), (fails, False)):
        if degree is None:
            continue
        gradient = polynomial(degree, 5)
        hessian = jax.jacobian(gradient) if name == "hvp" else None
        got, want = run(make(0.2), gradient, hessian=hessian)
        error = np.abs(got - want).max() / np.abs(want).max()
        assert (error < 1e-12) if is_exact else (error > 1e-3), (degree, error)


@pytest.mark.parametrize(
    ("make", "shared", "want"),
    [
        # With the same noise in both queries that of disk is the noise of an average.
        (lambda: denoise.disk(0.1, gamma=0.5), True, 0.1 / 1.9),
        # c = 18, so with its own in each: kappa^2 (c^2 + (1 - c)^2) / (1 - (1 - kappa)^2).
        (lambda: denoise.disk(0.1, gamma=0.5), False, 0.01 * (18**2 + 17**2) / 0.19),
        (lambda: denoise.storm(0.1), True, 0.1 / 1.9),
        (lambda: denoise.storm(0.1), False, (1 + 0.81) / 0.19),
        (lambda: denoise.hvp(0.1), True, 0.1 / 1.9),
    ],
)
def test_noise_of_its_own_in_two_queries_costs_what_theory_says(make, shared, want):
    """The stationary variance, within 5 %, with shared noise and with that of each query."""
    tx = make()
    queries = 1 if "hvp" in str(tx.init(jnp.zeros(1)).kind) else 2
    noise = jax.random.normal(jax.random.key(0), (160, 1 if shared else queries, 2000))
    noise = jnp.broadcast_to(noise, (160, queries, 2000))
    hessian = (lambda x: jnp.zeros((2000, 2000))) if queries == 1 else None
    got = follow(tx, jnp.zeros_like, jnp.zeros((160, 2000)), noise, hessian)
    np.testing.assert_allclose(np.var(got[60:]), want, rtol=0.05)


def test_a_scheduled_gain_serves_disk_storm_and_hvp():
    """The members read the gain of the step from the state as every denoiser."""
    for make in (denoise.disk, denoise.storm, denoise.hvp):
        tx, x = make(lambda step: 1 / (step.astype(jnp.float32) + 1)), jnp.zeros(2)
        _, state = tx.update(x, tx.init(x), x, queried=True, hvp=x)
        assert state.gain == 0.5
