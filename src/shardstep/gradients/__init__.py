"""Gradient sources: full gradients (ZeRO-1), or a reducer that shards them (ZeRO-2)."""

from shardstep.gradients.base import GradientSource
from shardstep.gradients.feeders import AutogradFeeder, DDPFeeder
from shardstep.gradients.full import FullGradients
from shardstep.gradients.reducer import GradReducer

__all__ = ["AutogradFeeder", "DDPFeeder", "FullGradients", "GradReducer", "GradientSource"]
