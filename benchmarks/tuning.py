"""Tuned settings: how they are chosen, written to ``settings.json``, and looked up."""

import datetime
import itertools
import math

import numpy as np

LARGEST = {"average": 1.0}  # the ends of settings that have one, beyond which no grid can reach


def search(race, grids, seeds, **about):
    """Returns what ``settings.json`` holds of a search over all points of ``grids``.

    ``race(method, settings, seeds)`` runs each of a list of settings with the seed beside it, and
    returns the criterion of each run.
    """
    tables = {}
    for method, grid in grids.items():
        points = [dict(zip(grid, x, strict=True)) for x in itertools.product(*grid.values())]
        settings = [point for point in points for _ in seeds]
        values = np.asarray(race(method, settings, list(seeds) * len(points)))
        tables[method] = values.reshape(*map(len, grid.values()), len(seeds)).mean(-1)
    return entry(tables, grids=grids, seeds=seeds, **about)


def entry(tables, *, grids, criterion, size, seeds):
    """Returns what ``settings.json`` holds for one benchmark.

    ``grids[method]`` maps each setting to its values; ``tables[method]`` is the criterion at each
    point, one axis a setting, and the lowest counts; of those that are the lowest to four digits,
    the one with the most settings inside their grids. A run that diverged may hold NaN.
    """
    methods = {}
    for method, grid in grids.items():
        table = np.asarray(tables[method], np.float64)
        table = np.round(np.where(np.isfinite(table), table, np.inf), 4)
        lowest = np.argwhere(table == table.min())
        inside = (lowest > 0) & (lowest < np.array(table.shape) - 1)
        best = lowest[np.argmax(inside.sum(1))]
        chosen = {
            name: values[index] for (name, values), index in zip(grid.items(), best, strict=True)
        }
        values = [float(x) if x < np.inf else None for x in table.flat]
        methods[method] = {
            "chosen": chosen,
            "value": float(table[tuple(best)]),
            "grid": {name: list(values) for name, values in grid.items()},
            "values": values,
        }
    return {
        "date": datetime.date.today().isoformat(),
        "criterion": criterion,
        "size": size,
        "seeds": list(seeds),
        "methods": methods,
    }


def chosen(context, method):
    """Returns the tuned settings of ``method``."""
    try:
        return context.settings["methods"][method]["chosen"]
    except KeyError:
        raise ValueError(
            f"settings.json must hold tuned settings of {method}, got none; --tune makes them."
        ) from None


def faults(settings):
    """Yields what makes a comparison unfair: unequal grids, a best value at the end of a grid."""
    methods = settings["methods"]
    sizes = {
        name: math.prod(len(values) for values in m["grid"].values()) for name, m in methods.items()
    }
    for one, other in itertools.pairwise(sizes):
        if sizes[one] != sizes[other]:
            yield f"the grids of {one} and {other} must be equal, got {sizes[one]}, {sizes[other]}"
    for name, method in methods.items():
        for setting, values in method["grid"].items():
            best = method["chosen"][setting]
            if best in (min(values), max(values)) and best != LARGEST.get(setting):
                yield f"{setting} of {name} must lie inside its grid, got its end, {best}"
