"""What members are for: their disagreement beside that of their teachers, example by example."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hydra_ensembles._records import write_whole
from hydra_ensembles.uncertainty import score_logits

from .answers import Answers, Store
from .methods import answer, draws_of
from .page import grid

BINS = 8
KINDS = ("all right", "some right", "all wrong alike", "all wrong apart")


def kinds_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return, for each example, which of KINDS its members' labels are `[example]`."""
    said = logits.argmax(-1)
    right = said == labels[:, None]
    alike = (said == said[:, :1]).all(1)
    found = torch.full((len(labels),), 1)
    found[right.all(1)] = 0
    found[~right.any(1) & alike] = 2
    found[~right.any(1) & ~alike] = 3
    return found


def ranks(values: Tensor) -> Tensor:
    """Return ranks, ties by their mean."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    return (ends - (counts - 1) / 2)[inverse]


def correlation(a: Tensor, b: Tensor) -> float:
    """Return Spearman's correlation."""
    return float(torch.corrcoef(torch.stack([ranks(a), ranks(b)]))[0, 1])


def pooled(answers: Answers) -> tuple[Tensor, Tensor]:
    """Return logits of test digits, shifts and outliers, and which of them are test digits."""
    parts = {k: v["logits"] for k, v in answers.sets.items() if k != "held_out"}
    known = [torch.full((len(v),), float(k == "test")) for k, v in parts.items()]
    return torch.cat(list(parts.values())), torch.cat(known).bool()


def write_examples(table: Mapping[str, Any], store: Store, folder: Path) -> None:
    """Write one line per student, and per bin of the teachers' mutual information."""
    by_name = {row["name"]: row for row in table["rows"]}
    teachers = answer(store, by_name[table["teachers"]], 0)
    logits, _ = pooled(teachers)
    theirs = score_logits(logits, "mutual-information")
    order = theirs.argsort(stable=True)
    lines: list[dict[str, Any]] = []
    for name in (table["teachers"], *table["students"]):
        row = by_name[name]
        for draw in draws_of(row):
            found = answer(store, row, draw)
            test = found.sets["test"]
            kinds = kinds_of(test["logits"], test["labels"])
            mine = score_logits(pooled(found)[0], "mutual-information")
            said = pooled(found)[0].argmax(-1)
            parted = (said != said[:, :1]).any(1).double()
            lines.append(
                {
                    "row": name,
                    "draw": draw,
                    "bin": "",
                    **{kind: int((kinds == place).sum()) for place, kind in enumerate(KINDS)},
                    "rank correlation": round(correlation(theirs, mine), 4),
                    "teachers": "",
                    "members": "",
                    "parted": round(float(parted.mean()), 4),
                }
            )
            for place, rows in enumerate(order.chunk(BINS)):
                lines.append(
                    {
                        "row": name,
                        "draw": draw,
                        "bin": place,
                        **dict.fromkeys(KINDS, ""),
                        "rank correlation": "",
                        "teachers": round(float(theirs[rows].mean()), 5),
                        "members": round(float(mine[rows].mean()), 5),
                        "parted": round(float(parted[rows].mean()), 4),
                    }
                )
    text = io.StringIO()
    writer = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_whole(folder / f"{table['name']}-examples.csv", text.getvalue())


def read_examples(table: Mapping[str, Any], folder: Path) -> list[dict[str, str]]:
    """Read what `write_examples` wrote."""
    path = folder / f"{table['name']}-examples.csv"
    if not path.exists():
        return []
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def mean_of(lines: Sequence[Mapping[str, str]], key: str) -> float:
    """Return the mean of a column over draws."""
    return sum(float(line[key]) for line in lines) / len(lines)


def examples_table(table: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the table of test digits by what members say together."""
    found = [line for line in read_examples(table, folder) if line["bin"] == ""]
    rows = []
    for name in (table["teachers"], *table["students"]):
        lines = [line for line in found if line["row"] == name]
        if lines:
            counts = [f"{mean_of(lines, kind):.1f}" for kind in KINDS]
            same = "1" if name == table["teachers"] else f"{mean_of(lines, 'rank correlation'):.2f}"
            rows.append([name, *counts, same])
    head = ["test digits, mean over draws", *KINDS, "rank correlation with the teachers' MI"]
    return grid(head, rows)


def members_picture(table: Mapping[str, Any], folder: Path) -> Path:
    """Draw members' mutual information and disagreement over that of their teachers."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    found = [line for line in read_examples(table, folder) if line["bin"] != ""]
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4))
    names = (table["teachers"], *table["students"])
    colours = dict(zip(names, ("#34495e", "#c0392b", "#7f8c8d"), strict=True))
    for name, colour in colours.items():
        places = sorted({int(line["bin"]) for line in found})
        groups = [[x for x in found if x["row"] == name and int(x["bin"]) == p] for p in places]
        across = [mean_of(group, "teachers") for group in groups]
        label = "teachers themselves" if name == table["teachers"] else name
        style = {"color": colour, "marker": "o", "markersize": 4, "label": label}
        axes[0].plot(across, [mean_of(group, "members") for group in groups], **style)
        axes[1].plot(across, [100 * mean_of(group, "parted") for group in groups], **style)
    axes[0].set_ylabel("members' mutual information (nats)", fontsize=9)
    axes[1].set_ylabel("examples on which members part (%)", fontsize=9)
    for axis in axes:
        axis.set_xlabel("teachers' mutual information (nats), in eight bins", fontsize=9)
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    axes[0].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    path = folder / f"{table['name']}.png"
    beside = path.with_name(f".{path.name}")
    figure.savefig(beside, dpi=80, format="png", metadata={"Software": ""})
    plt.close(figure)
    beside.replace(path)
    return path
