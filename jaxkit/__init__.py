"""Recent training algorithms for JAX: pure functions, optax transformations, thin loops."""

from jaxkit import spectral as spectral
from jaxkit import train as train

__version__ = "0.1.0"
