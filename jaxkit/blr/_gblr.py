"""The generalized Bayesian learning rule for independent coordinates, as a transformation."""

import math
import numbers
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxkit import _check, _numerics, _tree
from jaxkit.blr import _geometry, _state


def scale_by_gblr(
    *,
    ess,
    alpha=1.0,
    geometry="tsallis",
    reference="init",
    hess_init=1.0,
    b1=0.9,
    b2=0.99999,
    weight_decay=1e-4,
    clip_radius=math.inf,
    rescale_lr=True,
    hessian="given",
    batch_size=None,
    prior_mean=None,
):
    """Returns the learning rule without the learning rate.

    As :func:`gblr`, which explains it, but the mean lives on the grid of the parameters: a link of
    a chain does not see how far they will move. For parameters below float32 use :func:`gblr`.

    Args:
      ess: effective sample size, positive.
      alpha: Tsallis index above 1/3.
      geometry: "tsallis" or "logdet", static.
      reference: "init", "lebesgue", a positive number or a tree of them.
      hess_init: curvature of the mean loss to start from, positive.
      b1: decay of the average of gradients, in [0, 1).
      b2: decay of the average of curvatures, in [0, 1).
      weight_decay: prior precision over ``ess``, not negative.
      clip_radius: bound of each entry of the Newton step, positive; inf for none.
      rescale_lr: whether to multiply the step by ``hess_init + weight_decay``, static.
      hessian: "given" or "gradsq", static.
      batch_size: examples behind a gradient, for "gradsq" only.
      prior_mean: mean of the prior, a tree like the parameters; None for zero.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with a :class:`GBLRState`; its update takes
      ``hess``, and gives the Newton step uphill.

    Raises:
      TypeError, ValueError: as :func:`gblr`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jaxkit import blr
      >>> tx = blr.scale_by_gblr(ess=100, b1=0.0, b2=0.0, weight_decay=0.0, rescale_lr=False)
      >>> params = jnp.array([2.0, 4.0])
      >>> updates, _ = tx.update(params, tx.init(params), params, hess=jnp.ones(2))
      >>> print(updates)
      [2. 4.]

    Source: arXiv:2402.17641; derived here: ``alpha`` other than 1.

    Cost: as :func:`gblr`.
    """
    return _transformation(None, **locals())


def gblr(
    learning_rate,
    *,
    ess,
    alpha=1.0,
    geometry="tsallis",
    reference="init",
    hess_init=1.0,
    b1=0.9,
    b2=0.99999,
    weight_decay=1e-4,
    clip_radius=math.inf,
    rescale_lr=True,
    hessian="given",
    batch_size=None,
    prior_mean=None,
):
    r"""Returns the optimizer that learns a posterior over the parameters at the price of Adam.

    The posterior is a product of q-Gaussians with the parameters as means and standard deviations
    that follow the precision :math:`S = ess \, (h + \delta)`, with :math:`\delta` the weight decay.
    From the gradient g and curvature :math:`\hat h` of the mean loss, both asked at samples of the
    posterior, an update computes

    .. math:: h \gets h + r (\hat h - h) + \kappa r^2 \frac{(\hat h - h)^2}{h + \delta}, \quad
       m \gets b_1 m + (1 - b_1) g, \quad
       \mu \gets \mu - \eta \frac{m / (1 - b_1^t) + \delta (\mu - \mu_0)}{h + \delta}

    with :math:`r = 1 - b_2`. The precision stays positive whatever :math:`\hat h`. ``alpha`` 1 is
    IVON. For runs below ten thousand steps take ``b2`` from 0.99 to 0.999.

    Gradient and curvature come from :func:`gradient_estimator` with ``train.make_step``, or from
    :func:`gblr_value_and_grad` in a loop of your own. To accumulate them over slices of a batch,
    wrap the estimator in ``train.accumulate``: ``optax.MultiSteps`` averages gradients only and
    hands on the curvature of the last slice. Put ``optax.apply_if_finite`` around the whole chain
    to skip steps that are not finite; a curvature that is not finite makes the gradient NaN.

    Numbers may be traced or scheduled by ``optax.inject_hyperparams``; the state carries those that
    describe the posterior, and an update uses the ones that the gradient was asked with. With
    parameters below float32 give that ``hyperparam_dtype=jnp.float32``, or it rounds ``b2``. Such
    parameters have a float32 mean in the state, which they follow rounded.

    Args:
      learning_rate: positive, or a schedule ``step -> rate``.
      ess: effective sample size, positive; the number of training examples gives Bayes' posterior.
      alpha: Tsallis index above 1/3. 1 is the Gaussian, above 1 the support is bounded, below 1 the
        tails are heavy.
      geometry: "tsallis", or "logdet" for the standard deviation ``precision**-0.5`` whatever the
        ``alpha``; static.
      reference: precision at which the standard deviation is ``precision**-0.5`` for every
        ``alpha``: "init" for that of the start, ``ess * (hess_init + weight_decay)``; "lebesgue"
        for the base measure of the parameters as they are; a positive number; or a tree of the
        structure of the parameters, its leaves ``[]`` or of their shapes. Only "init" with
        "logdet", which needs none.
      hess_init: curvature of the mean loss to start from, positive.
      b1: decay of the average of gradients, in [0, 1).
      b2: decay of the average of curvatures, in [0, 1).
      weight_decay: prior precision over ``ess``, not negative.
      clip_radius: bound of each entry of the Newton step, positive; inf for none.
      rescale_lr: whether to multiply the step by ``hess_init + weight_decay``, so that rates are
        those of gradient descent at the start; static.
      hessian: "given" if update gets the curvature as ``hess``, "gradsq" to take ``batch_size``
        times the squared gradient instead, which is biased but needs no estimator; static.
      batch_size: examples behind a gradient, needed for "gradsq" and given for nothing else.
      prior_mean: mean of the prior, a tree like the parameters; None for zero.

    Returns:
      ``optax.GradientTransformationExtraArgs`` with a :class:`GBLRState`; its update takes
      ``hess``, a tree like the parameters. Of a part of the parameters, as inside ``optax.masked``,
      it takes the part of ``hess`` that it needs.

    Raises:
      TypeError: a number is none; or, when called, ``hess`` holds something else than arrays.
      ValueError: an option is out of range; or, when called, ``params`` or ``hess`` is missing,
        ``hess`` is given with "gradsq", or a tree is not like the parameters.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jaxkit import blr, train
      >>> def loss_fn(params, batch, key):
      ...     return jnp.mean((params - jnp.mean(batch, 0)) ** 2) / 2
      >>> tx = blr.gblr(0.1, ess=100, b2=0.9)
      >>> step = train.make_step(blr.gradient_estimator(train.backprop(loss_fn)), tx)
      >>> state = train.create(jnp.zeros(2), tx, jax.random.key(0))
      >>> state, _ = train.fit(step, state, jnp.full((200, 4, 2), 3.0))
      >>> print(state.params.round(0), state.opt_state.hess.shape)
      [3. 3.] (2,)

    Source: arXiv:2402.17641, arXiv:2107.04562, arXiv:2002.10060. Derived here: the map from
    precision to width for ``alpha`` other than 1, its reference, and kappa.

    Cost: elementwise; two arrays of the size of the parameters in the state, three for those below
    float32.
    """
    return _transformation(**locals())


