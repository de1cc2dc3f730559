"""Features for the near tables of hosts that `novelty.py features` does not know.

Two published models that nobody fine-tuned: MiniLM on CLINC150 and GoEmotions (`mean`, the mean
token of every block), DeiT-tiny at 112 pixels on CIFAR-10 (`readout` and `mean`). Small ViTs that
were trained on the digits without two classes, with all that `known.extract` gives. One file per
set, `CACHE/near/HOST/SET.safetensors`; a stopped run goes on.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from hydra_ensembles.data.batches import batch_length, split_batch, take
from hydra_ensembles.data.proxies import make_proxies
from hydra_ensembles.fusion.known_data import proxies_of
from hydra_ensembles.hosts.tiny_vit import TinyViT
from hydra_ensembles.training import finetune

from . import sets
from .known import BRANCHED, extract
from .known_sets import as_set, floats, letters
from .sets import ImageSet, TextSet, need
from .tasks import PAIRS, Digits, minilm_folder

DIGIT_PAIRS = PAIRS[:5]
PROXIES = 200
NEAR, FAR = ("oos_train", "oos_val", "oos_test"), ("trec", "ag-news", "multi30k", "sst2")


def _keep(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a file whole."""
    beside = path.with_suffix(f".{os.getpid()}.partial")
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, beside)
    os.replace(beside, path)
    print(f"{path.parent.name}, {path.stem}: {len(next(iter(tensors.values())))}", flush=True)


def _missing(folder: Path, names: Iterable[str]) -> Iterator[tuple[str, Path]]:
    """Yield the names whose files are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        path = folder / f"{name}.safetensors"
        if not path.exists():
            yield name, path


# --- texts


def goemotions(data: Path, part: str) -> TextSet:
    """Load comments with one emotion; `neutral` is left out."""
    lines = need(data / "text" / "goemotions" / f"{part}.tsv").read_text(encoding="utf-8")
    rows = [line.split("\t") for line in lines.splitlines()]
    single = [(row[0], int(row[1])) for row in rows if row[1].isdigit() and row[1] != "27"]
    return TextSet([text for text, _ in single], [label for _, label in single])


def keep_texts(data: Path, cache: Path) -> None:
    """Run MiniLM as published over CLINC150, GoEmotions and far texts."""
    from transformers import AutoTokenizer, BertModel

    texts = {name: sets.clinc150(data, name) for name in ("train", "val", "test", *NEAR)}
    far = (sets.trec(data, "train"), sets.ag_news(data), sets.multi30k(data), sets.sst2(data))
    texts |= {n: s.sample(500).unlabelled() for n, s in zip(FAR, far, strict=True)}
    emotions = {part: goemotions(data, part) for part in ("train", "dev")}
    tokenizer = AutoTokenizer.from_pretrained(minilm_folder())
    model = BertModel.from_pretrained(minilm_folder()).eval()

    def proxies(known: TextSet) -> dict[str, Any]:
        some = known.sample(PROXIES, seed=5).by_length()
        return dict(make_proxies(some.batches(tokenizer, batch_size=40), seed=0))

    for folder, found in (("minilm", texts), ("goemotions", emotions)):
        made = {f"proxy-{name}": kind for name, kind in proxies(found["train"]).items()}
        for name, path in _missing(cache / "near" / folder, [*found, *made]):
            if name in made:
                _keep(path, {"mean": torch.cat([_mean_tokens(model, b) for b in made[name]])})
                continue
            order = sorted(range(len(found[name])), key=lambda r, f=found[name]: len(f.texts[r]))
            mean = torch.empty(len(order), 6, model.config.hidden_size)
            for first in range(0, len(order), 64):
                rows = order[first : first + 64]
                some = [found[name].texts[row] for row in rows]
                options = {"padding": True, "truncation": True, "max_length": 64}
                mean[rows] = _mean_tokens(model, tokenizer(some, return_tensors="pt", **options))
            kept, labels = {"mean": mean}, found[name].labels
            _keep(path, kept if labels is None else kept | {"labels": torch.tensor(labels)})


@torch.no_grad()
def _mean_tokens(model: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the mean token after every block, `[text, block, width]`."""
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    states = model(**inputs, output_hidden_states=True).hidden_states[1:]
    weight = inputs["attention_mask"].float()
    weight = (weight / weight.sum(1, keepdim=True))[..., None]
    return torch.stack([(state * weight).sum(1) for state in states], 1)


