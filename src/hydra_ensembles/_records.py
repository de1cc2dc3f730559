"""Files that are whole whenever a process ends and whoever else writes them; JSON records; runs.

A file is written beside its place and renamed. A folder of several files is written by one process
at a time (`holding`), as is the folder of a run; it is read as one save left it (`read_steady`).
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from .errors import BusyError, DiskError, FormatError, HydraError

PARTIAL = ".partial"
"""How the name of a file ends that is being written, or that a killed process left."""

SEAL = "sha256"
"""Where a sealed record keeps the digest of everything else in it."""

LOCK = ".lock"
"""How the name of a file ends that is there while a process holds a folder or a file."""

WAIT = 60.0
"""Seconds to wait for a process that writes for seconds, such as a save."""

MOST_BYTES = 256 * 2**20
"""JSON files larger than this are not read: real ones have a few kilobytes."""

T = TypeVar("T")
_held = threading.local()
_DISK = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
_DISK_WORDS = ("no space left", "file too large", "disk quota", "enforce fail", "read-only file")


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file beside its place and rename it; a failure leaves what was there before.

    Missing folders are created. A device or a pipe is written as it is, and a link stays.
    """
    target = place_of(path)
    data = content.encode() if isinstance(content, str) else content
    beside = target.with_name(f".{target.name}{own_suffix()}{PARTIAL}")
    with writing(target):
        if is_device(target):
            target.write_bytes(data)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
        names_to_disk(target.parent)


def own_suffix() -> str:
    """Return the end of a name that no other process or thread uses, on this machine or another."""
    return f".{secrets.token_hex(4)}.{os.getpid()}"


@contextmanager
def holding(
    target: str | os.PathLike[str], *, wait: float = 0.0, is_file: bool = False
) -> Iterator[None]:
    """Hold a folder or a file for writing: no other process or thread holds it meanwhile.

    A thread may hold again what it holds already. The lock (of `filelock`: the system's, on a small
    file in the folder or beside the file) ends with its process, however that ends.

    Args:
        target: A folder, which is created if it is missing, or a file.
        wait: Seconds to wait for another holder before a `BusyError`.
        is_file: Whether the target is a file, which need not exist.
    """
    from filelock import FileLock, Timeout

    place = Path(target).resolve()
    lock = place.with_name(f".{place.name}{LOCK}") if is_file else place / LOCK
    mine: set[tuple[int, Path]] = _held.__dict__.setdefault("locks", set())
    key = (os.getpid(), lock)  # a forked process does not hold what its parent does
    if key in mine:
        yield
        return
    with writing(target):
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise FormatError(f"{lock.parent} is a file: give a folder to write to.") from None
        except (FileNotFoundError, NotADirectoryError) as error:  # such as below a file
            raise DiskError(f"Cannot make the folder {lock.parent}: {error.strerror}.") from error
        system = FileLock(lock, timeout=wait, thread_local=False)
        try:
            system.acquire()
        except Timeout:
            raise BusyError(
                f"Another process is writing {os.fspath(target)}. Wait for it, or choose another "
                f"{'file' if is_file else 'folder'}."
            ) from None
        except OSError as error:
            if is_disk(error):
                raise
            warnings.warn(
                f"Cannot lock {os.fspath(target)} ({error}): make sure that no other process "
                "writes it meanwhile.",
                stacklevel=4,
            )
    mine.add(key)
    try:
        yield
    finally:
        mine.discard(key)
        if system.is_locked:
            with suppress(OSError):  # Windows keeps a file that is open; filelock copes with either
                lock.unlink()
            system.release()


def read_steady(folder: Path, read: Callable[[], T]) -> T:
    """Return what `read` makes of the files of a folder, all of one save.

    When the folder is written meanwhile, it is read again while nobody else writes.
    """
    for pause in (0.0, 0.2, 1.0):
        time.sleep(pause)
        problem: Exception | None = None
        with ExitStack() as opened:
            before = _file_numbers(folder, opened)
            try:
                content = read()
            except Exception as error:
                if _file_numbers(folder) == before and not (folder / LOCK).exists():
                    raise
                problem = error
            else:
                if _file_numbers(folder) == before:
                    return content
        try:
            with holding(folder, wait=3.0):
                return read()
        except (BusyError, DiskError) as error:
            refused: HydraError = error
    if problem is not None and isinstance(refused, DiskError):
        raise problem  # a read-only folder cannot be held; its lock may be that of a killed process
    raise BusyError(
        f"{folder} is being written by another process. Load it again when that is done."
    ) from problem


