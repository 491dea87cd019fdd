"""Recent training algorithms for JAX: pure functions, optax transformations, thin loops."""

from jaxkit import blr as blr
from jaxkit import denoise as denoise
from jaxkit import metrics as metrics
from jaxkit import ot as ot
from jaxkit import rl as rl
from jaxkit import spectral as spectral
from jaxkit import train as train
from jaxkit import zo as zo

__version__ = "0.1.0"
