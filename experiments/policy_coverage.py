"""What a policy promises and what it keeps, over 200 splits: tables of `docs/concepts/policy.md`.

    python experiments/policy_coverage.py --cache CACHE          # all tasks: minutes of one core
    python experiments/policy_coverage.py --cache CACHE digits   # one; the others stay as they are
    python experiments/policy_coverage.py --page                 # the tables again, from the record

Logits and token summaries of every data set are those that `novelty.py features TASK` has stored
(run it first); no model runs here. Labelled data that no host was trained on is joined and split
200 times: `known` teaches novelty (20 draws), `labelled` fits the policy, `test` is all the rest.
Figures go to `experiments/results/policy_coverage.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from lab import plainly
from lab.known import BRANCHED, read_features
from lab.known_table import Set, fit_novelty, joined, proxies_in, rows_of, summaries
from torch import Tensor

from hydra_ensembles._records import write_whole
from hydra_ensembles.uncertainty import Rates, choose_policy, mean_probability, msp

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "experiments" / "results" / "policy_coverage.json"
PAGE = ROOT / "docs" / "concepts" / "policy.md"
DRAWS, SPLITS = 20, 10
"""Draws of known data, and splits of the rest for each."""
SIZES = {"digits": (250, 250), "sst2": (500, 500), "cifar10": (1000, 500), "clinc150": (1500, 500)}
"""Known and labelled examples."""
ASKED = (
    ("conformal", 0.02),
    ("conformal", 0.05),
    ("selective", 0.02),
    ("selective", 0.05),
    ("empirical", 0.02),
    ("empirical", 0.05),
)
ALARM, DELTA = 0.05, 0.1
OTHERS = {
    "digits": ("letters", "noise"),
    "sst2": ("ag-news", "intents", "shift-typos-5", "shift-drop_words-5"),
    "cifar10": ("tinyimagenet", "letters", "shift-gaussian_noise-3", "shift-fog-3"),
    "clinc150": ("oos-test", "sst2", "shift-typos-5"),
}
"""Data that is not exchangeable with the labelled: outliers, and shifts with labels."""
NAMES = {"digits": "digits", "sst2": "SST-2", "cifar10": "CIFAR-10", "clinc150": "CLINC150"}


class Scored:
    """Uncertainty, errors and novelty score of examples."""

    def __init__(self, data: Set, novelty: Any, blocks: int) -> None:
        logits = data["members"]
        self.uncertainty = msp(logits)
        labels = data.get("labels")
        label = mean_probability(logits).argmax(-1)
        self.errors = None if labels is None else label != labels
        self.novelty = novelty(summaries(data, blocks), logits)[1]

    def take(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return uncertainty, errors and novelty score of some."""
        assert self.errors is not None
        return self.uncertainty[rows], self.errors[rows], self.novelty[rows]


def measure(task: str, cache: Path) -> dict[str, Any]:
    """Fit and test policies on all splits of a task."""
    sets = read_features(cache, task)
    pool = joined([sets[name] for name in sorted(sets) if name.startswith("known-")])
    pool = joined([pool, {name: sets["test"][name] for name in pool}])
    blocks = pool["readout"].shape[1] - BRANCHED[task]
    count, (known, labelled) = len(pool["labels"]), SIZES[task]
    rates: dict[str, list[Rates]] = {f"{method} {risk}": [] for method, risk in ASKED}
    others: dict[str, list[Rates]] = {name: [] for name in OTHERS[task]}
    start = time.perf_counter()
    for draw in range(DRAWS):
        generator = torch.Generator().manual_seed(draw)
        order = torch.randperm(count, generator=generator)
        novelty = fit_novelty(rows_of(pool, order[:known]), blocks, proxies_in(sets))
        rest = Scored(rows_of(pool, order[known:]), novelty, blocks)
        strange = {name: Scored(sets[name], novelty, blocks) for name in others}
        for _ in range(SPLITS):
            rows = torch.randperm(count - known, generator=generator)
            uncertainty, errors, score = rest.take(rows[:labelled])
            tested = rest.take(rows[labelled:])
            for method, risk in ASKED:
                policy = choose_policy(
                    uncertainty,
                    errors,
                    novelty_score=score,
                    risk=risk,
                    alarm=ALARM,
                    method=method,
                    delta=DELTA,
                )
                decision = policy.decide(tested[0], tested[2])
                rates[f"{method} {risk}"].append(Rates.of(decision, tested[1]))
                if (method, risk) == ASKED[0]:
                    for name, data in strange.items():
                        decided = policy.decide(data.uncertainty, data.novelty)
                        others[name].append(Rates.of(decided, data.errors))
        seconds = time.perf_counter() - start
        left = seconds / (draw + 1) * (DRAWS - draw - 1)
        print(f"{task}: {draw + 1} of {DRAWS} draws, {left:.0f} s left", flush=True)
    wrong = (mean_probability(pool["members"]).argmax(-1) != pool["labels"]).double().mean()
    return {
        "splits": DRAWS * SPLITS,
        "known": known,
        "labelled": labelled,
        "test": count - known - labelled,
        "error_rate": float(wrong),
        "alarm": ALARM,
        "delta": DELTA,
        "policies": {name: _summary(name, found) for name, found in rates.items()},
        "others": {name: _means(found) for name, found in others.items()},
    }


