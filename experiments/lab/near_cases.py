"""Columns of the near tables: known data, test data and outliers by draw, on stored features.

Every set is a dictionary as in `known.py`. `taps` and `members` are what the library hears of the
host; rivals read `features`, `logits`, and `readout` and `mean`, or `taps` where there are none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from hydra_ensembles.fusion.call_options import tap_names
from hydra_ensembles.fusion.known_data import CLASS_BLOCKS
from hydra_ensembles.uncertainty import Novelty, NoveltyFit
from hydra_ensembles.uncertainty.distances import unit

from .detectors import Set, rivals
from .known import BRANCHED
from .known_table import joined, rows_of, summaries
from .near_features import DIGIT_PAIRS, FAR, NEAR
from .tasks import CIFAR8, PAIRS

SCALES = (5, 10, 15, 20, 25, 30, 40)
DRAWS = 5
CHOSEN = ("cifar8-09", "cifar8-18")
"""Hosts that were trained without two classes, on which a weight was chosen: no table has them."""
QUICK = 1500
"""Known examples above which slow rivals are left out."""


@dataclass(frozen=True)
class Draw:
    """One draw of a column.

    Attributes:
        known, test: Sets of the classes that are known.
        outliers: By name; `far` names those that are far, `chosen` those that choices may see.
        trained: What the classifier learned from, or None.
        proxies: Far outliers made of known data, by kind.
        readout: Whether the taps have readout tokens.
    """

    known: Set
    test: Set
    outliers: dict[str, Set]
    far: tuple[str, ...] = ()
    proxies: Mapping[str, Set] | None = None
    trained: Set | None = None
    readout: bool = True

    def novelty(
        self, *, choose: bool, labels: bool = True, train: bool = False, known: Set | None = None
    ) -> Novelty:
        """Fit the library's novelty."""
        known = self.known if known is None else known
        taps = known["taps"].shape[1]
        blocks = (taps - 1) // (1 + self.readout)
        fit = NoveltyFit(
            tap_names(blocks, readout=self.readout),
            classes=known["members"].shape[-1],
            class_taps=(1 + self.readout) * min(CLASS_BLOCKS, blocks) + 1,
            uses_last_block=True,
            choose=choose,
        )
        if train and self.trained is not None:
            given = self.trained
            fit.add_train_(given["taps"], given["members"], given["labels"])
        fit.add_(known["taps"], known["members"], known["labels"] if labels else None)

        def add_proxies() -> None:
            for name, found in (self.proxies or {}).items():
                fit.add_ood_(name, found["taps"], found["members"])

        return fit.finish(add_proxies=add_proxies if self.proxies else None)

    def rivals(self) -> dict[str, Callable[[Set], Tensor]]:
        """Fit the rivals; with many known examples those that are quick."""
        return rivals(self.known, slow=len(self.known["labels"]) <= QUICK)


def split(labels: Tensor, sizes: tuple[int, ...], seed: int) -> list[Tensor]:
    """Draw rows of every class, and the remaining ones, in parts."""
    draw = torch.Generator().manual_seed(seed)
    parts: list[list[Tensor]] = [[] for _ in (*sizes, 0)]
    for number in labels.unique():
        rows = (labels == number).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=draw)]
        for part, some in zip(parts, rows.tensor_split(_ends(sizes, len(rows))), strict=True):
            part.append(some)
    return [torch.cat(part) for part in parts]


def _ends(sizes: tuple[int, ...], count: int) -> tuple[int, ...]:
    """Return where parts end; of small classes in proportion."""
    share = min(1.0, 0.8 * count / sum(sizes))
    return tuple(int(share * sum(sizes[: place + 1])) for place in range(len(sizes)))


@cache
def read(folder: Path) -> dict[str, Set]:
    """Read the sets of a folder."""
    files = sorted(folder.glob("*.safetensors"))
    return {file.stem: load_file(file) for file in files if file.stem != "train-of-host"}


def numbered(labels: Tensor, kept: Tensor) -> Tensor:
    """Return labels as numbers among the classes that are kept."""
    number = torch.full((int(labels.max()) + 1,), -1)
    number[kept] = torch.arange(len(kept))
    return number[labels]


# --- MiniLM as published, classifier of class means


def _class_means(data: dict[str, Set], rows: Tensor, labels: Tensor, held_out: Set) -> Any:
    """Return what adds to a set what a classifier of class means says of it."""
    features = unit(data["train"]["mean"][rows, -1])
    weight = unit(torch.stack([features[labels == c].mean(0) for c in labels.unique()]))
    cosine = unit(held_out["mean"][:, -1]) @ weight.T
    scale = min(SCALES, key=lambda s: float(F.cross_entropy(s * cosine, held_out["labels"])))

    def heard(found: Set) -> Set:
        features = unit(found["mean"][:, -1])
        logits = scale * features @ weight.T
        return {
            **found,
            "taps": found["mean"],
            "features": features,
            "logits": logits,
            "members": logits[:, None],
            "weight": scale * weight,
            "bias": torch.zeros(len(weight)),
        }

    return heard


