"""Export an ensemble: one folder with ONNX programs, preprocessing and a contract. No pickle.

The ensemble is traced once (`torch.export`, any size of batch, any number of tokens) and written by
torch's ONNX exporter. The program is then loaded again from its file and compared with
`ensemble.predict` at batches of 1, 3 and 17. Only after that are the files moved into the folder.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._records import (
    holding,
    names_to_disk,
    own_suffix,
    sealed,
    sha256_of_file,
    use_new_file_mode,
    write_whole,
    writing,
)
from ..errors import DataError, FormatError, UnsupportedModelError
from ..fusion import HydraEnsemble
from ..hosts.architecture import library_versions
from ..registry import imported
from ..runtime.contract import CONTRACT, FORMAT, FORMAT_VERSION, OUTPUTS, problem_of, read_contract
from ..uncertainty import Policy
from ..uncertainty.policy import GIVEN
from .agreement import BATCHES, compare
from .checksums import write_sums
from .eight_bits import EightBits
from .export_example import Example, example_of
from .graph import (
    AnsweringGraph,
    exported_policy,
    frozen,
    in_float32,
    task_name,
    write_onnx,
)
from .preparation import image_preparation, text_preparation

FILES = {"onnx": "model.onnx", "int8": "model.int8.onnx"}
STAGING = ".exporting"
"""How the name of the folder starts in which an export is made."""


@dataclass(frozen=True)
class Export:
    """What was exported.

    Attributes:
        folder: Where it is.
        programs: Names of the programs' files by kind: `onnx`, `int8`.
        differences: By program and output, the largest difference to `ensemble.predict` in float32.
    """

    folder: Path
    programs: dict[str, str]
    differences: dict[str, dict[str, float]]

    def __str__(self) -> str:
        lines = [f"exported to {self.folder}"]
        for kind, name in self.programs.items():
            size = (self.folder / name).stat().st_size / 2**20
            found = self.differences[kind].items()
            worst = max(value for key, value in found if key not in ("novelty", "novelty_score"))
            lines.append(f"  {name:16} {size:8.1f} MiB  differs by at most {worst:.1e}")
        return "\n".join(lines)


def export(
    ensemble: HydraEnsemble,
    folder: str | os.PathLike[str],
    *,
    example: Any = None,
    int8: bool = False,
    known: Any = None,
    held_out: Any = None,
    alarm: float | None = 0.05,
    tolerance: float = 1e-4,
) -> Export:
    """Export an ensemble to a folder that `hydra_ensembles.runtime` runs without torch.

    `model.onnx` is the whole answer as one program; `contract.json` says what goes in and what
    comes out.

    Args:
        ensemble: Of any task. Programs compute in float32, whatever its own precision is.
        folder: Where to write; an earlier export there is replaced once the new one is complete.
        example: Real inputs to trace and to compare with: a batch of the host, images or texts.
            Made up where it is known what the host takes.
        int8: Also write `model.int8.onnx`, with 8-bit weights in the linear layers.
        known: With `int8`: in-distribution data, as `fit_novelty_` takes it, to refit novelty for
            the 8-bit program. Needed when the ensemble has novelty.
        held_out: With `int8`: labelled data, as `fit_policy` takes it, to refit the policy and the
            sets for the 8-bit program. Needed when the ensemble has a fitted policy; without it,
            and for tasks other than one class per input, the 8-bit program has no sets.
        alarm: For an ensemble without a policy: abstain when an input is more novel than all but
            this share of the known data. None answers everything.
        tolerance: Largest difference to `ensemble.predict` in float32, relative to values above 1.

    Raises:
        UnsupportedModelError: The host cannot be traced, or its task has no program.
        VerificationError: A program does not answer as the ensemble does.

    Example:
        >>> ensemble.export("exported", example=batch)
        >>> runtime.load("exported").predict(["a joy to watch"])
    """
    if not isinstance(ensemble, HydraEnsemble):
        raise UnsupportedModelError(
            f"Only a HydraEnsemble can be exported, not a {type(ensemble).__name__}. One model "
            "becomes an ensemble of one member with fuse(model, [HeadMask.full(model)])."
        )
    if not int8 and (known is not None or held_out is not None):
        raise ValueError("known= and held_out= are for the 8-bit program: pass int8=True.")
    if int8 and ensemble.novelty is not None and known is None:
        raise DataError(
            "8-bit weights move the features that novelty measures: with the statistics of the "
            "full weights the 8-bit program would call most inputs new. Give known=, data as "
            "fit_novelty_() takes it (hydra-ensembles export --known DATA), to refit novelty; or "
            "set ensemble.novelty = None and ensemble.policy = None to export without it."
        )
    if held_out is not None and ensemble.policy is None and ensemble.sets is None:
        raise ValueError(
            "held_out= fits a policy and sets, but this ensemble has neither: fit_policy() or "
            "fit_sets() first."
        )
    if int8 and held_out is None and ensemble.policy and ensemble.policy.method != GIVEN:
        raise DataError(
            "The guarantee of the ensemble's policy does not hold for 8-bit weights. Give "
            "held_out=, labelled data as fit_policy() takes it (hydra-ensembles export --held-out "
            "DATA), to refit it; or set ensemble.policy = None to export without it."
        )
    for package in ("onnx", "onnxscript", "onnxruntime"):
        imported(package, "The export to ONNX", "export")
    ensemble = in_float32(ensemble)
    inputs = example_of(ensemble, example)
    policies = {"onnx": exported_policy(ensemble.policy, ensemble, alarm)}
    sets = {} if ensemble.sets is None else {"onnx": ensemble.sets.to_dict()}
    ready = frozen(ensemble, inputs.batch(inputs.rows(3)))
    target = Path(folder)
    with holding(target), writing(target):
        for killed in target.glob(f"{STAGING}*"):
            shutil.rmtree(killed, ignore_errors=True)
        staging = target / f"{STAGING}{own_suffix()}"
        try:
            staging.mkdir()
            graph = AnsweringGraph(ready, inputs.names, policies["onnx"][0])
            write_onnx(graph, inputs, staging / FILES["onnx"])
            if int8:
                small = EightBits(ready, inputs, staging / FILES["int8"])
                policy = ensemble.policy
                if known is not None or held_out is not None:
                    policy = small.fit_(known, policy, held_out)
                policies["int8"] = exported_policy(policy, ready, alarm)
                by_input = ensemble.task.classifies and not ensemble.task.by_token
                if held_out is not None and ensemble.sets is not None and by_input:
                    sets["int8"] = small.fit_sets_(ensemble.sets, held_out).to_dict()
                small.write(AnsweringGraph(ready, inputs.names, policies["int8"][0]))
            contract = _contract(ensemble, inputs, graph.output_names, policies, staging)
            contract["sets"] = sets or None
            _write_contract(contract, staging)
            differences = compare(ensemble, inputs, policies["onnx"][0], staging, tolerance)
            contract["agreement"] = {
                "batches": list(BATCHES),
                "real_inputs": inputs.real,
                "largest_difference": differences,
            }
            _write_contract(contract, staging)
            write_sums(staging)
            _put_in_place(staging, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    return Export(target, contract["programs"], differences)


def _contract(
    ensemble: HydraEnsemble,
    inputs: Example,
    outputs: list[str],
    policies: Mapping[str, tuple[Policy, str]],
    staging: Path,
) -> dict[str, Any]:
    """Return the contract, without the files and the agreement; write the tokenizer's files."""
    outcome = ensemble.predict(inputs.batch(inputs.rows(1))).member_outputs
    members, classes = outcome.shape[1], outcome.shape[-1]
    task, by_token = task_name(ensemble), ensemble.task.by_token
    is_image = "pixel_values" in inputs.tensors
    if inputs.most_tokens:
        preparation = text_preparation(ensemble, inputs, staging)
    else:
        alone = is_image and len(inputs.tensors) == 1
        preparation = image_preparation(ensemble.transform) if alone else None
    if task == "classification" and (inputs.most_tokens or is_image):
        task = f"{'text' if inputs.most_tokens else 'image'}-classification"
    if preparation and preparation["kind"] == "image":
        shape = inputs.dims("pixel_values")
        if shape != ["batch", len(preparation["mean"]), *preparation["size"]]:
            raise FormatError(
                f"ensemble.transform makes images of {preparation['size']}, but the example has "
                f"the shape {shape}. Give an example that was prepared by the transform."
            )
    free: list[str | int] = ["tokens"] if by_token else []
    ends: list[str | int] = [*free, classes]
    if ensemble.task.ragged:  # start and end logits of every token
        classes, ends = 2, [2, "tokens"]
    shapes: dict[str, list[str | int]] = {
        "each": ["batch", *free],
        "each class": ["batch", *ends],
        "example": ["batch"],
        "tokens": ["batch", "tokens"],
        "members": ["batch", members, *ends],
    }
    names = ensemble.id2label
    named = task not in ("question-answering", "embedding") and names and len(names) == classes
    class_names = [names[i] for i in range(classes)] if names and named else None
    largest = Policy().finite().threshold

    def policy_record(policy: Policy, words: str) -> dict[str, Any]:
        limits = (policy.threshold, policy.novelty_threshold)
        unsure, new = (None if limit == largest else limit for limit in limits)
        return {
            "uncertainty_above": unsure,
            "novelty_score_above": new,
            "risk": policy.risk,
            "alarm": policy.alarm,
            "words": words,
        }

    return {
        "format": FORMAT,
        "format_version": list(FORMAT_VERSION),
        "libraries": library_versions("onnx", "onnxscript", "onnxruntime"),
        "task": task,
        "host": type(ensemble.host).__name__,
        "members": members,
        "classes": classes,
        "inputs": [
            {
                "name": name,
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": inputs.dims(name),
            }
            for name, tensor in inputs.tensors.items()
        ],
        "outputs": [
            {"name": name, "dtype": dtype, "shape": shapes[shape], "meaning": meaning}
            for name, (dtype, shape, meaning) in OUTPUTS.items()
            if name in outputs
        ],
        "class_names": class_names,
        "score": ensemble.score,
        "temperature": ensemble.temperature,
        "member_temperatures": ensemble.member_temperatures,
        "novelty": None if ensemble.novelty is None else {"examples": ensemble.novelty.examples},
        "policies": {kind: policy_record(*found) for kind, found in policies.items()},
        "limits": {"tokens": inputs.most_tokens} if inputs.most_tokens else {},
        "preprocessing": preparation,
        "programs": {kind: FILES[kind] for kind in policies},
        "agreement": {},
    }


def _write_contract(contract: dict[str, Any], staging: Path) -> None:
    paths = [p for p in sorted(staging.iterdir()) if p.is_file() and p.name != CONTRACT]
    files = {p.name: {"sha256": sha256_of_file(p), "bytes": p.stat().st_size} for p in paths}
    complete = sealed({**contract, "files": files})
    problem = problem_of(complete)
    if problem:
        raise FormatError(f"This ensemble cannot be exported: {problem}.")
    write_whole(staging / CONTRACT, json.dumps(complete, indent=1) + "\n")


def _put_in_place(staging: Path, target: Path) -> None:
    """Rename all files, the contract last; then remove files that only an earlier export had."""
    try:
        earlier = set(read_contract(target).data["files"])
    except FormatError:  # there is none, or it is damaged: remove nothing
        earlier = set()
    use_new_file_mode(staging)
    names = sorted(path.name for path in staging.iterdir() if path.name != CONTRACT)
    for name in (*names, CONTRACT):
        with (staging / name).open("rb") as file:
            os.fsync(file.fileno())
    for name in (*names, CONTRACT):
        os.replace(staging / name, target / name)
    for name in earlier - set(names):
        (target / name).unlink(missing_ok=True)
    names_to_disk(target)
