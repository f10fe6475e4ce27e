"""CenteredClip (Karimireddy et al., arXiv 2012.10333, algorithm 1): a mean that no single member can pull far. Pure.

From the median of each coordinate it moves by the weighted mean of the members' differences, each clipped to a radius,
until it stands still. What is finite and far away moves it by the radius at most, whatever it says.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

_STILL = 1e-6
_MAX_STEPS = 100


def centered_clip(points: torch.Tensor, weights: Sequence[float], radius: float) -> torch.Tensor:
    """The robust mean [d], fp64, of `points` [n, d] with positive `weights` [n]; the mean itself if `radius` is infinite."""
    points = points.double()
    weight = torch.tensor(weights, dtype=torch.float64)
    weight /= weight.sum()
    if math.isinf(radius):
        return weight @ points
    center = torch.quantile(points, 0.5, dim=0) if len(points) > 1 else points[0].clone()
    for _ in range(_MAX_STEPS):
        differences = points - center
        norms = torch.linalg.vector_norm(differences, dim=1)
        step = (weight * (radius / norms.clamp_min(1e-300)).clamp_max(1.0)) @ differences
        center += step
        if float(torch.linalg.vector_norm(step)) <= _STILL * min(1.0, radius):
            break
    return center
