"""Check a folder (`doctor`): read every file with the code that uses it, and list what that raises.

A folder may be several things at once: `build` writes a saved ensemble and, beside it, the finished
steps of its search.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from .._records import PARTIAL, check_seal, holding, inside, read_json, read_sealed, read_tensors
from ..errors import BusyError, FormatError, HydraError, MissingDependencyError
from ..evaluation import Results
from ..fusion import HydraEnsemble
from ..fusion.folder_reader import check_file
from ..fusion.folder_schema import CARD, CONFIG, FORMAT, NOVELTY, WEIGHTS, read_config
from ..fusion.folder_writer import SAVING, can_finish_saving, finish_saving
from ..runtime import Contract, load, read_contract
from ..runtime.contract import CONTRACT
from ..search.search_state import read_state, read_stored
from ..training.checkpoint import FILE_NAME, read_checkpoint
from ..training.distillation import RUN_FILE
from ..training.teacher_answers import read_answers
from .checksums import SUMS, check_sums
from .exporter import STAGING

SOUND, DAMAGED, MISSING, LEFTOVER = "sound", "damaged", "missing", "leftover"
ADVICE = "Copy it again, or run the command that wrote it."


@dataclass(frozen=True)
class Finding:
    """What was found out about one file.

    Attributes:
        file: Its path in the folder.
        state: `"sound"`, `"damaged"`, `"missing"` or `"leftover"` (by a process that was killed).
        words: What it is, or what is wrong with it and what to do.
        remake: Whether a rerun writes it again, so that it can be deleted.
    """

    file: str
    state: str
    words: str
    remake: bool = False


@dataclass
class Checkup:
    """The state of a folder.

    Attributes:
        folder: What was checked.
        findings: By file.
        advice: What can be saved, and what a rerun will do.
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

    def read(
        self,
        path: Path,
        reader: Callable[..., Any],
        *arguments: Any,
        words: str | Callable[[Any], str] = "SHA-256 as saved",
        remake: bool = False,
    ) -> bool:
        """Call a file's reader, add what it raises or `words`, and return whether it is sound."""
        try:
            inside(path.parent, path.name)  # a link must not lead out of the folder
            content = reader(*arguments)
            state, said = SOUND, words if isinstance(words, str) else words(content)
        except MissingDependencyError as error:
            state, said = SOUND, f"not loaded: {error}"
        except (HydraError, OSError) as error:
            state, said = DAMAGED if path.exists() else MISSING, str(error)
        self.findings.append(Finding(self._name(path), state, said, remake))
        return state == SOUND

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "folder": str(self.folder), "sound": self.is_sound}

    def __str__(self) -> str:
        width = max((len(found.file) for found in self.findings), default=0)
        lines = [f"{f.state:8}  {f.file:{width}}  {f.words}" for f in self.findings]
        lines += [f"- {words}" for words in self.advice]
        bad = sum(found.state in (DAMAGED, MISSING) for found in self.findings)
        return "\n".join([*lines, f"{bad} damaged or missing files." if bad else "Sound."])


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
        warnings.simplefilter("ignore")  # keys of newer versions
        for place in (home, *(path for path in paths if path.is_dir())):
            if _is_ensemble(place):
                _check_ensemble(place, checkup)
            if (place / CONTRACT).exists():
                _check_export(place, checkup)
            if (place / SUMS).is_file():
                _check_sums(place, checkup)
    for path in paths:
        name = path.relative_to(home).as_posix()
        if words := _leftover(path):
            hidden = path.name.startswith(".")
            checkup.findings.append(Finding(name, LEFTOVER, words, remake=hidden))
        elif path.is_file() and checkup.state_of(name) is None:
            found = ((read, says) for pattern, read, says in READERS if path.match(pattern))
            for read, says in islice(found, 1):
                remake = path.parent.name in REMADE
                checkup.read(path, read, path, words=says, remake=remake)
    if any(found.remake and found.state != SOUND for found in checkup.findings):
        checkup.advice.append(
            "--repair finishes a save that was stopped, and removes what a rerun writes again."
        )
    return checkup


def _paths(home: Path) -> Iterator[Path]:
    """Yield files and folders; not what is in hidden folders, and not through links."""
    for path in sorted(home.iterdir()):
        hidden = path.name.startswith(".")
        if path.is_dir() and not path.is_symlink():
            if not hidden or path.name.startswith((SAVING, STAGING)):
                yield path
            if not hidden:
                yield from _paths(path)
        else:
            yield path


