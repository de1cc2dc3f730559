"""Figures of novelty and its rivals from stored features (see `known.py`), as one JSON per task."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles._records import write_whole
from hydra_ensembles.evaluation.metrics_ood import ood_figures
from hydra_ensembles.fusion.known import CLASS_BLOCKS
from hydra_ensembles.fusion.taps import tap_names
from hydra_ensembles.uncertainty import Novelty, NoveltyFit, scores

from .detectors import Score, Set, rivals
from .known import BRANCHED, folder_of, read_features

RESULTS = Path(__file__).parents[2] / "docs" / "results"
DRAWS = 5
SIZES = (50, 200, 1000, 3000, 5000)
# `seen family`: other classes of a kind of outliers that choices were made on
FAMILIES: dict[str, dict[str, list[str]]] = {
    "imagenet": {
        "chosen on": ["textures-validation", "mnist"],
        "seen family": ["textures-test"],
        "near": [],
        "far": ["cifar10", "letters", "digits8", "noise"],
    },
    "cifar10": {
        "chosen on": ["textures-validation", "mnist"],
        "seen family": ["textures-test"],
        "near": ["tinyimagenet"],
        "far": ["letters", "digits8", "noise"],
    },
    "cifar8": {
        "chosen on": ["textures-validation"],
        "near": ["left-out"],
        "far": [],
    },
    "sst2": {
        "chosen on": ["trec"],
        "near": ["movie-reviews"],
        "far": ["ag-news", "multi30k", "intents", "arc"],
    },
    "clinc150": {
        "chosen on": ["trec", "oos-validation"],
        "near": ["oos-test"],
        "far": ["ag-news", "multi30k", "sst2"],
    },
    "digits": {
        "chosen on": ["scribbles"],
        "near": ["letters", "rotated"],
        "far": ["inverted", "textures", "noise"],
    },
}
ENSEMBLE_SCORES = ("msp", "entropy", "max-logit", "energy", "gen", "mutual-information")


def rows_of(data: Set, rows: Tensor) -> Set:
    """Return some examples of a set."""
    shared = ("weight", "bias")
    return {name: value if name in shared else value[rows] for name, value in data.items()}


def joined(parts: Sequence[Set]) -> Set:
    """Join sets."""
    shared = ("weight", "bias")
    return {
        name: parts[0][name] if name in shared else torch.cat([part[name] for part in parts])
        for name in parts[0]
    }


def summaries(data: Set, blocks: int) -> Tensor:
    """Return token summaries, `[example, tap, width]`, in the library's order."""
    pairs = torch.stack([data["readout"][:, :blocks], data["mean"][:, :blocks]], 2)
    return torch.cat([pairs.flatten(1, 2), data["end"][:, None]], 1)


def fit_novelty(known: Set, blocks: int, *, labels: bool = True) -> Novelty:
    """Fit the library's statistics to stored features."""
    taps = tap_names(blocks, readout=True)
    late = 2 * min(CLASS_BLOCKS, blocks) + 1
    fit = NoveltyFit(taps, classes=known["members"].shape[-1], class_taps=late, hears_end=True)
    fit.add_(summaries(known, blocks), known["members"], known["labels"] if labels else None)
    return fit.finish()


def alarm_rate(novelty: Novelty, data: Set, blocks: int) -> float:
    """Return the share of examples that raise an alarm at 5 %, in percent."""
    value, _ = novelty(summaries(data, blocks), data["members"])
    return round(100 * float((value > 0.95).double().mean()), 2)


