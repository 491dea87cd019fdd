"""The power of the contract: each seeded fault is caught, by the checks named beside it."""

from typing import Any, NamedTuple

import contract
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_checks import CHECKS
from jax.sharding import PartitionSpec as P

from jaxkit import _tree, train


class State(NamedTuple):
    step: jax.Array
    momentum: Any


def wide(x):
    return x.astype(np.promote_types(x.dtype, np.float32))


def normalized(m):
    power = jnp.mean(jnp.square(wide(m)))
    some = power > 0
    scale = jnp.where(some, jax.lax.rsqrt(jnp.where(some, power, 1)), 0)
    return (wide(m) * scale).astype(m.dtype)


def trivial(
    leaf=normalized,
    momentum=lambda m, g: (0.9 * m + g).astype(m.dtype),
    init=_tree.zeros_like,
    step=lambda: jnp.zeros([], jnp.int32),
    over=jax.tree.map,
):
    """Returns normalized momentum, a right transformation; each argument is a place for a fault."""

    def update(updates, state, params=None):
        del params
        average = jax.tree.map(momentum, state.momentum, updates)
        return over(leaf, average), State(state.step + 1, average)

    return optax.GradientTransformation(lambda params: State(step(), init(params)), update)


def hidden_count():
    calls = []
    return trivial(lambda m: m / (calls.append(0) or len(calls)))


def factory_draw():
    offset = np.random.default_rng().normal()
    return trivial(lambda m: m + offset)


def factory_buffer():
    zero = jnp.zeros([], jnp.int32)
    return trivial(step=lambda: zero)


def callback(m):
    jax.debug.callback(lambda: None)
    return normalized(m)


def gathered(m):
    if jax.typeof(m).sharding.mesh.are_all_axes_explicit:
        return jax.sharding.reshard(normalized(m), P(*[None] * m.ndim))
    return normalized(m)


@jax.custom_batching.custom_vmap
def mixed(m):
    return jnp.tanh(m)


@mixed.def_vmap
def _(size, batched, m):
    return jnp.broadcast_to(jnp.tanh(jnp.mean(m, 0, keepdims=True)), m.shape), batched[0]


TRACED = (
    "jit_equals_eager vmap_equals_loop sharded_equals_whole lowers_everywhere grad_is_finite "
    "dtype_is_kept state_is_stable tree_agnostic zero_grad_is_finite keeps_explicit_sharding "
    "composes"
)
REPEATED = (
    "jit_equals_eager vmap_equals_loop sharded_equals_whole same_call_same_result tree_agnostic "
    "keeps_explicit_sharding checkpoint_roundtrip"
)
DTYPES = "dtype_is_kept zero_grad_is_finite state_is_stable composes"
TRANSFORMATIONS = {
    "right": (trivial, ""),
    "state promoted": (
        lambda: trivial(lambda m: normalized(m), lambda m, g: 0.9 * wide(m) + wide(g)),
        DTYPES,
    ),
    "update promoted": (lambda: trivial(lambda m: wide(normalized(m))), DTYPES),
    "weak counter": (lambda: trivial(step=lambda: jnp.asarray(0)), "state_is_stable composes"),
    "params aliased": (lambda: trivial(init=lambda params: params), "buffers_are_donatable"),
    "factory's buffer in the state": (factory_buffer, "buffers_are_donatable"),
    "Python if on a tracer": (lambda: trivial(lambda m: m if jnp.sum(m) > 0 else -m), TRACED),
    "NumPy on a tracer": (lambda: trivial(lambda m: m * jnp.asarray(np.sign(m))), TRACED),
    "host callback": (lambda: trivial(callback), "lowers_everywhere"),
    "hidden Python state": (hidden_count, REPEATED),
    "global random numbers": (lambda: trivial(lambda m: m * np.random.normal()), REPEATED),
    "factory's random number": (factory_draw, "same_call_same_result"),
    "dict only": (
        lambda: trivial(over=lambda leaf, tree: {name: leaf(tree[name]) for name in tree}),
        "tree_agnostic composes",
    ),
    "NaN at zero gradient": (
        lambda: trivial(lambda m: (wide(m) / jnp.mean(jnp.abs(wide(m)))).astype(m.dtype)),
        "zero_grad_is_finite",
    ),
    "eps lost in float16": (
        lambda: trivial(lambda m: m / (jnp.mean(jnp.abs(m)) + 1e-8)),
        "zero_grad_is_finite",
    ),
    "derivative of sqrt at 0": (
        lambda: trivial(lambda m: m / (1 + jnp.sqrt(jnp.sum(wide(m) ** 2))).astype(m.dtype)),
        "zero_grad_is_finite",
    ),
    "string in the state": (
        lambda: trivial(step=lambda: "start"),
        f"{TRACED} {REPEATED} init_keeps_sharding buffers_are_donatable",
    ),
    "lost explicit sharding": (lambda: trivial(gathered), "keeps_explicit_sharding"),
    "init off the mesh": (lambda: trivial(init=optax.tree.zeros_like), "init_keeps_sharding"),
    "number of devices in the update": (
        lambda: trivial(lambda m: m * max(1, jax.typeof(m).sharding.mesh.size)),
        "sharded_equals_whole keeps_explicit_sharding",
    ),
    "batch mixed by vmap": (
        lambda: trivial(mixed),
        "vmap_equals_loop grad_is_finite zero_grad_is_finite",
    ),
}


