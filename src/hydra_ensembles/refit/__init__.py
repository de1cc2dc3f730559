"""Least squares instead of training: linear layers fitted to states of other models."""

from .folding import fold as fold

__all__ = ["fold"]
