"""NorMuon against its recursion."""

import contract
import numpy as np
from spectral.directions import direction, normal, polar, run

from jaxkit import spectral

# The default for the rest has a derivative of 5e7 times its rate at a zero gradient, which has to
# fit float16; optax's adam mixes int32 and float32.
test_contract = contract.transformation(
    contract.Case(
        "normuon",
        lambda: spectral.normuon(0.1, weight_decay=0.1, other_learning_rate=1e-4),
        promotion="standard",
    ),
)


def test_normuon_is_its_recursion_and_keeps_the_norm_of_the_factor():
    """v <- b2 v + (1 - b2) mean_j O^2, O / (sqrt(v) + eps), scaled back to the norm of O."""
    grads = [normal(6, 4, seed=seed) for seed in range(3)]
    got, state = run("normuon", *grads, b2=0.8)
    v = np.zeros((6, 1))
    for g in grads:
        o = polar(g)
        v = 0.8 * v + 0.2 * np.mean(o**2, axis=1, keepdims=True)
    want = o / (np.sqrt(v) + 1e-8)
    want *= np.linalg.norm(o) / np.linalg.norm(want)
    np.testing.assert_allclose(got, want, atol=1e-12)
    np.testing.assert_allclose(state.nu_unit["x"], v, atol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(got), 2.0, rtol=1e-12)  # sqrt(rank)


def test_a_row_of_zeros_stays_and_leaves_the_others_their_norm():
    """Without eps too, where its root mean square is zero."""
    x = np.diag([3.0, 0.0, -2.0])
    got = direction("normuon", x, eps=0.0)
    np.testing.assert_allclose(got, np.sign(x), atol=1e-12)
