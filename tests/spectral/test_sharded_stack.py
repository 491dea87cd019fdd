"""The whole optimizer on sharded leaves: every role's rule, one device's numbers, each layout."""

import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from problems import (
    BOTH_AGREE,
    PLAIN,
    assert_close,
    assert_same_layout,
    both_kinds,
    compile_for,
    make_mesh,
    place,
    run_two_processes,
)

from benchmarks.collectives import collective_bytes
from jaxkit import spectral

MODEL = {  # a small transformer with experts: shapes, and specs of axes "data" and "model"
    "embed": {"embedding": ((64, 8), P(("data", "model")))},
    "layers": {  # scanned
        "ln": {"scale": ((2, 8), P())},
        "attention": {
            "query": {"kernel": ((2, 8, 4, 6), P(None, "data", "model"))},
            "out": {"kernel": ((2, 4, 6, 8), P(None, "model", None, "data"))},
        },
        "mlp": {
            "gate": {"kernel": ((2, 8, 16), P(None, "data", "model"))},
            "up": {
                "kernel": ((2, 8, 16), P(None, "data", "model")),
                "bias": ((2, 16), P(None, "model")),
            },
            "down": {"kernel": ((2, 16, 8), P(None, "model", "data"))},
        },
    },
    "moe": {
        "gate": {"kernel": ((8, 4), P("data"))},
        "experts": {"up": {"kernel": ((4, 8, 6), P("data", None, "model"))}},
    },
    "lm_head": {"kernel": ((8, 64), P(None, ("data", "model"))), "bias": ((64,), P("model"))},
}


def model():
    """Returns the parameters of ``MODEL`` as fixed numbers, and their specs."""
    is_leaf = lambda x: isinstance(x, tuple)  # noqa: E731
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda leaf: np.float32(rng.normal(size=leaf[0]) + 0.3), MODEL, is_leaf=is_leaf
    )
    return params, jax.tree.map(lambda leaf: leaf[1], MODEL, is_leaf=is_leaf)


def whole_stack(sharding=None):
    """Returns symmetry_compatible with decay, and with the hybrid for one role."""
    roles = {"mlp_gate_up": {"rule": "row_then_polar", "alpha": 1.0}}
    return spectral.symmetry_compatible(
        0.1, roles=roles, weight_decay=0.1, sharding=sharding, **PLAIN
    )


def _two_updates(tx, params, state):
    """Returns the updates of two steps and the last state, and the compiled update."""
    # Compiled once: it refuses a state that does not lie where the one of init lies.
    update = compile_for(tx.update, params, state, params)
    first, state = update(params, state, params)
    second, state = update(jax.tree.map(jnp.add, params, first), state, params)
    return (first, second, state), update


@functools.cache
def _whole_stack_on_one_device():
    params, _ = model()
    return _two_updates(whole_stack(), params, whole_stack().init(params))[0]


@both_kinds
def test_symmetry_compatible_is_one_device(kind):
    """Two steps of the whole optimizer; every array of its state lies where its leaf lies."""
    params, specs = model()
    placed, named = place(make_mesh(kind), params, specs)
    tx = whole_stack(None if kind == "explicit" else named)
    with jax.numpy_dtype_promotion("standard"):  # AdamW
        got, update = _two_updates(tx, placed, compile_for(tx.init, placed)(placed))
        want = _whole_stack_on_one_device()
    assert_close(got, want, 1e-5)
    for tree in got[:2]:
        assert_same_layout(tree, named)
    homes = [(jax.tree_util.keystr(path), x) for path, x in jax.tree.leaves_with_path(named)]
    found = set()
    for path, x in jax.tree.leaves_with_path(got[2]):
        name = jax.tree_util.keystr(path)
        if x.ndim:
            key, home = next((key, home) for key, home in homes if name.endswith(key))
            assert_same_layout(x, home)
            found.add(key)
    assert found == dict(homes).keys()
    assert collective_bytes(update).keys() == {"all-reduce", "all-to-all"}


PROCESS = """
import numpy as np, sys
sys.path.insert(0, {tests!r})
from jax.experimental import multihost_utils
from problems import assert_close, assert_same_layout, compile_for, make_mesh
from jax.sharding import NamedSharding, PartitionSpec as P
from spectral.test_sharded_stack import model, whole_stack
params, specs = model()
mesh = make_mesh("auto", (2, 2))
named = jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P))
placed = jax.tree.map(
    lambda x, s: jax.make_array_from_callback(x.shape, s, lambda i: x[i]), params, named)
tx, single = whole_stack(named), whole_stack()
update = lambda tx, p: compile_for(lambda p: tx.update(p, tx.init(p), p)[0], p)(p)
got = update(tx, placed)
whole = multihost_utils.process_allgather(got, tiled=True)
want = update(single, params)
assert_close(whole, want, 1e-5)
assert_same_layout(got, named)
"""


def test_symmetry_compatible_on_two_processes_is_one_device():
    """Two processes of two devices each give the same numbers and keep the layout."""
    tests = str(pathlib.Path(__file__).parents[1])
    assert run_two_processes(PROCESS.format(tests=tests)) == BOTH_AGREE
