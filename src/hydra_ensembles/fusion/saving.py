"""The folder of an ensemble: `config.json`, `model.safetensors` and a model card. No pickle.

The config holds plain data only: the format's version, the host's class and config, masks, plan,
labels, calibration, and the SHA-256 of the weights. Every distinct head is stored once. Statistics
of known data lie beside the weights, in `novelty.safetensors`, when novelty is fitted.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._records import write_whole
from ..data.running import evaluating
from ..errors import FormatError
from ..heads.masks import HeadMask
from ..heads.plan import Plan
from ..hosts import HostModel, families, host_model
from ..hosts.examples import examples
from ..hosts.probe import Readout, end_of_text
from ..hosts.rebuild import describe_host, rebuild_host
from ..uncertainty.novelty import Novelty, from_tensors
from .assemble import Assembly
from .body import Body
from .structure import build_body_, split_classifier_

FORMAT = "hydra-ensembles"
FORMAT_VERSION = (1, 0)
CONFIG, WEIGHTS, CARD = "config.json", "model.safetensors", "README.md"
NOVELTY = "novelty.safetensors"
_KNOWN = {
    "format",
    "format_version",
    "libraries",
    "host",
    "family",
    "blocks_path",
    "masks",
    "plan",
    "copies",
    "readout",
    "merged",
    "switches",
    "mode",
    "temperature",
    "member_temperatures",
    "score",
    "labels",
    "dtype",
    "aliases",
    "sha256",
    "record",
}
_OPTIONAL = {"novelty"}


def save(ensemble: Any, folder: Any, *, tokenizer: Any = None, image_processor: Any = None) -> None:
    """Write an ensemble to a folder (see `HydraEnsemble.save_pretrained`)."""
    from safetensors.torch import save_file

    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tensors, aliases = _distinct(ensemble.host.state_dict())
    beside = target / (WEIGHTS + ".partial")
    save_file(tensors, beside, metadata={"format": "pt"})
    config = _config(ensemble, aliases, _sha256(beside))
    novelty = target / (NOVELTY + ".partial")
    if ensemble.novelty is not None:
        save_file(_contiguous(ensemble.novelty.tensors()), novelty, metadata={"format": "pt"})
        config["novelty"] = {**ensemble.novelty.facts(), "sha256": _sha256(novelty)}
    text = json.dumps(config, indent=2, default=_plain)
    os.replace(beside, target / WEIGHTS)
    if ensemble.novelty is not None:
        os.replace(novelty, target / NOVELTY)
    else:
        (target / NOVELTY).unlink(missing_ok=True)
    write_whole(target / CONFIG, text + "\n")
    write_whole(target / CARD, _card(ensemble))
    for part in (tokenizer, image_processor):
        if part is not None:
            part.save_pretrained(str(target))


def load(
    name_or_folder: Any, *, host: nn.Module | None = None, revision: str | None = None
) -> tuple[Assembly, HostModel, dict[str, Any]]:
    """Read the parts of a saved ensemble: the fused model, its host's view and the config."""
    folder = _folder(name_or_folder, revision)
    config = read_config(folder)
    weights = folder / WEIGHTS
    if not weights.exists():
        raise FormatError(
            f"{folder} has a {CONFIG} but no {WEIGHTS}: the folder is incomplete. Copy or download "
            "it again."
        )
    found = _sha256(weights)
    if found != config["sha256"]:
        raise FormatError(
            f"{weights} is not the file that was saved (SHA-256 {found[:12]}…, expected "
            f"{str(config['sha256'])[:12]}…): it was truncated, replaced or changed. Download or "
            "save it again."
        )
    skeleton = rebuild_host(config["host"]) if host is None else _copy_of(host)
    assembly, view = _structure(skeleton, config)
    _load_weights(assembly.model, weights, config)
    assembly.model.eval()
    config["novelty"] = _load_novelty(folder, config.get("novelty"))
    return assembly, view, config


def _contiguous(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}