# --- images


def keep_images(data: Path, cache: Path) -> None:
    """Run DeiT-tiny as published, at 112 pixels, over CIFAR-10 and far images."""
    import timm

    whole = sets.cifar10(data)

    def small(images: ImageSet) -> ImageSet:
        return as_set(floats(images, 32))

    found = {
        "pool": lambda: whole.subset(range(2400)),
        "textures-validation": lambda: small(sets.textures(data, "validation")),
        "mnist": lambda: small(sets.mnist(data).subset(range(200))),
        "textures-test": lambda: small(sets.textures(data, "test")),
        "tinyimagenet": lambda: small(sets.tinyimagenet(data).subset(range(400))),
        "letters": lambda: small(letters(200, size=96)),
    }
    file = str(need(data / "deit-tiny" / "model.safetensors"))
    model = timm.create_model(
        "deit_tiny_patch16_224",
        pretrained=True,
        pretrained_cfg_overlay={"file": file},
        num_classes=0,
        img_size=112,
    ).eval()
    states: list[Tensor] = []
    for block in model.blocks:
        block.register_forward_hook(lambda _module, _inputs, output: states.append(output))
    proxies = make_proxies(whole.subset(range(2400, 2520)).batches(size=112, batch_size=40), seed=0)
    made = {f"proxy-{name}": kind for name, kind in proxies.items()}
    for name, path in _missing(cache / "near" / "deit", [*found, *made]):
        images = None if name in made else found[name]()
        parts: dict[str, list[Tensor]] = {"readout": [], "mean": []}
        for batch in made[name] if images is None else images.batches(size=112, batch_size=50):
            args, kwargs, _ = split_batch(batch)
            states.clear()
            with torch.no_grad():
                model(*args, *kwargs.values())
            parts["readout"].append(torch.stack([state[:, 0] for state in states], 1))
            parts["mean"].append(torch.stack([state.mean(1) for state in states], 1))
        kept = {key: torch.cat(part) for key, part in parts.items()}
        if name == "pool" and images is not None and images.labels is not None:
            kept["labels"] = images.labels.long()
        _keep(path, kept)


# --- digits


def without(batches: Iterable[Any], classes: tuple[int, ...], *, only: bool = False) -> list[Any]:
    """Return labelled batches without some classes, or with them only."""
    found = []
    for batch in batches:
        kept = torch.isin(split_batch(batch)[2], torch.tensor(classes)) == only
        found.append(take(batch, kept.nonzero().flatten()))
    return [batch for batch in found if batch_length(batch)]


def keep_digits(cache: Path, hosts: Path | None) -> None:
    """Train a small ViT without each pair of digits; keep what `known.extract` gives."""
    torch.set_num_threads(1)
    task = Digits(None, hosts)
    for pair in DIGIT_PAIRS:
        known = without(task.held_out, pair)
        proxies = {f"proxy-{name.split()[0]}": d for name, d in proxies_of(known).items()}
        names = ("known-0", "test", "left-out", *proxies, *task.outliers, *task.ood["unseen"])
        missing = list(_missing(cache / "near" / f"digits-{pair[0]}{pair[1]}", names))
        if not missing:
            continue
        model = finetune(
            TinyViT(task.shape, seed=0),
            without(task.training("train"), pair),
            epochs=task.epochs,
            learning_rate=task.learning_rate,
            seed=0,
            progress=False,
        )[0].model.eval()
        data = {
            "known-0": known,
            "test": without(task.test, pair),
            "left-out": without([*task.held_out, *task.test], pair, only=True),
            **proxies,
            **task.outliers,
            **task.ood["unseen"],
        }
        for name, path in missing:
            _keep(path, extract(model, data[name], BRANCHED["digits"]))
