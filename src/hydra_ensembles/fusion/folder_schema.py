"""The format of an ensemble's folder: its files, its config's digest, and the values of each field.

Everything is checked before a module is built, so that a wrong field is refused here by name and
does not cause a crash or a wrong answer later.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .._records import inside, json_digest
from ..data.transforms import PROCESSOR_FILE, ImageTransform
from ..errors import FormatError, HydraError
from ..hosts.attention import FORMS, UNUSED
from ..uncertainty import Policy, checked_temperature, scores
from .plan_checks import copies_problem, plan_problem

FORMAT = "hydra-ensembles"
FORMAT_VERSION = (1, 2)
OLDEST_VERSION = (1, 1)
"""Version 1.2 has `policy` instead of `abstention`."""
CONFIG, WEIGHTS, CARD, NOVELTY = (
    "config.json",
    "model.safetensors",
    "README.md",
    "novelty.safetensors",
)
DIGEST = "config_sha256"
MOST_BYTES = 256 * 2**20
"""Larger configs are not read: real ones have a few kilobytes."""

DTYPES = ("float32", "bfloat16", "float16", "float64")
_PARTS = (
    r"norm1|norm2|query_norm|key_norm|output_bias|mlp\.\d+(\.\w+)*"
    r"|after_attention\.\d+|after_mlp\.\d+"
)


def digest_of(config: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a config's content, ignoring white space and its own digest."""
    return json_digest(config, DIGEST)


def signed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as JSON would read it back, with its digest."""
    plain = json.loads(json.dumps(config))
    return {**plain, DIGEST: digest_of(plain)}


def read_config(folder: Path) -> dict[str, Any]:
    """Read and check the config of a saved ensemble."""
    path = inside(folder, CONFIG)
    if not path.is_file():
        raise FormatError(
            f"No {CONFIG} in {folder}: expected a folder written by save_pretrained()."
        )
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes are too many for a config")
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{path} is damaged ({error}). Save or download it again.") from None
    except OSError as error:
        raise FormatError(f"Cannot read {path}: {error}.") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        kind = config.get("model_type") if isinstance(config, dict) else type(config).__name__
        raise FormatError(
            f"{path} is not the config of a Hydra ensemble (found {kind or 'another format'!r}). "
            "A host model is loaded with its own library and fused with hydra_ensembles.fuse()."
        )
    _check_version(config, path)
    old = set() if config["format_version"] >= [1, 2] else {"policy"}
    missing = FIELDS.keys() - config.keys() - old
    if missing:
        raise FormatError(f"{path} lacks {', '.join(sorted(missing))}. Save or download it again.")
    if digest_of(config) != config[DIGEST]:
        raise FormatError(
            f"{path} was changed after it was saved: its content does not match the digest in "
            "it. Copy or download it again; to change a setting, load the original, set it in "
            "Python and call save_pretrained()."
        )
    if old:
        config = _upgraded(config, path)
    unknown = config.keys() - FIELDS.keys()
    if unknown:
        warnings.warn(
            f"{path} has keys that this version does not know and leaves alone: "
            f"{', '.join(sorted(unknown))}.",
            stacklevel=4,
        )
    check_fields(config, str(path))
    return config


def _upgraded(config: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return a config of version 1.1 in today's format, without its abstention rule."""
    if config.get("abstention") is not None:
        warnings.warn(
            f"{path} holds a rule to abstain of an earlier version, which is left out: fit a "
            "policy with hydra_ensembles.fit_policy() and save the ensemble again.",
            stacklevel=5,
        )
    kept = {key: value for key, value in config.items() if key != "abstention"}
    return {"policy": None, **kept}


def check_fields(config: Mapping[str, Any], where: str) -> None:
    """Raise for the first field that is invalid, by itself or together with others."""
    for name, check in FIELDS.items():
        try:
            problem = check(config[name])
        except (
            HydraError,
            TypeError,
            ValueError,
            KeyError,
            AttributeError,
            OverflowError,
        ) as error:
            problem = str(error) or type(error).__name__
        if problem:
            raise FormatError(
                f"{where}: {name} is wrong ({problem}). Save or download the folder again."
            )
    problem = plan_problem(config) or copies_problem(config) or _members_problem(config)
    if problem:
        raise FormatError(f"{where}: {problem}. Save or download the folder again.")


