"""Read the folder of an ensemble; nothing is allocated before everything is known to fit."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from .._records import inside, read_json, read_steady, sha256_of_file
from ..errors import FormatError, HydraError, MissingDependencyError, check_place
from ..hosts import HostModel
from ..hosts.architecture import check_sizes, library_versions, rebuild_host
from ..hosts.example_inputs import examples
from ..hosts.mlp_site import remove_neurons_
from ..prediction_sets import Sets
from ..tasks import as_task
from ..uncertainty import Policy, as_calibrator
from ..uncertainty.novelty import Novelty, from_tensors
from .assembly import Assembly
from .call_options import tap_names
from .folder_schema import ADVICE, CONFIG, NOVELTY, WEIGHTS, Config, read_config
from .host_description import share_, structured, unfilled_host
from .inputs import Preparation

if TYPE_CHECKING:
    from .ensemble import HydraEnsemble
    from .fused_model import Mode

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
    kind: type[HydraEnsemble],
    name_or_folder: str | os.PathLike[str],
    *,
    host: nn.Module | None = None,
    mode: Mode | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> HydraEnsemble:
    """Load a saved ensemble (see `HydraEnsemble.from_pretrained`)."""
    folder = find_folder(name_or_folder, revision, token)
    assembly, view, config, novelty = read_steady(folder, lambda: _read(folder, host))
    ensemble = kind.around(
        assembly,
        view,
        mode=mode or config.mode,
        switches=config.switches,
        task=None if config.task is None else as_task(config.task),
    )
    ensemble.temperature = config.temperature
    ensemble.member_temperatures = config.member_temperatures
    ensemble.calibrator = as_calibrator(config.calibrator)
    if config.score in ensemble.task.scores:  # older folders of encoders name a score of classes
        ensemble.score = config.score
    ensemble.record = config.record
    ensemble.novelty = novelty
    if config.labels is not None:
        ensemble.id2label = {int(number): name for number, name in config.labels.items()}
    if config.policy is not None:
        ensemble.policy = Policy.from_dict(config.policy)
    if config.sets is not None:
        ensemble.sets = Sets.from_dict(config.sets)
    ensemble._preparation = Preparation(folder, config.files, config.image_transform)
    _check_novelty(ensemble, folder)
    _check_answers(ensemble, folder)
    return ensemble


def _read(
    folder: Path, host: nn.Module | None
) -> tuple[Assembly, HostModel, Config, Novelty | None]:
    """Read all files that are needed at once; what prepares inputs is read when it is used."""
    config = read_config(folder)
    check_files(folder, config)
    header = read_header(folder / WEIGHTS, config)
    try:
        if host is None:  # first without storage: a wrong size costs no memory
            largest = max((size for shape, _ in header.values() for size in shape), default=0)
            check_sizes(config.host, layers=len(config.masks[0]), largest=largest)
            with torch.device("meta"):
                skeleton = rebuild_host(config.host)
            _check_fit(*structured(skeleton, config), config, header, folder)
        skeleton = unfilled_host(config.host) if host is None else copy.deepcopy(host)
        remove_neurons_(skeleton, config.host.get("neurons", ()))  # a given host may have all
        assembly, view = structured(skeleton, config)
        _check_fit(assembly, view, config, header, folder)
    except (FormatError, MissingDependencyError):
        raise
    except Exception as error:  # the host's library refuses its config in its own words
        if host is not None and isinstance(error, HydraError):
            raise
        raise FormatError(
            f"Cannot build the host that {folder / CONFIG} describes ({type(error).__name__}: "
            f"{str(error)[:200]}). It was saved with {config.libraries}; installed are "
            f"{library_versions()}. Save or download the folder again, or pass host=."
        ) from error
    tensors = _load_tensors(folder / WEIGHTS)
    own = assembly.model.state_dict(keep_vars=True)
    for alias, name in config.aliases.items():  # equal when saved; tied only where the host ties
        tensors[alias] = tensors[name] if own[alias] is own[name] else tensors[name].clone()
    share_(assembly.model, tensors, config.host.get("buffers", {}))
    assembly.model.eval()
    if config.novelty is None:
        return assembly, view, config, None
    try:
        novelty = from_tensors(_load_tensors(folder / NOVELTY), config.novelty)
    except HydraError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise FormatError(f"Cannot read {folder / NOVELTY} ({error}). {ADVICE}") from None
    return assembly, view, config, novelty


def _load_tensors(path: Path) -> dict[str, Tensor]:
    """Read all tensors straight into their storage: nothing is held twice or stays mapped."""
    try:
        with safe_open(path, framework="pt"):  # checks that names, shapes and places are sound
            pass
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            described = json.loads(file.read(length))
            described.pop("__metadata__", None)
            tensors = {}
            for name, facts in described.items():
                tensors[name] = torch.empty(facts["shape"], dtype=_TYPES[facts["dtype"]])
                start, end = facts["data_offsets"]
                file.seek(8 + length + start)
                content: Any = tensors[name].flatten().view(torch.uint8).numpy()
                if file.readinto(content) != end - start:
                    raise OSError(f"{name!r:.60} is cut short")
            return tensors
    except (SafetensorError, OSError, KeyError) as error:
        raise FormatError(f"Cannot read {path} ({error}). {ADVICE}") from None


def find_folder(
    name_or_folder: str | os.PathLike[str], revision: str | None, token: str | bool | None = None
) -> Path:
    """Return the folder of an ensemble, downloaded when it is a name on the hub."""
    check_place("name_or_folder", name_or_folder)
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
            f"{text!r} is neither a folder on this machine nor a model on the hub that can be "
            f"downloaded ({type(error).__name__}). Check the name, and the network."
        ) from error
    return Path(files)


def check_files(folder: Path, config: Config) -> None:
    """Raise unless every file is there with the content that was saved, and no other is read."""
    for name, expected in {WEIGHTS: config.sha256, **config.files}.items():
        check_file(folder, name, expected)
        if name.endswith("_config.json"):
            _check_preparation(folder / name)
    for path in sorted(folder.iterdir()):
        if path.name not in config.files and _READ_BY_TRANSFORMERS.fullmatch(path.name):
            raise FormatError(
                f"{path} was not there when the ensemble was saved, and would change how its "
                "inputs are prepared. Remove it; or load the ensemble without it, set "
                "ensemble.tokenizer or ensemble.transform, and save it again."
            )


def _check_preparation(path: Path) -> None:
    """Raise when the config of a tokenizer or processor names code or files, or is invalid."""
    settings = read_json(path, "a table of settings", ADVICE)
    if not isinstance(settings, dict):
        raise FormatError(f"{path} is not a table of settings. {ADVICE}")
    for key, value in settings.items():
        if key == "auto_map" or (key.endswith("_file") and value is not None):
            raise FormatError(
                f"{path} sets {key} to {value!r:.60}. Code and files that a config names are not "
                "loaded: set the tokenizer or transform in Python, and save the ensemble again."
            )
    most = settings.get("model_max_length")
    if most is not None and not (type(most) in (int, float) and most >= 1):
        raise FormatError(
            f"{path} sets model_max_length to {most!r:.60}; expected 1 token or more. {ADVICE}"
        )


def check_file(folder: Path, name: str, expected: str) -> None:
    """Raise unless one file of an ensemble is there, in the folder, with its SHA-256."""
    path = inside(folder, name)
    advice = f"Copy or download it again; hydra-ensembles doctor {folder} shows what is damaged."
    if not path.is_file():
        raise FormatError(
            f"{folder} has a {CONFIG} but no {name}: the folder is incomplete. {advice}"
        )
    try:
        found = sha256_of_file(path)
    except OSError as error:
        raise FormatError(f"Cannot read {path}: {error}.") from error
    if found != expected:
        raise FormatError(
            f"{path} is not the file that was saved (SHA-256 {found[:12]}…, expected "
            f"{expected[:12]}…): it was truncated, replaced or changed, or saving was "
            f"interrupted. {advice}"
        )


def read_header(path: Path, config: Config) -> Header:
    """Read the names, shapes and types of the saved tensors, not the tensors."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
            header = {
                name: (tuple(part.get_shape()), _TYPES[part.get_dtype()])
                for name, part in slices.items()
            }
    except (SafetensorError, OSError, KeyError) as error:
        raise FormatError(f"Cannot read {path} ({error}). {ADVICE}") from None
    for alias, name in config.aliases.items():
        if name not in header or alias in header:
            raise FormatError(
                f"aliases in {CONFIG} say that the tensor {alias!r:.60} is {name!r:.60}, which "
                f"does not fit {path}. {ADVICE}"
            )
    header |= {alias: header[name] for alias, name in config.aliases.items()}
    kinds = {kind for _, kind in header.values() if kind.is_floating_point}
    if kinds and getattr(torch, config.dtype) not in kinds:
        raise FormatError(
            f"dtype in {CONFIG} is {config.dtype}, but the tensors in {path} are "
            f"{', '.join(sorted(str(k).removeprefix('torch.') for k in kinds))}. {ADVICE}"
        )
    return header


