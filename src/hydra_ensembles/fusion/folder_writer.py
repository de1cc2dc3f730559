"""Write the folder of an ensemble: `config.json`, `model.safetensors`, a model card. No pickle.

The config holds plain data only: the format's version, the host's class and config, masks, plan,
labels, calibration, and the SHA-256 of every other file and of itself (`folder_schema`). Every
distinct head is stored once. When novelty is fitted, its statistics are in `novelty.safetensors`,
next to the weights.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from .._records import (
    WAIT,
    holding,
    inside,
    names_to_disk,
    own_suffix,
    sealed,
    sha256_of_file,
    use_new_file_mode,
    writing,
)
from ..data.transforms import ImageTransform, ProcessorTransform
from ..errors import FormatError, check_place
from ..hosts.architecture import library_versions
from ..tasks import MultiClass
from .folder_schema import (
    CARD,
    CONFIG,
    DIGEST,
    FORMAT,
    FORMAT_VERSION,
    NOVELTY,
    WEIGHTS,
    PlanRecord,
    ReadoutRecord,
    ReadoutsRecord,
    Structure,
    check_config,
    plain_task,
    read_config,
)
from .host_description import checked_description, plain_data
from .host_engine_blocks import distinct
from .summary import make_card

if TYPE_CHECKING:
    from .ensemble import HydraEnsemble

SAVING = ".saving"
"""How the name of a sub-folder begins in which new files are written before they are renamed."""


def save(
    ensemble: HydraEnsemble, folder: str | os.PathLike[str], *, name: str = "this-folder"
) -> None:
    """Write an ensemble to a folder (see `HydraEnsemble.save_pretrained`).

    All files are first written completely into a sub-folder; then they are renamed, the config
    last. A failure before the renames leaves the folder as it was. If the process ends between two
    renames, the config does not match the files and loading says so; `finish_saving` then does the
    remaining renames. One process saves at a time; another one waits for it.

    Args:
        ensemble: What to save.
        folder: Where to; it is created if it does not exist.
        name: The ensemble's name on its card.
    """
    check_place("folder", folder)
    target = Path(folder)
    with holding(target, wait=WAIT), writing(target):
        finish_saving(target)  # of a killed process: this save may fail before it renames
        beside = target / f"{SAVING}{own_suffix()}"
        try:
            beside.mkdir()
            _write_files(ensemble, beside, name)
        except BaseException:
            shutil.rmtree(beside, ignore_errors=True)
            raise
        _rename(beside, target)  # a failure here leaves what `finish_saving` needs


def _write_files(ensemble: HydraEnsemble, beside: Path, name: str) -> None:
    """Write all files of an ensemble and flush them to the disk."""
    from safetensors.torch import save_file

    tensors, aliases = distinct(ensemble.host.state_dict())
    save_file(tensors, beside / WEIGHTS, metadata={"format": "pt"})
    _save_preparation(ensemble, beside)
    if ensemble.novelty is not None:
        statistics = {
            key: tensor.detach().cpu().contiguous().clone()
            for key, tensor in ensemble.novelty.tensors().items()
        }
        save_file(statistics, beside / NOVELTY, metadata={"format": "pt"})
    files = {
        path.relative_to(beside).as_posix(): sha256_of_file(path)
        for path in sorted(beside.rglob("*"))
        if path.is_file() and path.name not in (WEIGHTS, CARD)
    }
    content = _content(ensemble, aliases) | {
        "sha256": sha256_of_file(beside / WEIGHTS),
        "files": files,
    }
    content = sealed(json.loads(json.dumps(content, default=plain_data)), DIGEST)
    check_config(content, f"This {type(ensemble.host).__name__} cannot be saved")
    (beside / CARD).write_text(make_card(ensemble, name), encoding="utf-8")
    (beside / CONFIG).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    use_new_file_mode(beside)
    for file in (WEIGHTS, *files, CARD, CONFIG):
        with (beside / file).open("rb") as written:
            os.fsync(written.fileno())


def _rename(beside: Path, target: Path) -> None:
    """Move written files to their places, the config last; remove files of an older save."""
    files = _listed(beside)
    before = _listed(target)
    for name in (WEIGHTS, *sorted(files), CARD, CONFIG):
        if (beside / name).is_file():  # otherwise it was renamed before the process was killed
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(beside / name, target / name)
    for name in before - files:
        (target / name).unlink(missing_ok=True)
    names_to_disk(target)
    shutil.rmtree(beside, ignore_errors=True)


def _listed(folder: Path) -> set[str]:
    """Return the files that a valid config lists; none if there is no valid config."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # keys of a newer format do not matter here
            return set(read_config(folder).files)
    except FormatError:
        return set()


