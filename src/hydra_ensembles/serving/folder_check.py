"""Check a folder (`doctor`): read every file with the code that uses it, and list what that raises.

A folder may be several things at once: `build` writes a saved ensemble and, beside it, the finished
steps of its search.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._records import PARTIAL, check_seal, holding, inside, read_json, read_sealed
from .._tensors import read_tensors
from ..errors import BusyError, FormatError, HydraError, MissingDependencyError
from ..evaluation import Results
from ..fusion import HydraEnsemble
from ..fusion.folder_reader import check_file
from ..fusion.folder_schema import CARD, CONFIG, FORMAT, NOVELTY, WEIGHTS, read_config
from ..fusion.folder_writer import SAVING, can_finish_saving, finish_saving
from ..runtime import load, read_contract
from ..runtime.contract import CONTRACT
from ..search.search_state import read_state, read_stored
from ..training.checkpoint import FILE_NAME, read_checkpoint
from ..training.distillation import RUN_FILE
from ..training.teacher_answers import read_answers
from .checksums import SUMS, check_sums
from .exporter import STAGING

SOUND, DAMAGED, MISSING, LEFTOVER = "sound", "damaged", "missing", "leftover"
ADVICE = "Copy it again, or run the command that wrote it."


def _read_results(path: Path) -> None:
    results = Results.load(path)
    if read_sealed(path, "a record of results", ADVICE).get("examples") and not results.examples:
        raise FormatError("Its examples are missing, its figures are there. Evaluate again.")


def _read_json(path: Path) -> None:
    content = read_json(path, "JSON", ADVICE)
    if isinstance(content, dict):
        check_seal(content, path, ADVICE)


def _read_yaml(path: Path) -> None:
    import yaml

    try:
        yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is not YAML ({error}). {ADVICE}") from None


READERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "build.json": (read_state, "steps of build; a rerun goes on from there"),
    "search.json": (read_state, "steps of a search; a rerun goes on from there"),
    RUN_FILE: (_read_json, "a run of distill; a rerun goes on from there"),
    FILE_NAME: (lambda path: read_checkpoint(path.parent), "training; a rerun goes on from there"),
    "candidates/*.safetensors": (read_stored, "logits of a candidate"),
    "answers/*.npy": (read_answers, "answers of a teacher"),
    "results-*.json": (_read_results, "results of eval"),
    "*.safetensors": (lambda path: read_tensors(path, "safetensors", ADVICE), "tensors"),
    "*.json": (_read_json, "JSON"),
    "config.yaml": (_read_yaml, "options of the command"),
}
"""What reads a file of a run, and what it is, by its name; the first that fits."""


@dataclass(frozen=True)
class Finding:
    """What was found out about one file.

    Attributes:
        file: Its path in the folder.
        state: `"sound"`, `"damaged"`, `"missing"` or `"leftover"` (by a process that was killed).
        words: What it is, or what is wrong with it and what to do.
    """

    file: str
    state: str
    words: str


@dataclass
class Checkup:
    """The state of a folder.

    Attributes:
        folder: What was checked.
        findings: By file.
        advice: What can be saved.
    """

    folder: Path
    findings: list[Finding] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged or missing; leftovers do no harm."""
        return not any(found.state in (DAMAGED, MISSING) for found in self.findings)

    def state_of(self, file: str) -> str | None:
        """Return the state of a file; None for a file that this library did not write."""
        return next((found.state for found in self.findings if found.file == file), None)

    def __str__(self) -> str:
        width = max((len(found.file) for found in self.findings), default=0)
        lines = [f"{f.state:8}  {f.file:{width}}  {f.words}" for f in self.findings]
        lines += [f"- {words}" for words in self.advice]
        bad = sum(found.state in (DAMAGED, MISSING) for found in self.findings)
        return "\n".join([*lines, f"{bad} damaged or missing files." if bad else "Sound."])

    def _read(self, path: Path, words: str, reader: Callable[..., Any], *arguments: Any) -> Any:
        """Call a file's reader and add what it raises; return what it returns, or None."""
        content = None
        try:
            inside(path.parent, path.name)  # a link must not lead out of the folder
            content, state = reader(*arguments), SOUND
        except MissingDependencyError as error:
            state, words = SOUND, f"not loaded: {error}"
        except (HydraError, OSError) as error:
            state, words = DAMAGED if path.exists() else MISSING, str(error)
        name = path.relative_to(self.folder).as_posix()
        self.findings.append(Finding(name, state, words))
        return content