def _check_fit(
    assembly: Assembly, view: HostModel, config: Config, header: Header, folder: Path
) -> None:
    """Raise unless the host has the tensors of the file, by name and shape, and the family."""
    custom = config.host["library"] == "custom"
    if view.blocks_path != config.blocks_path or not (custom or view.family.name == config.family):
        raise FormatError(
            f"{folder / CONFIG} describes {config.family} blocks at {config.blocks_path!r}, but "
            f"{view.name} has {view.family.name} blocks at {view.blocks_path!r}. {ADVICE}"
        )
    expected = assembly.model.state_dict()
    wrong = {*(expected.keys() ^ header.keys())}
    for name in expected.keys() & header.keys():
        tensor, (shape, kind) = expected[name], header[name]
        precision = tensor.is_floating_point() and kind.is_floating_point  # which may differ
        if tuple(tensor.shape) != shape or not (precision or tensor.dtype == kind):
            wrong.add(name)
    if wrong:
        raise FormatError(
            f"{folder / WEIGHTS} does not fit the host built from {CONFIG} "
            f"({', '.join(sorted(wrong)[:4])} …). It was saved with {config.libraries}; installed "
            f"are {library_versions()}. Install those, or pass host=."
        )


@torch.no_grad()
def _check_novelty(ensemble: HydraEnsemble, folder: Path) -> None:
    """Run the statistics of known data on zeros: they must fit each other and the trunk."""
    novelty = ensemble.novelty
    if novelty is None:
        return
    taps = tap_names(len(ensemble.body.trunk), readout=ensemble.readout.has_token)
    try:
        width = novelty.measures.distance.mean.shape[-1]
        absent = novelty.measures.absent
        known = 2 if novelty.classes is None else len(novelty.classes.counts)
        classes = known if absent is None else len(absent)
        summaries = torch.zeros(2, len(novelty.taps), width)
        logits = torch.zeros(2, ensemble.members, classes)
        novelty(summaries, logits if novelty.measures.probable else None)
        problem = None if novelty.taps == taps else f"taps {list(novelty.taps)!r:.100}"
    except Exception as error:
        problem = f"{type(error).__name__}: {str(error)[:100]}"
    if problem is not None:
        raise FormatError(
            f"{folder}: the statistics of known data do not fit the model ({problem}). {ADVICE}"
        )


