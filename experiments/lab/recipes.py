"""Fine-tune the hosts of the tables, as `recipes.yaml` says; a killed run resumes.

Text hosts are plain Hugging Face folders `seed<n>`; image hosts are `model.safetensors` (timm's
state dict) and `config.json`.

The split of SST-2 (`splits/sst2.json`, row numbers of train.tsv from 0 after the header). The file
holds the phrases of parse trees: a row is a *sentence* if no longer row contains its words. Of the
sentences of at least 5 words, 500 each were drawn for `calibration`, `validation` and `reserve`,
and no training row contains or is part of one of them. `train` is all other sentences and the
longest free phrases, 6,920 rows. `reserve_phrases` occur in reserve sentences and nowhere else.
Rows that equal a dev sentence are left out.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from hydra_ensembles import evaluate, finetune
from hydra_ensembles._records import write_whole

from .sets import ImageSet, cifar10, need
from .tasks import TextTask, minilm_folder, open_task

RECIPES = Path(__file__).parents[1] / "recipes.yaml"


class Drawn:
    """Training batches, drawn anew each epoch.

    Texts of similar length share a batch, padded to its longest; images are flipped at random.
    """

    def __init__(self, task: Any, examples: Any, batch_size: int, seed: int) -> None:
        self.task, self.examples, self.batch_size, self.seed = task, examples, batch_size, seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the order of an epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.examples) // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        draw = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        order = torch.randperm(len(self.examples), generator=draw).tolist()
        if isinstance(self.examples, ImageSet):
            flips = torch.rand(len(order), generator=draw) < 0.5
            for rows in _chunks(order, self.batch_size):
                yield self._images(rows, flips[rows])
            return
        tokens = self.task.tokenizer(self.examples.texts, truncation=True, max_length=64)[
            "input_ids"
        ]
        batches: list[list[int]] = []
        for chunk in _chunks(order, 25 * self.batch_size):  # sorted within: similar, not equal
            chunk.sort(key=lambda row: len(tokens[row]))
            batches += _chunks(chunk, self.batch_size)
        for place in torch.randperm(len(batches), generator=draw).tolist():
            yield next(iter(self.examples.subset(batches[place]).batches(self.task.tokenizer)))

    def _images(self, rows: Sequence[int], flips: Tensor) -> Any:
        some = self.examples.subset(rows)
        pixels = torch.where(flips.view(-1, 1, 1, 1), some.pixels.flip(-1), some.pixels)
        return next(iter(self.task.batches(ImageSet(pixels, some.labels), len(rows))))


def _chunks(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def new_host(recipe: dict[str, Any], data: Path, seed: int) -> nn.Module:
    """Return the pretrained host with a fresh, seeded classifier."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if recipe["base"] == "minilm":
            from transformers import BertForSequenceClassification

            return BertForSequenceClassification.from_pretrained(
                minilm_folder(), num_labels=recipe["classes"]
            )
        import timm

        return timm.create_model(
            "deit_tiny_patch16_224",
            pretrained=True,
            pretrained_cfg_overlay={"file": str(need(data / "deit-tiny" / "model.safetensors"))},
            num_classes=recipe["classes"],
            img_size=recipe["image_size"],
        )


def save_host(model: Any, task: Any, recipe: dict[str, Any], folder: Path) -> None:
    """Save a host, beside and renamed."""
    beside = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    if isinstance(task, TextTask):
        model.save_pretrained(beside)
        task.tokenizer.save_pretrained(beside)
    else:
        from safetensors.torch import save_file

        state = {name: value.contiguous() for name, value in model.state_dict().items()}
        save_file(state, beside / "model.safetensors")
        config = {"architecture": "deit_tiny_patch16_224", "num_classes": recipe["classes"]}
        config["img_size"] = recipe["image_size"]
        write_whole(beside / "config.json", json.dumps(config, indent=2))
    os.replace(beside, folder)


def finetune_hosts(
    name: str | None, data: Path | None, hosts: Path | None, seeds: Sequence[int]
) -> None:
    """Fine-tune the hosts of a recipe that are not there yet."""
    recipes = yaml.safe_load(RECIPES.read_text(encoding="utf-8"))
    if name not in recipes:
        raise SystemExit(f"There is no recipe {name!r}. There are: {', '.join(recipes)}.")
    recipe, task = recipes[name], open_task(name, data, hosts)

    def part(kind: str) -> Any:
        if isinstance(task, TextTask):
            return task.part(kind)
        return cifar10(task.data, kind).without(recipe.get("without", ()))

    for seed in seeds:
        folder = task.hosts / f"seed{seed}"
        if folder.exists():
            continue
        work = folder.with_name(f"{folder.name}.training")
        member = finetune(
            new_host(recipe, task.data, seed),
            Drawn(task, part(recipe["train"]), recipe["batch_size"], seed),
            epochs=recipe["epochs"],
            learning_rate=recipe["learning_rate"],
            seed=seed,
            weight_decay=recipe.get("weight_decay", 0.01),
            parameters=recipe.get("parameters"),
            validation=task.batches(part(recipe["validation"])),
            folder=work,
            save_every=40,
            progress=False,
        )[0]
        save_host(member.model, task, recipe, folder)
        test = part(recipe["test"])
        some = test.subset(range(min(2000, len(test))))
        found = evaluate(member.model, task.batches(some), progress=False, name=f"{name}-{seed}")
        shutil.rmtree(work)
        print(
            f"{name}, seed {seed}: {found['cls/Acc']:.4f}, NLL {found['cls/NLL']:.4f}", flush=True
        )
