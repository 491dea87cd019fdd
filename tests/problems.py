"""What several test files share: real digits in batches, equality, meshes and two processes."""

import functools
import os
import pathlib
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

KINDS = {"explicit": AxisType.Explicit, "auto": AxisType.Auto}
both_kinds = pytest.mark.parametrize("kind", KINDS)
# A polynomial for polar without large terms that cancel: two programs that round differently stay
# within 1e-5 also where damping makes the factor small.
PLAIN = {"coefficients": (1.875, -1.25, 0.375), "steps": 1}


@functools.cache
def digits(steps, size):
    """Returns batches of digits: images ``[steps, size, 64]`` in [0, 1] and labels, NumPy."""
    images, labels = pytest.importorskip("sklearn.datasets").load_digits(return_X_y=True)
    rows = np.random.default_rng(0).integers(0, len(images), (steps, size))
    return np.float32(images[rows] / 16), np.int32(labels[rows])


def cross_entropies(logits, labels):
    """Returns the cross-entropy in nats of each row of ``logits`` ``[size, 10]``."""
    hits = jax.nn.one_hot(labels, 10)
    return -jnp.sum(hits * jax.nn.log_softmax(logits), axis=-1)


def cross_entropy(logits, labels):
    """Returns the mean cross-entropy in nats of ``logits`` ``[size, 10]``."""
    return jnp.mean(cross_entropies(logits, labels))


def step_of(batches, i):
    """Returns the batch of step ``i``."""
    return jax.tree.map(lambda x: x[i], batches)


def assert_equal(got, want):
    """Checks that two trees, random keys included, agree bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def assert_close(got, want, rtol):
    """Checks each leaf to ``rtol`` of its largest entry."""
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


def make_mesh(kind, sizes=(4, 2), names=("data", "model")):
    """Returns a mesh of the CPU devices, all axes of one of the ``KINDS``."""
    return jax.make_mesh(sizes, names, axis_types=(KINDS[kind],) * len(names))


def is_spec(x):
    """Says whether ``x`` is a leaf of a tree of specs, of which each is a tuple too."""
    return isinstance(x, PartitionSpec)


def place(mesh, tree, specs):
    """Returns ``tree`` on the mesh, by a tree of specs, and its shardings."""
    named = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
    return jax.device_put(tree, named), named


def assert_same_layout(got, want):
    """Checks that each leaf lies where the one of ``want`` lies, which may be a sharding."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        y = getattr(y, "sharding", y)
        assert x.sharding.is_equivalent_to(y, x.ndim), (x.sharding, y)


def compile_for(fun, *args):
    """Returns ``fun`` compiled for ``args``."""
    return jax.jit(fun).lower(*args).compile()


def jit_as_by_default(fun):
    """Returns ``fun`` jitted with the fusions that users get, which conftest turns off.

    Where bits of two programs are compared, they depend on them.
    """
    known = jax.__version_info__ < (0, 11)
    return jax.jit(fun, compiler_options={"xla_cpu_use_fusion_emitters": True} if known else None)


JOIN = """
import sys
import jax
jax.distributed.initialize("127.0.0.1:" + sys.argv[1], num_processes=2, process_id=int(sys.argv[2]))
assert jax.device_count() == 4 and jax.local_device_count() == 2
"""
END = """
print(jax.process_index(), "of", jax.process_count(), "agrees")
"""
BOTH_AGREE = ["0 of 2 agrees", "1 of 2 agrees"]


def run_two_processes(script):
    """Runs a script in two processes of two CPU devices each, joined on the loopback.

    Returns what each says at its end, to compare with ``BOTH_AGREE``: a script that stops early
    without an error says nothing.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    root = pathlib.Path(__file__).resolve().parents[1]
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": str(root),
    }
    running = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN + script + END, port, str(i)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]
    said = []
    try:
        for process in running:
            out, _ = process.communicate(timeout=120)
            assert process.returncode == 0, out[-3000:]
            said += [line for line in out.splitlines() if line.endswith(" agrees")]
    finally:
        for process in running:
            process.kill()
    return said
