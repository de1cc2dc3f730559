"""Read the folder of an ensemble; nothing is allocated before everything is known to fit."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._records import inside, read_steady, sha256_of_file
from ..errors import FormatError, HydraError, MissingDependencyError
from ..hosts import HostModel
from ..hosts.architecture import check_sizes, library_versions, rebuild_host
from ..hosts.example_inputs import examples
from ..uncertainty.novelty import Novelty, from_tensors
from .assembly import Assembly
from .call_options import tap_names
from .folder_schema import CONFIG, NOVELTY, WEIGHTS, read_config
from .host_description import fill_, structure

Header = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of every tensor in a file, by name."""

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


_READ_BY_TRANSFORMERS = re.compile(
    r"(\w+_)?(pre)?processor_config\.json|tokenizer.*\.json|vocab.*\.(json|txt)|merges\.txt"
    r"|(added_tokens|special_tokens_map|chat_template|tekken)\.json|bpe\.codes"
    r"|.*\.(model|spm|jinja|tiktoken)|additional_chat_templates"
)
"""Files that transformers reads where it finds them, whoever put them there."""


def load(
    name_or_folder: Any,
    *,
    host: nn.Module | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> tuple[Assembly, HostModel, dict[str, Any]]:
    """Read the parts of a saved ensemble: the fused model, its host's view and the config.

    The config gets the key `"folder"`, where its other files lie; its `"novelty"` is read.
    """
    folder = find_folder(name_or_folder, revision, token)
    return read_steady(folder, lambda: _read(folder, host))


def _read(folder: Path, host: nn.Module | None) -> tuple[Assembly, HostModel, dict[str, Any]]:
    config = read_config(folder)
    check_files(folder, config)
    header = read_header(folder / WEIGHTS, config)
    try:
        if host is None:
            _check_on_meta(config, header, folder)
        skeleton = rebuild_host(config["host"]) if host is None else copy.deepcopy(host)
        assembly, view = structure(skeleton, config)
        _check_fit(assembly.model, view, config, header, folder)
    except (FormatError, MissingDependencyError):
        raise
    except Exception as error:  # the host's library refuses its config in its own words
        if host is not None and isinstance(error, HydraError):
            raise
        raise FormatError(
            f"Cannot build the host that {folder / CONFIG} describes ({type(error).__name__}: "
            f"{str(error)[:200]}). It was saved with {config['libraries']}; installed are "
            f"{library_versions()}. Save or download the folder again, or pass host=."
        ) from error
    _load_weights(assembly.model, folder / WEIGHTS, config)
    assembly.model.eval()
    novelty = _load_novelty(folder, config["novelty"])
    return assembly, view, {**config, "folder": folder, "novelty": novelty}


def find_folder(name_or_folder: Any, revision: str | None, token: str | bool | None = None) -> Path:
    """Return the folder of an ensemble, downloaded when it is a name of the hub."""
    path = Path(name_or_folder)
    if path.is_dir():
        return path
    text = str(name_or_folder)
    if path.is_absolute() or text.startswith(".") or text.count("/") > 1 or path.exists():
        raise FormatError(f"No folder {path}: expected one written by save_pretrained().")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # no code, no pickle
    try:
        files = snapshot_download(text, revision=revision, token=token, allow_patterns=patterns)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FormatError(
            f"{text!r} is neither a folder here nor a model that the hub gives "
            f"({type(error).__name__}). Check the name, or the network."
        ) from error
    return Path(files)


def check_files(folder: Path, config: dict[str, Any]) -> None:
    """Raise unless every file is there with the content that was saved, and no other is read."""
    for name, expected in {WEIGHTS: config["sha256"], **config["files"]}.items():
        check_file(folder, name, expected)
        if name.endswith("_config.json"):
            _check_preparation(folder / name)
    for path in sorted(folder.iterdir()):
        if path.name not in config["files"] and _READ_BY_TRANSFORMERS.fullmatch(path.name):
            raise FormatError(
                f"{path} was not there when the ensemble was saved, and would change how its "
                "inputs are prepared. Remove it; or load the ensemble without it, set "
                "ensemble.tokenizer or ensemble.transform, and save it again."
            )


def _check_preparation(path: Path) -> None:
    """Raise when a tokenizer's or processor's config names code or other files, or cannot be."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is damaged ({error}). Save or download it again.") from None
    if not isinstance(config, dict):
        raise FormatError(f"{path} holds no settings. Save or download it again.")
    for key, value in config.items():
        if key == "auto_map" or (key.endswith("_file") and value is not None):
            raise FormatError(
                f"{path} sets {key} to {value!r:.60}: code, and files that it names, are not "
                "loaded. Set the tokenizer or transform in Python, and save the ensemble again."
            )
    most = config.get("model_max_length")
    if most is not None and not (type(most) in (int, float) and most >= 1):
        raise FormatError(
            f"{path} sets model_max_length to {most!r:.60}; expected a number of tokens, 1 or "
            "more. Save or download it again."
        )


def check_file(folder: Path, name: str, expected: str) -> None:
    """Raise unless one file of an ensemble is there, in the folder, with its SHA-256."""
    path = inside(folder, name)
    if not path.is_file():
        raise FormatError(
            f"{folder} has a {CONFIG} but no {name}: the folder is incomplete. Copy or "
            f"download it again; hydra-ensembles doctor {folder} says what is left."
        )
    try:
        found = sha256_of_file(path)
    except OSError as error:
        raise FormatError(f"Cannot read {path}: {error}.") from error
    if found != expected:
        raise FormatError(
            f"{path} is not the file that was saved (SHA-256 {found[:12]}…, expected "
            f"{expected[:12]}…): it was truncated, replaced or changed, or saving was "
            f"interrupted. Download or save it again; hydra-ensembles doctor {folder} says what "
            "is left."
        )


def read_header(path: Path, config: dict[str, Any]) -> Header:
    """Read the names, shapes and types of the saved tensors, not the tensors."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            header = {
                name: (tuple(part.get_shape()), _TYPES[part.get_dtype()])
                for name, part in names.items()
            }
    except (SafetensorError, OSError, KeyError) as error:
        raise FormatError(f"Cannot read {path} ({error}). Save or download it again.") from None
    for alias, name in config["aliases"].items():
        if name not in header or alias in header:
            raise FormatError(
                f"{CONFIG} says that the tensor {alias!r:.60} is {name!r:.60}, which does not fit "
                f"{path}. Save or download the folder again."
            )
    header.update({alias: header[name] for alias, name in config["aliases"].items()})
    kinds = {kind for _, kind in header.values() if kind.is_floating_point}
    if kinds and getattr(torch, config["dtype"]) not in kinds:
        raise FormatError(
            f"{CONFIG} says {config['dtype']}, but the tensors in {path} are "
            f"{', '.join(sorted(str(k).removeprefix('torch.') for k in kinds))}."
        )
    return header