def can_finish_saving(beside: Path) -> bool:
    """Return whether a save was stopped after all files were written, before all were renamed.

    Args:
        beside: The sub-folder in which the files were written.
    """
    try:
        config = read_config(beside)
        for name, digest in {WEIGHTS: config.sha256, **config.files}.items():
            places = [inside(beside.parent, f"{beside.name}/{name}"), inside(beside.parent, name)]
            path = next((place for place in places if place.is_file()), None)
            if path is None or sha256_of_file(path) != digest:
                return False
    except (FormatError, OSError):
        return False
    return True


def finish_saving(folder: Path) -> bool:
    """Do the remaining renames of a stopped save; return whether there were any.

    What remains of other saves is removed: nobody writes it while the folder is held here.
    """
    with holding(folder, wait=WAIT), writing(folder):
        stopped = [path for path in sorted(folder.glob(f"{SAVING}*")) if path.is_dir()]
        whole = next((path for path in stopped if can_finish_saving(path)), None)
        if whole is not None:
            _rename(whole, folder)
        for path in stopped:
            shutil.rmtree(path, ignore_errors=True)
    return whole is not None


def _save_preparation(ensemble: HydraEnsemble, folder: Path) -> None:
    """Write the tokenizer and the image processor; our own transform is part of the config."""
    transform, tokenizer = ensemble.transform, ensemble.tokenizer
    if hasattr(tokenizer, "save_pretrained"):
        tokenizer.save_pretrained(str(folder))
    if isinstance(transform, ProcessorTransform):
        transform.processor.save_pretrained(str(folder))
    elif transform is not None and not isinstance(transform, ImageTransform):
        warnings.warn(
            f"ensemble.transform is a {type(transform).__name__}, which is not saved: use an "
            "ImageTransform or the host's image processor to have it in the folder.",
            stacklevel=4,
        )


def _content(ensemble: HydraEnsemble, aliases: dict[str, str]) -> dict[str, Any]:
    """Return the fields of the config that do not depend on other files."""
    body, policy, transform = ensemble.body, ensemble.policy, ensemble.transform
    recorded = isinstance(transform, (ImageTransform, ProcessorTransform))
    structure = Structure(
        family=body.family.name,
        blocks_path=ensemble._view.blocks_path,
        masks=[[[int(v) for v in row] for row in mask.tolist()] for mask in ensemble.masks],
        plan=msgspec.convert(ensemble.plan.to_dict(), PlanRecord),
        copies=ensemble.copies,
        readout=ReadoutRecord(
            tokens=body.readout.tokens,
            folds=body.readout.folds,
            why=body.readout.why,
            end_of_text=body.readout.positions is not None,
        ),
        merged=list(ensemble.merged),
        switches=ensemble.switches,
        aliases=aliases,
        readouts=None if body.readouts is None else ReadoutsRecord.of(body.readouts),
    )
    described = msgspec.to_builtins(structure)
    if structure.readouts is None:
        del described["readouts"]  # as in folders of older versions
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "libraries": library_versions(),
        "host": checked_description(ensemble, structure),
        **described,
        "mode": ensemble.mode,
        "temperature": ensemble.temperature,
        "member_temperatures": ensemble.member_temperatures,
        "score": ensemble.score,
        "labels": ensemble.id2label,
        "policy": None if policy is None else policy.to_dict(),
        "image_transform": transform.to_dict() if recorded else None,
        "dtype": plain_data(ensemble.dtype),
        "novelty": None if ensemble.novelty is None else ensemble.novelty.facts(),
        "record": ensemble.record,
        **({} if ensemble.task == MultiClass() else {"task": plain_task(ensemble.task)}),
        **({} if ensemble.sets is None else {"sets": ensemble.sets.to_dict()}),
        **({} if ensemble.calibrator is None else {"calibrator": ensemble.calibrator.to_dict()}),
    }
