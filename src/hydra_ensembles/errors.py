"""Errors of the library: each says what was found, what was expected and what to do next."""

from __future__ import annotations


class HydraError(Exception):
    """Base of every error that this library raises on purpose."""


class MaskError(HydraError, ValueError):
    """A head mask or a score table does not fit the model or is malformed."""


class UnsupportedModelError(HydraError, TypeError):
    """The host model has a structure that cannot be pruned or fused."""


class DataError(HydraError, ValueError):
    """A batch, a loader or a file of data is not usable."""


class FormatError(HydraError, ValueError):
    """A saved folder or file is damaged, newer than this library or not ours."""


class DiskError(HydraError, OSError):
    """A file cannot be written: the disk is full or read-only, or a quota is used up."""

    def __str__(self) -> str:  # OSError would print the number and the file again
        return str(self.args[0]) if self.args else ""


class BusyError(HydraError):
    """Another process is writing the same folder or file; wait for it, or choose another one."""


class VerificationError(HydraError, AssertionError):
    """Two computations that must be equal differ."""


class UnknownNameError(HydraError, KeyError, ValueError):
    """A name (of a method, a score, a mode ...) is not known; the message lists those that are."""

    def __str__(self) -> str:  # KeyError would print the repr
        return str(self.args[0]) if self.args else ""


class MissingDependencyError(HydraError, ImportError):
    """An optional package is needed; the message names the extra that brings it."""
