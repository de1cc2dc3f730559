"""What each kind of folder and file is checked by: the code that reads it in earnest."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._records import check_seal, inside, read_sealed
from ..errors import FormatError, HydraError, MissingDependencyError
from ..fusion import HydraEnsemble
from ..fusion.folder_reader import check_file, read_header
from ..fusion.folder_schema import CARD, CONFIG, FORMAT, NOVELTY, WEIGHTS, Config, read_config
from ..runtime.contract import CONTRACT, read_contract
from ..search.search_state import read_state, read_stored
from ..training.checkpoint import FILE_NAME, read_checkpoint
from ..training.distillation import RUN_FILE
from ..training.teacher_answers import DIGEST, read_answers
from .checksums import SIGNATURE, SUMS, check_signature, check_sums
from .findings import DAMAGED, MISSING, SOUND, Checkup, Finding
from .sbom import SBOM

BUILD, SEARCH = "build.json", "search.json"


@dataclass(frozen=True)
class Part:
    """A kind of folder.

    Attributes:
        is_here: Tells whether a folder is of this kind.
        check: Adds to a checkup and returns the files that it has looked at.
    """

    is_here: Callable[[Path], bool]
    check: Callable[[Path, Checkup, Any], set[str]]


def _name(path: Path, checkup: Checkup) -> str:
    return path.relative_to(checkup.folder).as_posix()


# --- a saved ensemble ----------------------------------------------------------------------------


def _is_ensemble(folder: Path) -> bool:
    try:
        text = inside(folder, CONFIG).read_text(encoding="utf-8", errors="replace")
    except (OSError, FormatError):
        return (folder / CARD).is_file() and (folder / WEIGHTS).is_file()
    return f'"{FORMAT}"' in text or (folder / NOVELTY).is_file()


def _check_ensemble(folder: Path, checkup: Checkup, _: Any) -> set[str]:
    checkup.kinds.append("a saved ensemble")
    looked_at = {_name(folder / name, checkup) for name in (CONFIG, WEIGHTS, CARD)}

    def add(name: str, state: str, words: str) -> None:
        looked_at.add(_name(folder / name, checkup))
        checkup.findings.append(Finding(_name(folder / name, checkup), state, words))

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # keys that are not known
            config = read_config(folder)
    except FormatError as error:
        add(CONFIG, DAMAGED if (folder / CONFIG).exists() else MISSING, str(error))
        checkup.advice.append(
            "Without its config an ensemble cannot be loaded. Copy or download the folder again, "
            "or run the command that made it: finished steps are used."
        )
        return looked_at
    major, minor = config.format_version
    host, members = config.host["class"], len(config.masks)
    add(CONFIG, SOUND, f"format {major}.{minor}, {members} members of {host}")
    bad = []
    for name, digest in {WEIGHTS: config.sha256, **config.files}.items():
        try:
            check_file(folder, name, digest)
            add(name, SOUND, "SHA-256 as saved")
        except FormatError as error:
            bad.append(name)
            add(name, DAMAGED if (folder / name).exists() else MISSING, str(error))
    if bad:
        _advise_on_ensemble(checkup, config, bad)
        return looked_at
    try:
        read_header(folder / WEIGHTS, config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ensemble = HydraEnsemble.from_pretrained(folder)
            _ = ensemble.tokenizer, ensemble.transform
        checkup.advice.append(f"{folder} loads and answers.")
    except MissingDependencyError as error:
        checkup.advice.append(f"Its files are whole, but it was not loaded: {error}")
    except HydraError as error:
        if config.host["library"] == "custom":
            checkup.advice.append("Its files are whole. It was not loaded: its host is your own.")
        else:
            add(CONFIG, DAMAGED, str(error))
    return looked_at


def _advise_on_ensemble(checkup: Checkup, config: Config, bad: list[str]) -> None:
    if WEIGHTS in bad:
        trained = " unless its members were trained"
        checkup.advice.append(
            f"{CONFIG} is whole: masks, temperatures and the record are there. With the host that "
            f"it was made from, fuse(host, masks) makes the ensemble again{trained}"
            + (", replay(host, record) the whole of it." if config.record else ".")
        )
    else:
        checkup.advice.append(
            f"The weights are whole; {', '.join(bad)} can be copied again by itself from where "
            "the folder came from."
        )


# --- an exported artefact ------------------------------------------------------------------------


def _is_artefact(folder: Path) -> bool:
    return (folder / CONTRACT).exists()


def _check_artefact(folder: Path, checkup: Checkup, _: Any) -> set[str]:
    checkup.kinds.append("an exported artefact")
    place = _name(folder / CONTRACT, checkup)
    looked_at = {place}
    try:
        contract = read_contract(folder)
    except FormatError as error:
        checkup.findings.append(Finding(place, DAMAGED, str(error)))
        checkup.advice.append("Without its contract an artefact cannot be used: export it again.")
        return looked_at
    facts = contract.data
    major, minor = facts["format_version"]
    words = f"format {major}.{minor}, {facts['members']} members of {facts['host']}"
    checkup.findings.append(Finding(place, SOUND, words))
    bad = False
    for name in facts["files"]:
        looked_at.add(_name(folder / name, checkup))
        try:
            contract.file(name)
            state, words = SOUND, "SHA-256 as exported"
        except FormatError as error:
            state, words = DAMAGED if (folder / name).exists() else MISSING, str(error)
            bad = True
        checkup.findings.append(Finding(_name(folder / name, checkup), state, words))
    if not bad and {"onnx", "int8"} & facts["programs"].keys():
        from ..runtime import load

        try:
            load(folder, threads=1)
            checkup.advice.append(f"{folder} loads.")
        except MissingDependencyError as error:
            checkup.advice.append(f"Its files are whole, but it was not loaded: {error}")
        except HydraError as error:
            checkup.findings.append(Finding(place, DAMAGED, str(error)))
    return looked_at


def _has_sums(folder: Path) -> bool:
    return (folder / SUMS).is_file()


def _check_sums(folder: Path, checkup: Checkup, public_key: Any) -> set[str]:
    looked_at = {_name(folder / name, checkup) for name in (SUMS, SIGNATURE, SBOM)}
    sums = _name(folder / SUMS, checkup)
    before = {found.file for found in checkup.findings}
    try:
        problems = check_sums(folder)
    except FormatError as error:
        checkup.findings.append(Finding(sums, DAMAGED, str(error)))
        return looked_at
    checkup.findings.append(Finding(sums, SOUND, f"{len(problems)} files"))
    for name, problem in problems.items():
        place = _name(folder / name, checkup)
        looked_at.add(place)
        if problem is not None:
            state = MISSING if problem == "is missing" else DAMAGED
            checkup.findings.append(Finding(place, state, f"{problem}. Copy or export it again."))
        elif place not in before:
            checkup.findings.append(Finding(place, SOUND, f"SHA-256 as in {SUMS}"))
    if (folder / SIGNATURE).exists() or public_key is not None:
        signature = _name(folder / SIGNATURE, checkup)
        try:
            who = check_signature(folder, public_key)
            by = "" if public_key else "; whose key it is, --public-key tells"
            checkup.findings.append(Finding(signature, SOUND, f"{who}{by}"))
        except MissingDependencyError as error:
            checkup.advice.append(f"The signature was not checked: {error}")
        except FormatError as error:
            checkup.findings.append(Finding(signature, DAMAGED, str(error)))
    return looked_at


PARTS: list[Part] = [
    Part(_is_ensemble, _check_ensemble),
    Part(_is_artefact, _check_artefact),
    Part(_has_sums, _check_sums),
]
"""Kinds of folders, in the order in which they are checked."""


# --- the folder of a run, file by file -----------------------------------------------------------


def _build(path: Path, checkup: Checkup) -> str:
    steps = read_state(path)["steps"]
    checkup.kinds.append("a run of build")
    if any("masks" in step for step in steps if isinstance(step, dict)):
        checkup.advice.append("The search of build is done: a rerun fuses what it found.")
        return "finished"
    checkup.advice.append("Run the same build again: it goes on from its finished steps.")
    return f"{len(steps)} steps are done"


def _search(path: Path, checkup: Checkup) -> str:
    state = read_state(path)
    checkup.kinds.append("a search of a circuit")
    layers = state["settings"].get("layers")
    total = f" of {len(layers)}" if isinstance(layers, list) else ""
    checkup.advice.append("Run the same search again: it goes on from its finished layers.")
    return f"{len(state['steps'])}{total} layers are done"


def _distillation(path: Path, checkup: Checkup) -> str:
    read_sealed(path, "the record of a distillation", "Delete the folder to start again.")
    checkup.kinds.append("a run of distill")
    checkup.advice.append(
        "Run the same distill again: kept answers and steps are used, what is missing is made."
    )
    return "what the run is made of"


def _training(path: Path, checkup: Checkup) -> str:
    saved = read_checkpoint(path.parent)
    assert saved is not None
    record = saved[1]
    settings = record.get("settings", {}) if isinstance(record, dict) else {}
    try:
        step, total = int(record["step"]), settings["epochs"] * settings["steps_per_epoch"]
    except (KeyError, TypeError, ValueError) as error:
        raise FormatError(f"{path} is no checkpoint of a training ({error!r}).") from None
    if "a training run" not in checkup.kinds:
        checkup.kinds.append("a training run")
    return "finished" if step >= total else f"step {step} of {total}; a rerun goes on from there"


def _results(path: Path, checkup: Checkup) -> str:
    from ..evaluation import Results

    results = Results.load(path)
    if "results of eval" not in checkup.kinds:
        checkup.kinds.append("results of eval")
    if (entry := read_sealed(path, "results", "").get("examples")) and not results.examples:
        raise FormatError(
            f"Its examples ({entry.get('file')}) are missing, its figures are whole. Evaluate "
            "again to have them."
        )
    return f"{len(results.figures)} figures of {results.name}"


def _yaml(path: Path, _: Checkup) -> str:
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:100]
        raise FormatError(f"Not YAML ({reason}). A rerun writes it again.") from None
    command = content.get("command") if isinstance(content, dict) else None
    return f"options of {command}" if command else "YAML"


def _json(path: Path, _: Checkup) -> str:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"Not JSON ({str(error)[:100]}). Copy it, or make it again.") from None
    if isinstance(content, dict):
        check_seal(content, path, "Copy it, or make it again.")
        return f"a {content['kind']}" if isinstance(content.get("kind"), str) else "JSON"
    return "JSON"


def _tensors(path: Path, _: Checkup) -> str:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            count = len(list(file.keys()))
    except (SafetensorError, OSError) as error:
        raise FormatError(f"Not safetensors ({error}). Copy it, or make it again.") from None
    return f"{count} tensors; nothing here says their SHA-256"


def _stored(path: Path, _: Checkup) -> str:
    return f"logits {list(read_stored(path).shape)}"


def _answers(path: Path, _: Checkup) -> str:
    known = "" if path.with_suffix(DIGEST).is_file() else "; nothing here says its SHA-256"
    return f"answers {list(read_answers(path).shape)}{known}"


def _check_of(path: Path) -> tuple[Callable[[Path, Checkup], str], bool] | None:
    """Return how a file is checked, and whether a rerun makes it again; None: none of ours."""
    by_name = {
        BUILD: _build,
        SEARCH: _search,
        RUN_FILE: _distillation,
        FILE_NAME: _training,
        "config.yaml": _yaml,
    }
    if path.name in by_name:
        return by_name[path.name], False
    if path.suffix == ".safetensors" and path.parent.name == "candidates":
        return _stored, True
    if path.suffix == ".npy" and path.parent.name == "answers":
        return _answers, True
    if path.name.startswith("results-") and path.suffix == ".json":
        return _results, False
    by_ending = {".json": _json, ".safetensors": _tensors}
    check = by_ending.get(path.suffix)
    return None if check is None else (check, False)


def check_file_of_run(path: Path, name: str, checkup: Checkup) -> Finding | None:
    """Check one file of a run by what reads it; None when it is none of ours."""
    found = _check_of(path)
    if found is None:
        return None
    check, again = found
    try:
        return Finding(name, SOUND, check(path, checkup), again)
    except HydraError as error:
        return Finding(name, DAMAGED, str(error), again)
    except OSError as error:
        return Finding(name, DAMAGED, f"cannot be read ({error})", again)
