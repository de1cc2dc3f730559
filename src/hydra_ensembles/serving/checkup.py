"""Check a folder: what is whole, what is damaged, what a rerun will do, what can be saved.

A folder may be several things at once: `build` writes a saved ensemble and, beside it, the finished
steps of its search. Every file is read by the code that reads it in earnest.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .._records import PARTIAL, holding, inside
from ..errors import BusyError, FormatError, HydraError
from ..fusion.folder_writer import SAVING, can_finish_saving, finish_saving
from .findings import DAMAGED, LEFTOVER, SOUND, Checkup, Finding
from .folder_checks import PARTS, check_file_of_run

MOST_FILES = 100_000
EXPORTING = ".exporting"


def check_folder(folder: str | os.PathLike[str], *, public_key: Any = None) -> Checkup:
    """Check a saved ensemble, the folder of a run, an exported artefact, or all of them in one.

    Nothing is changed.

    Args:
        folder: What to check.
        public_key: A file with the ssh key that must have signed an artefact's checksums.
    """
    home = Path(folder)
    if not home.is_dir():
        raise FormatError(f"{home} is no folder: give one that hydra-ensembles wrote.")
    checkup = Checkup(home)
    known: set[str] = set()
    for place in _folders(home):
        for part in PARTS:
            if part.is_here(place):
                known |= part.check(place, checkup, public_key)
    for path in _files(home):
        name = path.relative_to(home).as_posix()
        if name in known:
            continue
        found = _leftover(path, name) or check_file_of_run(path, name, checkup)
        if found is not None:
            checkup.findings.append(found)
    _advise_on_leftovers(checkup)
    return checkup


def _folders(home: Path) -> Iterator[Path]:
    """Yield a folder and those in it, but not what is hidden and not through links."""
    yield home
    for path in sorted(home.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            yield from _folders(path)


def _files(home: Path) -> Iterator[Path]:
    """Yield all files, and hidden folders of saves as one."""
    count = 0
    for path in sorted(home.iterdir()):
        if path.is_dir() and not path.is_symlink():
            if path.name.startswith((SAVING, EXPORTING)):
                yield path
            elif not path.name.startswith("."):
                yield from _files(path)
        else:
            count += 1
            if count > MOST_FILES:
                raise FormatError(f"{home} holds more than {MOST_FILES} files: give a run's own.")
            yield path


def _leftover(path: Path, name: str) -> Finding | None:
    """Find what a killed process left."""
    if path.name.startswith(SAVING):
        words = (
            "a save that was stopped when all its files were written: --repair finishes it"
            if can_finish_saving(path)
            else "half a save; the next save removes it"
        )
        return Finding(name, LEFTOVER, words, again=True)
    if path.name.startswith(EXPORTING):
        return Finding(name, LEFTOVER, "half an export; the next export removes it", again=True)
    if path.name.endswith(PARTIAL):
        if path.name.startswith("."):
            return Finding(name, LEFTOVER, "half a file; a rerun writes it again", again=True)
        return Finding(name, LEFTOVER, "unfinished output: its last line may be cut; run it again")
    if path.is_symlink():
        try:
            inside(path.parent, path.name)
        except FormatError as error:
            return Finding(name, DAMAGED, str(error))
    return None


def _advise_on_leftovers(checkup: Checkup) -> None:
    again = [found.file for found in checkup.findings if found.again and found.state != SOUND]
    if again:
        files = f"{again[0]} and {len(again) - 1} more" if len(again) > 1 else again[0]
        checkup.advice.append(
            f"--repair finishes a save that was stopped, and removes what a rerun makes again "
            f"({files})."
        )


def repair(checkup: Checkup) -> list[str]:
    """Finish stopped saves, and delete what a rerun makes again; return what was done.

    Files of processes that still run are left alone.
    """
    done = []
    for found in checkup.findings:
        path = checkup.folder / found.file
        if not found.again or found.state == SOUND or _is_in_use(path):
            continue
        try:
            with holding(path.parent):
                if path.name.startswith(SAVING) and finish_saving(path.parent):
                    done.append(f"finished the save in {path.parent}")
                    continue
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except BusyError:
            continue
        except OSError as error:
            raise HydraError(f"Cannot remove {path}: {error}.") from error
        done.append(f"removed {found.file}")
    return done


def _is_in_use(path: Path) -> bool:
    """Tell whether the process that writes a `.NAME.PID.partial` is alive."""
    number = path.name.removesuffix(PARTIAL).rpartition(".")[2]
    if not path.name.endswith(PARTIAL) or not number.isdigit():
        return False
    try:
        os.kill(int(number), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is somebody else's
        return True
    return True