def _check_on_meta(config: dict[str, Any], header: Header, folder: Path) -> None:
    """Build the host without storage and compare: a wrong size costs no memory."""
    largest = max((size for shape, _ in header.values() for size in shape), default=0)
    check_sizes(config["host"], layers=len(config["masks"][0]), largest=largest)
    with torch.device("meta"):
        skeleton = rebuild_host(config["host"])
    assembly, view = structure(skeleton, config)
    _check_fit(assembly.model, view, config, header, folder)


def _check_fit(
    model: nn.Module, view: HostModel, config: dict[str, Any], header: Header, folder: Path
) -> None:
    """Raise unless the host has the tensors of the file, by name and shape, and the family."""
    own = config["host"]["library"] == "custom"
    if view.blocks_path != config["blocks_path"] or not (
        own or view.family.name == config["family"]
    ):
        raise FormatError(
            f"{folder / CONFIG} describes {config['family']} blocks at {config['blocks_path']!r}, "
            f"but {view.name} has {view.family.name} blocks at {view.blocks_path!r}. Save or "
            "download the folder again."
        )
    expected = model.state_dict()
    missing, extra = expected.keys() - header.keys(), header.keys() - expected.keys()
    wrong = [n for n in expected if n in header and not _is_like(expected[n], *header[n])]
    if missing or extra or wrong:
        detail = ", ".join(sorted([*missing, *extra, *wrong])[:4])
        raise FormatError(
            f"{folder / WEIGHTS} does not fit the host built from {CONFIG} ({detail} …). It was "
            f"saved with {config['libraries']}; installed are {library_versions()}. Install those, "
            "or pass host=."
        )