def _file_numbers(folder: Path, opened: ExitStack | None = None) -> dict[str, int]:
    """Return the inode of every file; kept open, so that no number is used again, if asked."""
    numbers = {}
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False) or entry.name.endswith(LOCK):
            continue
        numbers[entry.name] = entry.inode()
        if opened is not None and entry.is_file(follow_symlinks=False) and os.name == "posix":
            with suppress(OSError):  # Windows gives no number twice, and replaces no open file
                handle = os.open(entry.path, os.O_RDONLY)
                opened.callback(os.close, handle)
                numbers[entry.name] = os.fstat(handle).st_ino
    return numbers


def use_new_file_mode(folder: Path) -> None:
    """Give every file of a folder the mode of a new file; safetensors makes files private."""
    example = folder / f".mode{own_suffix()}"
    example.touch()
    mode = example.stat().st_mode & 0o777
    example.unlink()
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)


def place_of(path: str | os.PathLike[str]) -> Path:
    """Return where a file is written: a link stays, and what it leads to is replaced."""
    target = Path(path)
    return target.resolve() if target.is_symlink() else target


def is_device(path: Path) -> bool:
    """Tell whether a path is a device or a pipe, beside which nothing can be written."""
    return path.exists() and not path.is_file() and not path.is_dir()


def names_to_disk(folder: Path) -> None:
    """Make renames in a folder last through a power cut, where the system can."""
    if os.name != "posix":  # other systems do not open folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network disks cannot
            raise
    finally:
        os.close(handle)


@contextmanager
def writing(target: str | os.PathLike[str]) -> Iterator[None]:
    """Turn the system's errors of a disk that is full or read-only into a `DiskError`."""
    try:
        yield
    except DiskError:
        raise
    except Exception as error:
        if not is_disk(error):
            raise
        refused = DiskError(
            f"Cannot write {os.fspath(target)}: {' '.join(str(error).split())}. What was there "
            "before is still there, and finished steps are kept: make room or choose another "
            "place, and start again."
        )
        refused.errno, refused.filename = getattr(error, "errno", None), os.fspath(target)
        raise refused from error


def is_disk(error: BaseException) -> bool:
    """Tell whether writing failed; safetensors wraps the system's error in its own."""
    if isinstance(error, DiskError) or (isinstance(error, OSError) and error.errno in _DISK):
        return True
    return any(word in str(error).lower() for word in _DISK_WORDS)


def inside(folder: str | os.PathLike[str], name: str) -> Path:
    """Return a file of a folder; raise when a link or its name leads out of the folder.

    The hub's cache keeps a snapshot's files as links into its own `blobs`, which are followed.
    """
    home, path = Path(folder).resolve(), Path(folder) / name
    try:
        place = path.resolve()
    except (OSError, RuntimeError) as error:  # links in a circle
        raise FormatError(f"{path} leads nowhere ({error}). Copy the folder again.") from None
    in_cache = home.parent.name == "snapshots" and place.parent == home.parent.parent / "blobs"
    if not place.is_relative_to(home) and not in_cache:
        raise FormatError(
            f"{path} leads out of its folder, to {place}. Nothing outside is read: copy the file "
            "into the folder, or download the folder again."
        )
    return path


def sha256_of(content: bytes) -> str:
    """Return the SHA-256 of some bytes in hexadecimal digits."""
    return hashlib.sha256(content).hexdigest()


def sha256_of_file(path: str | os.PathLike[str]) -> str:
    """Return the SHA-256 of a file, read piece by piece."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def sealed(content: Mapping[str, Any], key: str = SEAL) -> dict[str, Any]:
    """Return data as it is read back from JSON, with the digest that `check_seal` compares."""
    plain = json.loads(json.dumps(content))
    return {**plain, key: _json_digest(plain, key)}


def check_seal(content: Mapping[str, Any], where: Any, advice: str, key: str = SEAL) -> None:
    """Raise when sealed data was changed; data without a seal (written by hand) passes."""
    if key in content and content[key] != _json_digest(content, key):
        raise FormatError(
            f"{where} was changed after it was saved: its content does not match the SHA-256 in "
            f"it. {advice}"
        )


def _json_digest(content: Mapping[str, Any], key: str) -> str:
    rest = {name: value for name, value in content.items() if name != key}
    return sha256_of(json.dumps(rest, sort_keys=True, ensure_ascii=True).encode())


def check_version(found: Any, newest: tuple[int, int], where: Any) -> tuple[int, int]:
    """Return a format's version; raise when it is malformed or of a newer major."""
    if not isinstance(found, list) or [type(n) is int and n >= 0 for n in found] != [True, True]:
        raise FormatError(f"{where} has the format version {found!r:.60}; expected two numbers.")
    if found[0] > newest[0]:
        raise FormatError(
            f"{where} has format {found[0]}.{found[1]}, newer than {newest[0]}.{newest[1]} which "
            "this library reads. Upgrade hydra-ensembles."
        )
    return found[0], found[1]