def _load_novelty(folder: Path, facts: dict[str, Any] | None) -> Novelty | None:
    """Read the statistics of known data; None when the folder was saved without."""
    from safetensors.torch import load_file

    if facts is None:
        return None
    path = folder / NOVELTY
    if not path.exists():
        raise FormatError(
            f"{folder} has no {NOVELTY}, but its {CONFIG} names one: the folder is incomplete. "
            "Copy or download it again."
        )
    if _sha256(path) != facts.get("sha256"):
        raise FormatError(
            f"{path} is not the file that was saved (its SHA-256 differs): it was truncated, "
            "replaced or changed. Download or save it again."
        )
    return from_tensors(load_file(path), facts)


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check the config of a saved ensemble."""
    path = folder / CONFIG
    if not path.exists():
        raise FormatError(
            f"No {CONFIG} in {folder}: expected a folder written by save_pretrained()."
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is damaged ({error}). Save or download it again.") from None
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        kind = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise FormatError(
            f"{path} is not the config of a Hydra ensemble (found {kind or 'another format'!r}). "
            "A host model is loaded with its own library and fused with hydra_ensembles.fuse()."
        )
    found = tuple(config.get("format_version", (0, 0)))
    if found[0] > FORMAT_VERSION[0]:
        raise FormatError(
            f"{path} has format {found[0]}.{found[1]}, newer than {FORMAT_VERSION[0]}."
            f"{FORMAT_VERSION[1]} which this library reads. Upgrade hydra-ensembles."
        )
    missing = _KNOWN - config.keys()
    if missing:
        raise FormatError(f"{path} lacks {', '.join(sorted(missing))}. Save or download it again.")
    unknown = config.keys() - _KNOWN - _OPTIONAL
    if unknown:
        warnings.warn(
            f"{path} has keys that this version does not know and leaves alone: "
            f"{', '.join(sorted(unknown))}.",
            stacklevel=3,
        )
    return config


def _folder(name_or_folder: Any, revision: str | None) -> Path:
    path = Path(name_or_folder)
    if path.is_dir():
        return path
    text = str(name_or_folder)
    if path.is_absolute() or text.startswith(".") or text.count("/") > 1 or path.exists():
        raise FormatError(f"No folder {path}: expected one written by save_pretrained().")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        files = snapshot_download(
            text, revision=revision, allow_patterns=["*.json", "*.safetensors"]
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise FormatError(
            f"{text!r} is neither a folder here nor a model that the hub gives "
            f"({type(error).__name__}). Check the name, or the network."
        ) from error
    return Path(files)


def _config(ensemble: Any, aliases: dict[str, str], sha256: str) -> dict[str, Any]:
    body: Body = ensemble.body
    return {
        "format": FORMAT,
        "format_version": list(FORMAT_VERSION),
        "libraries": _versions(),
        "host": _checked_description(ensemble),
        "family": body.family.name,
        "blocks_path": ensemble._view.blocks_path,
        "masks": [[[int(v) for v in row] for row in mask.tolist()] for mask in ensemble.masks],
        "plan": ensemble.plan.to_dict(),
        "copies": ensemble.copies,
        "readout": {
            "tokens": body.readout.tokens,
            "folds": body.readout.folds,
            "why": body.readout.why,
            "end_of_text": body.readout.positions is not None,
        },
        "merged": list(ensemble.merged),
        "switches": ensemble.switches,
        "mode": ensemble.mode,
        "temperature": ensemble.temperature,
        "member_temperatures": ensemble.member_temperatures,
        "score": ensemble.score,
        "labels": ensemble.id2label,
        "dtype": str(ensemble.dtype).removeprefix("torch."),
        "aliases": aliases,
        "sha256": sha256,
        "record": ensemble.record,
    }


def _checked_description(ensemble: Any) -> dict[str, Any]:
    """Describe the host; if it cannot be built again from that, say that it is the user's own."""
    description = ensemble._assembly.description
    if description["library"] == "custom":
        return description
    try:
        plain = json.loads(json.dumps(description, default=_plain))
        config = {
            "masks": [mask.tolist() for mask in ensemble.masks],
            "plan": ensemble.plan.to_dict(),
            "copies": ensemble.copies,
            "family": ensemble.body.family.name,
            "blocks_path": ensemble._view.blocks_path,
            "readout": {
                "tokens": ensemble.readout.tokens,
                "folds": ensemble.readout.folds,
                "why": "",
                "end_of_text": ensemble.readout.positions is not None,
            },
            "merged": [],
        }
        twin, view = _structure(rebuild_host(plain), config)
        ours, theirs = ensemble.host.state_dict(), twin.model.state_dict()
        fits = ours.keys() == theirs.keys() and all(
            ours[name].shape == theirs[name].shape for name in ours
        )
        fits = fits and _answers_alike(ensemble, twin, view)
    except Exception:  # an unusual host: it must be given when loading
        fits = False
    return description if fits else {"library": "custom", "class": description["class"]}


