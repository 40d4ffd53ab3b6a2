"""Steering: add a vector to an activation, in every forward pass."""

from __future__ import annotations

from kamui_steering.steering import Steering

__all__ = ["Steering"]