def _summary(name: str, rates: list[Rates]) -> dict[str, Any]:
    """Return promised and measured rates: mean, worst, and the share of splits over."""
    method, risk = name.split()
    wrong = "answered_and_wrong" if method == "conformal" else "wrong_if_answered"
    found = {"method": method, "risk": float(risk), **_means(rates)}
    for key, promised in {"new": ALARM, wrong: float(risk)}.items():
        values = torch.tensor([getattr(rate, key) or 0.0 for rate in rates])
        found[f"{key}_over"] = {
            "promised": promised,
            "mean": float(values.mean()),
            "worst": float(values.max()),
            "share_of_splits_over": float((values > promised).double().mean()),
        }
    found["never_answers"] = sum(rate.answer == 0 for rate in rates) / len(rates)
    return found


def _means(rates: list[Rates]) -> dict[str, float]:
    names = ("answer", "unsure", "new", "answered_and_wrong", "wrong_if_answered")
    found = {}
    for name in names:
        values = [getattr(rate, name) for rate in rates if getattr(rate, name) is not None]
        if values:
            found[name] = sum(values) / len(values)
    return found


# --- the page


def percent(value: float | None, digits: int = 1) -> str:
    """Return a share as a percentage."""
    return "–" if value is None else f"{100 * value:.{digits}f}"


def promised_table(record: dict[str, Any]) -> str:
    """Return the table of promised and measured rates."""
    lines = [
        "| task | method, risk | answered | wrong: guaranteed | mean | worst split | splits over "
        "| new: guaranteed | mean | worst split | splits over |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for task, found in record.items():
        for policy in found["policies"].values():
            key = "answered_and_wrong" if "answered_and_wrong_over" in policy else ""
            wrong = policy[f"{key or 'wrong_if_answered'}_over"]
            cells = [NAMES[task], f"{policy['method']}, {policy['risk']}"]
            cells.append(percent(policy["answer"]))
            cells.append(percent(wrong["promised"]) if policy["method"] != "empirical" else "–")
            cells += [percent(wrong["mean"], 2), percent(wrong["worst"], 2)]
            cells.append(percent(wrong["share_of_splits_over"], 0))
            new = policy["new_over"]
            cells += [percent(new["promised"]), percent(new["mean"], 2), percent(new["worst"])]
            cells.append(percent(new["share_of_splits_over"], 0))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def others_table(record: dict[str, Any]) -> str:
    """Return the table of what happens on other data."""
    lines = [
        "| task | data | answered | unsure | new | answered and wrong |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for task, found in record.items():
        first = found["policies"][f"{ASKED[0][0]} {ASKED[0][1]}"]
        for name, rates in {"like the labelled": first, **found["others"]}.items():
            cells = [NAMES[task], name, *(percent(rates[k]) for k in ("answer", "unsure", "new"))]
            labelled = name.startswith(("like", "shift"))
            cells.append(percent(rates.get("answered_and_wrong") if labelled else None))
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_page(record: dict[str, Any]) -> None:
    """Put the tables between their marks in the page."""
    text = PAGE.read_text(encoding="utf-8")
    for mark, table in {
        "promised": promised_table(record),
        "others": others_table(record),
    }.items():
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}"
    write_whole(PAGE, text)


def main() -> None:
    """Measure tasks, write the record and the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tasks", nargs="*", help=", ".join(SIZES))
    parser.add_argument("--cache", type=Path, default=os.environ.get("HYDRA_CACHE", "work/answers"))
    parser.add_argument("--page", action="store_true", help="only write the tables")
    args = parser.parse_args()
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    if not args.page:
        for task in args.tasks or SIZES:
            record[task] = measure(task, Path(args.cache))
            record = {name: record[name] for name in SIZES if name in record}
            write_whole(RECORD, json.dumps(record, indent=1) + "\n")
    write_page(record)


if __name__ == "__main__":
    plainly(main)
