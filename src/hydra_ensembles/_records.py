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
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import BusyError, DiskError, FormatError, HydraError

if TYPE_CHECKING:  # torch takes a second to import, and writing a file does not need it
    from torch import Tensor, nn


PARTIAL = ".partial"
"""How the name of a file ends that is being written, or that a killed process left."""

SEAL = "sha256"
"""Where a sealed record keeps the digest of everything else in it."""

LOCK = ".lock"
"""How the name of a file ends that is there while a process holds a folder or a file."""

WAIT = 60.0
"""Seconds to wait for a process that writes for seconds, such as a save."""

T = TypeVar("T")
_held = threading.local()
_DISK = {errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM}
_DISK_WORDS = ("no space left", "file too large", "disk quota", "enforce fail", "read-only file")


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file beside its place and rename it; a failure leaves what was there before.

    Folders that are missing are made. A device or a pipe is written as it is, and a link stays.
    """
    target = place_of(path)
    beside = target.with_name(f".{target.name}{own_suffix()}{PARTIAL}")
    with writing(target):
        if is_device(target):
            with target.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with beside.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
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
        target: A folder, which is made if it is missing, or a file.
        wait: Seconds to wait for another holder before a `BusyError`.
        is_file: Whether the target is a file, which need not be there.
    """
    from filelock import FileLock, Timeout

    place = Path(target).resolve()
    lock = place.with_name(f".{place.name}{LOCK}") if is_file else place / LOCK
    mine: set[tuple[int, Path]] = _held.__dict__.setdefault("locks", set())
    key = (os.getpid(), lock)  # a forked process does not hold what its parent does
    if key in mine:
        yield
        return
    kind = "file" if is_file else "folder"
    with writing(target):
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError:
            raise FormatError(f"{lock.parent} is a file: give a folder to write to.") from None
        system = FileLock(lock, timeout=wait, thread_local=False)
        try:
            system.acquire()
        except Timeout:
            raise BusyError(
                f"Another process is writing {os.fspath(target)}. Wait for it, or choose another "
                f"{kind}."
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
                found = read()
            except Exception as error:
                if _file_numbers(folder) == before and not (folder / LOCK).exists():
                    raise
                problem = error
            else:
                if _file_numbers(folder) == before:
                    return found
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
    """Return the system's number of every file in a folder: a file in its place has another one.

    Args:
        folder: Without what is in its sub-folders.
        opened: Keeps the files open: the number of an open file is not given to another one.
    """
    found = {}
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False) or entry.name.endswith(LOCK):
            continue
        found[entry.name] = entry.inode()
        if opened is not None and entry.is_file(follow_symlinks=False) and os.name == "posix":
            with suppress(OSError):  # Windows gives no number twice, and replaces no open file
                handle = os.open(entry.path, os.O_RDONLY)
                opened.callback(os.close, handle)
                found[entry.name] = os.fstat(handle).st_ino
    return found


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
        text = " ".join(str(error).split())
        found = DiskError(
            f"Cannot write {os.fspath(target)}: {text}. What was there before is still there, and "
            "finished steps are kept: make room or choose another place, and start again."
        )
        found.errno, found.filename = getattr(error, "errno", None), os.fspath(target)
        raise found from error


def is_disk(error: BaseException) -> bool:
    """Tell whether writing failed; safetensors wraps the system's error in its own."""
    if isinstance(error, DiskError) or (isinstance(error, OSError) and error.errno in _DISK):
        return True
    return any(word in str(error).lower() for word in _DISK_WORDS)


def inside(folder: str | os.PathLike[str], name: str) -> Path:
    """Return a file of a folder; raise when a link or its name leads out of the folder.

    The cache of the hub keeps a snapshot's files as links to its own `blobs`: these are followed.
    """
    home = Path(folder).resolve()
    path = Path(folder) / name
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


def json_digest(content: Mapping[str, Any], leave_out: str = SEAL) -> str:
    """Return the SHA-256 of JSON data, whatever its spacing and order; one key left out."""
    rest = {key: value for key, value in content.items() if key != leave_out}
    return sha256_of(json.dumps(rest, sort_keys=True, ensure_ascii=True).encode())


