"""Optimizers that act on the singular values of matrix parameters."""

from jaxkit.spectral._describe import describe as describe
from jaxkit.spectral._hybrid import hybrid as hybrid
from jaxkit.spectral._labels import label_params as label_params
from jaxkit.spectral._matrix_spec import MatrixSpec as MatrixSpec
from jaxkit.spectral._muon import muon as muon
from jaxkit.spectral._normuon import normuon as normuon
from jaxkit.spectral._polar import polar as polar
from jaxkit.spectral._polargrad import polargrad as polargrad
from jaxkit.spectral._qk_clip import qk_clip as qk_clip
from jaxkit.spectral._row_norm import row_norm as row_norm
from jaxkit.spectral._scale_by_spectral import ScaleBySpectralState as ScaleBySpectralState
from jaxkit.spectral._scale_by_spectral import scale_by_spectral as scale_by_spectral
from jaxkit.spectral._scion import scion as scion
from jaxkit.spectral._symmetry_compatible import symmetry_compatible as symmetry_compatible