def _transformation(
    learning_rate,
    *,
    ess,
    alpha,
    geometry,
    reference,
    hess_init,
    b1,
    b2,
    weight_decay,
    clip_radius,
    rescale_lr,
    hessian,
    batch_size,
    prior_mean,
):
    inf = math.inf
    _check.between("ess", ess, 0, inf, closed=False)
    _geometry.check_alpha("alpha", alpha)
    _check.choice("geometry", geometry, _geometry.GEOMETRIES)
    _check.between("hess_init", hess_init, 0, inf, closed=False)
    _check.between("b1", b1, 0, 1)
    _check.between("b2", b2, 0, 1)
    _check.between("weight_decay", weight_decay, 0, inf)
    if not (isinstance(clip_radius, float) and clip_radius == inf):
        _check.between("clip_radius", clip_radius, 0, inf, closed=False)
    if learning_rate is not None and not callable(learning_rate):
        _check.between("learning_rate", learning_rate, 0, inf)
    _check_reference(reference, geometry)
    check_gradsq(_check.choice("hessian", hessian, ("given", "gradsq")), batch_size)
    if hessian == "given" and isinstance(alpha, numbers.Real) and alpha <= 0.6:
        warnings.warn(
            f"alpha={alpha} is at most 0.6, so the curvature from gradients at samples has "
            "infinite variance: clip hess at a multiple of the state's hess + weight_decay.",
            stacklevel=3,
        )
    has_master = learning_rate is not None

    def own_reference(params, dtype):
        if isinstance(reference, str):
            is_init = reference == "init"
            at = ess * (hess_init + weight_decay) if is_init else _geometry.lebesgue(alpha)
            return _array(at, dtype)
        if _state.is_shared(reference) and jnp.ndim(reference) == 0:
            return _array(reference, dtype)
        leaves = _state.cut("reference", reference, params)
        _state.check_shapes("reference", leaves, params, scalars=True)
        own = [
            _array(x, _numerics.wide(p.dtype)) if _state.has_posterior(p) else None
            for x, p in zip(leaves, jax.tree.leaves(params), strict=True)
        ]
        return jax.tree.structure(params).unflatten(own)

    def described(params):
        """Returns what the state says about the posterior at the present options."""
        dtypes = [p.dtype for p in jax.tree.leaves(params) if _state.has_posterior(p)]
        dtype = _numerics.wide(*dtypes)
        return {
            "ess": _array(ess, dtype),
            "weight_decay": _array(weight_decay, dtype),
            "alpha": _array(alpha, dtype),
            "exponent": _array(_geometry.gamma(alpha, geometry), dtype),
            "reference": own_reference(params, dtype),
        }

    def init(params):
        params = jax.tree.map(jnp.asarray, params)

        def zeros(p):
            return _tree.zeros_like(p, _numerics.wide(p.dtype))

        def start(p):
            return zeros(p) + _array(hess_init, _numerics.wide(p.dtype))

        def master(p):
            is_narrow = jnp.finfo(p.dtype).bits < 32
            return p.astype(jnp.float32) if has_master and is_narrow else None

        def each(fun):
            return jax.tree.map(lambda p: fun(p) if _state.has_posterior(p) else None, params)

        return _state.GBLRState(
            jnp.zeros([], jnp.int32), each(zeros), each(start), each(master), **described(params)
        )

    def update(updates, state, params=None, *, hess=None, **extra):
        del extra
        if params is None:
            raise ValueError("params must be given to update, got None.")
        params = jax.tree.map(jnp.asarray, params)
        leaves, treedef = jax.tree.flatten(params)
        curvatures = _curvatures(updates, hess, params, hessian, batch_size)
        priors = [None] * len(leaves)
        if prior_mean is not None:
            priors = _state.cut("prior_mean", prior_mean, params)
            _state.check_shapes("prior_mean", priors, params)
        step = optax.safe_increment(state.step)
        rate = 1.0 if learning_rate is None else learning_rate
        rate = rate(state.step) if callable(rate) else rate
        if rescale_lr:
            rate = rate * (hess_init + weight_decay)
        kappa = _geometry.kappa(state.exponent)

        def leaf(p, g, curvature, m, h, master, prior):
            if h is None:
                return g, m, h, master
            dtype = h.dtype
            decay, rho = _array(b1, dtype), _array(1 - b2, dtype)
            delta = state.weight_decay.astype(dtype)
            m = decay * m + (1 - decay) * g.astype(dtype)
            change = rho * (curvature.astype(dtype) - h)
            h = h + change + kappa.astype(dtype) * jnp.square(change) / (h + delta)
            mean = _state.mean(p, master)
            pull = mean if prior is None else mean - _array(prior, dtype)
            unbiased = m / (1 - decay ** step.astype(dtype))
            newton = (unbiased + delta * pull) / (h + delta)
            radius = _array(clip_radius, dtype)
            newton = _array(rate, dtype) * jnp.clip(newton, -radius, radius)
            if learning_rate is None:
                return newton.astype(g.dtype), m, h, master
            if master is None:
                return (-newton).astype(g.dtype), m, h, master
            # The parameter follows the master, so an update that was rounded is made up for.
            master = mean - newton
            follow = master.astype(p.dtype).astype(dtype) - p.astype(dtype)
            return follow.astype(g.dtype), m, h, master

        fields = (
            treedef.flatten_up_to(tree)
            for tree in (updates, state.momentum, state.hess, state.master)
        )
        grads, momenta, hessians, masters = fields
        rows = zip(leaves, grads, curvatures, momenta, hessians, masters, priors, strict=True)
        out = [leaf(*row) for row in rows]
        columns = zip(*out, strict=True) if out else ((),) * 4
        updates, momentum, hess, master = (treedef.unflatten(column) for column in columns)
        state = _state.GBLRState(step, momentum, hess, master, **described(params))
        return updates, state

    return optax.GradientTransformationExtraArgs(init, update)


