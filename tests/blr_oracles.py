"""The q-Gaussian in NumPy float64, from its definition alone: normalized by finding the root."""

import functools
from typing import NamedTuple

import numpy as np

ALPHAS = (0.4, 0.5, 0.8, 0.999, 1.0, 1.001, 1.5, 2.0, 3.0, 10.0)


class Grid(NamedTuple):
    """A density ``[1 + (alpha - 1)(-S x^2 / 2 - A)]_+^(1 / (alpha - 1))`` for integration."""

    x: np.ndarray
    dx: np.ndarray  # weights of the quadrature
    p: np.ndarray
    log_normalizer: float  # A

    def integral(self, values):
        return float(np.sum(self.dx * values))

    def mean(self, fun):
        return self.integral(self.p * fun(self.x))


@functools.cache
def density(alpha, natural=1.0):
    """Returns the density of mean zero and natural precision ``natural`` on a grid."""
    from scipy.optimize import brentq

    def excess(log_peak):
        _, dx, p = _points(alpha, natural, log_peak)
        return np.sum(dx * p) - 1

    if alpha == 1:
        log_peak = np.log(natural / (2 * np.pi)) / 2
        return Grid(*_points(alpha, natural, log_peak), -log_peak)
    log_peak = brentq(excess, -20, 20, xtol=1e-15)
    normalizer = -np.expm1((alpha - 1) * log_peak) / (alpha - 1)
    return Grid(*_points(alpha, natural, log_peak), normalizer)


def negentropy(alpha, grid):
    """Returns (int p**alpha - 1) / (alpha (alpha - 1)), or int p log p."""
    if alpha == 1:
        return grid.integral(grid.p * np.log(np.maximum(grid.p, 1e-300)))
    return (grid.integral(grid.p**alpha) - 1) / (alpha * (alpha - 1))


def discrepancy(alpha, mean, natural, prior_mean, prior_natural):
    """Returns Omega(q) + Omega*(f) - <q, f> by quadrature, with Omega*(f) = <p, f> - Omega(p)."""
    q, p = density(alpha, natural), density(alpha, prior_natural)

    def f(x):
        return -prior_natural * np.square(x - prior_mean) / 2

    conjugate = p.mean(lambda x: f(x + prior_mean)) - negentropy(alpha, p)
    return negentropy(alpha, q) + conjugate - q.mean(lambda x: f(x + mean))


def rule(alpha):
    """Returns nodes of variance one and weights of sum one for expectations."""
    grid = density(alpha)
    z, weights = grid.x / np.sqrt(grid.mean(np.square)), grid.dx * grid.p
    some = weights * (1 + np.square(z)) > 1e-18
    return z[some], weights[some] / weights.sum()


def _points(alpha, natural, log_peak):
    """Returns x, dx and p, whose A is such that 1 - (alpha - 1) A = exp((alpha - 1) log_peak)."""
    eps = alpha - 1
    top = np.exp(eps * log_peak)
    if alpha > 1:
        edge = np.sqrt(2 * top / (eps * natural))
        nodes, weights = _legendre()
        width = min(1.0, 12 / (np.sqrt(natural) * edge))  # nothing lies beyond 12 deviations
        angle = width * np.pi / 2 * nodes
        x, dx = edge * np.sin(angle), edge * np.cos(angle) * width * np.pi / 2 * weights
    else:
        t = np.arange(-100, 100, 0.1) if alpha < 0.99 else np.arange(-6, 6, 0.01)
        x = np.sinh(t) / np.sqrt(natural)
        dx = np.cosh(t) / np.sqrt(natural) * (t[1] - t[0])
    square = natural * np.square(x) / 2
    if alpha == 1:
        return x, dx, np.exp(log_peak - square)
    inside = top > eps * square
    log_p = np.log(np.where(inside, top - eps * square, 1)) / eps
    return x, dx, np.where(inside, np.exp(log_p), 0)


@functools.cache
def _legendre():
    return np.polynomial.legendre.leggauss(400)
