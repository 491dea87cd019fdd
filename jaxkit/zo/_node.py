"""Node perturbation: noise on the outputs of the layers in place of noise on the weights."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check, _estimator, _numerics, _tree
from jaxkit.zo import _node_noise, _tap_plan, _tap_rows, _tap_run
from jaxkit.zo._tap_program import Kind, is_literal
from jaxkit.zo._tap_rows import Mixed, Rows


class Node(NamedTuple):
    """What :func:`node` returns.

    Attributes:
      noise: kind of the noise, "rademacher" or "normal".
    """

    noise: str


def node(*, noise="rademacher"):
    r"""Returns node perturbation: noise on what the layers put out, not on their weights.

    The noise :math:`\mu \xi` is added wherever parameters meet data: at the output of each dense
    layer, convolution, lookup, scale and bias. The slope s of the loss gives :math:`s \xi` in
    place of the gradient of that output, which is multiplied with the inputs as backpropagation
    would. That is unbiased, and its variance grows with the number of outputs of a layer and not
    with that of its weights. With ``per_example=True`` each example has a slope of its own, which
    is far better again. It is only right if the loss of an example depends on no other example;
    the program is searched for a proof, and losses that have none raise (those with batch
    statistics and contrastive ones, among others).

    There is no direction in the space of parameters, so it serves :func:`value_and_zo_grad` and
    :func:`gradient_estimator` only. The value and ``aux`` are those at the parameters themselves.
    The default ``mu`` is 1e-2; at 0.1 what lies in front of a normalization is biased by half.
    A term of the loss that depends on parameters alone, such as weight decay, gets its exact
    gradient if it is added last.

    Args:
      noise: "rademacher" for signs, which are faster and have less variance, or "normal"; static.

    Returns:
      What to give as ``direction``.

    Raises:
      ValueError: ``noise`` is unknown. When the gradient is taken: the loss has another shape,
        depends on no data, or mixes examples with ``per_example=True``.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import zo
      >>> run = zo.value_and_zo_grad(lambda w, x: x * w, direction=zo.node(), per_example=True)
      >>> value, grad = run(jax.random.key(0), jnp.array(2.0), jnp.array([1.0, 5.0]))
      >>> print(value, grad.round(2))
      6.0 3.0

    Source: arXiv:2310.00965. Derived here: the proof, and the reach over whole programs.

    Cost: 2 K + 1 calls of ``loss_fn``, and K + 1 products of outputs with inputs in place of the
    backward pass; no activations are kept. A random bit per output and call.
    """
    return Node(_check.choice("noise", noise, tuple(_node_noise.KINDS)))


def node_value_and_grad(
    loss_fn,
    *,
    num_samples=1,
    mu=1e-2,
    per_example=False,
    has_aux=False,
    noise="rademacher",
    skip_nonfinite=False,
):
    """Returns ``(key, params, *args) -> (value, grads)`` by node perturbation.

    All as of ``value_and_zo_grad``, but that value and aux are those at ``params``. With
    ``skip_nonfinite`` a slope that is not finite counts as zero.
    """
    _check.function("loss_fn", loss_fn)
    num_samples = _check.count("num_samples", num_samples)
    _check.between("mu", mu, 0, float("inf"), closed=False)
    draw = _node_noise.KINDS[_check.choice("noise", noise, tuple(_node_noise.KINDS))]

    def checked_loss(params, *args):
        out = loss_fn(params, *args)
        return _estimator.split_loss(out, per_example=per_example, has_aux=has_aux)

    def value_and_grad(key, params, *args):
        _estimator.check_params(params)
        params = _tree.strong(params)
        plan = _tap_plan.plan(checked_loss, params, args)
        if not plan.paths:
            raise ValueError("params must hold at least one number, got an empty tree.")
        loss, _ = plan.out_types
        if plan.level.kind(plan.level.outs[0]) == Kind.PARAMS:
            raise ValueError("the loss must depend on data, got one of the parameters alone.")
        num_rows = loss.shape[0] if per_example else 1
        owners = _owners(plan, num_rows)
        exact = _added_last(plan.level)
        dtype = _numerics.wide(loss.dtype)

        # Not vmap: of keys of the kind unsafe_rbg it gives other ones.
        keys = jax.lax.map(lambda k: jax.random.fold_in(key, k), jnp.arange(num_samples))

        def noise_at(key, site, y, index):
            key = jax.random.fold_in(key, site.index + _node_noise.zero_after(y))
            for i in index:
                key = jax.random.fold_in(key, i)
            return draw(key, y)

        def noisy_loss(i):
            key_k, sign = keys[i // 2], 1 - 2 * (i % 2)

            def at_site(step, read, y, index):
                site = step.site
                if site.group and site.index not in exact:
                    size = jnp.asarray(mu, dtype) * sign.astype(dtype)
                    y += (size * noise_at(key_k, site, y, index).astype(dtype)).astype(y.dtype)
                return y, {}

            outs, _ = _tap_run.run(plan, params, args, _tap_run.Visitor(at_site))
            return outs[0].astype(dtype)

        losses = jax.lax.map(noisy_loss, jnp.arange(2 * num_samples))
        losses = losses.reshape(num_samples, 2, num_rows)
        slopes = (losses[:, 0] - losses[:, 1]) / (2 * jnp.asarray(mu, dtype))
        if skip_nonfinite:
            slopes = jnp.where(jnp.isfinite(slopes), slopes, 0)
        # The gradient of the mean over examples, and over samples.
        weights = slopes / (num_rows * num_samples)

        def at_site(step, read, y, index):
            site = step.site
            if not site.group:
                return y, {}
            if site.index in exact:
                total = jnp.full_like(y, exact[site.index] / num_rows)
            else:
                rows = owners.get(site.index)

                def drawn(k):
                    noise = noise_at(keys[k], site, y, index)
                    return _spread(weights[k], rows, y) * noise.astype(dtype)

                total = drawn(0)
                if num_samples > 1:
                    ks = jnp.arange(1, num_samples)
                    total, _ = jax.lax.scan(lambda t, k: (t + drawn(k), None), total, ks)
            found = _tap_run.pull_back(site, read, total.astype(y.dtype))
            # The model goes on behind the product, else XLA keeps the inputs of all sites.
            zero = sum(map(_node_noise.zero_after, found.values()), jnp.uint32(0))
            return y + zero.astype(y.dtype), found

        visitor = _tap_run.Visitor(at_site, jnp.add, pull=True)
        outs, grads = _tap_run.run(plan, params, args, visitor)
        value, aux = plan.out_tree.unflatten(outs)
        value = jnp.mean(value.astype(dtype))
        grads = jax.tree.structure(params).unflatten([grads[i] for i in range(len(plan.paths))])
        return ((value, aux), grads) if has_aux else (value, grads)

    return value_and_grad


def _owners(plan, num_rows):
    """Returns the label of each site; raises unless each example has its own rows."""
    if num_rows == 1:
        return {}
    owners, loss = _tap_rows.owners(plan, num_rows)
    if loss != Rows(0, 1):
        why = f"{loss.reason} mixes them" if isinstance(loss, Mixed) else "it has no axis of them"
        raise ValueError(f"per_example=True needs a loss that keeps examples apart, but {why}.")
    return owners


def _spread(weights, rows, y):
    """Returns the weight of each entry of ``y`` from one per example."""
    if rows is None or len(weights) == 1:
        return jnp.sum(weights)
    size = y.shape[rows.axis]
    wide = (size // (rows.inner * len(weights)), len(weights), rows.inner)
    weights = jnp.broadcast_to(weights[None, :, None], wide).reshape(size)
    return weights.reshape([size if i == rows.axis else 1 for i in range(y.ndim)])


def _added_last(level):
    """Returns the sites that only add to the loss, number -> derivative by their output.

    Noise on them would swamp the slopes, and their gradient needs none.
    """
    uses, makers, found = {}, {}, {}
    for step in level.steps:
        makers |= dict.fromkeys(step.outs, step)
        for x in step.ins:
            if not is_literal(x):
                uses[x] = uses.get(x, 0) + 1

    def visit(x, factor, want):
        step = makers.get(x)
        if uses.get(x, 0) != want or step is None or step.kind != Kind.NOISY or step.bodies:
            return
        if step.name not in ("add", "sub", "neg", "convert_element_type"):
            return
        if step.site is not None:
            found[step.site.index] = factor
        for i, operand in enumerate(step.ins):
            if (
                level.kind(operand) == Kind.NOISY
                and level.type(operand).shape == level.types[x].shape
            ):
                flip = step.name == "neg" or (step.name == "sub" and i == 1)
                visit(operand, -factor if flip else factor, 1)

    visit(level.outs[0], 1.0, 0)
    return found
