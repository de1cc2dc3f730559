"""Registries: strings that name things, open to a user's own."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

from .errors import MissingDependencyError, UnknownNameError

T = TypeVar("T")


def unknown_name(kind: str, name: object, known: Iterable[str]) -> UnknownNameError:
    """Return the error for a name that is not among the known ones; it suggests near ones."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
    hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
    return UnknownNameError(f"Unknown {kind} {name!r}.{hint} Known: {', '.join(known)}.")


def check_name(kind: str, name: object, known: Iterable[str]) -> None:
    """Raise `UnknownNameError` unless a name is among the known ones."""
    known = list(known)
    if name not in known:
        raise unknown_name(kind, name, known)


def imported(module: str, who: str, extra: str) -> Any:
    """Import a package that an extra of the library brings, or say what needs it.

        parquet = imported("pyarrow.parquet", "Reading Parquet files", "ray")

    Raises:
        MissingDependencyError: It is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingDependencyError(
            f"{who} needs {package}: pip install 'hydra-ensembles[{extra}]'."
        ) from error


def public_function(name: str) -> Any:
    """Return a function of the library by its public name.

    For a method that hands over to a room that comes later, as `HydraEnsemble.export` does: the
    library's own table of names knows where it is.
    """
    assert __package__ is not None
    return getattr(importlib.import_module(__package__), name)


class Registry(Generic[T]):
    """A named table of things of one kind; an unknown name's error lists the near ones.

    Example:
        >>> shapes = Registry("shape")
        >>> @shapes.register("circle")
        ... def circle(): ...
        >>> shapes["circle"] is circle
        True
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str, *, replace: bool = False) -> Callable[[T], T]:
        """Register the decorated thing under `name`."""

        def add(entry: T) -> T:
            if name in self._entries and not replace:
                raise ValueError(
                    f"The {self.kind} {name!r} is registered already; pass replace=True."
                )
            self._entries[name] = entry
            return entry

        return add

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            raise unknown_name(self.kind, name, sorted(self._entries)) from None

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __repr__(self) -> str:
        return f"Registry({self.kind}: {', '.join(self._entries)})"
