"""Errors of the library: each says what was found, what was expected and what to do next."""

from __future__ import annotations

import os


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


class ArgumentError(HydraError, ValueError, TypeError):
    """An argument has a value or a type that the function cannot use."""


def check_number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    whole: bool = False,
    optional: bool = False,
) -> None:
    """Raise `ArgumentError` unless an argument is a number within its bounds.

    Args:
        name, value: The argument's name and value.
        least, above, most: Bounds; `above` itself is refused.
        whole: Only integers will do.
        optional: None will do as well.
    """
    if value is None and optional:
        return
    good = hasattr(value, "__index__") or (not whole and hasattr(value, "__float__"))
    if good and not isinstance(value, str | bool):
        number = float(value)  # type: ignore[arg-type]
        within = least is None or number >= least, above is None or number > above
        if all(within) and (most is None or number <= most):
            return
    words = [f"{least:g} or more"] if least is not None else []
    words += [f"above {above:g}"] if above is not None else []
    words += [f"{most:g} at most"] if most is not None else []
    kind = "a whole number" if whole else "a number"
    raise ArgumentError(
        f"{name}={value!r:.60}: expected {kind}{', ' * bool(words)}{', '.join(words)}"
        f"{' or None' if optional else ''}."
    )


def check_place(name: str, value: object) -> None:
    """Raise `ArgumentError` unless an argument is a path."""
    if not isinstance(value, str | os.PathLike):
        raise ArgumentError(f"{name}={value!r:.60}: expected the path of a folder.")
