"""Figures of novelty and its rivals from stored features (see `known.py`), as one JSON per task.

A record holds what its run computed and nothing else: a row without figures is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles._records import write_whole
from hydra_ensembles.errors import DataError
from hydra_ensembles.evaluation.metrics import ood_figures
from hydra_ensembles.fusion.call_options import tap_names
from hydra_ensembles.fusion.known_data import CLASS_BLOCKS
from hydra_ensembles.research.feature_detectors import choose_neighbours
from hydra_ensembles.uncertainty import Novelty, NoveltyFit

from .detectors import Score, Set, logit_score, of_training, rivals, single_taps
from .differences import Resamples, Scored, difference, told_above
from .known import BRANCHED, read_features
from .records import this_commit

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
Far = Mapping[str, tuple[Tensor, Tensor]]  # taps and logits by kind
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
ENSEMBLE_SCORES = ("msp", "entropy", "mutual-information", "energy")
ENSEMBLE_SEEDS = (0, 1, 2)
ROWS = (
    *("novelty", "novelty, no labels", "single + novelty", "single + novelty, no labels"),
    *("single student + novelty",),
    *("Deep Ensemble + novelty", *(f"Deep Ensemble, {name}" for name in ENSEMBLE_SCORES)),
    *("msp", "energy", "gen", "ash", "she", "fdbd", "nci", "vim", "knn", "knn, k = 50"),
    *("mahalanobis", "rmds", "mahalanobis++", "relative mahalanobis++", "multi-layer knn"),
    *("multi-layer mahalanobis++", "multi-layer mahalanobis++, no labels"),
    *("vim, trained statistics", "knn, trained statistics", "mahalanobis, trained statistics"),
    *("rmds, trained statistics", "mahalanobis++, trained statistics"),
    "multi-layer mahalanobis++, trained statistics",
)
"""Rows of every table, in order; one that a run has no figures of is shown as missing."""


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


def fit_statistics(
    taps: Tensor, logits: Tensor, labels: Tensor | None, proxies: Far | None = None
) -> Novelty:
    """Fit the library's statistics to taps `[example, tap, width]` and logits of members."""
    blocks = taps.shape[1] // 2
    names, late = tap_names(blocks, readout=True), 2 * min(CLASS_BLOCKS, blocks) + 1
    fit = NoveltyFit(names, classes=logits.shape[-1], class_taps=late, uses_last_block=True)
    fit.add_(taps, logits, labels)

    def add_proxies() -> None:
        if not proxies:
            raise DataError("There are no features of proxies.")
        for name, found in proxies.items():
            fit.add_ood_(name, *found)

    return fit.finish(add_proxies=add_proxies)


def proxies_in(sets: Mapping[str, Set]) -> dict[str, Set]:
    """Return the proxies among the sets of a task."""
    return {name: found for name, found in sets.items() if name.startswith("proxy-")}


def fit_novelty(
    known: Set, blocks: int, proxies: Mapping[str, Set], *, labels: bool = True
) -> Novelty:
    """Fit the library's statistics to the stored features of three members above a trunk."""
    classes = known["labels"] if labels else None
    far = {name: (summaries(found, blocks), found["members"]) for name, found in proxies.items()}
    return fit_statistics(summaries(known, blocks), known["members"], classes, far)


def novelty_of(
    known: Set,
    taps: Callable[[Set], Tensor],
    logits: Callable[[Set], Tensor],
    proxies: Mapping[str, Set],
    *,
    labels: bool = True,
) -> Score:
    """Fit novelty to the taps and logits of known data; return its score."""
    far = {name: (taps(found), logits(found)) for name, found in proxies.items()}
    classes = known["labels"] if labels else None
    fitted = fit_statistics(taps(known), logits(known), classes, far)
    return lambda data: fitted(taps(data), logits(data))[1]


def alone(data: Set) -> Tensor:
    """Return the logits of the single model as those of one member."""
    return data["logits"][:, None]


def alarm_rate(novelty: Novelty, data: Set, blocks: int) -> float:
    """Return the share of examples that raise an alarm at 5 %, in percent."""
    value, _ = novelty(summaries(data, blocks), data["members"])
    return round(100 * float((value > 0.95).double().mean()), 2)