def check_folder(folder: str | os.PathLike[str]) -> Checkup:
    """Check a saved ensemble, the folder of a run, an exported folder, or several in one.

    Nothing is changed.

    Example:
        >>> check_folder("vit-hydra").is_sound
        True
    """
    home = Path(folder)
    if not home.is_dir():
        raise FormatError(f"{home} is not a folder: give one that hydra-ensembles wrote.")
    checkup = Checkup(home)
    paths = list(_paths(home))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of keys that a newer version wrote
        for place in (home, *(path for path in paths if path.is_dir())):
            if _is_ensemble(place):
                _check_ensemble(place, checkup)
            if (place / CONTRACT).exists():
                kind = "an exported ensemble"
                contract = checkup._read(place / CONTRACT, kind, read_contract, place)
                for name in contract.data["files"] if contract is not None else ():
                    checkup._read(place / name, "SHA-256 as exported", contract.file, name)
                if contract is not None and checkup.is_sound:
                    checkup._read(place / CONTRACT, "the exported ensemble loads", load, place)
            if (place / SUMS).is_file():
                _check_sums(place, checkup)
    for path in paths:
        name = path.relative_to(home).as_posix()
        if words := _leftover(path):
            checkup.findings.append(Finding(name, LEFTOVER, words))
        elif not path.is_dir() and checkup.state_of(name) is None:
            reader = next((READERS[pattern] for pattern in READERS if path.match(pattern)), None)
            if reader is not None:
                checkup._read(path, reader[1], reader[0], path)
    return checkup


def _paths(home: Path) -> Iterator[Path]:
    """Yield files and folders; not what is in hidden folders, and not through links."""
    for path in sorted(home.iterdir()):
        hidden, is_folder = path.name.startswith("."), path.is_dir() and not path.is_symlink()
        if not (hidden and is_folder) or path.name.startswith((SAVING, STAGING)):
            yield path
        if is_folder and not hidden:
            yield from _paths(path)


def _leftover(path: Path) -> str | None:
    """Say what a killed process left, or return None."""
    if path.name.startswith(SAVING):
        if can_finish_saving(path):
            return "a save that was stopped after all its files were written: --repair finishes it"
        return "an unfinished save; --repair or the next save removes it"
    if path.name.startswith(STAGING):
        return "an unfinished export; --repair or the next export removes it"
    if path.name.endswith(PARTIAL):
        return "an unfinished file; run the command again to write it"
    return None


def _is_ensemble(folder: Path) -> bool:
    try:
        text = inside(folder, CONFIG).read_text(encoding="utf-8", errors="replace")
    except (OSError, FormatError):
        return (folder / CARD).is_file() and (folder / WEIGHTS).is_file()
    return f'"{FORMAT}"' in text or (folder / NOVELTY).is_file()


def _check_ensemble(folder: Path, checkup: Checkup) -> None:
    config = checkup._read(folder / CONFIG, "a saved ensemble", read_config, folder)
    if config is None:
        return
    for name, digest in {WEIGHTS: config.sha256, **config.files}.items():
        checkup._read(folder / name, "SHA-256 as saved", check_file, folder, name, digest)
    if checkup.is_sound and config.host["library"] != "custom":

        def load_all() -> None:
            ensemble = HydraEnsemble.from_pretrained(folder)
            _ = ensemble.tokenizer, ensemble.transform

        checkup._read(folder / CONFIG, "the ensemble loads", load_all)
    elif checkup.state_of((folder / WEIGHTS).relative_to(checkup.folder).as_posix()) != SOUND:
        checkup.advice.append(
            f"{CONFIG} is sound: masks, temperatures and the record are there. With its host, "
            "fuse(host, masks) makes the ensemble again, unless its members were trained."
        )


def _check_sums(folder: Path, checkup: Checkup) -> None:
    def refuse(problem: str | None) -> None:
        if problem:
            raise FormatError(f"{problem}. {ADVICE}")

    problems = checkup._read(folder / SUMS, "checksums", check_sums, folder)
    for name, problem in (problems or {}).items():
        place = (folder / name).relative_to(checkup.folder).as_posix()
        if problem or checkup.state_of(place) is None:
            checkup._read(folder / name, f"SHA-256 as in {SUMS}", refuse, problem)


def repair(checkup: Checkup) -> list[str]:
    """Finish stopped saves and delete leftovers; return what was done.

    Files of processes that still run are left alone.
    """
    done = []
    for found in checkup.findings:
        path = checkup.folder / found.file
        hidden = path.name.startswith(".")  # the output of `predict -o FILE` so far is not
        if found.state != LEFTOVER or not hidden or not path.exists() or _is_in_use(path):
            continue
        try:
            with holding(path.parent):
                if path.name.startswith(SAVING) and finish_saving(path.parent):
                    done.append(f"finished the save in {path.parent}")
                    continue
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
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
    except PermissionError:  # another user's process
        return True
    return True