class Figures:
    """Figures of one task."""

    def __init__(self, cache: Path, task: str) -> None:
        self.task, self.families = task, FAMILIES[task]
        self.sets = read_features(cache, task)
        self.outliers = [name for family in self.families.values() for name in family]
        self.blocks = self.sets["test"]["readout"].shape[1] - BRANCHED[task]
        parts = [self.sets[name] for name in sorted(self.sets) if name.startswith("known-")]
        self.pool, self.test = joined(parts), self.sets["test"]
        self.redrawn = task == "clinc150"
        if self.redrawn:
            # its test part is drier than its validation part: only a joint draw is exchangeable
            self.pool = joined([self.pool, self.test])
        self.others = self._other_hosts(cache)
        self._fitted: dict[tuple[int, int, bool], Novelty] = {}

    def _other_hosts(self, cache: Path) -> list[dict[str, Set]]:
        found = []
        for seed in (1, 2):
            if folder_of(cache, self.task, seed).exists():
                found.append(read_features(cache, self.task, seed=seed))
        return found

    def draw(self, count: int, seed: int) -> tuple[Set, Set]:
        """Draw known data; return it and the test data."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.pool["labels"]), generator=generator)
        known = rows_of(self.pool, order[:count])
        return known, rows_of(self.pool, order[count:]) if self.redrawn else self.test

    def novelty(self, count: int, seed: int, *, labels: bool = True) -> Novelty:
        """Return the statistics of a draw, fitted once."""
        key = (count, seed, labels)
        if key not in self._fitted:
            self._fitted[key] = fit_novelty(self.draw(count, seed)[0], self.blocks, labels=labels)
        return self._fitted[key]

    def sizes(self) -> list[int]:
        """Sizes of known data that there are enough of."""
        most = len(self.pool["labels"]) - (500 if self.redrawn else 0)
        found = [size for size in SIZES if size <= most]
        return found if found[-1] >= 1000 else [*found, most]

    def of_scores(self, score: Score, test: Set) -> dict[str, dict[str, float]]:
        """Return AUROC and FPR95 of every outlier set; nothing for a detector that gives NaN."""
        inside = score(test).double()
        if bool(inside.isnan().any()):
            return {}
        figures = {
            name: ood_figures(inside, score(self.sets[name]).double()) for name in self.outliers
        }
        return {
            name: {key: round(100 * row[key], 3) for key in ("AUROC", "FPR95")}
            for name, row in figures.items()
        }

    def detectors(self, count: int, seed: int, *, others: bool = True) -> dict[str, Any]:
        """Return the figures of all detectors on one draw, or of novelty only."""
        known, test = self.draw(count, seed)

        def by(fitted: Novelty) -> Score:
            return lambda data: fitted(summaries(data, self.blocks), data["members"])[1]

        every: dict[str, Score] = {
            "novelty": by(self.novelty(count, seed)),
            "novelty, no labels": by(self.novelty(count, seed, labels=False)),
            **(rivals(known) if others else {}),
        }
        found = {name: self.of_scores(score, test) for name, score in every.items()}
        return {name: figures for name, figures in found.items() if figures}

    def deep_ensemble(self) -> dict[str, Any]:
        """Return the figures of a Deep Ensemble's scores; empty without hosts of other seeds."""
        every = [self.sets, *self.others]
        if len(every) < 2:
            return {}
        names = ["test", *self.outliers]
        stacked = {
            name: {"logits": torch.stack([sets[name]["logits"] for sets in every], 1)}
            for name in names
            if all(name in sets for sets in every)
        }
        if len(stacked) < len(names):
            return {}
        found = {"members": len(every)}
        for name in ENSEMBLE_SCORES:
            inside = scores[name](stacked["test"]["logits"].double())
            found[name] = {
                key: {
                    figure: round(100 * value, 3)
                    for figure, value in ood_figures(
                        inside, scores[name](stacked[key]["logits"].double())
                    ).items()
                    if figure in ("AUROC", "FPR95")
                }
                for key in self.outliers
            }
        return found

    def alarms(self, count: int, seed: int, *, changes: bool = True) -> dict[str, dict[str, float]]:
        """Return the share of alarms at 5 % on labelled sets, with their accuracy."""
        _, test = self.draw(count, seed)
        novelty = self.novelty(count, seed)
        kinds = ("mild-", "shift-") if changes else ()
        changed = {n: s for n, s in self.sets.items() if n.startswith(kinds)}
        found = {}
        for name, data in {"test": test, **changed}.items():
            right = data["members"].softmax(-1).mean(1).argmax(-1) == data["labels"]
            found[name] = {
                "alarms": alarm_rate(novelty, data, self.blocks),
                "accuracy": round(100 * float(right.double().mean()), 2),
            }
        return found

    def redrawn_alarms(self, count: int, seed: int) -> float:
        """Return the share of alarms at 5 % when known and new data are drawn together."""
        every = self.pool if self.redrawn else joined([self.pool, self.test])
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(every["labels"]), generator=generator)
        known, new = rows_of(every, order[:count]), rows_of(every, order[count:])
        return alarm_rate(fit_novelty(known, self.blocks), new, self.blocks)

    def caught(self, count: int, seed: int) -> dict[str, float]:
        """Return the share of outliers that raise an alarm at 5 %."""
        novelty = self.novelty(count, seed)
        return {
            name: alarm_rate(novelty, data, self.blocks)
            for name, data in self.sets.items()
            if name in self.outliers
        }

    def contaminated(self, count: int, seed: int, share: float = 0.05) -> dict[str, Any]:
        """Return novelty's figures when a share of the known data are outliers in truth."""
        known, test = self.draw(count, seed)
        family = self.sets[self.families["chosen on"][0]]
        number = int(share * count)
        known = {name: value.clone() for name, value in known.items()}
        for name in ("readout", "mean", "end", "members"):
            known[name][:number] = family[name][:number]
        novelty = fit_novelty(known, self.blocks, labels=False)
        return self.of_scores(
            lambda data: novelty(summaries(data, self.blocks), data["members"])[1], test
        )

    def left_out(self, seed: int) -> dict[str, float]:
        """Return AUROC of CIFAR-10 classes that the known data leave out, to a host of ImageNet."""
        data = self.sets["cifar10"]
        generator = torch.Generator().manual_seed(seed)
        out = torch.randperm(10, generator=generator)[:2]
        new = torch.isin(data["labels"], out)
        rows = (~new).nonzero().flatten()
        rows = rows[torch.randperm(len(rows), generator=generator)]
        half = len(rows) // 2
        known, test, outliers = (
            rows_of(data, part) for part in (rows[:half], rows[half:], new.nonzero().flatten())
        )
        novelty = fit_novelty(known, self.blocks)
        every: dict[str, Score] = {
            "novelty": lambda part: novelty(summaries(part, self.blocks), part["members"])[1],
            **rivals(known),
        }
        return {
            name: round(
                100 * ood_figures(score(test).double(), score(outliers).double())["AUROC"], 3
            )
            for name, score in every.items()
        }


