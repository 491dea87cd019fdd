"""Value and gradient from evaluations of the loss alone."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxkit import _numerics
from jaxkit.zo._directions import gaussian
from jaxkit.zo._measure import Options, check_options, check_params, outcome, over_calls
from jaxkit.zo._node import Node, node_value_and_grad
from jaxkit.zo._probe import materialize, probe


def value_and_zo_grad(
    loss_fn,
    *,
    has_aux=False,
    num_samples=1,
    mu=None,
    direction=gaussian(),  # noqa: B008
    mode="two_sided",
    aggregate="mean",
    matched=True,
    batch="map",
    per_example=False,
    skip_nonfinite=False,
    axis_name=None,
    axis_directions="same",
):
    r"""Returns the function that estimates value and gradient from evaluations of ``loss_fn``.

    It stands where ``jax.value_and_grad`` stood. With random directions :math:`u_k` of covariance
    one it returns :math:`\frac1K \sum_k s_k u_k` with the slopes
    :math:`s_k = (F(\theta + \mu u_k) - F(\theta - \mu u_k)) / 2\mu`. Memory is that of the loss
    alone and one perturbed copy of the parameters. All calls get the very same ``args``, among
    them the key of a stochastic loss, so that noise which does not depend on the parameters
    cancels. Losses and their differences are in float32 or wider whatever the parameters are.

    The directions are drawn from ``fold_in(fold_in(key, k), leaf)``, leaves counted in the order
    of ``jax.tree.leaves``; a leaf that is added behind the others changes none of them.

    Args:
      loss_fn: function ``(params, *args)`` that returns the loss, ``[]`` real floating, or with
        ``has_aux`` the tuple ``(loss, aux)``.
      has_aux: whether ``loss_fn`` returns ``aux`` too, static. That of the first call is returned.
      num_samples: number K of directions, static.
      mu: radius of the perturbation, positive; may be traced; None for 1e-3, and 1e-2 for
        :func:`node`. Not used by mode "jvp".
      direction: :func:`gaussian`, :func:`rademacher`, :func:`sphere`, :func:`orthogonal`,
        :func:`low_rank`, :func:`activation` or another :class:`Direction`; or :func:`node`, whose
        value and ``aux`` are those at ``params`` and which takes ``has_aux``, ``num_samples``,
        ``mu``, ``per_example`` and ``skip_nonfinite`` only.
      mode: "two_sided"; "one_sided" for slopes :math:`(F(\theta + \mu u_k) - F(\theta)) / \mu`;
        "jvp" for exact slopes by forward-mode differentiation; "coordinate" for two-sided slopes
        along each entry, which takes a pair of calls per parameter, and ``has_aux``, ``mu`` and
        ``per_example`` only.
      aggregate: "mean"; "project" for the combination :math:`\hat g` of the directions with
        :math:`\langle u_k, \hat g \rangle = s_k`, the projection of the gradient on their span
        (times d / K it is unbiased for isotropic directions); "rloo" for one-sided slopes against
        the mean of the other losses in place of :math:`F(\theta)`.
      matched: False to study noise: the second call of each pair then gets other data, see below.
      batch: "map" for one call after the other, "vmap" for all at once, which takes the memory of
        all and keys of the kind threefry2x32.
      per_example: whether ``loss_fn`` returns one loss per example, ``[B]``, static. The value is
        their mean.
      skip_nonfinite: whether a direction whose slope is not finite gets coefficient zero, static;
        the value is then the mean of the finite losses. Otherwise the gradient is not finite.
      axis_name: name of the device axis, or axes, inside ``jax.shard_map`` over which examples or
        directions are split; None if there is none. Parameters are the same on all devices.
      axis_directions: "same" if all devices try the same directions, on their own data: the losses
        are averaged before the difference. "own" if each tries ``num_samples`` others: device j
        those from j K to j K + K - 1 of one device with as many samples as all together. Either
        way a scalar per call or direction crosses, and all devices return the same bits but
        ``aux``, which stays the device's own.

    Returns:
      Function ``(key, params, *args, args_minus=None, oracle_key=None)`` that returns
      ``(value, grads)``, or with ``has_aux`` ``((value, aux), grads)``. ``value`` is the mean loss
      over the calls, or the loss at ``params`` for "one_sided" and "jvp"; ``grads`` has the tree,
      shapes and dtypes of ``params``. With ``matched=False`` the second call of a pair gets the
      tuple ``args_minus`` in place of ``args``; or each call gets a key of its own, made from
      ``oracle_key``, behind ``args``; or both.

    Raises:
      TypeError: an argument is of the wrong kind; or, when called, a leaf of ``params`` is not
        real floating, or ``loss_fn`` returns no loss.
      ValueError: an option is out of range or does not go with another; or, when called,
        ``params`` is empty, the loss has another shape, there are more orthogonal directions than
        parameters, ``batch="vmap"`` meets an rbg key, or ``matched=False`` has no second data.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> run = zo.value_and_zo_grad(lambda x: jnp.sum(x**2), mode="coordinate", mu=0.1)
      >>> value, grads = run(jax.random.key(0), jnp.array([1.0, 2.0]))
      >>> print(grads.round(2))
      [2. 4.]

    Source: arXiv:2305.17333; "project": arXiv:2509.15552; "jvp": forward gradients.

    Cost: 2 K calls of ``loss_fn`` ("one_sided": K + 1, "rloo": K, "jvp": K forward-mode passes),
    one after the other, and K draws of each leaf for the calls of each sign and for the sum.
    "project" draws K(K + 1) more.
    """
    if mu is None:
        mu = 1e-2 if isinstance(direction, Node) else 1e-3
    options = Options(
        has_aux,
        num_samples,
        mu,
        direction,
        mode,
        aggregate,
        matched,
        batch,
        per_example,
        skip_nonfinite,
        axis_name,
        axis_directions,
    )
    if mode == "coordinate":
        return _coordinate(loss_fn, options)
    if isinstance(direction, Node):
        return _node(loss_fn, options)
    run = probe(loss_fn, **options._asdict())

    def value_and_grad(key, params, *args, args_minus=None, oracle_key=None):
        out = run(key, params, *args, args_minus=args_minus, oracle_key=oracle_key)
        out, aux = out if has_aux else (out, None)
        value = (out.value, aux) if has_aux else out.value
        return value, materialize(out, params)

    return value_and_grad


def _only(what, options, *names):
    """Checks that options other than ``names`` have their defaults; returns the defaults."""
    plain = Options()
    for name, value in options._asdict().items():
        default = getattr(plain, name)
        if name not in names and value != default:
            raise ValueError(f"{name} must be {default!r} for {what}, got {value!r}.")
    return plain


def _node(loss_fn, options):
    """Returns the function of node perturbation."""
    names = "has_aux", "num_samples", "mu", "per_example", "skip_nonfinite"
    _only("zo.node()", options, "direction", *names)
    given = {name: getattr(options, name) for name in names}
    return node_value_and_grad(loss_fn, noise=options.direction.noise, **given)


def _coordinate(loss_fn, options):
    """Returns the function that takes two-sided slopes along each entry of the parameters."""
    names = "has_aux", "mu", "per_example"
    plain = _only("mode='coordinate'", options, "mode", *names)
    plain = plain._replace(**{name: getattr(options, name) for name in names})
    check_options(loss_fn, plain)

    def value_and_grad(key, params, *args):
        del key
        params = check_params(params)
        leaves, treedef = jax.tree.flatten(params)
        ends = np.cumsum([x.size for x in leaves])

        def evaluate(x):
            entry, sign = x

            def moved(x, end):
                here = jnp.arange(end - x.size, end, dtype=jnp.int32).reshape(x.shape) == entry
                wide = x.astype(_numerics.wide(x.dtype))
                step = jnp.asarray(options.mu, wide.dtype) * sign.astype(wide.dtype)
                return jnp.where(here, wide + step, wide).astype(x.dtype)

            return outcome(loss_fn(treedef.unflatten(map(moved, leaves, ends)), *args), plain)

        entries = jnp.repeat(jnp.arange(ends[-1], dtype=jnp.int32), 2)
        signs = jnp.tile(jnp.array([1.0, -1.0]), ends[-1])
        losses, aux = over_calls(evaluate, (entries, signs), plain)
        slopes = (losses[::2] - losses[1::2]) / (2 * jnp.asarray(options.mu, losses.dtype))
        slopes = jnp.split(slopes, ends[:-1])
        grads = [s.reshape(x.shape).astype(x.dtype) for s, x in zip(slopes, leaves, strict=True)]
        value = jnp.mean(losses)
        return ((value, aux) if options.has_aux else value), treedef.unflatten(grads)

    return value_and_grad
