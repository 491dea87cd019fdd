"""The differentially private gradient at the query points of a denoiser, as an estimator."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxkit import _check, _estimator, _numerics, _random, _slices, _tree
from jaxkit.denoise import _clipping, _query_points
from jaxkit.denoise._poisson_sample import Padded
from jaxkit.denoise._state import DenoiseState


def private_gradient_estimator(
    loss_fn,
    *,
    l2_clip_norm,
    noise_multiplier,
    batch_size=None,
    denoised=True,
    noise_variance=True,
    num_micro=1,
    norms_fn=None,
    axis_name=None,
):
    r"""Returns the estimator of DP-SGD, which releases one noisy gradient a step.

    For each example :math:`i` the gradients :math:`\nabla f_i(z_j)` at the query points of
    :func:`denoise` are combined, :math:`v_i = \sum_j weights_j \nabla f_i(z_j)`, and then clipped
    to :math:`\|v_i\| \leq C` over all leaves together, in float32 or wider. The gradient is

    .. math:: u = \frac{1}{batch\_size} \Bigl(\sum_i \min(1, C / \|v_i\|) \, v_i
        + noise\_multiplier \; C \; \mathcal N(0, I)\Bigr).

    One example more or less moves the sum by at most ``C``, up to rounding, whatever the weights
    (by ``2 C`` if it is replaced). So the accounting is that of DP-SGD, one Gaussian release a
    step with sensitivity ``C``: everything after it, denoiser and optimizer, is post-processing.
    An example whose gradient has a norm that is not finite counts as zero. What a small batch of
    a large set gains on top holds for :func:`poisson_sample`, not for shuffled batches.

    **Only the gradient and the extras are private.** ``value`` and ``aux`` are plain means over
    the examples, without noise: to publish them, or to decide by them when to stop, which
    learning rate to take or which checkpoint to keep, is not covered by the accounting. The noise
    is drawn in floating point, with no defense against attacks on its last bits.

    The estimator is never wrapped: accumulation, posterior samples and query points of other
    estimators would each add a release. Slices of a large batch are ``num_micro`` here.

    Args:
      loss_fn: function ``(params, batch, key)`` as of :func:`~jaxkit.train.backprop`. It is given
        one example at a time, with a leading axis of 1, and a key of its own, the same for all
        query points. With :class:`~jaxkit.train.Stateful` it reads the model state, which stays
        as it is, and must return none: one made from examples would leave the step without noise.
      l2_clip_norm: :math:`C > 0`, a number or traced.
      noise_multiplier: at least 0, a number or traced.
      batch_size: what the sum is divided by, over all devices; None: the number of examples.
        Under Poisson sampling the expected number, ``rate * n``; a :class:`Padded` batch needs it.
      denoised: whether ``opt_state`` holds a denoiser, static. False is plain DP-SGD.
      noise_variance: whether to hand on ``extras["noise_variance"]``, static. An optimizer that
        averages further, by a momentum of its own, sees less noise than that.
      num_micro: slices of the batch in a scan, static: gradients of single examples exist for one
        slice at a time. Slice ``i`` holds the examples ``i``, ``i + num_micro``, ...
      norms_fn: function ``(points, weights, batch, keys) -> [B]`` that returns the squared norm of
        each combined gradient, for instance by :func:`dense_norms`; ``points`` and ``weights`` are
        those of :func:`query_points`, ``keys`` ``[B]`` those that ``loss_fn`` is given. Then no
        gradient of a single example is formed. **The privacy rests on it**: a norm that is too
        small breaks the clip. It holds to the precision of the matrix products of the model,
        which add up examples: ``jax.default_matmul_precision("float32")`` on accelerators, and no
        mixed precision. Norms and parameters must be float32 or wider.
      axis_name: axes of devices inside ``jax.shard_map``, of which each has examples of its own and
        the same ``key``; the clipped sums are added over them, the noise once. Not with
        ``norms_fn``, which would add up cotangents of different devices. Under ``jit`` a sharded
        batch needs no name.

    Returns:
      Estimator ``(key, params, opt_state, batch) -> Estimate``. It splits ``key`` into one for its
      draws and one for ``loss_fn``, and folds the index of the example into the latter. ``value``
      is the mean of the weighted losses and ``aux`` that of all numbers in it at the first query
      point, in float32 or wider, over the examples that count, 0 if none does. Extras, of what the
      noise alone does to each entry: ``queried`` if denoised, and ``noise_variance``, that of the
      new estimate, or of the gradient if not denoised; for ``gain="auto"`` instead
      ``query_variance``, that of the gradient.

    Raises:
      TypeError: ``loss_fn`` or ``norms_fn`` is no function, an option no number; or, when called,
        a leaf of ``params`` or ``aux`` does not fit.
      ValueError: an option is out of range; or, when called, ``opt_state`` holds no denoiser, one
        of kind "hvp", or one although not ``denoised``; ``loss_fn`` returns a model state; the
        batch does not divide by ``num_micro``, or is padded and ``batch_size`` None; inside a
        ``shard_map``, ``axis_name`` does not fit the batch or ``params`` are in shards.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import denoise
      >>> def loss_fn(params, batch, key):
      ...     return jnp.mean((batch @ params) ** 2) / 2
      >>> estimator = denoise.private_gradient_estimator(
      ...     loss_fn, l2_clip_norm=1.0, noise_multiplier=0.0, denoised=False)
      >>> print(estimator(jax.random.key(0), jnp.array([0.5, 2.0]), (), jnp.eye(2)).grads)
      [0.25 0.5 ]

    Source: arXiv:1607.00133, algorithm 1; arXiv:2410.03883 for one release on a combination.
    Derived here: the shift trick, :math:`v_i` is the gradient of
    :math:`\sum_j weights_j f_i(z_j + v)` in :math:`v` at 0.

    Cost: per query point one forward and one backward pass over the batch; the memory of one
    gradient for each example of a slice, or of two if there are several query points. With
    ``norms_fn`` a second pass, and no such memory. With ``axis_name``, or sharded examples, one
    sum of a gradient crosses the network, and with ``norms_fn`` an example.
    """
    _check.function("loss_fn", loss_fn)
    _check.between("l2_clip_norm", l2_clip_norm, 0, math.inf, closed=False)
    _check.between("noise_multiplier", noise_multiplier, 0, math.inf)
    if batch_size is not None:
        _check.between("batch_size", batch_size, 0, math.inf, closed=False)
    num_micro = _check.count("num_micro", num_micro)
    if norms_fn is not None:
        _check.function("norms_fn", norms_fn)
        if axis_name is not None:
            raise ValueError(f"axis_name must be None with norms_fn, got {axis_name!r}.")

    axes = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())

    @jax.jit  # traced once, whatever the number of query points
    def outcome(params, example, key):
        loss, aux = _estimator.split_loss(loss_fn(params, example, key))
        if isinstance(aux, dict) and "model_state" in aux:
            raise ValueError(
                "aux must hold no 'model_state' from a private gradient, got one; it would carry "
                "examples out of the step without noise."
            )
        _clipping.check_aux(aux)
        return loss, aux

    def estimator(key, params, opt_state, batch):
        own_key, loss_key = jax.random.split(key)
        node_key, noise_key = jax.random.split(own_key)
        is_stateful = isinstance(batch, _estimator.Stateful)
        model_state, batch = batch if is_stateful else (None, batch)
        _check_params(params, norms_fn)
        state, gain, points, weights = _query(node_key, params, opt_state, denoised)
        examples, mask, index = _rows(batch, batch_size, axes)
        # Its derivative must be the device's own: that of what all have, JAX adds up over devices.
        shift = jax.tree.map(
            lambda p: _tree.vary(_tree.zeros_like(p, _numerics.wide(p.dtype)), frozenset(axes)),
            params,
        )

        def loss_of(params, example, key):
            if is_stateful:
                example = _estimator.Stateful(model_state, example)
            return outcome(params, example, key)

        def sums_of(examples, mask, index):
            keys = jax.vmap(jax.random.fold_in, (None, 0))(loss_key, index)
            return _clipping.clipped_sums(
                loss_of, points, weights, examples, keys, mask, shift,
                l2_clip_norm=l2_clip_norm, norms_fn=norms_fn,
            )  # fmt: skip

        sums, divisor = _over_slices(sums_of, (examples, mask, index), num_micro), batch_size
        if axes:
            sums = jax.lax.psum(sums, axes)
        if batch_size is None:
            divisor = mask.shape[0] * jax.lax.axis_size(axes)
        stddev = noise_multiplier * l2_clip_norm
        grads = _release(noise_key, sums.grads, stddev, divisor)
        number = jnp.maximum(sums.number, 1)
        value, aux = jax.tree.map(lambda x: x / number.astype(x.dtype), (sums.loss, sums.aux))
        return _estimator.Estimate(
            jnp.asarray(value, jnp.float32),
            _estimator.cast_like(grads, params),
            _with_model_state(aux, model_state) if is_stateful else aux,
            _extras(state, gain, (stddev / divisor) ** 2, noise_variance),
        )

    estimator.is_private = True  # for those that must not wrap it
    return estimator


def _check_params(params, norms_fn):
    _estimator.check_params(params)
    # Not that of a shard: the norm of the rest would escape the clip.
    _query_points.check_whole(params, "a private gradient")
    for path, leaf in _tree.leaves_with_paths(params) if norms_fn else ():
        dtype = jnp.result_type(leaf)
        if _numerics.wide(dtype) != dtype:
            # Its sum over examples is rounded to that dtype, by more than one example can add.
            raise TypeError(f"params must be float32 or wider for norms_fn, got {dtype} at {path}.")


def _query(key, params, opt_state, denoised):
    """Returns the denoiser's state and the gain of its update, the query points and weights."""
    if not denoised:
        leaves = jax.tree.leaves(opt_state, is_leaf=lambda x: isinstance(x, DenoiseState))
        if any(isinstance(x, DenoiseState) for x in leaves):
            raise ValueError("opt_state must hold no DenoiseState for denoised=False, got one.")
        return None, None, jax.tree.map(lambda p: p[None], params), jnp.ones(1)
    state = _estimator.find_state(opt_state, DenoiseState)
    if state.kind == "hvp":
        raise ValueError(
            "opt_state must hold a denoiser that asks for gradients only, got one of kind 'hvp'."
        )
    _query_points.check_like_state(state, params)
    plan = _query_points.plan_query(state, params, key if state.kind == "random" else None)
    return state, plan.gain, jax.vmap(plan.point)(plan.s), plan.weights