def _check_version(config: Mapping[str, Any], path: Path) -> None:
    version: Any = config.get("format_version")
    good = isinstance(version, list) and len(version) == 2 and all(_is_count(n) for n in version)
    if not good:
        raise FormatError(f"{path} has the format version {version!r:.60}; expected two numbers.")
    if version[0] > FORMAT_VERSION[0]:
        raise FormatError(
            f"{path} has format {version[0]}.{version[1]}, newer than {FORMAT_VERSION[0]}."
            f"{FORMAT_VERSION[1]} which this library reads. Upgrade hydra-ensembles."
        )
    if tuple(version) < OLDEST_VERSION:
        raise FormatError(
            f"{path} has format {version[0]}.{version[1]}, from before a release of this library. "
            "Build or fuse the ensemble again."
        )


# --- single fields: each check returns what is wrong, or None ------------------------------------

Check = Callable[[Any], "str | None"]


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(_is_count(v) for v in value)


def _of(kind: type | tuple[type, ...], words: str) -> Check:
    def check(value: Any) -> str | None:
        return None if isinstance(value, kind) else f"{value!r:.60} is not {words}"

    return check


def _one_of(*allowed: Any) -> Check:
    def check(value: Any) -> str | None:
        if any(value == a and type(value) is type(a) for a in allowed):
            return None
        return f"{value!r:.60} is none of {', '.join(map(str, allowed))}"

    return check


def _maybe(check: Check) -> Check:
    return lambda value: None if value is None else check(value)


def _temperature(value: Any) -> str | None:
    if not isinstance(value, (int, float)):
        return f"{value!r:.60} is not a number"
    checked_temperature(value)
    return None


def _temperatures(value: Any) -> str | None:
    if not isinstance(value, list):
        return f"{value!r:.60} is not a list"
    return next((problem for v in value if (problem := _temperature(v))), None)


def _score(value: Any) -> str | None:
    if not isinstance(value, str):
        return f"{value!r:.60} is not a name"
    scores[value]
    return None


def _sha256(value: Any) -> str | None:
    good = isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value)
    return None if good else f"{value!r:.60} is not a SHA-256"


def _files(value: Any) -> str | None:
    if not isinstance(value, dict):
        return f"{value!r:.60} is not a table of files"
    for name, digest in value.items():
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)?", name):
            return f"{name!r:.60} is not the name of a file in the folder"
        if problem := _sha256(digest):
            return problem
    return None


def _labels(value: Any) -> str | None:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        return f"{value!r:.60} is not a table of names"
    if set(value) != {str(number) for number in range(len(value))} or not value:
        return f"its keys are not the classes 0 to {len(value) - 1}"
    return None


def _strings(value: Any) -> str | None:
    good = isinstance(value, dict) and all(isinstance(v, str) for v in value.values())
    return None if good else f"{value!r:.60} is not a table of names"


def _list_of_strings(value: Any) -> str | None:
    good = isinstance(value, list) and all(isinstance(v, str) for v in value)
    return None if good else f"{value!r:.60} is not a list of names"


def _host(value: Any) -> str | None:
    if not isinstance(value, dict):
        return f"{value!r:.60} is not a description"
    for key in ("library", "class"):
        if not isinstance(value.get(key), str):
            return f"its {key} is {value.get(key)!r:.60}"
    buffers = value.get("buffers", {})
    if not isinstance(buffers, dict) or not set(buffers.values()) <= set(DTYPES):
        return f"its buffers are {buffers!r:.60}"
    return None


def _readout(value: Any) -> str | None:
    if not isinstance(value, dict) or value.keys() != {"tokens", "folds", "why", "end_of_text"}:
        return f"{value!r:.60} is not a readout"
    tokens = value["tokens"]
    if tokens is not None and not (_is_count(tokens) and 0 < tokens <= 64):
        return f"{tokens!r:.60} is not a number of tokens"
    kinds = (("folds", bool), ("end_of_text", bool), ("why", str))
    return next(
        (f"{key} is {value[key]!r:.60}" for key, k in kinds if type(value[key]) is not k), None
    )


def _switches(value: Any) -> str | None:
    if not isinstance(value, dict):
        return f"{value!r:.60} is not a table of switches"
    for key, switch in value.items():
        if not isinstance(switch, (bool, str)) and key not in ("cuts", "rotary"):
            return f"{key} is {switch!r:.60}"
    if value.get("engine", "fused") not in ("fused", "host"):
        return f"engine is {value['engine']!r:.60}"
    if not re.fullmatch(r"|(tuple|list) \d", str(value.get("form", ""))):
        return f"form is {value['form']!r:.60}"
    rotary = value.get("rotary", FORMS[0])
    if not all(form in (*FORMS, UNUSED) for form in (rotary if type(rotary) is list else [rotary])):
        return f"rotary is {rotary!r:.60}"
    if value.get("engine") == "host" and type(value.get("folds")) is not bool:
        return f"folds is {value.get('folds')!r:.60}"
    return None


