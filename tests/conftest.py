"""Global test settings: eight CPU devices, strict promotion, warnings as errors (pyproject)."""

import importlib.metadata
import os
import pathlib

# Before jax is imported: XLA reads these once.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
# Compiling takes most of the time, and two thirds of it go into these optimizations of machine
# code. XLA's own passes all run, so that tests may read what they leave.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
_FLAGS = {"xla_force_host_platform_device_count": "8"}
if importlib.metadata.version("jaxlib").startswith("0.10."):  # others abort, not knowing it
    _FLAGS["xla_cpu_use_fusion_emitters"] = "false"
_given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(
    [_given, *(f"--{name}={value}" for name, value in _FLAGS.items() if name not in _given)]
).strip()

import jax  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Each compiled program maps memory a few times, and Linux ends a process that has 65,530 mappings.
_MAPPINGS = pathlib.Path("/proc/self/maps")
_MANY_MAPPINGS = 15_000


@pytest.fixture(autouse=True, scope="module")
def few_mappings():
    """Frees the programs of earlier files before a process holds too many."""
    if _MAPPINGS.exists() and _MAPPINGS.read_bytes().count(b"\n") > _MANY_MAPPINGS:
        jax.clear_caches()


@pytest.fixture
def standard_promotion():
    """Models and optimizers of others need JAX's own promotion; in all threads, so no context."""
    given = {"jax_numpy_dtype_promotion": "standard", "jax_numpy_rank_promotion": "allow"}
    before = {name: getattr(jax.config, name) for name in given}
    for name in given:
        jax.config.update(name, given[name])
    yield
    for name in given:
        jax.config.update(name, before[name])