@torch.no_grad()
def _answers_alike(ensemble: Any, twin: Assembly, view: HostModel) -> bool:
    """Check that a rebuilt host with the same weights answers the same, on an example.

    A setting that has no weights (how tokens are pooled, say) shows nowhere else.
    """
    inputs = examples(ensemble.host)[-1:]
    if not inputs:
        return True
    device, dtype = ensemble.device, ensemble.dtype
    other = type(ensemble).around(twin, view, mode="fused", switches={})
    other.host.to(device, dtype).load_state_dict(ensemble.host.state_dict())
    with evaluating(ensemble), evaluating(other):
        a, b = (e.fused_logits(*inputs[0]) for e in (ensemble, other))
    return a.shape == b.shape and bool(torch.allclose(a, b, atol=1e-4, rtol=1e-4))


def _structure(skeleton: nn.Module, config: dict[str, Any]) -> tuple[Assembly, HostModel]:
    """Give a plain host the structure that a config describes."""
    known = config["family"] in families
    family = families[config["family"]] if known else None
    view = host_model(skeleton, family=family)
    readout = config["readout"]
    positions = end_of_text(skeleton) if readout["end_of_text"] else None
    view.__dict__["readout"] = Readout(
        readout["tokens"], readout["folds"], readout["why"], positions
    )
    masks = [HeadMask(rows) for rows in config["masks"]]
    if masks[0].shape != view.head_counts:
        raise FormatError(
            f"The folder was saved for {len(masks[0])} layers of {masks[0].shape} heads but "
            f"{view.name} has {view.head_counts}. Pass the host that it was made from."
        )
    plan = Plan.from_dict(config["plan"], masks)
    description = describe_host(skeleton)
    body, moulds = build_body_(view, plan, config["copies"])
    split_classifier_(view.model, config["copies"])
    merged = tuple(config["merged"])
    return Assembly(
        view.model, body, plan, moulds, dict(config["copies"]), merged, description
    ), view


def _load_weights(model: nn.Module, path: Path, config: dict[str, Any]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(path)
    except SafetensorError as error:
        raise FormatError(f"{path} is damaged ({error}). Save or download it again.") from None
    for alias, name in config["aliases"].items():
        tensors[alias] = tensors[name]
    model.to(getattr(torch, config["dtype"]))
    expected = model.state_dict()
    missing, extra = expected.keys() - tensors.keys(), tensors.keys() - expected.keys()
    wrong = [n for n in expected if n in tensors and expected[n].shape != tensors[n].shape]
    if missing or extra or wrong:
        detail = ", ".join(sorted([*missing, *extra, *wrong])[:4])
        raise FormatError(
            f"{path} does not fit the host built from {CONFIG} ({detail} …). It was saved with "
            f"{config['libraries']}; installed are {_versions()}. Install those, or pass host=."
        )
    model.load_state_dict(tensors)


def _distinct(state: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Keep each tensor once; name the others as aliases."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in state.items():
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        if tensor.numel() and key in seen:
            aliases[name] = seen[key]
        else:
            seen[key] = name
            tensors[name] = tensor.detach().cpu().contiguous().clone()
    return tensors, aliases


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _versions() -> dict[str, str]:
    result = {}
    for name in ("hydra-ensembles", "torch", "transformers", "timm", "open_clip_torch"):
        try:
            result[name] = version(name)
        except PackageNotFoundError:
            continue
    return result


def _plain(value: Any) -> Any:
    """Turn what JSON does not know into plain data."""
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def _copy_of(host: nn.Module) -> nn.Module:
    import copy

    return copy.deepcopy(host)


def _card(ensemble: Any) -> str:
    summary = str(ensemble)
    name = type(ensemble.host).__name__
    return f"""---
library_name: hydra-ensembles
tags: [uncertainty, ensemble, pruning]
---
# A Hydra ensemble of {name}

One model that is an ensemble of {ensemble.members} members with pruned attention heads.

```
{summary}
```

```python
import hydra_ensembles as hydra

ensemble = hydra.HydraEnsemble.from_pretrained("this-folder")
answer = ensemble.predict(batch)  # .probabilities .label .uncertainty .member_logits
```
"""
