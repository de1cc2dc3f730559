"""Export an ensemble: one folder with programs, preprocessing and a contract. No pickle.

The ensemble is traced once (`torch.export`, any size of batch, any number of tokens). That one
graph becomes `model.pt2` and, by torch's ONNX exporter, `model.onnx`. Every program is then loaded
again from its file and compared with `ensemble.predict` at batches of 1, 3 and 17; only after that
is anything put in its place.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._records import (
    holding,
    names_to_disk,
    own_suffix,
    sha256_of_file,
    use_new_file_mode,
    write_whole,
    writing,
)
from ..errors import DataError, FormatError, MissingDependencyError, UnsupportedModelError
from ..fusion import HydraEnsemble
from ..hosts.architecture import library_versions
from ..registry import check_name
from ..runtime.contract import CONTRACT, FORMAT, FORMAT_VERSION, OUTPUTS, problem_of, signed
from .agreement import BATCHES, compare
from .checksums import SIGNATURE, write_sums
from .eight_bits import EightBits
from .export_example import Example, example_of, most_tokens
from .graph import AnsweringGraph, frozen, in_float32, trace, write_onnx
from .preparation import image_preparation, text_preparation
from .program import save_program
from .rules import Rule, rule_of
from .sbom import write_sbom

FORMATS = ("onnx", "torch")
FILES = {"onnx": "model.onnx", "torch": "model.pt2", "int8": "model.int8.onnx"}
_BESIDE = ".exporting"


@dataclass(frozen=True)
class Export:
    """What was exported.

    Attributes:
        folder: Where it is.
        programs: Names of the programs' files by kind.
        differences: By program and output, the largest difference to `ensemble.predict` in float32.
    """

    folder: Path
    programs: dict[str, str]
    differences: dict[str, dict[str, float]]

    def __str__(self) -> str:
        lines = [f"exported to {self.folder}"]
        for kind, name in self.programs.items():
            size = (self.folder / name).stat().st_size / 2**20
            found = self.differences[kind]
            worst = max(found["probabilities"], found["member_logits"])
            lines.append(f"  {name:16} {size:8.1f} MiB  differs by at most {worst:.1e}")
        return "\n".join(lines)


def export(
    ensemble: HydraEnsemble,
    folder: Any,
    *,
    formats: Sequence[str] = FORMATS,
    example: Any = None,
    int8: bool = False,
    known: Any = None,
    held_out: Any = None,
    alarm: float | None = 0.05,
    tolerance: float = 1e-4,
    key: str | os.PathLike[str] | None = None,
) -> Export:
    """Export an ensemble to a folder that runs without this library's training code.

    `model.onnx` runs by `hydra_ensembles.runtime` without torch, `model.pt2` by `load_program` or
    `torch.export.load`. `contract.json` says what goes in and what comes out.

    Args:
        ensemble: A classifier. Programs compute in float32, whatever its own precision is.
        folder: Where to write; an earlier export there is replaced once the new one is whole.
        formats: Any of `"onnx"` and `"torch"`.
        example: Real inputs, to trace and to compare with: a batch of the host, pictures or texts.
            Made up where it is known what the host takes.
        int8: Also write `model.int8.onnx`, with the linear layers' weights in 8 bits.
        known: For `int8`: known data, as `fit_novelty_` takes it. 8-bit weights move the features
            that novelty measures, so the 8-bit program learns anew, from its own features, what is
            known (every other batch row by row, since a batch shares the scale of its activations).
            Needed when the ensemble has novelty.
        held_out: For `int8`: labelled data, as `fit_policy` takes it, that the thresholds of the
            8-bit program are fitted on anew. Without it the threshold of the uncertainty stays that
            of the full weights, and the alarm is a rank among `known`.
        alarm: For an ensemble without a policy: abstain when an input is newer than all but this
            share of the known data. None answers everything.
        tolerance: Largest difference to `ensemble.predict` in float32, relative to values above 1.
        key: A private key of ssh to sign `SHA256SUMS` with; `doctor` checks the signature.

    Raises:
        UnsupportedModelError: The host cannot be traced, or gives no classes.
        VerificationError: A program does not answer as the ensemble does.
    """
    if isinstance(formats, str):
        formats = [formats]
    for name in formats:
        check_name("format", name, FORMATS)
    if not formats or (int8 and "onnx" not in formats):
        raise ValueError(f'formats={list(formats)}: give at least one, and "onnx" for int8.')
    if not isinstance(ensemble, HydraEnsemble):
        raise UnsupportedModelError(
            f"Only a HydraEnsemble can be exported, not a {type(ensemble).__name__}. One model "
            "becomes an ensemble of one member with fuse(model, [HeadMask.full(model)])."
        )
    _check_small(ensemble, int8, known, held_out)
    if "onnx" in formats:
        _check_packages()
    ensemble = in_float32(ensemble)
    inputs = example_of(ensemble, example)
    rule = rule_of(ensemble, alarm)
    ready = frozen(ensemble, inputs.batch(inputs.rows(3)))
    graph = AnsweringGraph(ready, inputs.names, rule).eval()
    target = Path(folder)
    with _staging(target) as beside:
        limits = {"tokens": most_tokens(ensemble)} if inputs.has_tokens else {}
        program = trace(graph, inputs, limits)
        programs, rules = {}, {}
        if "onnx" in formats:
            programs["onnx"] = FILES["onnx"]
            write_onnx(program, inputs, graph.output_names, beside / FILES["onnx"])
            if int8:
                programs["int8"] = FILES["int8"]
                small = EightBits(ready, ensemble.policy, inputs, limits, beside)
                rules["int8"] = small.write(FILES["int8"], rule, known, held_out, alarm)
        if "torch" in formats:
            programs["torch"] = FILES["torch"]
            save_program(program, beside / FILES["torch"])
        contract = _contract(ensemble, inputs, graph, rule, limits, programs, beside)
        contract["rules"] = {kind: own.to_dict() for kind, own in rules.items()}
        write_sbom(beside, list(programs.values()), name=contract["host"])
        _write_contract(contract, beside)
        agreement = compare(ensemble, inputs, rule, beside, tolerance)
        contract["agreement"] = {
            "batches": list(BATCHES),
            "real_inputs": inputs.real,
            "largest_difference": agreement,
        }
        _write_contract(contract, beside)
        write_sums(beside, key=key)
        _put_in_place(beside, target)
    return Export(target, programs, agreement)


def _check_small(ensemble: HydraEnsemble, int8: bool, known: Any, held_out: Any) -> None:
    """Refuse an 8-bit program that would decide by statistics of other features than its own."""
    if not int8:
        if known is not None or held_out is not None:
            raise ValueError("known= and held_out= are for the 8-bit program: pass int8=True.")
        return
    if ensemble.novelty is not None and known is None:
        raise DataError(
            "8-bit weights move the features that novelty measures: with the statistics of the "
            "full weights the 8-bit program would call most inputs new. Give known=, data as "
            "fit_novelty_() takes it (hydra-ensembles export --known DATA), so that it learns what "
            "is known from its own features; or set ensemble.novelty = None and "
            "ensemble.policy = None to export it without."
        )
    if held_out is not None and ensemble.policy is None:
        raise ValueError("held_out= fits a policy, but this ensemble has none: fit_policy() first.")


def _check_packages() -> None:
    try:
        import onnx
        import onnxruntime
        import onnxscript
    except ImportError as error:
        raise MissingDependencyError(
            "ONNX export needs onnx, onnxscript and onnxruntime: pip install "
            "'hydra-ensembles[export]'."
        ) from error
    del onnx, onnxruntime, onnxscript


@contextmanager
def _staging(target: Path) -> Iterator[Path]:
    """Hold the target and make a folder in it for new files, which goes whatever happens."""
    with holding(target), writing(target):
        for killed in target.glob(f"{_BESIDE}*"):
            shutil.rmtree(killed, ignore_errors=True)
        beside = target / f"{_BESIDE}{own_suffix()}"
        try:
            beside.mkdir()
            yield beside
        finally:
            shutil.rmtree(beside, ignore_errors=True)


def _contract(
    ensemble: HydraEnsemble,
    inputs: Example,
    graph: AnsweringGraph,
    rule: Rule,
    limits: dict[str, int],
    programs: dict[str, str],
    beside: Path,
) -> dict[str, Any]:
    logits = _answer_shape(ensemble, inputs)
    members, classes = logits[1], logits[-1]
    tokens: list[str | int] = ["tokens"] if len(logits) == 4 else []
    if inputs.has_tokens:
        preparation = text_preparation(ensemble, list(inputs.tensors), beside)
        task = "token-classification" if tokens else "text-classification"
    else:
        pictures = len(inputs.tensors) == 1 and "pixel_values" in inputs.tensors
        preparation = image_preparation(ensemble.transform) if pictures else None
        task = "image-classification" if "pixel_values" in inputs.tensors else "classification"
    if preparation and preparation["kind"] == "image":
        shape = inputs.dims("pixel_values")
        if shape != ["batch", len(preparation["mean"]), *preparation["size"]]:
            raise FormatError(
                f"ensemble.transform makes pictures of {preparation['size']}, but the example has "
                f"the shape {shape}. Give an example that was made by it."
            )
    shapes: dict[str, list[str | int]] = {
        "each": ["batch", *tokens],
        "each class": ["batch", *tokens, classes],
        "example": ["batch"],
        "members": ["batch", members, *tokens, classes],
    }
    names = ensemble.id2label
    known = names is not None and len(names) == classes
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
            {
                "name": name,
                "dtype": OUTPUTS[name][0],
                "shape": shapes[OUTPUTS[name][1]],
                "meaning": OUTPUTS[name][2],
            }
            for name in graph.output_names
        ],
        "class_names": [names[i] for i in range(classes)] if names and known else None,
        "score": ensemble.score,
        "temperature": ensemble.temperature,
        "member_temperatures": ensemble.member_temperatures,
        "novelty": None if ensemble.novelty is None else {"examples": ensemble.novelty.examples},
        "rule": rule.to_dict(),
        "limits": limits,
        "preprocessing": preparation,
        "programs": programs,
        "agreement": {},
    }


def _answer_shape(ensemble: HydraEnsemble, inputs: Example) -> list[int]:
    answer = ensemble.predict(inputs.batch(inputs.rows(1)))
    return list(answer.member_logits.shape)


def _write_contract(contract: dict[str, Any], beside: Path) -> None:
    paths = [p for p in sorted(beside.iterdir()) if p.is_file() and p.name != CONTRACT]
    files = {p.name: {"sha256": sha256_of_file(p), "bytes": p.stat().st_size} for p in paths}
    whole = signed({**contract, "files": files})
    problem = problem_of(whole)
    if problem:
        raise FormatError(f"This ensemble cannot be exported: {problem}.")
    write_whole(beside / CONTRACT, json.dumps(whole, indent=1) + "\n")


def _put_in_place(beside: Path, target: Path) -> None:
    """Rename all files, the contract last; then remove what an earlier export alone had."""
    earlier = _named_files(target / CONTRACT)
    use_new_file_mode(beside)
    names = sorted(path.name for path in beside.iterdir() if path.name != CONTRACT)
    for name in (*names, CONTRACT):
        with (beside / name).open("rb") as file:
            os.fsync(file.fileno())
    for name in (*names, CONTRACT):
        os.replace(beside / name, target / name)
    for name in (earlier | {SIGNATURE}) - set(names):
        (target / name).unlink(missing_ok=True)
    names_to_disk(target)


def _named_files(contract: Path) -> set[str]:
    from ..runtime.contract import read_contract

    try:
        return set(read_contract(contract.parent).data["files"])
    except FormatError:  # none there, or a damaged one: nothing is removed on its word
        return set()