def dropout(key, x, mask):
    kept = jnp.where(mask, x, 0) * jax.random.bernoulli(key, shape=x.shape).astype(x.dtype)
    return jnp.sum(kept, where=mask), mask


def masked_case(name, fun):
    args = jax.random.key(0), contract.normal(8), jnp.arange(8) % 2 == 0
    return contract.Case(name, lambda: (fun, args), draws=True, mask={2: (1,)})


FUNCTIONS = {
    "right": (dropout, ""),
    "NaN under the mask": (
        lambda key, x, mask: dropout(key, x, mask)[0] + jnp.sum(x * mask.astype(x.dtype)),
        "masked_entries_do_not_matter",
    ),
    "NaN under the mask in the gradient": (
        lambda key, x, mask: jnp.sum(
            jnp.where(mask, dropout(key, x, mask)[0] * jnp.sqrt(abs(x)), 0)
        ),
        "masked_entries_do_not_matter",
    ),
    "key ignored": (
        lambda key, x, mask: dropout(jax.random.key(0), x, mask),
        "same_key_same_result",
    ),
    "global random numbers": (
        lambda key, x, mask: dropout(key, x, mask)[0] * np.random.normal(),
        "jit_equals_eager vmap_equals_loop sharded_equals_whole same_key_same_result "
        "masked_entries_do_not_matter",
    ),
    "promoted": (lambda key, x, mask: wide(dropout(key, x, mask)[0]), "dtype_is_kept"),
    "default dtype": (
        lambda key, x, mask: (dropout(key, x, mask), jnp.zeros(3)),
        "dtype_is_kept",
    ),
    "derivative of sqrt at 0": (
        lambda key, x, mask: jnp.sqrt(jnp.sum(dropout(key, x - x, mask)[0])),
        "grad_is_finite same_key_same_result masked_entries_do_not_matter",
    ),
    "host callback": (
        lambda key, x, mask: callback(dropout(key, x, mask)[0]),
        "lowers_everywhere",
    ),
    "number of devices": (
        lambda key, x, mask: dropout(key, x, mask)[0] * max(1, jax.typeof(x).sharding.mesh.size),
        "sharded_equals_whole",
    ),
    "batch mixed by vmap": (
        lambda key, x, mask: mixed(dropout(key, x, mask)[0][None]),
        "vmap_equals_loop grad_is_finite masked_entries_do_not_matter",
    ),
}


def backprop(change=lambda estimate: estimate, key=lambda key: key, see=lambda opt_state: None):
    """Returns a right estimator; each argument is a place for a fault."""

    def factory(loss_fn):
        def value_and_aux(params, batch, key):
            out = loss_fn(params, batch, key)
            return out if isinstance(out, tuple) else (out, None)

        def estimate(rng, params, opt_state, batch):
            see(opt_state)
            grad = jax.value_and_grad(value_and_aux, has_aux=True)
            (value, aux), grads = grad(params, batch, key(rng))
            return change(train.Estimate(value.astype(jnp.float32), grads, aux, {}))

        return estimate

    return factory


def with_value(fun):
    return lambda e: e._replace(value=fun(e.value))


def scaled(factor):
    return lambda e: e._replace(grads=jax.tree.map(lambda g: factor(g) * g, e.grads))