def untuned_texts(
    cache_folder: Path,
    task: str,
    seed: int,
    *,
    left_out: int = 0,
    each: int = 20,
    redrawn: bool = False,
) -> Draw:
    """Draw known texts and those of the classifier, `each` per class.

    Args:
        cache_folder: Where features lie.
        task: `minilm` (CLINC150) or `goemotions`.
        seed: Of the draw.
        left_out: Number of classes that are in neither: their test texts are the outliers.
        each: Texts per class.
        redrawn: Whether test texts are drawn together with the known ones; no outliers then.
    """
    data = read(cache_folder / "near" / task)
    every = data["train"]["labels"].unique()
    order = every[torch.randperm(len(every), generator=torch.Generator().manual_seed(seed))]
    kept = order[left_out:].sort().values

    def of(found: Set, *, new: bool = False) -> Set:
        rows = (torch.isin(found["labels"], kept) != new).nonzero().flatten()
        some = rows_of(found, rows)
        return some if new else {**some, "labels": numbered(some["labels"], kept)}

    train = of(data["train"])
    known, trained, rest = split(train["labels"], (each, each), seed)
    test = of(data["test" if task == "minilm" else "dev"])
    half = torch.arange(0, len(test["labels"]), 2) if task != "minilm" else None
    held_out = of(data["val"]) if half is None else rows_of(test, half)
    heard = _class_means({"train": train}, trained, train["labels"][trained], held_out)
    if half is not None:
        test = rows_of(test, half[:-1] + 1)
    if redrawn:
        new = heard(rows_of(train, rest))
        return Draw(heard(rows_of(train, known)), new, {}, readout=False)
    names = NEAR if task == "minilm" and not left_out else ()
    outliers = {name: heard(data[name]) for name in names}
    if left_out:
        outliers["left-out"] = heard(of(data["test" if task == "minilm" else "dev"], new=True))
    others = read(cache_folder / "near" / "minilm")
    outliers |= {name: heard(others[name]) for name in FAR}
    made = {name: heard(found) for name, found in data.items() if name.startswith("proxy-")}
    return Draw(
        heard(rows_of(train, known)),
        heard(test),
        outliers,
        FAR,
        made,
        heard(rows_of(train, trained)),
        readout=False,
    )


# --- DeiT-tiny as published, linear probe


