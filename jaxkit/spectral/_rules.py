"""The update rules: what happens to a leaf before, in and after the exchange of its matrices."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxkit import _check, _numerics
from jaxkit.spectral import _leaf, _polar

_POLAR = ("polar", "right_spectral", "left_spectral", "row_then_polar", "polar_then_row", "normuon")
RULES = (*_POLAR, "row_norm", "sign")
_SIZED = ("polar", "right_spectral", "left_spectral", "row_then_polar", "polar_then_row")
_NOISY = ("polar", "right_spectral", "left_spectral", "normuon")
SCALES = ("none", "muon", "spectral", "scion", "rms", "unit_rms")


class Rule(NamedTuple):
    """A rule and its options, checked.

    Rows are normalized and centered where the leaf lies, which sends little or nothing over the
    network; the polar factor needs whole matrices.

    Attributes:
      name: static.
      alpha: exponent of the size, None if it is 0.
      eps: smallest size, absolute floor of the rows, damping of the one-sided rules.
      eps_mode: static.
      row_floor: relative floor of the rows, None if it is absolute.
      rows: static; "unit" or "feature".
      centered: static.
      b2: decay of the second moment of normuon.
    """

    name: str
    alpha: object
    eps: object
    eps_mode: str
    row_floor: object
    rows: str
    centered: bool
    b2: object

    @property
    def has_polar(self):
        return self.name in _POLAR

    @property
    def has_row_sums(self):
        return self.name in ("polar_then_row", "normuon")

    @property
    def has_row_state(self):
        return self.name == "normuon"

    def before(self, x, view):
        """Returns what the polar factor is taken of; ``x`` is float32 or wider."""
        if self.centered:
            x = _leaf.center(x, view)
        if self.name in ("row_norm", "row_then_polar"):
            x = _leaf.row_norm(x, view, *self._floor(x.dtype))
            if self.centered:  # the division brings back a mean
                x = _leaf.center(x, view)
        return jnp.sign(x) if self.name == "sign" else x

    def inside(self, settings, x, axis_names, noisy):
        """Returns the factor of whole matrices ``[..., m, n]``, with its size if alpha is not 0."""
        damping = None
        if noisy:
            damping = _polar.Damping(1.0, False)
        elif self.name in ("right_spectral", "left_spectral") and not self._is_lost(settings, x):
            damping = _polar.Damping(self.eps, self.eps_mode == "relative")
        # With a relative floor the longest row of a matrix is about of size one.
        in_range = self.name == "row_then_polar" and self.row_floor is not None
        factor = _polar.apply(settings, x, axis_names, damping, in_range)
        if self.alpha is None:
            return factor
        wide = _numerics.wide(x.dtype)
        nu = jnp.sum(x.astype(wide) * factor.astype(wide), axis=(-2, -1), keepdims=True)
        if axis_names:
            nu = jax.lax.psum(nu, axis_names)
        return (self.size(nu) * factor.astype(wide)).astype(factor.dtype)

    def size(self, nu):
        """Returns the size by which a factor is multiplied, for its inner product with X."""
        return jnp.maximum(nu, as_dtype(self.eps, nu.dtype)) ** as_dtype(self.alpha, nu.dtype)

    def after(self, y, squares, nu, view):
        """Returns the direction and the new ``nu``, given the factor in float32 or wider.

        ``squares`` are those sums of squares over axes of ``y`` that are known.
        """
        if self.has_row_sums:
            square = squares.get(view.columns)
            if square is None:
                square = _leaf.total(jnp.square(y), view, view.columns)
            if self.has_row_state:
                decay = as_dtype(self.b2, nu.dtype)
                y, nu = _leaf.equalize_rows(y, square, nu, view, decay, as_dtype(self.eps, y.dtype))
            else:
                y = _leaf.factor_row_norm(y, square, view, *self._floor(y.dtype))
        return (_leaf.center(y, view) if self.centered else y), nu

    def _is_lost(self, settings, x):
        """Says whether the damping is below the rounding of the Gram matrix it is added to."""
        if self.eps_mode != "relative" or settings.method not in ("auto", "gram"):
            return _is_zero(self.eps)
        rounding = jnp.finfo(_numerics.wide(x.dtype)).eps
        return isinstance(self.eps, int | float) and self.eps < rounding

    def _floor(self, dtype):
        """Returns the floor of the rows, and whether it is relative."""
        relative = self.row_floor is not None
        return as_dtype(self.row_floor if relative else self.eps, dtype), relative


def make_rule(name, *, alpha, eps, eps_mode, row_floor, rows, centered, b2):
    """Checks the options of a rule."""
    _check.choice("rule", name, RULES)
    _check.choice("eps_mode", eps_mode, ("relative", "absolute"))
    _check.choice("rows", rows, ("unit", "feature"))
    _check.between("eps", eps, 0.0, math.inf)
    if alpha is not None:
        _check.between("alpha", alpha, -math.inf, math.inf)
    alpha = None if alpha is None or _is_zero(alpha) else alpha
    if alpha is not None and name not in _SIZED:
        raise ValueError(f"alpha must be 0 for rule={name!r}, which has no size, got {alpha}.")
    if name == "polar_then_row":
        alpha = None  # the rows are normalized after it
    has_floor = name in ("row_norm", "row_then_polar", "polar_then_row")
    if row_floor is not None:
        if not has_floor or eps_mode == "absolute":
            raise ValueError(
                f"row_floor belongs to row rules with eps_mode='relative', got {row_floor} with "
                f"rule={name!r} and eps_mode={eps_mode!r}."
            )
        _check.between("row_floor", row_floor, 0.0, math.inf)
    elif has_floor and eps_mode == "relative":
        row_floor = 0.1
    if rows == "feature" and not (has_floor or name == "normuon" or centered):
        raise ValueError(f"rows='feature' needs a rule with rows, or centered, got rule={name!r}.")
    if b2 is not None:
        if name != "normuon":
            raise ValueError(f"b2 belongs to rule='normuon', got {b2} with rule={name!r}.")
        _check.between("b2", b2, 0.0, 1.0)
    return Rule(
        name, alpha, eps, eps_mode, row_floor, rows, bool(centered), 0.95 if b2 is None else b2
    )


def check_noise(rule, noise_damping):
    """Returns the factor of the noise variance."""
    if noise_damping is None:
        return 4.0
    check_noisy("noise_damping", rule)
    return _check.between("noise_damping", noise_damping, 0.0, math.inf)


def check_noisy(name, rule):
    """Checks that a rule can be damped by noise."""
    if rule.name not in _NOISY:
        raise ValueError(
            f"{name} belongs to rules {', '.join(_NOISY)}, got one for rule={rule.name!r}."
        )


def check_scale(scale, rule):
    """Checks a scale's name, and that the sizes that it promises exist."""
    if not callable(scale):
        _check.choice("scale", scale, SCALES)
    if scale == "unit_rms" and rule.alpha is not None:
        raise ValueError(
            f"scale='unit_rms' needs alpha=None or a static 0, got alpha={rule.alpha}."
        )


def scale_of(scale, rule, units, features, window):
    """Returns the factor for matrices of one shape; ``window`` is the area of a convolution."""
    if callable(scale):
        return scale(units, features)
    if rule.name in ("row_norm", "polar_then_row"):
        rms = math.sqrt(features if rule.rows == "unit" else units)
    else:
        rms = 1.0 if rule.name == "sign" else math.sqrt(max(units, features))
    return {
        "none": 1.0,
        "muon": math.sqrt(max(1.0, units / features)),
        "spectral": math.sqrt(units / features),
        "scion": math.sqrt(units / features / window),
        "rms": 0.2 * rms,
        "unit_rms": rms,
    }[scale]


def as_dtype(value, dtype):
    """Gives a traced hyperparameter the dtype of what it meets; Python numbers are weak anyway."""
    return value if isinstance(value, int | float) else jnp.asarray(value).astype(dtype)


def _is_zero(value):
    return isinstance(value, int | float) and value == 0
