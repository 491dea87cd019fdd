"""Better gradients from noisy ones, between any estimator and any optimizer."""

from jaxkit.denoise._combine import combine as combine
from jaxkit.denoise._denoise import denoise as denoise
from jaxkit.denoise._denoise_schedule import denoise_schedule as denoise_schedule
from jaxkit.denoise._denoise_with_grad_fn import denoise_with_grad_fn as denoise_with_grad_fn
from jaxkit.denoise._dense_norms import dense_norms as dense_norms
from jaxkit.denoise._gradient_estimator import gradient_estimator as gradient_estimator
from jaxkit.denoise._kalman_gain import kalman_gain as kalman_gain
from jaxkit.denoise._members import disk as disk
from jaxkit.denoise._members import ema as ema
from jaxkit.denoise._members import hvp as hvp
from jaxkit.denoise._members import igt as igt
from jaxkit.denoise._members import storm as storm
from jaxkit.denoise._poisson_sample import Padded as Padded
from jaxkit.denoise._poisson_sample import poisson_sample as poisson_sample
from jaxkit.denoise._private_gradient_estimator import (
    private_gradient_estimator as private_gradient_estimator,
)
from jaxkit.denoise._quadratic_mle import QuadraticFit as QuadraticFit
from jaxkit.denoise._quadratic_mle import quadratic_mle as quadratic_mle
from jaxkit.denoise._query_points import query_points as query_points
from jaxkit.denoise._recursive_quadratic import RecursiveQuadratic as RecursiveQuadratic
from jaxkit.denoise._recursive_quadratic import RecursiveQuadraticState as RecursiveQuadraticState
from jaxkit.denoise._recursive_quadratic import recursive_quadratic as recursive_quadratic
from jaxkit.denoise._state import DenoiseState as DenoiseState
