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
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from hydra_ensembles._records import write_whole
from hydra_ensembles.data.batches import split_batch
from hydra_ensembles.data.model_runs import call_model
from hydra_ensembles.errors import DataError
from hydra_ensembles.hosts import main_output
from hydra_ensembles.tasks import task_of
from hydra_ensembles.training import Settings
from hydra_ensembles.training.accelerator import accelerator
from hydra_ensembles.training.loop import Run
from hydra_ensembles.training.sample_order import Stream

from .decoder import new_classifier
from .other_tasks import TAGS, host_class
from .sets import ImageSet, cifar10, need
from .tasks import CIFAR8, TextTask, minilm_folder, open_task

HEADS = ("classifier", "head", "qa_outputs", "score")
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
        tokens = self.examples.tokens(self.task.tokenizer)
        batches: list[list[int]] = []
        for chunk in _chunks(order, 25 * self.batch_size):  # sorted within: similar, not equal
            chunk.sort(key=tokens.__getitem__)
            batches += _chunks(chunk, self.batch_size)
        for place in torch.randperm(len(batches), generator=draw).tolist():
            yield next(iter(self.examples.subset(batches[place]).batches(self.task.tokenizer)))

    def _images(self, rows: Sequence[int], flips: Tensor) -> Any:
        some = self.examples.subset(rows)
        pixels = torch.where(flips.view(-1, 1, 1, 1), some.pixels.flip(-1), some.pixels)
        return next(iter(self.task.batches(ImageSet(pixels, some.labels), len(rows))))


def _chunks(rows: list[int], size: int) -> list[list[int]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def read_recipe(name: str | None) -> dict[str, Any]:
    """Return the recipe of a task's hosts."""
    recipes: dict[str, Any] = yaml.safe_load(RECIPES.read_text(encoding="utf-8"))
    recipes |= {
        task: {**recipes["cifar8"], "without": list(pair)}
        for task, pair in CIFAR8.items()
        if "cifar8" in recipes
    }
    if name not in recipes:
        raise DataError(f"There is no recipe {name!r}. There are: {', '.join(recipes)}.")
    recipe: dict[str, Any] = recipes[name]
    return recipe


def part_of(task: Any, recipe: dict[str, Any], kind: str) -> Any:
    """Return the examples that hosts are trained on (`train`) or tested on (`test`)."""
    if isinstance(task, TextTask):
        found = task.part(recipe[kind])
    else:
        found = cifar10(task.data, recipe[kind]).without(recipe.get("without", ()))
    return found.sample(recipe["count"]) if kind == "train" and "count" in recipe else found


def new_host(recipe: dict[str, Any], data: Path, seed: int) -> nn.Module:
    """Return the pretrained host with a fresh, seeded classifier."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if recipe["base"] == "minilm":
            kind, options = recipe.get("task", "multi-class"), {}
            if kind in ("multi-label", "regression"):
                problem = "regression" if kind == "regression" else "multi_label_classification"
                options = {"problem_type": problem}
            elif kind == "token-classification":
                options = {"id2label": dict(enumerate(TAGS))}
            return host_class(kind).from_pretrained(
                minilm_folder(), num_labels=recipe["classes"], **options
            )
        if recipe["base"] == "smollm":
            return new_classifier(recipe["classes"])
        import timm

        return timm.create_model(
            "deit_tiny_patch16_224",
            pretrained=True,
            pretrained_cfg_overlay={"file": str(need(data / "deit-tiny" / "model.safetensors"))},
            num_classes=recipe["classes"],
            img_size=recipe["image_size"],
        )


def save_host(
    model: Any, task: Any, recipe: dict[str, Any], folder: Path, figures: dict[str, float]
) -> None:
    """Save a host and its figures, beside and renamed."""
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
    write_whole(beside / "figures.json", json.dumps(figures, indent=2))
    os.replace(beside, folder)


class HostRun(Run):
    """A run whose classifier, which is new, learns at a rate of its own."""

    head_share = 1.0

    def _rate_of(self, name: str) -> float:
        return self.head_share if name.split(".")[0] in HEADS else 1.0


def train_host(
    recipe: dict[str, Any],
    model: nn.Module,
    data: Drawn,
    *,
    seed: int,
    folder: Path,
    precision: str,
) -> nn.Module:
    """Train a host as its recipe says."""
    settings = Settings(
        epochs=recipe["epochs"],
        learning_rate=recipe["learning_rate"],
        weight_decay=recipe.get("weight_decay", 0.01),
        mixed_precision=precision,
    )
    trained = re.compile(recipe.get("parameters", ""))
    with accelerator(settings.mixed_precision) as group:
        run = HostRun(
            model=model,
            stream=Stream(data, seed=seed),
            settings=settings,
            seed=seed,
            is_trained=lambda name, _: trained.search(name) is not None,
            folder=folder,
            save_every=40,
            progress=False,
            accelerator=group,
        )
        run.head_share = recipe["head_rate"] / recipe["learning_rate"]
        return run.train().model


@torch.no_grad()
def host_figures(model: nn.Module, data: Any, classes: int) -> dict[str, float]:
    """Return accuracy and NLL in percent and nats; of two classes Matthews' correlation too.

    Of a task other than one class per example it is the task's loss.
    """
    task = task_of(model)
    if task.name != "multi-class":
        losses = [
            task.losses(main_output(call_model(model, b), task.fields), split_batch(b)[2])
            for b in data
        ]
        return {"loss": float(torch.cat(losses).mean())}
    logits, labels = zip(
        *((main_output(call_model(model, b)), split_batch(b)[2]) for b in data), strict=True
    )
    answers, truth = torch.cat(logits).float(), torch.cat(labels)
    found = {
        "accuracy": 100 * float((answers.argmax(-1) == truth).double().mean()),
        "NLL": float(F.cross_entropy(answers, truth)),
    }
    if classes == 2:
        pair = torch.stack([answers.argmax(-1), truth]).double()
        found["Matthews"] = 100 * float(pair.corrcoef()[0, 1])
    return found


def finetune_hosts(
    name: str | None,
    data: Path | None,
    hosts: Path | None,
    seeds: Sequence[int],
    precision: str = "bf16",
    epochs: int | None = None,
) -> None:
    """Fine-tune the hosts of a recipe that are not there yet; `precision` as in `Settings`."""
    recipe, task = read_recipe(name), open_task(str(name), data, hosts)
    recipe = recipe if epochs is None else {**recipe, "epochs": epochs}
    train, test = (part_of(task, recipe, kind) for kind in ("train", "test"))
    for seed in seeds:
        folder = task.hosts / f"seed{seed}"
        if folder.exists():
            continue
        start, work = time.perf_counter(), folder.with_name(f"{folder.name}.training")
        drawn = Drawn(task, train, recipe["batch_size"], seed)
        host = new_host(recipe, task.data, seed)
        model = train_host(recipe, host, drawn, seed=seed, folder=work, precision=precision)
        some = test.subset(range(min(2000, len(test))))
        found = host_figures(model, task.batches(some), recipe["classes"])
        save_host(model, task, recipe, folder, found)
        shutil.rmtree(work)
        minutes = (time.perf_counter() - start) / 60  # of the last start; equal hosts, equal files
        said = ", ".join(f"{key} {value:.3f}" for key, value in found.items())
        print(f"{name}, seed {seed}: {said}, {minutes:.1f} minutes", flush=True)
