"""The page of `benchmarks/breadth.py`, from its record alone."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from breadth_popular import popular_table

from hydra_ensembles._records import write_whole

PAGE = Path(__file__).parent.parent / "docs" / "results" / "breadth.md"


def write_page(record: dict[str, Any]) -> None:
    """Write `docs/results/breadth.md`."""
    write_whole(PAGE, page(record))


def page(record: dict[str, Any]) -> str:
    """Return the page: counts before and now, what is fused, and why the rest is not."""
    now, before = record["counts"], record.get("before", {}).get("counts", {})
    lines = [f"| {what} | {before.get(what, '')} | {number} |" for what, number in now.items()]
    groups: dict[str, list[str]] = defaultdict(list)
    for name, result in record["models"].items():
        groups[result["verdict"]].append(name)
    parts = [
        "# Which models work\n\nMade by one command, `python benchmarks/breadth.py`: every "
        "classifier class of transformers and one timm, torchvision and open_clip model of every "
        "kind, tiny, with weights scaled so that biases and positions matter. What `explain` "
        "promises is compared with what happens: gated against pruned, fused members against the "
        "gated host at 1e-4 (texts without padding, padded on the right and on the left), the cost "
        "of the plan against the cost of the ensemble, saved against loaded.\n"
        + (f"\n{record['note']}\n" if "note" in record else ""),
        "## Popular families\n\n" + popular_table(record["models"]),
        "\n## All models\n\n| | before | now |\n|---|---|---|\n" + "\n".join(lines),
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


def _names(names: list[str]) -> str:
    by_library: dict[str, list[str]] = defaultdict(list)
    for name in names:
        library, _, rest = name.partition("/")
        task = "ForTokenClassification"
        key = f"{library}, token classification" if rest.endswith(task) else library
        short = rest.removesuffix("ForSequenceClassification").removesuffix(task)
        by_library[key].append(short.removesuffix("ForImageClassification"))
    return "\n".join(f"- **{key}** ({len(v)}): {', '.join(v)}" for key, v in by_library.items())


def _reasons(record: dict[str, Any], verdict: str) -> str:
    """Group models by the first sentence of the reason."""
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, result in record["models"].items():
        if result["verdict"] == verdict:
            # the class's name, with which a reason begins
            reason = re.sub(r"^[A-Z]\w*(:| (?=has |makes |keeps |is ))\s*", "", result["reason"])
            reason = reason.partition(". ")[0].partition(" (")[0]
            reason = "".join("#" if c.isdigit() else c for c in reason)
            by_reason[reason].append(name.partition("/")[2])
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
