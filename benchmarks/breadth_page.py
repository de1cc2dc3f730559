"""The page of `benchmarks/breadth.py`, from its record alone."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

from breadth_popular import popular_table

from hydra_ensembles._records import write_whole

ENDS = {
    "ForTokenClassification": "tokens",
    "ForQuestionAnswering": "answers in texts",
    "ForMultipleChoice": "multiple choice",
}
TASKS = ("classes", "multi-label", "regression", *ENDS.values(), "embeddings")
PAGE = Path(__file__).parent.parent / "docs" / "results" / "breadth.md"


def write_page(record: dict[str, Any]) -> None:
    """Write `docs/results/breadth.md`."""
    write_whole(PAGE, page(record))


def page(record: dict[str, Any]) -> str:
    """Return the page: counts by task, what is fused, and why the rest is not."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, result in record["models"].items():
        groups[result["verdict"]].append(name)
    parts = [
        "# Which models work\n\nMade by one command, `python benchmarks/breadth.py`: every class "
        "of transformers for our tasks and one timm, torchvision and open_clip model of every "
        "kind, tiny, with weights scaled so that biases and positions matter. What `explain` "
        "promises is compared with what happens: gated against pruned, fused members against the "
        "gated host at 1e-4 (texts without padding, padded on the right and on the left), the cost "
        "of the plan against the cost of the ensemble, saved against loaded.\n"
        + (f"\n{record['note']}\n" if "note" in record else ""),
        "## Popular families\n\n" + popular_table(record["models"]),
        "\n## All models, by task\n\n" + _by_task(record),
        "\n## Fused exactly\n\n" + _names(groups["fused"]),
        "\n## Scored and gated, and pruned where it says so\n\n" + _reasons(record, "scored"),
        "\n## Refused, and why\n\n" + _reasons(record, "refused"),
    ]
    for verdict, title in (
        ("wrong", "Silently wrong"),
        ("broken", "Promised and broken"),
        ("crashed", "Raised something that is not a HydraError"),
    ):
        if groups[verdict]:
            parts.append(f"\n## {title}\n\n" + _failures(record, groups[verdict]))
    return "\n".join(parts) + "\n"


def counts(models: dict[str, Any]) -> dict[str, int]:
    """Count verdicts of models, and promises."""
    found = Counter(result["verdict"] for result in models.values())
    steps = Counter(step for r in models.values() for step in r.get("steps", {}).values())
    return {
        "models": len(models) - found["not built"],
        "fused exactly": found["fused"],
        "scored, gated or pruned": found["scored"],
        "refused with a reason": found["refused"],
        "silently wrong": found["wrong"],
        "promised and broken": found["broken"],
        "not a HydraError": found["crashed"],
        "promises kept": steps["kept"],
        "not built": found["not built"],
    }


def task_in(name: str) -> str:
    """Return the task of a model of the sweep, by its name."""
    library, _, rest = name.partition("/")
    cls, _, variant = rest.partition(", ")
    if variant or library != "transformers":
        return variant or "classes"
    found = (task for end, task in ENDS.items() if end in cls)
    return next(found, "classes" if re.search("For[A-Z]", cls) else "embeddings")


def _by_task(record: dict[str, Any]) -> str:
    """Return the counts of each task, those of the sweep before in brackets."""
    before = record.get("before", {"verdicts": {}, "counts": {}})
    columns: dict[str, tuple[dict[str, int], dict[str, int]]] = {}
    for task in TASKS:
        now = {n: r for n, r in record["models"].items() if task_in(n) == task}
        old = {n: {"verdict": v} for n, v in before["verdicts"].items() if task_in(n) == task}
        columns[task] = counts(now), counts(old)
    columns["all"] = record["counts"], before["counts"]
    head = f"| | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}\n"
    rows = []
    for what in record["counts"]:
        cells = []
        for task, (now, old) in columns.items():
            asked = old.get("models", 0) and (what != "promises kept" or task == "all")
            cells.append(f"{now[what]} ({old[what]})" if asked else str(now[what]))
        rows.append(f"| {what} | {' | '.join(cells)} |")
    return f"{head}" + "\n".join(rows) + "\n\nIn brackets: the sweep before, where it had the task."


def _names(names: list[str]) -> str:
    by_kind: dict[str, list[str]] = defaultdict(list)
    for name in names:
        library, _, rest = name.partition("/")
        task = task_in(name)
        short = re.sub(
            r"(For(Sequence|Image|Token)Classification|ForQuestionAnswering|ForMultipleChoice|Model)$",
            "",
            rest.split(", ")[0],
        )
        by_kind[library if task == "classes" else f"{library}, {task}"].append(short)
    return "\n".join(f"- **{key}** ({len(v)}): {', '.join(v)}" for key, v in by_kind.items())


def _reasons(record: dict[str, Any], verdict: str) -> str:
    """Group models by the first sentence of the reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, result in record["models"].items():
        if result["verdict"] == verdict:
            # the class's name, with which a reason begins
            reason = re.sub(r"^[A-Z]\w*(:| (?=has |makes |keeps |is ))\s*", "", result["reason"])
            reason = reason.partition(". ")[0].partition(" (")[0]
            reason = "".join("#" if c.isdigit() else c for c in reason)
            by_reason[reason].append(name.partition("/")[2].replace(", ", " as "))
    ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    return "\n".join(f"- {reason}: {', '.join(names)}" for reason, names in ordered)


def _failures(record: dict[str, Any], names: list[str]) -> str:
    rows = []
    for name in names:
        result = record["models"][name]
        bad = [s for s, how in result["steps"].items() if how in ("wrong", "broken", "crashed")]
        note = "; ".join(f"{step}: {result['notes'][step][:120]}" for step in bad)
        rows.append(f"- {name}: {note}")
    return "\n".join(rows)