def read_json(
    source: str | os.PathLike[str],
    what: str,
    advice: str,
    *,
    error: type[Exception] = FormatError,
) -> Any:
    """Read JSON from text that starts with `{` or `[`, or from a file.

    Args:
        source: The text, or a path.
        what: What it is, for errors: `"the state of a search"`.
        advice: What to do when it is damaged.
        error: Raised when it is.
    """
    text, where = str(source), "This"
    try:
        if isinstance(source, os.PathLike) or not text.lstrip().startswith(("{", "[")):
            path, where = Path(source), text
            if not path.exists():
                raise error(f"No file {path}: expected {what}.")
            if path.stat().st_size > MOST_BYTES:
                raise ValueError(f"{path.stat().st_size} bytes are too many")
            text = path.read_text(encoding="utf-8")
        return json.loads(text)
    except (ValueError, RecursionError, OSError) as wrong:  # also not UTF-8, nested without end
        if isinstance(wrong, error):
            raise
        raise error(f"{where} is not {what}, or damaged ({wrong}). {advice}") from None


def read_sealed(
    path: str | os.PathLike[str], what: str, advice: str, key: str = SEAL
) -> dict[str, Any]:
    """Read a JSON object (see `read_json`) and check its seal, which it keeps under `key`."""
    content = read_json(Path(path), what, advice)
    if not isinstance(content, dict):
        raise FormatError(f"{path} is not {what} (a {type(content).__name__}). {advice}")
    check_seal(content, path, advice, key)
    return content


def to_record(
    kind: str,
    payload: Mapping[str, Any],
    path: str | os.PathLike[str] | None = None,
    *,
    indent: int | None = None,
    seal: bool = False,
) -> str:
    """Return a record as JSON text that names its kind; write it whole when a path is given.

    A sealed record is not meant to be edited by hand: a change is found when it is read.
    """
    content = {"kind": kind, "version": 1, **payload}
    text = json.dumps(sealed(content) if seal else content, indent=indent)
    if path is not None:
        write_whole(path, text + "\n")
    return text


def read_record(
    kind: str, source: str | os.PathLike[str], *, error: type[Exception] = FormatError
) -> dict[str, Any]:
    """Read what `to_record` wrote, from text or from a file; raise `error` for anything else."""
    advice = f"Write it with {kind}.to_json()."
    record = read_json(source, f"the JSON of a {kind}", advice, error=error)
    name = record.get("kind") if isinstance(record, dict) else type(record).__name__
    if not isinstance(record, dict) or name != kind:
        raise error(f"Expected the JSON of a {kind} but found {name!r}. {advice}")
    if record.get("version", 1) != 1:
        raise error(
            f"This {kind} has version {record['version']}, and this library reads version 1. "
            "Upgrade hydra-ensembles to read it."
        )
    check_seal(record, f"This {kind}", "Delete it to compute it again, or copy it again.")
    return record


_CONTENTS = {
    "model": "the model's weights have changed",
    "start": "the model's weights have changed",
    "data": "the data has changed",
    "inputs": "the input files have changed",
    "ood": "the outliers have changed",
    "outliers": "the outliers have changed",
    "teachers": "the teachers have changed",
}
"""What changed, for settings that hold fingerprints, which mean nothing to people."""


def check_same_run(
    where: str | os.PathLike[str], saved: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raise unless a saved run had the settings of the run that wants to continue it.

    Args:
        where: The file or folder, for the error.
        saved: Settings as they were read back from JSON.
        now: Plain data.
    """
    before = dict(_leaves(saved))
    after = dict(_leaves(json.loads(json.dumps(now))))  # as it would be read back
    changes: dict[str, None] = {}  # in order, each once
    for name in sorted({**before, **after}):
        values = [json.dumps(side.get(name)) for side in (before, after)]
        if values[0] == values[1]:
            continue
        if any(re.search("[0-9a-f]{64}", value) for value in values):
            root = name.partition(".")[0]
            changes[_CONTENTS.get(root, f"{root} has changed")] = None
        else:
            old, new = ("not set" if value == "null" else value[:40] for value in values)
            changes[f"{name} was {old}, is {new}"] = None
    if changes:
        more = f"; and {len(changes) - 6} more" if len(changes) > 6 else ""
        raise FormatError(
            f"{os.fspath(where)} was written with different settings: "
            f"{'; '.join(list(changes)[:6])}{more}. Use the original settings to resume, or choose "
            "another folder."
        )


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the full name and the value of every setting in nested data."""
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, inner in pairs:
        full = f"{name}.{key}".lstrip(".")
        if inner and isinstance(inner, (Mapping, list)):
            yield from _leaves(inner, full)
        else:
            yield full, inner
