"""Recent training algorithms for JAX: pure functions, optax transformations, thin loops."""

import gc as _gc

# Imports leave no garbage, and by now a search for some through all that JAX has made is due, which
# takes as long as all that follows.
_collects = _gc.isenabled()
_gc.disable()
try:
    from jaxkit import blr as blr
    from jaxkit import denoise as denoise
    from jaxkit import metrics as metrics
    from jaxkit import ot as ot
    from jaxkit import rl as rl
    from jaxkit import spectral as spectral
    from jaxkit import train as train
    from jaxkit import zo as zo
finally:
    if _collects:
        _gc.enable()

__version__ = "0.1.0"
