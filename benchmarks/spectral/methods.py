"""The optimizers that the benchmarks of spectral compare; each takes two learning rates.

The matrices of the blocks get the first, all else the second. But for the whole stack, embedding,
head, positions and norms get the same AdamW from all but rollfast, with the look-ahead that
``optax.contrib.muon`` always gives its AdamW. So the loss differs by the rule for matrices alone.
"""

import functools

import jax
import optax

from jaxkit import spectral

MUON = "spectral.muon"
STACK = "spectral.symmetry_compatible"


def muon(learning_rate, other_learning_rate):
    return spectral.muon(learning_rate, other=_adamw(other_learning_rate))


def stack(learning_rate, other_learning_rate):
    multiplier = {"multiplier": other_learning_rate / learning_rate}
    return spectral.symmetry_compatible(
        learning_rate,
        roles={"embedding": multiplier, "lm_head": multiplier},
        other=_adamw(other_learning_rate),
    )


def adamw(learning_rate, other_learning_rate):
    groups = {True: _adamw(learning_rate), False: _adamw(other_learning_rate)}
    return optax.partition(groups, _is_matrix)


def optax_muon(learning_rate, other_learning_rate):
    return optax.contrib.muon(
        learning_rate,
        adam_b2=0.95,
        adam_learning_rate=other_learning_rate,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=functools.partial(
            _specs, optax.contrib.MuonDimensionNumbers()
        ),
    )


def rollfast(note):
    """Returns the package, or None and, if there is a ``note``, a printed line."""
    try:
        import rollfast
    except ImportError as error:
        if note:
            note(f"rollfast (Python 3.12 or newer) is left out: {error}.")
        return None
    return rollfast


def rollfast_muon(package):
    def make(learning_rate, other_learning_rate):
        return package.muon(
            learning_rate,
            adam_b2=0.95,
            adam_learning_rate=other_learning_rate,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=functools.partial(
                _specs, package.MatrixDimensionNumbers()
            ),
        )

    return make


def _adamw(learning_rate):
    return optax.adamw(learning_rate, b2=0.95, weight_decay=0.0, nesterov=True)


def _is_matrix(params):
    roles = spectral.label_params(params)
    return jax.tree.map(lambda role: role not in ("embedding", "lm_head", "other"), roles)


def _specs(spec, params):
    return jax.tree.map(lambda is_matrix: spec if is_matrix else None, _is_matrix(params))
