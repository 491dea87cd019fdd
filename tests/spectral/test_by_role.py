"""Whole optimizers: matrices get the rule and its options, the rest the other optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_close
from spectral.models import first_update, small_model

from jaxkit import spectral

OPTIMIZERS = {
    "polargrad": (spectral.polargrad, {"rule": "polar", "alpha": 1.0, "scale": "none"}),
    "normuon": (spectral.normuon, {"rule": "normuon", "nesterov": True}),
    "row_norm": (spectral.row_norm, {"rule": "row_norm"}),
    "hybrid": (spectral.hybrid, {"rule": "row_then_polar"}),
}


def _normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_matrices_get_the_rule_and_the_rest_the_other(name):
    """-rate (scale_by_spectral + decay W) for hidden matrices, `other` for all that is left."""
    make, options = OPTIMIZERS[name]
    params, grads = small_model(), small_model(1)
    got = first_update(make(0.5, weight_decay=0.25, other=optax.sgd(2.0)), params, grads)
    tx = spectral.scale_by_spectral(**options)
    matrix = {"up": {"kernel": grads["up"]["kernel"]}}
    want = tx.update(matrix, tx.init(matrix))[0]["up"]["kernel"]
    want = -0.5 * (want + 0.25 * params["up"]["kernel"])
    assert_close(got["up"]["kernel"], want, 1e-6)
    for path in (("embed", "embedding"), ("up", "bias"), ("lm_head", "kernel")):
        np.testing.assert_array_equal(got[path[0]][path[1]], -2 * grads[path[0]][path[1]])


@pytest.mark.parametrize(
    ("make", "options", "rule"),
    [
        (spectral.polargrad, {"polar_first": True, "nesterov": True}, OPTIMIZERS["polargrad"][1]),
        (spectral.normuon, {"b2": 0.5, "eps": 0.1, "nesterov": False}, {"rule": "normuon"}),
        (
            spectral.row_norm,
            {"eps": 0.5, "eps_mode": "absolute", "rows": "feature"},
            {"rule": "row_norm"},
        ),
        (spectral.row_norm, {"row_floor": 0.5, "centered": True}, {"rule": "row_norm"}),
        (spectral.hybrid, {"alpha": 1.0, "centered": True}, {"rule": "row_then_polar"}),
        (
            spectral.hybrid,
            {"order": "polar_then_row", "row_floor": 0.5},
            {"rule": "polar_then_row"},
        ),
        (spectral.hybrid, {"steps": 2, "method": "gram", "b1": 0.5}, {"rule": "row_then_polar"}),
    ],
)
def test_options_reach_the_rule(make, options, rule):
    """Each option changes the update as it does in scale_by_spectral."""
    params, grads = {"kernel": _normal(4, 6)}, [{"kernel": _normal(4, 6, seed=i)} for i in (1, 2)]
    plain = {name: value for name, value in options.items() if name != "order"}
    pairs = [(make(-1.0, **options), 1), (spectral.scale_by_spectral(**rule, **plain), 1)]
    if "order" not in options:
        pairs.append((make(-1.0), 1))
    out = []
    for tx, _ in pairs:
        state = tx.init(params)
        for g in grads:
            with jax.numpy_dtype_promotion("standard"):
                updates, state = tx.update(g, state, params)
        out.append(updates["kernel"])
    assert_close(out[0], out[1], 1e-6)
    assert np.abs(out[0] - out[-1]).max() > 1e-3 or len(out) == 2


def test_bad_orders_and_options_are_named():
    """The optimizers check what they are given when they are made."""
    with pytest.raises(ValueError, match="order must be one of 'row_then_polar', 'polar_then_row'"):
        spectral.hybrid(0.1, order="polar")
    with pytest.raises(ValueError, match="eps must be in"):
        spectral.row_norm(0.1, eps=-1.0)
    with pytest.raises(TypeError, match="learning_rate must be a number, got None"):
        spectral.polargrad(None)