def _leftover(path: Path) -> str | None:
    """Say what a killed process left, or return None."""
    if path.name.startswith(SAVING):
        if can_finish_saving(path):
            return "a save that was stopped after all its files were written: --repair finishes it"
        return "an unfinished save; the next save removes it"
    if path.name.startswith(STAGING):
        return "an unfinished export; the next export removes it"
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
    def facts(config: dict[str, Any]) -> str:
        major, minor = config["format_version"]
        return (
            f"format {major}.{minor}, {len(config['masks'])} members of {config['host']['class']}"
        )

    if not checkup.read(folder / CONFIG, read_config, folder, words=facts):
        return
    config = read_config(folder)
    files = {WEIGHTS: config["sha256"], **config["files"]}
    sound = {n: checkup.read(folder / n, check_file, folder, n, d) for n, d in files.items()}
    if not sound[WEIGHTS]:
        checkup.advice.append(
            f"{CONFIG} is sound: masks, temperatures and the record are there. With its host, "
            "fuse(host, masks) makes the ensemble again, unless its members were trained."
        )
    if all(sound.values()) and config["host"]["library"] != "custom":

        def load_all() -> None:
            ensemble = HydraEnsemble.from_pretrained(folder)
            _ = ensemble.tokenizer, ensemble.transform

        checkup.read(folder / WEIGHTS, load_all, words="the ensemble loads")


def _check_export(folder: Path, checkup: Checkup) -> None:
    def facts(contract: Contract) -> str:
        return f"{contract.data['members']} members of {contract.data['host']}"

    if not checkup.read(folder / CONTRACT, read_contract, folder, words=facts):
        return
    contract = read_contract(folder)
    sound = [checkup.read(folder / name, contract.file, name) for name in contract.data["files"]]
    if all(sound):
        checkup.read(folder / CONTRACT, load, folder, words="the exported ensemble loads")


def _check_sums(folder: Path, checkup: Checkup) -> None:
    def compare(problem: str | None) -> None:
        if problem:
            raise FormatError(f"{problem}. {ADVICE}")

    if checkup.read(folder / SUMS, check_sums, folder, words="the list of files"):
        for name, problem in check_sums(folder).items():
            if problem or checkup.state_of(checkup._name(folder / name)) is None:
                checkup.read(folder / name, compare, problem)


def _read_results(path: Path) -> Results:
    results = Results.load(path)
    if read_sealed(path, "a record of results", ADVICE).get("examples") and not results.examples:
        raise FormatError("Its examples are missing, its figures are whole. Evaluate again.")
    return results


def _read_json(path: Path) -> None:
    content = read_json("file", path)
    if isinstance(content, dict):
        check_seal(content, path, ADVICE)


def _read_yaml(path: Path) -> None:
    import yaml

    try:
        yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is not YAML ({error}). {ADVICE}") from None


READERS: tuple[tuple[str, Callable[[Path], Any], str], ...] = (
    ("build.json", read_state, "steps of build; a rerun goes on from there"),
    ("search.json", read_state, "steps of a search; a rerun goes on from there"),
    (RUN_FILE, _read_json, "a run of distill; a rerun goes on from there"),
    (FILE_NAME, lambda path: read_checkpoint(path.parent), "training; a rerun goes on from there"),
    ("results-*.json", _read_results, "results of eval"),
    ("candidates/*.safetensors", read_stored, "logits of a candidate"),
    ("answers/*.npy", read_answers, "answers of a teacher"),
    ("*.safetensors", lambda path: read_tensors(path, "safetensors", ADVICE), "tensors"),
    ("*.json", _read_json, "JSON"),
    ("config.yaml", _read_yaml, "options of the command"),
)
"""What reads a file of a run, by its name; the first that fits."""
REMADE = ("candidates", "answers")
"""Folders whose files a rerun makes again."""


def repair(checkup: Checkup) -> list[str]:
    """Finish stopped saves, and delete what a rerun writes again; return what was done.

    Files of processes that still run are left alone.
    """
    done = []
    for found in checkup.findings:
        path = checkup.folder / found.file
        if not found.remake or found.state == SOUND or _is_in_use(path):
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
    except PermissionError:  # another user's process
        return True
    return True
