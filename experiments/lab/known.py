"""What the novelty tables are made of: token summaries and logits of every data set, kept on disk.

Every data set becomes one file `CACHE/novelty/<task>/<set>.safetensors`: `readout` and `mean` (the
readout token and the mean over unpadded tokens after every block, `[example, block, width]`),
`logits` and `features` (what the classifier reads) of the single model, `members` (logits of three
members fused above the shared trunk), `end` (the mean of their readout tokens after the last
block), and `labels`. All detectors read these files, so that they see the same features. Files in
`<task>-student` have the taps and logits of a single student of the hosts. One pass per set; a
stopped run goes on with the sets that are missing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hydra_ensembles import HeadMask, HydraEnsemble, fuse
from hydra_ensembles.data.batches import batch_length, split_batch
from hydra_ensembles.errors import DataError
from hydra_ensembles.fusion.known_data import features_of
from hydra_ensembles.hosts import host_model, main_output

from .answers import Store
from .known_sets import MAKERS
from .methods import distilled
from .tasks import CIFAR8, open_task

BRANCHED = {"imagenet": 2, "cifar10": 2, "sst2": 1, "clinc150": 1, "digits": 2}
BRANCHED |= dict.fromkeys(CIFAR8, 2)
"""Blocks, from the last, in which the three members differ."""
SEEDS = {task: (0,) if task in ("imagenet", *CIFAR8) else (0, 1, 2) for task in BRANCHED}
"""Hosts of a task; three are a Deep Ensemble."""
STUDENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "digits": ("digits", {}),
    "sst2": ("text", {"part": "train"}),
    "clinc150": ("clinc150", {}),
    "cifar10": ("cifar10", {"part": "further"}),
}
"""The table whose row `student` says how a task's student is trained, and what differs here: it
learns from no example that may be known data."""


def classifier_of(model: nn.Module) -> nn.Linear:
    """Return the linear layer that gives the logits."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def members_of(model: nn.Module, branched: int) -> list[HeadMask]:
    """Return three members that lose a third of the heads of the last blocks, in turn."""
    full = HeadMask.full(model)
    found = []
    for member in range(3):
        mask = full
        for layer in range(len(full))[-branched:]:
            kept = [head % 3 != member for head in range(len(full[layer]))]
            mask = mask.with_layer(layer, kept)
        found.append(mask)
    return found


@torch.no_grad()
def extract(model: nn.Module, batches: Iterable[Any], branched: int) -> dict[str, Tensor]:
    """Run the single model and the fused members over data; see the top of this file."""
    ensemble = fuse(model, members_of(model, branched)).eval()
    states: list[Tensor] = []
    read: list[Tensor] = []
    linear = classifier_of(model)

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        states.append(output[0] if isinstance(output, tuple) else output)

    hooks = [block.module.register_forward_hook(keep) for block in host_model(model).blocks]
    hooks.append(linear.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0])))
    parts: dict[str, list[Tensor]] = {}
    for batch in batches:
        args, kwargs, labels = split_batch(batch)
        states.clear()
        read.clear()
        logits = main_output(model(*args, **kwargs))
        mask = kwargs.get("attention_mask")
        weight = torch.ones(states[0].shape[:2]) if mask is None else mask.float()
        weight = (weight / weight.sum(1, keepdim=True))[..., None]
        # the members' trunk is the single model's: it runs once
        with ensemble.body.options(trunk_states=states[-branched - 1]):
            run = ensemble.run(args, kwargs, summaries=True)
        row = {
            "readout": torch.stack([state[:, 0] for state in states], 1),
            "mean": torch.stack([(state * weight).sum(1) for state in states], 1),
            "end": run.summaries[:, -1],
            "logits": logits,
            "features": read[-1] if read[-1].ndim == 2 else read[-1][:, 0],
            "members": run.member_logits,
        }
        if labels is not None:
            row["labels"] = labels.long()
        for name, value in row.items():
            parts.setdefault(name, []).append(value.clone())
    for hook in hooks:
        hook.remove()
    found = {name: torch.cat(values) for name, values in parts.items()}
    return {**found, "weight": linear.weight.detach(), "bias": linear.bias.detach()}


@torch.no_grad()
def extract_student(model: HydraEnsemble, batches: Iterable[Any]) -> dict[str, Tensor]:
    """Run a single student over data; keep what its novelty hears."""
    said = [features_of(model, batch) for batch in batches]
    logits, taps = (torch.cat(parts) for parts in zip(*said, strict=True))
    return {"logits": logits, "taps": taps}


def _first(batches: Iterable[Any], count: int) -> Iterator[Any]:
    """Yield batches until there are as many examples."""
    seen = 0
    for batch in batches:
        if seen >= count:
            return
        seen += batch_length(batch)
        yield batch


def folder_of(cache: Path, task: str, seed: int | None = 0) -> Path:
    """Return where a task's files lie, by the seed of the host; None is the student."""
    if seed is None:
        return cache / "novelty" / f"{task}-student"
    return cache / "novelty" / (task if seed == 0 else f"{task}-seed{seed}")


def keep_features(
    name: str,
    *,
    data: Path | None,
    hosts: Path | None,
    cache: Path,
    seed: int | None = 0,
    student: Mapping[str, Any] | None = None,
    only: Sequence[str] = (),
    most: int | None = None,
) -> None:
    """Extract the sets of a task that are missing, or the first `most` examples of each.

    Of the hosts 1 and 2, and of the student (`seed` None; `student` is its row), only what the
    comparison with them needs.
    """
    task = open_task(name, data, hosts)
    if student is None:
        assert seed is not None
        run = partial(extract, task.host(seed), branched=BRANCHED[name])
    else:
        row = {**student, **STUDENTS[name][1], "name": "student for novelty"}
        run = partial(extract_student, distilled(Store(cache, task), row, 0))
    folder = folder_of(cache, name, seed)
    folder.mkdir(parents=True, exist_ok=True)
    for key, make in MAKERS[name](task).items():
        path = folder / f"{key}.safetensors"
        unused = seed != 0 and key.startswith(("train", "mild-", "shift-"))
        if path.exists() or unused or (only and key not in only):
            continue
        found = run(batches=make() if most is None else _first(make(), most))
        beside = path.with_suffix(f".{os.getpid()}.partial")
        save_file({part: tensor.contiguous() for part, tensor in found.items()}, beside)
        os.replace(beside, path)
        print(f"{name} {key}: {len(found['logits'])} examples", flush=True)


def read_features(cache: Path, task: str, *, seed: int | None = 0) -> dict[str, dict[str, Tensor]]:
    """Read all sets of a task."""
    files = sorted(folder_of(cache, task, seed).glob("*.safetensors"))
    if not files:
        raise DataError(f"No features of {task}: run experiments/novelty.py features {task}.")
    return {file.stem: load_file(file) for file in files}