def sealed(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return data as it is read back from JSON, with the digest that `check_seal` compares."""
    plain = json.loads(json.dumps(content))
    return {**plain, SEAL: json_digest(plain)}


def check_seal(content: Mapping[str, Any], where: str | os.PathLike[str], advice: str) -> None:
    """Raise when sealed data was changed; data without a seal passes (older, or made by hand)."""
    if SEAL in content and content[SEAL] != json_digest(content):
        raise FormatError(
            f"{os.fspath(where)} is damaged: its content does not have the SHA-256 that it names. "
            f"{advice}"
        )


def read_sealed(path: Path, what: str, advice: str) -> dict[str, Any]:
    """Read a JSON object that was written sealed.

    Args:
        path: Of the file.
        what: What it is, for errors: `"the state of a search"`.
        advice: What to do when it is damaged.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested without end
        raise FormatError(f"{path} is not {what} ({error}). {advice}") from None
    if not isinstance(content, dict):
        raise FormatError(f"{path} is not {what} (a {type(content).__name__}). {advice}")
    check_seal(content, path, advice)
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


def read_json(
    kind: str, source: str | os.PathLike[str], *, error: type[Exception] = FormatError
) -> Any:
    """Read JSON from text that starts with `{` or `[`, or from a file; `kind` is for errors."""
    text = str(source)
    if isinstance(source, os.PathLike) or not text.lstrip().startswith(("{", "[")):
        path = Path(source)
        if not path.exists():
            raise error(f"No file {path}: expected a {kind} saved by to_json().")
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as wrong:
            raise error(
                f"{path} is not the JSON of a {kind} ({wrong}). It is damaged or something else: "
                f"write it again with {kind}.to_json()."
            ) from None
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise error(
            f"Not the JSON of a {kind} ({wrong}). It must come from {kind}.to_json()."
        ) from None


def read_record(
    kind: str, source: str | os.PathLike[str], *, error: type[Exception] = FormatError
) -> dict[str, Any]:
    """Read what `to_record` wrote, from text or from a file.

    Args:
        kind: The kind that it must have.
        source: JSON text, or a path.
        error: Raised when it is something else.
    """
    record = read_json(kind, source, error=error)
    name = record.get("kind") if isinstance(record, dict) else type(record).__name__
    if not isinstance(record, dict) or name != kind:
        raise error(
            f"Expected the JSON of a {kind} but found {name!r}. It must come from {kind}.to_json()."
        )
    if record.get("version", 1) != 1:
        raise error(
            f"This {kind} has version {record['version']}, and this library reads version 1. "
            "Update hydra-ensembles to read it."
        )
    if record.get(SEAL, "") != json_digest(record) and SEAL in record:
        raise error(
            f"This {kind} was changed after it was written: its content does not have the SHA-256 "
            "that it names. Delete it to make it again, or copy it again from where it was made."
        )
    return record


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


def tensor_bytes(tensor: Tensor) -> Any:
    """Return a tensor's bytes without a copy; numpy has no bfloat16, so they are bytes first."""
    import torch

    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else b""


def model_fingerprint(model: nn.Module) -> str:
    """Return a SHA-256 over the names, types, shapes and bytes of a model's tensors."""
    return tensors_digest(model.state_dict())


def tensors_digest(tensors: Mapping[str, Any]) -> str:
    """Return a SHA-256 over the names, types, shapes and bytes of tensors; others are left out."""
    import torch

    whole = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        if isinstance(tensor, torch.Tensor):
            whole.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            whole.update(tensor_bytes(tensor))
    return whole.hexdigest()


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor], record: str = "", *, name: str = "record"
) -> None:
    """Write tensors and a text of that name as one safetensors file, whole, with their digest."""
    from safetensors.torch import save

    digest = sha256_of(f"{tensors_digest(tensors)} {record}".encode())
    write_whole(path, save(dict(tensors), metadata={name: record, SEAL: digest}))


def read_tensors(
    path: Path, what: str, advice: str, *, name: str = "record"
) -> tuple[dict[str, Tensor], str]:
    """Read what `write_tensors` wrote; see `read_sealed` for the arguments.

    A file without a digest (an older one) passes.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            facts = file.metadata() or {}
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError, OSError) as error:
        raise FormatError(f"{path} is not {what} ({error}). {advice}") from None
    record: str = facts.get(name, "")
    digest = sha256_of(f"{tensors_digest(tensors)} {record}".encode())
    if facts.get(SEAL, digest) != digest:
        raise FormatError(
            f"{path} is damaged: its content does not have the SHA-256 that it names. {advice}"
        )
    return tensors, record


def check_same_run(
    where: str | os.PathLike[str], saved: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    """Raise unless a saved run had the settings of the run that wants to continue it.

    Args:
        where: The file or folder, for the error.
        saved: Settings as they were read back from JSON.
        now: Plain data.
    """
    now = json.loads(json.dumps(now))  # as it would be read back: tuples become lists
    changes = _changes("", dict(saved), now)
    if changes:
        more = f"; and {len(changes) - 6} more" if len(changes) > 6 else ""
        raise FormatError(
            f"{os.fspath(where)} was written with different settings: {'; '.join(changes[:6])}"
            f"{more}. Use the original settings to resume, or choose another folder."
        )


_CONTENTS = {
    "model": "the model's weights have changed",
    "start": "the model's weights have changed",
    "data": "the data has changed",
    "inputs": "the input files have changed",
    "ood": "the outliers have changed",
    "outliers": "the outliers have changed",
    "teachers": "the teachers have changed",
}
"""What settings are about that hold fingerprints, which mean nothing to people."""


def _changes(name: str, before: Any, after: Any) -> list[str]:
    """Say in words how two values of a setting differ."""
    if before == after:
        return []
    if name and re.search(r"[0-9a-f]{64}", json.dumps([before, after])):
        return [_CONTENTS.get(name, f"{name} has changed")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if isinstance(before, dict) and isinstance(after, dict):
        names = {key: f"{name}.{key}".lstrip(".") for key in sorted({**before, **after})}
        pairs = [(full, before.get(key), after.get(key)) for key, full in names.items()]
        return [words for pair in pairs for words in _changes(*pair)]
    return [f"{name} was {_words(before)}, is {_words(after)}"]


def _words(value: Any) -> str:
    if value is None:
        return "not set"
    text = json.dumps(value)
    if len(text) <= 40:
        return text
    return f"{len(value)} values" if isinstance(value, (list, dict)) else text[:37] + "..."
