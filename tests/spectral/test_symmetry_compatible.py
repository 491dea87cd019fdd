"""The whole stack: what each role gets, and how its options change."""

import contract
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import assert_close
from spectral.models import first_update, small_model

from jaxkit import spectral

# The default for the rest has a derivative of 5e7 times its rate at a zero gradient, which has to
# fit float16; optax's adam mixes int32 and float32.
test_contract = contract.transformation(
    contract.Case(
        "symmetry_compatible",
        lambda: spectral.symmetry_compatible(
            0.1,
            roles={"hidden": {"rule": "right_spectral", "centered": True}},
            other_learning_rate=1e-4,
        ),
        promotion="standard",
    ),
)


def test_each_role_of_the_stack_gets_its_rule():
    """Hidden: Muon. Embedding: right-spectral. Head: the same, centered. Vectors: `other`."""
    params, grads = small_model(), small_model(1)
    got = first_update(spectral.symmetry_compatible(0.5, other=optax.sgd(2.0)), params, grads)
    tokens = {"rule": "right_spectral", "b1": 0.9, "nesterov": True}
    roles = {
        ("up", "kernel"): {"rule": "polar", "nesterov": True},
        ("embed", "embedding"): tokens,
        ("lm_head", "kernel"): {**tokens, "centered": True},
    }
    for (module, name), options in roles.items():
        tx = spectral.scale_by_spectral(**options)
        leaf = {module: {name: grads[module][name]}}
        want = tx.update(leaf, tx.init(leaf))[0][module][name]
        assert_close(got[module][name], -0.5 * want, 1e-6)
    np.testing.assert_array_equal(got["up"]["bias"], -2 * grads["up"]["bias"])


def test_options_of_a_role_replace_its_defaults():
    """A multiplier, a decay, another rule; "other" sends a role away; the rest stays as it was."""
    params, grads = small_model(), small_model(1)
    plain = first_update(spectral.symmetry_compatible(0.5, weight_decay=0.25), params, grads)
    roles = {
        "embedding": {"multiplier": 0.5, "weight_decay": 0.125},
        "lm_head": "other",
        "mlp_gate_up": {"rule": "row_norm", "scale": "none", "b1": 0.0, "row_floor": 0.0},
    }
    tx = spectral.symmetry_compatible(0.5, weight_decay=0.25, roles=roles, other=optax.sgd(2.0))
    got = first_update(tx, params, grads)
    old, new = plain["embed"]["embedding"], got["embed"]["embedding"]
    assert_close(new, 0.5 * (old - 0.5 * 0.125 * params["embed"]["embedding"]), 1e-6)
    np.testing.assert_array_equal(got["lm_head"]["kernel"], -2 * grads["lm_head"]["kernel"])
    g, w = grads["up"]["kernel"], params["up"]["kernel"]
    rows = g / np.linalg.norm(g, axis=0, keepdims=True)
    assert_close(got["up"]["kernel"], -0.5 * (rows + 0.25 * w), 1e-6)


def test_rate_may_be_a_schedule_or_injected():
    """The multiplier scales both."""
    params, grads = small_model(), small_model(1)
    roles = {"embedding": {"multiplier": 0.25}}
    make = spectral.symmetry_compatible
    want = first_update(make(0.5, roles=roles), params, grads)
    schedule = make(lambda step: jnp.asarray(0.5), roles=roles)
    assert_close(first_update(schedule, params, grads), want, 1e-6)
    injected = optax.inject_hyperparams(make)(learning_rate=0.5, roles=roles)
    assert_close(first_update(injected, params, grads), want, 1e-6)


@pytest.mark.parametrize(
    ("roles", "error", "match"),
    [
        ({"head": {}}, ValueError, "roles must be one of 'hidden'.*got 'head'"),
        ({"other": {"rule": "polar"}}, ValueError, "roles must be one of .*got 'other'"),
        (
            {"lm_head": {"lr": 1.0}},
            ValueError,
            r"option of roles\['lm_head'\] must be one of 'rule'",
        ),
        ({"lm_head": "row_norm"}, TypeError, r"roles\['lm_head'\] must be a mapping or 'other'"),
        ({"lm_head": {"rule": "rows"}}, ValueError, "rule must be one of"),
        ({"lm_head": {"multiplier": "2"}}, TypeError, "multiplier must be a number, got '2'"),
        (["lm_head"], TypeError, r"roles must be a mapping, got \['lm_head'\]"),
    ],
)
def test_bad_roles_are_named(roles, error, match):
    """Unknown roles, options and kinds raise when the optimizer is made."""
    with pytest.raises(error, match=match):
        spectral.symmetry_compatible(0.1, roles=roles)
