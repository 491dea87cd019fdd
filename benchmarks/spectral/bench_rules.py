"""A word model: the rules for embedding and output head against AdamW, all else being equal."""

import functools

import optax

from benchmarks import lm, tuning
from jaxkit import spectral

ON_REQUEST = True

SIZES = {
    "smoke": lm.Size("help_words", 16, 48, 1, 2, 8, 4, 10, 5, 8),
    "short": lm.Size("frequent_help_words", 64, 192, 1, 4, 32, 16, 80, 10, 208),
    "full": lm.Size("help_words", 64, 192, 1, 4, 32, 16, 200, 10, 336),
}
SEEDS = {"smoke": (1, 2), "short": range(1, 6), "full": range(1, 11)}
TUNE_SEEDS = (1001, 1002)  # never reported
HIDDEN_RATE = 0.02  # of Muon
POSITION_RATE = 0.01  # of AdamW, for positions and norms
ABSOLUTE = "row_norm, absolute eps"
RULES = {
    "right_spectral": {"rule": "right_spectral"},
    "row_then_polar": {"rule": "row_then_polar"},
    "row_norm": {"rule": "row_norm"},
    ABSOLUTE: {"rule": "row_norm", "eps_mode": "absolute"},
}
RIVAL = "optax.adamw"
# The short form leaves out what is known to lose, the smoke form what takes long to compile.
LEFT_OUT = {"full": (), "short": (ABSOLUTE,), "smoke": (ABSOLUTE, "row_norm", "row_then_polar")}
# All grids are of the same ratios, and each lies around the best rates of its method.
GRID = {"embedding_rate": (1e-2, 3e-2, 1e-1, 3e-1), "head_rate": (1e-3, 3e-3, 1e-2, 3e-2)}
GRIDS = {
    **dict.fromkeys(RULES, GRID),
    "right_spectral": {**GRID, "embedding_rate": (3e-3, 1e-2, 3e-2, 1e-1)},
    RIVAL: {"embedding_rate": (3e-2, 1e-1, 3e-1, 1.0), "head_rate": (3e-3, 1e-2, 3e-2, 1e-1)},
}
ABOUT = {"case": "embedding and head", "unit": "nats per word"}


def run(context):
    size, seeds = SIZES[context.form], SEEDS[context.form]
    makers = {name: MAKERS[name] for name in MAKERS if name not in LEFT_OUT[context.form]}
    rates = {name: tuning.chosen(context, name) for name in makers}
    results = lm.Task(size, context.dtype).race(makers, rates, seeds, context.track)
    yield from lm.losses(
        tuple(makers)[:-1], results, **ABOUT, metric="validation loss", size=size, seeds=seeds
    )
    yield from lm.curves(results, **ABOUT)


def steps(context):
    makers = {name: MAKERS[name] for name in ("right_spectral", RIVAL, *MAKERS)}
    rates = {name: tuning.chosen(context, name) for name in makers}
    yield from lm.Task(SIZES[context.form], context.dtype).steps(makers, rates)


def tune(context):
    size = SIZES[context.form]
    return tuning.entry(
        lm.Task(size).search(MAKERS, GRIDS, TUNE_SEEDS, context.track),
        grids=GRIDS,
        criterion="lowest mean validation loss, nats per word, after the last step",
        size=str(size),
        seeds=TUNE_SEEDS,
    )


def _by_rule(options, embedding_rate, head_rate):
    options = {**options, "scale": "unit_rms"}
    return spectral.symmetry_compatible(
        HIDDEN_RATE,
        roles={
            "embedding": {**options, "multiplier": embedding_rate / HIDDEN_RATE},
            "lm_head": {**options, "centered": True, "multiplier": head_rate / HIDDEN_RATE},
        },
        other=_plain_adamw(POSITION_RATE),
    )


def _adamw(embedding_rate, head_rate):
    rates = {"embedding": embedding_rate, "lm_head": head_rate, "other": POSITION_RATE}
    return spectral.symmetry_compatible(
        HIDDEN_RATE,
        roles={"embedding": "other", "lm_head": "other"},
        other=optax.partition(
            {role: _plain_adamw(rate) for role, rate in rates.items()}, spectral.label_params
        ),
    )


def _plain_adamw(learning_rate):
    return optax.adamw(learning_rate, b1=0.95, b2=0.95, weight_decay=0.0)


MAKERS = {name: functools.partial(_by_rule, options) for name, options in RULES.items()}
MAKERS[RIVAL] = _adamw