class Figures:
    """Figures of one task."""

    def __init__(self, cache: Path, task: str) -> None:
        self.task, self.families = task, FAMILIES[task]
        self.outliers = [name for family in self.families.values() for name in family]
        self.sets = self._read(cache)
        self.blocks = self.sets["test"]["readout"].shape[1] - BRANCHED[task]
        parts = [self.sets[name] for name in sorted(self.sets) if name.startswith("known-")]
        self.pool, self.test = joined(parts), self.sets["test"]
        self.proxies = proxies_in(self.sets)
        self.redrawn = task == "clinc150"
        if self.redrawn:
            # its test part is drier than its validation part: only a joint draw is exchangeable
            self.pool = joined([self.pool, self.test])
        self.trained = of_training(self.sets["train"]) if "train" in self.sets else None
        self._fitted: dict[tuple[int, int, bool], Novelty] = {}

    def _read(self, cache: Path) -> dict[str, Set]:
        """Read the sets of host 0, and of all three hosts and of their student where they are."""
        found = read_features(cache, self.task)
        used = ("test", *self.outliers)
        needed = [n for n in found if n.startswith(("known-", "proxy-")) or n in used]

        def whole(seeds: Sequence[int | None]) -> list[dict[str, Set]]:
            try:
                every = [read_features(cache, self.task, seed=seed) for seed in seeds]
            except DataError:
                return []
            return every if all(name in sets for sets in every for name in needed) else []

        hosts, students = whole(ENSEMBLE_SEEDS), whole([None])
        for name in needed:
            if hosts:
                taps = torch.stack([single_taps(sets[name]) for sets in hosts])
                found[name]["ensemble taps"] = taps.mean(0)
                found[name]["ensemble logits"] = torch.stack([s[name]["logits"] for s in hosts], 1)
            for student in students:
                found[name]["student taps"] = student[name]["taps"]
                found[name]["student logits"] = student[name]["logits"]
        return found

    def order(self, seed: int) -> Tensor:
        """Return the order in which a draw takes the pool's examples."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randperm(len(self.pool["labels"]), generator=generator)

    def draw(self, count: int, seed: int) -> tuple[Set, Set]:
        """Draw known data; return it and the test data."""
        order = self.order(seed)
        known = rows_of(self.pool, order[:count])
        return known, rows_of(self.pool, order[count:]) if self.redrawn else self.test

    def novelty(self, count: int, seed: int, *, labels: bool = True) -> Novelty:
        """Return the statistics of a draw, fitted once."""
        key = (count, seed, labels)
        if key not in self._fitted:
            known = self.draw(count, seed)[0]
            self._fitted[key] = fit_novelty(known, self.blocks, self.proxies, labels=labels)
        return self._fitted[key]

    def sizes(self) -> list[int]:
        """Sizes of known data that there are enough of."""
        most = len(self.pool["labels"]) - (500 if self.redrawn else 0)
        found = [size for size in SIZES if size <= most]
        return found if found[-1] >= 1000 else [*found, most]

    def rows(self, count: int, seed: int) -> dict[str, Score]:
        """Fit every row to one draw of known data."""
        known, _ = self.draw(count, seed)

        def hydra(labels: bool) -> Score:
            fitted = self.novelty(count, seed, labels=labels)
            return lambda data: fitted(summaries(data, self.blocks), data["members"])[1]

        found = {
            "novelty": hydra(True),
            "novelty, no labels": hydra(False),
            "single + novelty": novelty_of(known, single_taps, alone, self.proxies),
            "single + novelty, no labels": novelty_of(
                known, single_taps, alone, self.proxies, labels=False
            ),
            **rivals(known),
            **({} if self.trained is None else self.trained(known)),
        }
        if "student taps" in known:
            found["single student + novelty"] = novelty_of(
                known, lambda d: d["student taps"], lambda d: d["student logits"], self.proxies
            )
        if "ensemble taps" in known:
            found["Deep Ensemble + novelty"] = novelty_of(
                known, lambda d: d["ensemble taps"], lambda d: d["ensemble logits"], self.proxies
            )
            for name in ENSEMBLE_SCORES:
                found[f"Deep Ensemble, {name}"] = logit_score(name, "ensemble logits")
        return found

    def scored(self, rows: dict[str, Score], test: Set) -> dict[str, Scored]:
        """Score the test data and every outlier set; a detector that gives NaN is left out."""
        sets = {"test": test, **{name: self.sets[name] for name in self.outliers}}
        found = {
            row: {name: score(data).double() for name, data in sets.items()}
            for row, score in rows.items()
        }
        whole = {
            row for row, some in found.items() if not any(v.isnan().any() for v in some.values())
        }
        return {row: found[row] for row in found if row in whole}

    def of_scores(self, scored: Scored) -> dict[str, dict[str, float]]:
        """Return AUROC and FPR95 of every outlier set."""
        figures = {name: ood_figures(scored["test"], scored[name]) for name in self.outliers}
        return {
            name: {key: round(100 * row[key], 3) for key in ("AUROC", "FPR95")}
            for name, row in figures.items()
        }

    def compared(self, draws: Sequence[dict[str, Scored]], count: int) -> dict[str, Any]:
        """Return which rows are told above which, by column, and one model against Hydra."""
        rows = [row for row in ROWS if all(row in draw for draw in draws)]
        tested = [self.order(s)[count:] for s in range(len(draws))] if self.redrawn else None
        everything = len(self.pool["labels"]) if self.redrawn else len(self.test["labels"])
        sizes = {name: len(self.sets[name]["logits"]) for name in self.outliers}
        whole = [torch.arange(everything)] * len(draws)
        resamples = Resamples({**sizes, "test": everything}, tested or whole)
        found = {row: resamples.figures([draw[row] for draw in draws]) for row in rows}

        def values(sets: Sequence[str], place: int) -> Tensor:
            means = [torch.stack([found[row][n][place] for n in sets]).mean(0) for row in rows]
            return torch.stack(means)

        kinds = [kind for kind in ("near", "far") if self.families[kind]]
        columns = {name: values([name], 0) for name in self.outliers}
        columns |= {kind: values(self.families[kind], 0) for kind in kinds}
        if "far" in kinds:
            columns["FPR95 far"] = -values(self.families["far"], 1)
        hydra = rows.index("novelty")
        alone = {"single less Hydra": "single + novelty"}
        alone["student less Hydra"] = "single student + novelty"
        return {
            "rows": rows,
            "above": {column: told_above(some) for column, some in columns.items()},
            **{
                key: {
                    column: difference(some[rows.index(row)], some[hydra])
                    for column, some in columns.items()
                    if column != "FPR95 far"
                }
                for key, row in alone.items()
                if row in rows
            },
        }

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
        return alarm_rate(fit_novelty(known, self.blocks, self.proxies), new, self.blocks)

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
        novelty = fit_novelty(known, self.blocks, self.proxies, labels=False)
        rows = {"": lambda d: novelty(summaries(d, self.blocks), d["members"])[1]}
        return self.of_scores(self.scored(rows, test)[""])

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
        novelty = fit_novelty(known, self.blocks, self.proxies)
        every: dict[str, Score] = {
            "novelty": lambda part: novelty(summaries(part, self.blocks), part["members"])[1],
            "single + novelty": novelty_of(known, single_taps, alone, self.proxies),
            **rivals(known),
        }
        return {
            name: round(
                100 * ood_figures(score(test).double(), score(outliers).double())["AUROC"], 3
            )
            for name, score in every.items()
        }


def write_table(cache: Path, task: str, draws: int | None = None) -> None:
    """Write `docs/results/novelty-TASK.json`, all of it from stored features."""
    figures = Figures(cache, task)
    draws = draws or DRAWS
    sizes, seeds = figures.sizes(), range(draws)
    usual = 1000 if 1000 in sizes else sizes[-1]
    scored = []
    for seed in seeds:
        scored.append(figures.scored(figures.rows(usual, seed), figures.draw(usual, seed)[1]))
        print(f"{task}: draw {seed + 1} of {draws}", flush=True)

    def novelty_alone(size: int, seed: int) -> dict[str, Any]:
        fitted, test = figures.novelty(size, seed), figures.draw(size, seed)[1]
        rows = {"novelty": lambda d: fitted(summaries(d, figures.blocks), d["members"])[1]}
        return {"novelty": figures.of_scores(figures.scored(rows, test)["novelty"])}

    def neighbours(seed: int) -> int:
        known, _ = figures.draw(usual, seed)
        return choose_neighbours(known["features"], known["labels"])

    def accuracy(logits: Tensor) -> float:
        right = logits.argmax(-1) == figures.test["labels"]
        return round(100 * float(right.double().mean()), 2)

    record: dict[str, Any] = {
        "task": task,
        "command": f"python experiments/novelty.py table {task}",
        "commit": this_commit(),
        "families": figures.families,
        "accuracy": accuracy(figures.test["logits"]),
        "usual": usual,
        "neighbours": [neighbours(seed) for seed in seeds],
        "choices": [figures.novelty(usual, seed).choice for seed in seeds],
        "detectors": {
            str(size): [
                {row: figures.of_scores(one) for row, one in scored[seed].items()}
                if size == usual
                else novelty_alone(size, seed)
                for seed in seeds
            ]
            for size in sizes
        },
        **figures.compared(scored, usual),
        "alarms": [figures.alarms(usual, seed) for seed in seeds],
        "alarms by size": {
            str(size): [
                figures.alarms(size, seed, changes=False)["test"]["alarms"] for seed in seeds
            ]
            for size in sizes
        },
        "alarms redrawn": {
            str(size): [figures.redrawn_alarms(size, seed) for seed in range(2 * draws)]
            for size in sizes
        },
        "caught": [figures.caught(usual, seed) for seed in seeds],
        "contaminated": [figures.contaminated(usual, seed) for seed in seeds],
    }
    if "student logits" in figures.test:
        record["student accuracy"] = accuracy(figures.test["student logits"][:, 0])
    if task == "imagenet":
        record["left out"] = [figures.left_out(seed) for seed in seeds]
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"novelty-{task}.json"
    write_whole(path, json.dumps(record) + "\n")
    print(f"wrote {path.name}", flush=True)
