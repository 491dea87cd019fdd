"""PolarGrad: its rate, the stall of plain polar, and the polar-first form."""

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
from spectral.directions import normal, polar, run

from jaxkit import spectral

# The default for the rest has a derivative of 5e7 times its rate at a zero gradient, which has to
# fit float16; optax's adam mixes int32 and float32.
test_contract = contract.transformation(
    contract.Case(
        "polargrad",
        lambda: spectral.polargrad(0.1, polar_first=True, other_learning_rate=1e-4),
        promotion="standard",
    ),
)


def test_polargrad_leaves_the_spread_of_the_singular_values():
    """On |X - C|^2 / 2 one step of alpha = 1 at rate 1/r leaves |s_i - mean(s)|."""
    u, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))
    s = np.array([5.0, 3.0, 2.0, 1.0])
    x = {"kernel": jnp.asarray((u[:, :4] * s) @ u[:4, :4].T, jnp.float32)}
    s = np.linalg.svd(x["kernel"], compute_uv=False).astype(np.float64)
    tx = spectral.polargrad(1 / 4, b1=0.0, method="qdwh", other=optax.identity())
    updates, _ = tx.update(x, tx.init(x))
    left = np.linalg.svd(x["kernel"] + updates["kernel"], compute_uv=False)
    np.testing.assert_allclose(left, np.sort(np.abs(s - s.mean()))[::-1], atol=1e-5)


def test_polargrad_shrinks_the_square_by_its_rate_and_plain_polar_stalls():
    """At rate 1/r alpha = 1 shrinks f by 1 - 1/r each step; alpha = 0 ends at r lr^2 / 2."""
    target = contract.normal(4, 6)
    r, lr = 4, 0.05

    def loss(x):
        return 0.5 * jnp.sum((x - target) ** 2)

    def run(alpha, rate, steps):
        tx = spectral.scale_by_spectral(b1=0.0, alpha=alpha, scale="none", method="qdwh")

        def step(carry, _):
            x, state = carry
            updates, state = tx.update({"kernel": jax.grad(loss)(x)}, state)
            x = x - rate * updates["kernel"]
            return (x, state), loss(x)

        x = jnp.zeros((4, 6))
        start = x, tx.init({"kernel": x})
        return np.asarray(jax.jit(lambda: jax.lax.scan(step, start, length=steps)[1])())

    losses = np.concatenate([[float(loss(jnp.zeros((4, 6))))], run(1.0, 1 / r, 20)])
    assert np.all(losses[1:] <= (1 - 1 / r) * losses[:-1] + 1e-6)
    plain = run(0.0, lr, 200)[-20:]
    assert np.all(plain <= 0.5 * r * lr**2 * 1.001) and np.all(plain > 1e-5)


def test_polar_first_averages_factors_and_takes_the_size_of_the_newest_gradient():
    """P <- b P + (1 - b) polar(G), D = nu(G)^alpha P."""
    grads = [normal(6, 4, seed=seed) for seed in range(3)]
    p = np.zeros((6, 4))
    for g in grads:
        p = 0.9 * p + 0.1 * polar(g)
    nu = np.linalg.norm(grads[-1], "nuc")
    for alpha, want in ((0.0, p), (1.0, nu * p)):
        got, state = run("polar", *grads, b1=0.9, alpha=alpha, polar_first=True)
        np.testing.assert_allclose(got, want, rtol=1e-11)
        np.testing.assert_allclose(state.mu["x"], p, rtol=1e-11)