def probe(features: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Fit logistic regression to features, with weight decay; return weight and bias."""
    mean, deviation = features.mean(0), features.std(0).clamp_min(1e-6)
    rows, classes = (features - mean) / deviation, int(labels.max()) + 1
    weight = torch.zeros(classes, rows.shape[1], requires_grad=True)
    bias = torch.zeros(classes, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(rows @ weight.T + bias, labels) + 2e-3 * weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    scaled = weight.detach() / deviation
    return scaled, bias.detach() - scaled @ mean


def untuned_images(cache_folder: Path, pair: tuple[int, ...], seed: int) -> Draw:
    """Draw known images and those of the probe, 75 per class, without a pair of classes."""
    data = read(cache_folder / "near" / "deit")
    pool = data["pool"]
    kept = torch.tensor([c for c in range(10) if c not in pair])
    inside = torch.isin(pool["labels"], kept)
    some = rows_of(pool, inside.nonzero().flatten())
    some["labels"] = numbered(some["labels"], kept)
    known, trained, test = split(some["labels"], (75, 75), seed)
    weight, bias = probe(some["readout"][trained, -1], some["labels"][trained])

    def heard(found: Set) -> Set:
        logits = found["readout"][:, -1] @ weight.T + bias
        pairs = torch.stack([found["readout"][:, :-1], found["mean"][:, :-1]], 2)
        return {
            **found,
            "taps": torch.cat([pairs.flatten(1, 2), found["readout"][:, -1:]], 1),
            "features": found["readout"][:, -1],
            "logits": logits,
            "members": logits[:, None],
            "weight": weight,
            "bias": bias,
        }

    far = ("textures-validation", "textures-test", "mnist", "letters")
    outliers = {"left-out": heard(rows_of(pool, (~inside).nonzero().flatten()))}
    outliers |= {name: heard(data[name]) for name in ("tinyimagenet", *far)}
    made = {name: heard(found) for name, found in data.items() if name.startswith("proxy-")}
    parts = (heard(rows_of(some, rows)) for rows in (known, test, trained))
    known_set, test_set, trained_set = parts
    return Draw(known_set, test_set, outliers, far, made, trained_set)


# --- hosts that were trained on the classes


def tuned(
    folder: Path,
    seed: int,
    *,
    branched: int,
    far: tuple[str, ...],
    count: int = 1000,
    redrawn: bool = False,
    drop: tuple[int, ...] = (),
) -> Draw:
    """Draw known data of a host and its fused members.

    Args:
        folder: Where `novelty.py features` or `near_features.py` wrote.
        seed: Of the draw.
        branched: Blocks in which the members differ.
        far: Names of the far sets.
        count: Most known examples.
        redrawn: Whether test and known data are drawn together.
        drop: Classes that known and test data leave out: they are the outliers then.
    """
    sets = read(folder)
    blocks = sets["test"]["readout"].shape[1] - branched
    heard = {
        name: {**found, "taps": summaries(found, blocks)}
        for name, found in sets.items()
        if not name.startswith(("train", "mild-", "shift-"))
    }
    pool, test = heard.pop("known-0"), heard.pop("test")
    proxies = {name: heard.pop(name) for name in [*heard] if name.startswith("proxy-")}
    if redrawn:
        pool = joined([pool, test])
    if drop:
        new = torch.isin(pool["labels"], torch.tensor(drop))
        heard = {"left-out": rows_of(pool, new.nonzero().flatten())} | {n: heard[n] for n in far}
        pool = rows_of(pool, (~new).nonzero().flatten())
        there = ~torch.isin(test["labels"], torch.tensor(drop))
        test = rows_of(test, there.nonzero().flatten())
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(pool["labels"]), generator=generator)
    known = rows_of(pool, order[:count])
    far = tuple(name for name in far if name in heard)
    return Draw(known, rows_of(pool, order[count:]) if redrawn else test, heard, far, proxies)


def columns(cache_folder: Path) -> dict[str, list[Callable[[], Draw]]]:
    """Return the draws of every column, each as a function."""
    root = cache_folder / "novelty"
    image_far = ("textures-validation", "textures-test", "mnist", "letters")
    cifar = {"branched": BRANCHED["cifar10"], "far": image_far}
    clinc = {"branched": BRANCHED["clinc150"], "far": FAR, "redrawn": True}
    intents = torch.arange(150)
    found: dict[str, list[Callable[[], Draw]]] = {
        "CLINC150, untuned": [
            lambda s=s: untuned_texts(cache_folder, "minilm", s) for s in range(DRAWS)
        ],
        "CLINC150, untuned, 30 intents left out": [
            lambda s=s: untuned_texts(cache_folder, "minilm", s, left_out=30) for s in range(DRAWS)
        ],
        "GoEmotions, untuned, 6 emotions left out": [
            lambda s=s: untuned_texts(cache_folder, "goemotions", s, left_out=6, each=40)
            for s in range(DRAWS)
        ],
        "CIFAR-10, untuned, pairs left out": [
            lambda s=s, p=p: untuned_images(cache_folder, p, s) for s, p in enumerate(PAIRS)
        ],
        "CIFAR-10, pairs left out of known data": [
            lambda s=s, p=p: tuned(root / "cifar10", s, drop=p, **cifar)
            for s, p in enumerate(PAIRS)
        ],
        "CIFAR-10, all classes": [
            lambda s=s: tuned(root / "cifar10", s, **cifar) for s in range(DRAWS)
        ],
        "CIFAR-10, pairs left out of training": [
            lambda s=s, name=name: tuned(root / name, s, **cifar)
            for s, name in enumerate(name for name in CIFAR8 if name not in CHOSEN)
        ],
        "CLINC150, fine-tuned": [
            lambda s=s: tuned(root / "clinc150", s, count=3000, **clinc) for s in range(DRAWS)
        ],
        "CLINC150, fine-tuned, 30 intents left out of known data": [
            lambda s=s: tuned(
                root / "clinc150",
                s,
                count=2400,
                drop=tuple(intents[s::DRAWS].tolist()),
                **clinc,
            )
            for s in range(DRAWS)
        ],
        "SST-2": [
            lambda s=s: tuned(
                root / "sst2",
                s,
                branched=BRANCHED["sst2"],
                far=("trec", "ag-news", "multi30k", "intents", "arc"),
            )
            for s in range(DRAWS)
        ],
        "digits, pairs left out of training": [
            lambda p=p: tuned(
                cache_folder / "near" / f"digits-{p[0]}{p[1]}",
                0,
                branched=BRANCHED["digits"],
                far=("inverted", "textures", "noise"),
            )
            for p in DIGIT_PAIRS
        ],
    }
    return found