def _rows(batch, batch_size, axes):
    """Returns the examples, their mask and their numbers among those of all devices, ``[B]``."""
    is_padded = isinstance(batch, Padded)
    examples = batch.examples if is_padded else batch
    size = _check.leading_axis("batch", examples)
    if is_padded and batch_size is None:
        # The number of rows is not the expected number, and that under the mask is not public.
        raise ValueError("batch_size must be the expected number of examples of a padded batch.")
    mask = batch.mask if is_padded else jnp.ones(size, jnp.bool)
    _check.shape("mask", mask, "B", B=size)
    if jnp.result_type(mask) != jnp.bool:
        raise TypeError(f"mask must be bool, got {jnp.result_type(mask)}.")
    index = jnp.arange(size)
    if axes:
        index += size * jax.lax.axis_index(axes)
    varying = frozenset().union(*map(_tree.varying, jax.tree.leaves(examples)))
    if varying != _tree.varying(index):
        # Else gradients would be added over devices before the clip, or one example counted twice.
        raise ValueError(
            "axis_name must hold the axes of a shard_map over which the batch varies, wanted "
            f"{sorted(varying)}, got {list(axes)}."
        )
    sharding = jax.typeof(jax.tree.leaves(examples)[0]).sharding
    if AxisType.Explicit in sharding.mesh.axis_types:
        # vmap wants all rows on their devices.
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:1]))
        mask, index = jax.sharding.reshard((jnp.asarray(mask), index), sharding)
    return examples, mask, index


