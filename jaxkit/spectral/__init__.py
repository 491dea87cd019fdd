"""Optimizers that act on the singular values of matrix parameters."""

from jaxkit.spectral._labels import describe as describe
from jaxkit.spectral._labels import label_params as label_params
from jaxkit.spectral._matrix_spec import MatrixSpec as MatrixSpec
from jaxkit.spectral._muon import muon as muon
from jaxkit.spectral._polar import polar as polar
from jaxkit.spectral._scale_by_spectral import ScaleBySpectralState as ScaleBySpectralState
from jaxkit.spectral._scale_by_spectral import scale_by_spectral as scale_by_spectral
