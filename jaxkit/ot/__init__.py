"""Optimal transport from slices: potentials, bounds, and warm starts for Sinkhorn."""

from jaxkit.ot._bridge import from_ott as from_ott
from jaxkit.ot._bridge import to_ott as to_ott
from jaxkit.ot._bridge import warm_start as warm_start
from jaxkit.ot._certificate import Certificate as Certificate
from jaxkit.ot._certificate import certificate as certificate
from jaxkit.ot._costs import geodesic as geodesic
from jaxkit.ot._costs import power as power
from jaxkit.ot._costs import sqeuclidean as sqeuclidean
from jaxkit.ot._costs import squared as squared
from jaxkit.ot._duals_1d import duals_1d as duals_1d
from jaxkit.ot._extend_1d import extend_1d as extend_1d
from jaxkit.ot._fit_objective import ObjectiveInfo as ObjectiveInfo
from jaxkit.ot._fit_objective import fit_objective as fit_objective
from jaxkit.ot._fit_regression import RegressionState as RegressionState
from jaxkit.ot._fit_regression import fit_regression as fit_regression
from jaxkit.ot._fit_regression import merge_regression as merge_regression
from jaxkit.ot._fit_regression import regression_state as regression_state
from jaxkit.ot._fit_regression import solve_regression as solve_regression
from jaxkit.ot._fit_regression import update_regression as update_regression
from jaxkit.ot._half_steps import soft_f as soft_f
from jaxkit.ot._half_steps import soft_g as soft_g
from jaxkit.ot._pair import Pair as Pair
from jaxkit.ot._plan_from_f import plan_from_f as plan_from_f
from jaxkit.ot._predict_potential import predict_potential as predict_potential
from jaxkit.ot._projections import linear as linear
from jaxkit.ot._projections import stereographic as stereographic
from jaxkit.ot._sample_pairs import sample_pairs as sample_pairs
from jaxkit.ot._sliced_params import SlicedParams as SlicedParams
from jaxkit.ot._sliced_params import untrained as untrained
from jaxkit.ot._sliced_potentials import sliced_potentials as sliced_potentials
from jaxkit.ot._tight_frame import equispaced_frame as equispaced_frame
from jaxkit.ot._tight_frame import tight_frame as tight_frame


def __getattr__(name):
    # The one name that needs ott loads it, at its first use.
    if name == "SlicedInitializer":
        from jaxkit.ot._sliced_initializer import SlicedInitializer

        return SlicedInitializer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), "SlicedInitializer"})