@torch.no_grad()
def _check_answers(ensemble: HydraEnsemble, folder: Path) -> None:
    """Run a loaded ensemble once: what its config makes impossible shows here, not at predict."""
    inputs = examples(ensemble.host)[:1]
    if not inputs or ensemble.dtype == torch.float16:  # half is for other devices than this one
        return
    args, kwargs = inputs[0]
    ensemble._warned_precisions.add(ensemble.precision())  # the user has not run it yet
    try:
        answer = ensemble.predict(kwargs or args[0])  # novelty and the score too
    except Exception as error:
        raise FormatError(
            f"{folder} loads but cannot run ({type(error).__name__}: {str(error)[:200]}): its "
            f"{CONFIG} does not describe the model that was saved. {ADVICE}"
        ) from error
    ensemble._warned_precisions.clear()
    names = ensemble.id2label
    classes = answer.member_outputs.shape[-1]
    named = "label" in answer.FIELDS and "MultipleChoice" not in type(ensemble.host).__name__
    # ragged outputs have no axis of names
    named = named and "member_logits" in answer and not ensemble.task.ragged
    if named and names is not None and len(names) != classes:
        raise FormatError(
            f"labels in {folder / CONFIG} has {len(names)} class names, but the model has "
            f"{classes} classes. {ADVICE}"
        )