ESTIMATORS = {
    "right": (backprop, ""),
    "grads promoted": (
        lambda: backprop(lambda e: e._replace(grads=jax.tree.map(wide, e.grads))),
        "types",
    ),
    "value in the dtype of the loss": (
        lambda: backprop(lambda e: e._replace(value=e.value.astype(e.grads["third"].dtype))),
        "types",
    ),
    "whole number in extras": (
        lambda: backprop(lambda e: e._replace(extras={"count": jnp.zeros([], jnp.int32)})),
        "types",
    ),
    "tuple for an Estimate": (lambda: backprop(tuple), "types with_stateful grads_descend"),
    "key ignored": (lambda: backprop(key=lambda key: jax.random.key(0)), "same_key_same_result"),
    "draw of its own, undeclared": (
        lambda: backprop(key=lambda key: jax.random.split(key)[1]),
        "",
    ),
    "opt_state changed": (
        lambda: backprop(see=lambda s: isinstance(s, dict) and s.pop("other")),
        "opt_state_is_read_only",
    ),
    "opt_state by position": (lambda: backprop(see=lambda s: s[0]), "opt_state_is_read_only"),
    "aux dropped": (lambda: backprop(lambda e: e._replace(aux=None)), "with_stateful"),
    "ascent": (lambda: backprop(scaled(lambda g: -1)), "grads_descend"),
    "global random numbers": (
        lambda: backprop(scaled(lambda g: np.random.uniform(1, 2))),
        "jit_equals_eager vmap_equals_loop sharded_equals_whole same_key_same_result "
        "opt_state_is_read_only",
    ),
    "host callback": (
        lambda: backprop(scaled(lambda g: jax.debug.callback(lambda: None) or 1)),
        "lowers_everywhere",
    ),
    "number of devices": (
        lambda: backprop(scaled(lambda g: max(1, jax.typeof(g).sharding.mesh.size))),
        "sharded_equals_whole",
    ),
    "batch mixed by vmap": (
        lambda: backprop(with_value(lambda x: mixed(0.01 * x))),
        "vmap_equals_loop",
    ),
}
del ESTIMATORS["draw of its own, undeclared"]
FAULTS = {"transformation": TRANSFORMATIONS, "function": FUNCTIONS, "estimator": ESTIMATORS}


ROWS = [(kind, name) for kind, rows in FAULTS.items() for name in rows]


def case_and_checks(kind, name):
    make, caught = FAULTS[kind][name]
    case = masked_case(name, make) if kind == "function" else contract.Case(name, make)
    return case, set(caught.split())


@pytest.mark.parametrize(("kind", "name"), [row for row in ROWS if row[1] != "right"])
def test_fault_is_caught(kind, name):
    """A fault fails each of the checks named beside it."""
    case, caught = case_and_checks(kind, name)
    assert caught
    assert contract.failures(kind, case, caught) == caught


@pytest.mark.parametrize("kind", FAULTS)
def test_what_is_right_passes(kind):
    """The thing in which the faults are seeded fails no check."""
    assert contract.failures(kind, case_and_checks(kind, "right")[0]) == set()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), ROWS)
def test_fault_is_caught_by_nothing_else(kind, name):
    """The checks that are not named beside a fault pass, so each of them says one thing."""
    case, caught = case_and_checks(kind, name)
    assert contract.failures(kind, case) == caught


@pytest.mark.parametrize("kind", FAULTS)
def test_every_check_catches_some_fault(kind):
    """No check is there for nothing."""
    caught = {name for _, names in FAULTS[kind].values() for name in names.split()}
    assert caught == set(CHECKS[kind])


def test_skip_of_a_check_that_passes_fails(tmp_path):
    """A skip is a strict expected failure, so that a fault once mended must lose its skip."""
    (tmp_path / "pytest.ini").write_text("[pytest]")
    (tmp_path / "test_it.py").write_text(
        "import contract, jax.numpy as jnp\n"
        "skip = {'grad_is_finite': 'infinite', 'jit_equals_eager': 'stale'}\n"
        "make = lambda: (lambda x: jnp.sqrt(x - x), (contract.normal(8),))\n"
        "test_it = contract.function(contract.Case('sqrt', make, skip=skip))\n"
    )
    outcomes = {}

    class Outcomes:
        def pytest_runtest_logreport(self, report):
            if report.when == "call":
                outcomes[report.nodeid.split("-")[-1][:-1]] = report.outcome

    pytest.main(
        ["-p", "no:cacheprovider", "-c", str(tmp_path / "pytest.ini"), str(tmp_path)], [Outcomes()]
    )
    assert outcomes.pop("jit_equals_eager") == "failed"
    assert outcomes.pop("grad_is_finite") == "skipped"
    assert set(outcomes.values()) == {"passed"}


def test_skip_must_name_a_check():
    """A misspelt skip is refused."""
    with pytest.raises(ValueError, match=r"skip of sgd must name its checks, got \['nothing'\]"):
        contract.transformation(contract.Case("sgd", trivial, skip={"nothing": "there"}))
