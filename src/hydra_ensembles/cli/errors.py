"""Exit codes that scripts can use, and errors as one line.

| code | what happened |
|---|---|
| 0 | fine |
| 1 | something unexpected |
| 2 | wrong usage |
| 3 | data or a given file is missing or not usable |
| 4 | the model is not supported or cannot be loaded |
| 5 | a saved file is damaged, foreign or newer, or a mask does not fit |
| 6 | a package is missing |
| 7 | the disk is full or cannot be written |
| 8 | a verification failed |
| 9 | another process is writing the same folder or file |
| 130 | interrupted |
"""

from __future__ import annotations

from ..errors import (
    BusyError,
    DataError,
    DiskError,
    FormatError,
    HydraError,
    MaskError,
    MissingDependencyError,
    UnknownNameError,
    UnsupportedModelError,
    VerificationError,
)

OPTIONS = {
    "pass skip_broken=True": "give --skip-broken",
    "(text_column)": "with --text-column",
    "(label_column)": "with --label-column",
    "choose another folder": "choose another folder with --output",
    "choose another file": "choose another file with --output",
}
"""What messages of the library call an argument, and what it is called here."""


class Stop(HydraError):
    """An error of the command line itself, with its exit code."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error."""
    from .._records import is_disk  # --help imports nothing that it does not need

    if isinstance(error, Stop):
        return error.code
    if is_disk(error):
        return 7
    kinds: list[tuple[type[BaseException] | tuple[type[BaseException], ...], int]] = [
        (MissingDependencyError, 6),
        (VerificationError, 8),
        (UnsupportedModelError, 4),
        ((FormatError, MaskError), 5),
        (DataError, 3),
        (BusyError, 9),
        (UnknownNameError, 2),
        (FileNotFoundError, 3),
        (HydraError, 3),
        (ValueError, 2),
    ]
    return next((code for kind, code in kinds if isinstance(error, kind)), 1)


def one_line(error: BaseException) -> str:
    """Return an error's message in one line, with what to do next where we know it."""
    from .._records import is_disk

    text = " ".join(str(error).split()) or type(error).__name__
    for name, option in OPTIONS.items():
        text = text.replace(name, option)
    if is_disk(error) and not isinstance(error, DiskError):  # which says all of it itself
        where = getattr(error, "filename", None)
        place = f" at {where}" if where else ""
        return (
            f"Cannot write{place}: {text}. What was finished is kept: make room or choose another "
            "--output, and start again."
        )
    return text
