"""Objectives of reinforcement learning from sampled outputs."""

from jaxkit.rl._boltzmann_weights import boltzmann_weights as boltzmann_weights
from jaxkit.rl._group_advantages import group_advantages as group_advantages
