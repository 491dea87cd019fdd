"""The contract: what every transformation, function and gradient estimator must hold.

A test file joins with one line, ``test_contract = contract.transformation(contract.Case(...))``,
or with ``function`` or ``estimator``. It gets one test per case and check, with the id
``name-check``. The checks are in ``contract_checks``.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import contract_checks
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from contract_checks import CHECKS
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def normal(*shape, seed=0):
    """Returns fixed normal numbers; nothing is compiled to draw them."""
    return jnp.asarray(np.random.default_rng((seed, *shape)).normal(size=shape), jnp.float32)


def matrices():
    """Returns two matrices; for a transformation that takes nothing else."""
    return {"first": normal(8, 16), "second": normal(16, 8)}


def small_tree():
    """Returns the parameters of every case that brings none: two matrices and a vector."""
    return {**matrices(), "third": normal(8)}


def vary(args):
    """Returns another problem of the same shapes: new keys, rolled arrays, halved scalars."""

    def other(x):
        if contract_checks.is_key(x):
            return contract_checks.next_key(x)
        if x.ndim:
            return jnp.roll(x, 1, -1)
        return x / 2 if jnp.issubdtype(x.dtype, jnp.floating) else x

    return jax.tree.map(other, args)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One subject of the contract; what makes it special is said here, not in the checks.

    Attributes:
      name: start of the test ids.
      make: takes nothing; returns a transformation, or ``(fun, args)`` with ``args`` a tuple of
        trees of arrays, or the function from ``loss_fn`` to an estimator.
      skip: check -> mathematical reason; such a check must fail.
      public: names of the topic that this case covers, default ``name``.
      params: takes nothing; returns float32 parameters (an estimator's have the default's names).
      extra: ``(grads, params)`` -> keyword arguments of ``update`` (transformations).
      within: what a transformation may be put into.
      dtypes: dtypes that the subject accepts.
      rtol: tolerance between two programs, relative to the largest entry of a leaf; a tenth of it
        between one device and eight.
      vary: ``args`` -> other valid ``args`` of the same shapes.
      draws: another key gives other numbers (functions; estimators of a loss without noise).
      mask: position of a mask in ``args`` -> positions of the arrays it masks (functions).
      opt_state: ``params`` -> what an estimator finds in its third argument.
      num_micro: slices of the batch through which an estimator threads the model state.
      promotion: of dtypes; "standard" for what contains one of optax's parts that need it.
    """

    name: str
    make: Callable[[], Any]
    _: dataclasses.KW_ONLY
    skip: Mapping[str, str] = dataclasses.field(default_factory=dict)
    public: str | tuple[str, ...] = ()
    params: Callable[[], Any] = small_tree
    extra: Callable[[Any, Any], dict] = lambda grads, params: {}
    within: tuple[str, ...] = ("chain", "masked", "multi_steps")
    dtypes: tuple[str, ...] = ("bfloat16", "float16", "float32", "float64")
    rtol: float = 1e-4
    vary: Callable[[tuple], tuple] = vary
    draws: bool = False
    mask: Mapping[int, tuple[int, ...]] = dataclasses.field(default_factory=dict)
    opt_state: Callable[[Any], Any] = optax.scale_by_adam().init
    num_micro: int = 1
    promotion: str = "strict"

    @property
    def covers(self):
        """The public names of this case, a tuple."""
        names = self.public or self.name
        return (names,) if isinstance(names, str) else names


def transformation(*cases):
    """Returns the test of optax transformations."""
    return _suite("transformation", cases)


def function(*cases):
    """Returns the test of pure functions of arrays."""
    return _suite("function", cases)


def estimator(*cases):
    """Returns the test of gradient estimators."""
    return _suite("estimator", cases)


def failures(kind, case, names=None):
    """Returns the names of the checks (of ``names``, by default all) that ``case`` fails."""
    failed = set()
    for name in _names(kind, case) if names is None else names:
        try:
            _run(kind, case, name)
        except Exception:
            failed.add(name)
    return failed