def _masks(value: Any) -> str | None:
    if not isinstance(value, list) or not value:
        return f"{value!r:.60} is not a list of masks"
    for mask in value:
        if not isinstance(mask, list) or not mask or not all(isinstance(row, list) for row in mask):
            return f"{mask!r:.60} is not a mask"
        if not all(type(v) is int and v in (0, 1) for row in mask for v in row):
            return "a mask holds values other than 0 and 1"
        if [len(row) for row in mask] != [len(row) for row in value[0]]:
            return "masks differ in their numbers of heads"
    return None


def _plan(value: Any) -> str | None:
    if not isinstance(value, dict) or not _is_count(value.get("trunk")):
        return f"{value!r:.60} is not a plan"
    lists = [value.get("ends"), value.get("streams")]
    heads, layers = value.get("trunk_heads"), value.get("layers")
    if not isinstance(heads, list) or not isinstance(layers, list):
        return "it lacks trunk_heads or layers"
    if not all(_are_counts(numbers) for numbers in [*lists, *heads]):
        return "ends, streams or trunk_heads are not lists of numbers"
    for layer in layers:
        if not isinstance(layer, dict) or not _is_count(layer.get("layer")):
            return f"{layer!r:.60} is not a layer"
        rows = layer.get("heads")
        if not isinstance(rows, list) or not rows or not all(_are_counts(row) for row in rows):
            return f"heads of layer {layer['layer']} are no lists of numbers"
        if not all(_are_counts(layer.get(key)) for key in ("parents", "members")):
            return f"parents or members of layer {layer['layer']} are no lists of numbers"
        if not all(type(layer.get(key)) is bool for key in ("shared", "readout_only")):
            return f"shared or readout_only of layer {layer['layer']} is not true or false"
    return None


def _copies(value: Any) -> str | None:
    if not isinstance(value, dict):
        return f"{value!r:.60} is not a table"
    for name, count in value.items():
        if not _is_count(count) or not count:
            return f"{name} has {count!r:.60} copies"
        if not re.fullmatch(rf"\d+\.({_PARTS})|classifier\.[\w.]+", name):
            return f"{name!r:.60} is not a part of a block or classifier"
    return None


def _policy(value: Any) -> str | None:
    if not isinstance(value, dict):
        return f"{value!r:.60} is not a policy"
    policy = Policy.from_dict(value).to_dict()
    missing = policy.keys() - value.keys()  # a default instead would be another policy
    if policy.get("measured"):
        missing |= policy["measured"].keys() - value["measured"].keys()
    return f"it lacks {', '.join(sorted(missing))}" if missing else None


def _transform(value: Any) -> str | None:
    if not isinstance(value, dict):
        return f"{value!r:.60} is not a transform"
    if "processor" in value:
        good = value.keys() == {"processor", "exif_orientation"}
        good &= type(value.get("exif_orientation")) is bool and value["processor"] == PROCESSOR_FILE
        return None if good else f"{value!r:.60} is not the record of an image processor"
    ImageTransform.from_dict(value)
    return None


_name = _of(str, "a name")
_table = _of(dict, "a table")

FIELDS: dict[str, Check] = {
    "format": _name,
    "format_version": _of(list, "two numbers"),
    "libraries": _strings,
    "host": _host,
    "family": _name,
    "blocks_path": _name,
    "masks": _masks,
    "plan": _plan,
    "copies": _copies,
    "readout": _readout,
    "merged": _list_of_strings,
    "switches": _switches,
    "mode": _one_of("fused", "loop"),
    "temperature": _maybe(_temperature),
    "member_temperatures": _maybe(_temperatures),
    "score": _score,
    "labels": _maybe(_labels),
    "policy": _maybe(_policy),
    "image_transform": _maybe(_transform),
    "dtype": _one_of(*DTYPES),
    "aliases": _strings,
    "sha256": _sha256,
    "files": _files,
    "record": _table,
    "novelty": _maybe(_table),
    DIGEST: _sha256,
}


# --- several fields together ---------------------------------------------------------------------


def _members_problem(config: Mapping[str, Any]) -> str | None:
    temperatures, members = config["member_temperatures"], len(config["masks"])
    if temperatures is not None and len(temperatures) != members:
        return f"there are {len(temperatures)} member_temperatures for {members} members"
    if (config["novelty"] is None) != (NOVELTY not in config["files"]):
        return f"novelty and the file {NOVELTY} belong together, but one is missing"
    policy = config["policy"]
    if policy is not None and policy.get("score", "msp") != config["score"]:
        return f"the policy is about {policy['score']!r}, the score is {config['score']!r}"
    if policy is not None and policy.get("alarm") is not None and config["novelty"] is None:
        return "the policy has an alarm, but there are no statistics of known data"
    return None
