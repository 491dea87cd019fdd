"""Counts of points in balls from full matrices of distances, in float64."""

import numpy as np


def by_pairs(centers, points, k):
    """Returns the points in each ball, and the balls around each point."""
    centers, points = np.float64(centers), np.float64(points)
    own, pairs = (
        np.sqrt(np.sum((centers[:, None] - x[None]) ** 2, axis=-1)) for x in (centers, points)
    )
    radii = np.sort(own, axis=1)[:, k]  # the first is the center itself, or a copy
    inside = pairs <= radii[:, None] + 1e-9
    return inside.sum(1), inside.sum(0)