def check_gradsq(hessian, batch_size):
    """Checks that ``batch_size`` is given where it is needed, and nowhere else."""
    if hessian != "gradsq":
        if batch_size is not None:
            raise ValueError(f"batch_size must be None with hessian={hessian!r}, got {batch_size}.")
    elif batch_size is None:
        raise ValueError("batch_size must be given with hessian='gradsq', got None.")
    else:
        _check.between("batch_size", batch_size, 0, math.inf, closed=False)


def _curvatures(grads, hess, params, hessian, batch_size):
    if hessian == "gradsq":
        if hess is not None:
            raise ValueError("hess must be left out with hessian='gradsq', got one.")
        return [batch_size * jnp.square(_wide(g)) for g in jax.tree.leaves(grads)]
    if hess is None:
        raise ValueError(
            "hess is required; get it from blr.gblr_value_and_grad, or from blr.gradient_estimator "
            "in train.make_step, got None."
        )
    leaves = _state.cut("hess", hess, params)
    _state.check_shapes("hess", leaves, params)
    return [jnp.asarray(x) for x in leaves]


def _check_reference(reference, geometry):
    if isinstance(reference, str):
        _check.choice("reference", reference, ("init", "lebesgue"))
    else:
        for path, x in _tree.leaves_with_paths(reference):
            name = "reference" if _state.is_shared(reference) else f"reference at {path}"
            if isinstance(x, np.ndarray) and not (x > 0).all():
                raise ValueError(f"{name} must be positive, got {x.min()}.")
            _check.between(name, x, 0, math.inf, closed=False)
    if geometry == "logdet" and not (isinstance(reference, str) and reference == "init"):
        raise ValueError(f"reference must be 'init' with geometry='logdet', got {reference!r}.")


def _array(x, dtype):
    # A copy: a state that is donated shares no buffer with the caller's numbers.
    return jnp.array(x, dtype, copy=True)


def _wide(x):
    return x.astype(_numerics.wide(x.dtype))