def write_table(cache: Path, task: str, *, others: bool = True) -> None:
    """Write `docs/results/novelty-TASK.json`; without `others` rivals keep their figures."""
    figures = Figures(cache, task)
    path = RESULTS / f"novelty-{task}.json"
    sizes = figures.sizes()
    usual = 1000 if 1000 in sizes else sizes[-1]
    seeds = range(DRAWS)
    right = figures.test["logits"].argmax(-1) == figures.test["labels"]
    record: dict[str, Any] = {
        "task": task,
        "command": f"python experiments/novelty.py table {task} --cache CACHE",
        "families": figures.families,
        "accuracy": round(100 * float(right.double().mean()), 2),
        "usual": usual,
        "detectors": {
            str(size): [figures.detectors(size, seed, others=others) for seed in seeds]
            for size in sizes
        },
        "alarms": [figures.alarms(usual, seed) for seed in seeds],
        "alarms by size": {
            str(size): [
                figures.alarms(size, seed, changes=False)["test"]["alarms"] for seed in seeds
            ]
            for size in sizes
        },
        "alarms redrawn": {
            str(size): [figures.redrawn_alarms(size, seed) for seed in range(2 * DRAWS)]
            for size in sizes
        },
        "caught": [figures.caught(usual, seed) for seed in seeds],
    }
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    # without hosts of other seeds the ensemble keeps its figures
    record["deep ensemble"] = figures.deep_ensemble() or before.get("deep ensemble", {})
    if others:
        record["contaminated"] = [figures.contaminated(usual, seed) for seed in seeds]
        if task == "imagenet" and "labels" in figures.sets["cifar10"]:
            record["left out"] = [figures.left_out(seed) for seed in seeds]
    else:
        for size, draws in before["detectors"].items():
            fresh = record["detectors"][size]
            record["detectors"][size] = [
                {**old, **new} for old, new in zip(draws, fresh, strict=True)
            ]
        record = {**before, **record}
    RESULTS.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(record) + "\n")
    print(f"wrote {path.name}", flush=True)
