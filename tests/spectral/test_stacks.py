"""A stack of matrices gets what its matrices get as leaves of their own, by every rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import PLAIN, assert_close, compile_for

from jaxkit import spectral
from jaxkit.spectral import MatrixSpec, _exchange

# Whatever stacks them, the matrices are kernels (in, out) of this shape.
FEATURES, UNITS, NUM = 4, 6, 3
STACKS = {  # path: the axis of the stack
    "layers/kernel": 0,
    "moe/experts/up/kernel": 0,
    "attention/query/kernel": 1,  # (d, heads, head_dim)
    "attention/out/kernel": 0,  # (heads, head_dim, d)
}
AXES = {"layers/kernel": MatrixSpec(unit=2, feature=1, batch=0)}
SIZED = ("polar", "right_spectral", "left_spectral", "row_then_polar", "polar_then_row")
ROWS = ("row_then_polar", "polar_then_row", "row_norm", "normuon")
CASES = [
    *((rule, 1.0, {"centered": True}) for rule in SIZED),
    *((rule, 0.0, {"rows": "feature"}) for rule in ROWS),
    *((rule, 0.0, {}) for rule in (*SIZED[:3], "sign")),
]


@pytest.mark.parametrize(("rule", "alpha", "options"), CASES)
def test_stack_is_its_matrices(rule, alpha, options):
    """Layers, experts and heads: sizes, norms, means and moments are those of one matrix."""
    rng = np.random.default_rng(0)
    sizes = 10.0 ** np.arange(NUM)  # one size for the whole stack would be far off
    stacks = {}
    for path, axis in STACKS.items():
        matrices = rng.normal(size=(NUM, FEATURES, UNITS)) * sizes[:, None, None]
        stacks[path] = np.float32(np.moveaxis(matrices, 0, axis))
    options = {"alpha": alpha, "scale": "muon", "eps": 0.01, **PLAIN, **options}

    def two_steps(overrides):
        tx = spectral.scale_by_spectral(rule, overrides=overrides, **options)

        def update(grad):
            _, state = tx.update(jax.tree.map(jnp.cos, grad), tx.init(grad))
            return tx.update(grad, state)[0]

        return update

    got = jax.device_get(compile_for(two_steps(AXES), stacks)(stacks))
    one = compile_for(two_steps(None), {"kernel": np.ones((FEATURES, UNITS), np.float32)})
    for path, axis in STACKS.items():
        for i in range(NUM):
            want = one({"kernel": np.take(stacks[path], i, axis)})["kernel"]
            assert_close(np.take(got[path], i, axis), want, 1e-5)


@pytest.mark.parametrize("rows", ["unit", "feature"])
@pytest.mark.parametrize("rule", ["row_then_polar", "polar_then_row", "normuon"])
def test_pieces_of_a_stack_are_its_matrices(rule, rows, monkeypatch):
    """Three wide and two tall matrices in one bucket, on a CPU by twos and a rest of one."""
    monkeypatch.setattr(_exchange, "_CPU_PIECE", 2 * FEATURES * UNITS)
    rng, spec = np.random.default_rng(0), AXES["layers/kernel"]
    grads = {
        "wide/kernel": rng.normal(size=(3, FEATURES, UNITS)).astype(np.float32),
        "tall/kernel": rng.normal(size=(2, UNITS, FEATURES)).astype(np.float32),
    }

    def update(overrides, grads):
        tx = spectral.scale_by_spectral(
            rule, b1=0.0, scale="none", rows=rows, overrides=overrides, **PLAIN
        )
        return jax.jit(lambda grads: tx.update(grads, tx.init(grads))[0])(grads)

    got = update(dict.fromkeys(grads, spec), grads)
    for path, stack in grads.items():
        for x, y in zip(stack, got[path], strict=True):
            assert_close(y, update(None, {"kernel": x})["kernel"], 1e-5)


def test_results_take_the_place_of_the_stack(monkeypatch):
    """The update keeps one array like params in memory beside its arguments and results."""
    monkeypatch.setattr(_exchange, "_CPU_PIECE", 128 * 256)
    grads = {f"layer_{i}": {"kernel": np.ones((128, 256), np.float32)} for i in range(24)}
    tx = spectral.scale_by_spectral(nesterov=True)
    compiled = jax.jit(tx.update).lower(grads, tx.init(grads)).compile()
    size = sum(x.nbytes for x in jax.tree.leaves(grads))
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5 * size