def _names(kind, case):
    unmasked = kind == "function" and not case.mask
    return [name for name in CHECKS[kind] if not (unmasked and name.startswith("masked"))]


def _run(kind, case, name):
    with jax.numpy_dtype_promotion(case.promotion):
        CHECKS[kind][name](_subject(kind, case))


def _suite(kind, cases):
    rows = []
    for case in cases:
        if unknown := sorted(set(case.skip) - set(_names(kind, case))):
            raise ValueError(f"skip of {case.name} must name its checks, got {unknown}.")
        for name in _names(kind, case):
            reason = case.skip.get(name)
            marks = [pytest.mark.xfail(strict=True, reason=reason)] if reason else []
            rows.append(pytest.param(case, name, id=f"{case.name}-{name}", marks=marks))

    @pytest.mark.parametrize(("case", "check"), rows)
    def test_contract(case, check):
        _run(kind, case, check)

    test_contract.cases = cases
    return test_contract


class Subject:
    """A case as ``fun(*args)``: init and two updates, the function, or one estimate.

    Attributes:
      args: trees of arrays.
      axes: of each argument under ``vmap``; None is shared by all.
      tx: the transformation, if it is one.
      fun: not compiled.
      value: the part of ``fun`` that has derivatives.
    """

    def __init__(self, kind, case):
        self.kind, self.case = kind, case
        if kind == "transformation":
            params = case.params()
            self.args = params, _normal_like(params, 1), _normal_like(params, 2)
        elif kind == "estimator":
            params, batch = case.params(), (normal(16, 8, seed=3), normal(16, 8, seed=4))
            self.args = jax.random.key(0), params, case.opt_state(params), batch
        else:
            self.args = jax.tree.map(jnp.asarray, tuple(case.make()[1]))
        self.axes = (0, 0, None, None) if kind == "estimator" else (0,) * len(self.args)
        self.tx, self.fun = self.fresh()
        self.value = (lambda *args: self.fun(*args)[0]) if kind == "transformation" else self.fun
        self.jitted = jax.jit(self.fun)
        self.derivative = jax.jit(functools.partial(contract_checks.derivative, self.value))

    def fresh(self):
        """Returns ``(tx, fun)`` from a new call of the case's factory."""
        made = self.case.make()
        if self.kind == "transformation":
            tx = optax.with_extra_args_support(made)
            return tx, functools.partial(_updates, self.case, tx)
        return None, made(contract_checks.noisy_loss) if self.kind == "estimator" else made[0]

    def placed(self, axis_type):
        """Returns a mesh of eight devices and the arguments on it.

        Data are split by their leading axis, parameters and what looks like them by two axes.
        """
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)
        sizes = {"data": 4, "model": 2, ("data", "model"): 8}

        def put(names, x):
            split = [n if d % sizes[n] == 0 else None for d, n in zip(x.shape, names, strict=False)]
            return jax.device_put(x, NamedSharding(mesh, P(*split)))

        def names(position):
            is_data = {"transformation": False, "estimator": position == 3, "function": True}
            return (("data", "model"),) if is_data[self.kind] else ("data", "model")

        return mesh, tuple(
            jax.tree.map(functools.partial(put, names(i)), arg) for i, arg in enumerate(self.args)
        )


# Room for the case at hand and for one that a test looks at in between.
_subject = functools.lru_cache(maxsize=2)(Subject)


def _normal_like(tree, seed):
    return jax.tree.map(lambda x: normal(*x.shape, seed=seed), tree)


def _updates(case, tx, params, *grads):
    """Returns the last updates, and the state, after ``init`` and a step for each gradient."""
    state = tx.init(params)
    for grad in grads:
        updates, state = tx.update(grad, state, params, **case.extra(grad, params))
        params = optax.apply_updates(params, updates)
    return updates, state