def _is_like(tensor: Tensor, shape: tuple[int, ...], kind: torch.dtype) -> bool:
    """Tell whether a saved tensor can be this one; numbers may differ in precision."""
    precision = tensor.is_floating_point() and kind.is_floating_point
    return tuple(tensor.shape) == shape and (precision or tensor.dtype == kind)


def _load_weights(model: nn.Module, path: Path, config: dict[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except (SafetensorError, OSError) as error:
        raise FormatError(f"Cannot read {path} ({error}). Save or download it again.") from None
    for alias, name in config["aliases"].items():
        tensors[alias] = tensors[name]
    fill_(model, tensors, config["host"].get("buffers", {}))


def _load_novelty(folder: Path, facts: dict[str, Any] | None) -> Novelty | None:
    """Read the statistics of known data; None when the folder was saved without."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if facts is None:
        return None
    path = folder / NOVELTY
    try:
        return from_tensors(load_file(path), facts)
    except HydraError:
        raise
    except (SafetensorError, OSError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise FormatError(f"Cannot read {path} ({error}). Save or download it again.") from None


@torch.no_grad()
def _check_novelty(ensemble: Any, name: Any) -> None:
    """Run the statistics of known data on nothing: they must fit each other and the trunk."""
    novelty = ensemble.novelty
    if novelty is None:
        return
    taps = tap_names(len(ensemble.body.trunk), readout=ensemble.readout.has_token)
    try:
        width = novelty.distance.mean.shape[-1]
        classes = 2 if novelty.classes is None else len(novelty.classes.counts)
        summaries = torch.zeros(2, len(novelty.taps), width)
        novelty(summaries, torch.zeros(2, ensemble.members, classes))
        known = (taps, taps[:-1])  # statistics of format 1 do not hear the last block
        problem = None if novelty.taps in known else f"taps {list(novelty.taps)!r:.100}"
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:100]}"
    if problem is not None:
        raise FormatError(
            f"{name}: the statistics of known data do not fit the model ({problem}). Save or "
            "download the folder again."
        )


@torch.no_grad()
def check_answers(ensemble: Any, name: Any) -> None:
    """Run a loaded ensemble once: what its config makes impossible shows here, not at predict."""
    _check_novelty(ensemble, name)
    inputs = examples(ensemble.host)[:1]
    if not inputs or ensemble.dtype == torch.float16:  # half is for other devices than this one
        return
    args, kwargs = inputs[0]
    ensemble._warned_precisions.add(ensemble.precision())  # nobody said yet how it will be run
    try:
        if ensemble.is_classifier:  # novelty and the score too
            classes = ensemble.predict(kwargs or args[0]).probabilities.shape[-1]
        else:
            classes = ensemble.fused_logits(args, kwargs).shape[-1]
    except Exception as error:
        raise FormatError(
            f"{name} loads but cannot run ({type(error).__name__}: {str(error)[:200]}): its "
            f"{CONFIG} does not describe the model that was saved. Save or download it again."
        ) from error
    ensemble._warned_precisions.clear()
    names = ensemble.id2label
    if ensemble.is_classifier and names is not None and len(names) != classes:
        raise FormatError(
            f"{name} names {len(names)} classes, but the model tells {classes} apart. Save or "
            "download it again."
        )
