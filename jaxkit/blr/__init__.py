"""Posteriors over parameters at the price of an optimizer, with a generalized learning rule."""

from jaxkit.blr._alpha import alpha_from_df as alpha_from_df
from jaxkit.blr._alpha import alpha_from_q as alpha_from_q
from jaxkit.blr._alpha import alpha_from_support as alpha_from_support
from jaxkit.blr._elliptical import Elliptical as Elliptical
from jaxkit.blr._elliptical import EllipticalInfo as EllipticalInfo
from jaxkit.blr._elliptical import EllipticalState as EllipticalState
from jaxkit.blr._elliptical import elliptical as elliptical
from jaxkit.blr._free_energy import free_energy as free_energy
from jaxkit.blr._gblr import gblr as gblr
from jaxkit.blr._gblr import scale_by_gblr as scale_by_gblr
from jaxkit.blr._gblr_value_and_grad import gblr_value_and_grad as gblr_value_and_grad
from jaxkit.blr._gradient_estimator import gradient_estimator as gradient_estimator
from jaxkit.blr._predictive_log_probs import predictive_log_probs as predictive_log_probs
from jaxkit.blr._q_gaussian_noise import q_gaussian_noise as q_gaussian_noise
from jaxkit.blr._sample_posterior import sample_posterior as sample_posterior
from jaxkit.blr._state import GBLRState as GBLRState
from jaxkit.blr._support_box import linear_range as linear_range
from jaxkit.blr._support_box import support_box as support_box

_WITH_DISTRAX = ("MultivariateQGaussian", "QGaussian", "posterior")


def __getattr__(name):
    # The three names that need distrax load it, at their first use.
    if name == "MultivariateQGaussian":
        from jaxkit.blr._multivariate_q_gaussian import MultivariateQGaussian

        return MultivariateQGaussian
    if name == "QGaussian":
        from jaxkit.blr._q_gaussian import QGaussian

        return QGaussian
    if name == "posterior":
        from jaxkit.blr._posterior import posterior

        return posterior
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *_WITH_DISTRAX})