def _over_slices(sums_of, rows, num_micro):
    """Returns the sums of all slices of ``rows``, one in memory at a time."""
    if num_micro == 1:
        return sums_of(*rows)
    slices = _slices.strided(rows, num_micro, "num_micro")

    def of_slice(index):
        return sums_of(*_slices.pick(slices, index))

    def add(total, index):
        return jax.tree.map(jnp.add, total, of_slice(index)), None

    start = jax.tree.map(_estimator.zeros_of, jax.eval_shape(of_slice, jnp.int32(0)))
    return jax.lax.scan(add, start, jnp.arange(num_micro, dtype=jnp.int32))[0]


def _release(key, total, stddev, divisor):
    """Returns ``(total + noise) / divisor``, each leaf with draws of its own."""
    leaves, treedef = jax.tree.flatten(total)
    keys = jax.random.split(key, len(leaves))

    def noisy(key, x):
        noise = jnp.asarray(stddev, x.dtype) * _random.normal(key, x.shape, x.dtype)
        return (x + noise) / jnp.asarray(divisor, x.dtype)

    return treedef.unflatten(noisy(k, x) for k, x in zip(keys, leaves, strict=True))


def _with_model_state(aux, model_state):
    if aux is not None and not isinstance(aux, dict):
        raise TypeError(f"aux must be a dict for a model with a state, got {type(aux).__name__}.")
    return {**(aux or {}), "model_state": model_state}


def _extras(state, gain, variance, noise_variance):
    """Returns what the update is told, given the variance of the noise in the new gradient."""
    variance = jnp.asarray(variance, jnp.float32)
    if state is None:
        return {"noise_variance": variance} if noise_variance else {}
    extras = {"queried": jnp.float32(1)}
    if state.kind == "auto":
        extras["query_variance"] = variance
    elif noise_variance:
        variance = variance.astype(state.noise_variance.dtype)
        extras["noise_variance"] = (1 - gain) ** 2 * state.noise_variance + gain**2 * variance
    return extras
