"""Summarize an ensemble: what was built, at a glance."""

from __future__ import annotations

import re
from typing import Any

from .._html import table
from ..costs.cost_record import CostRatio
from ..costs.counting import cost
from ..errors import HydraError
from ..heads.plan import Plan
from ..hosts.examples import example_batch


def summarize_html(ensemble: Any) -> str:
    """Describe an ensemble as a table for notebooks: what `summarize` says, line by line."""
    title, *lines = summarize(ensemble).splitlines()
    # what stands in columns in a terminal would run together here
    rows = [[line[2:10].strip(), re.sub(" {2,}", " · ", line[11:].strip())] for line in lines]
    return table(title, [], rows, texts=2)


def summarize(ensemble: Any) -> str:
    """Describe an ensemble in a few lines: members, heads, branch, cost, score."""
    plan: Plan = ensemble.plan
    lines = [f"HydraEnsemble of {type(ensemble.host).__name__}, {_members(ensemble)}"]
    if plan.trunk:
        blocks = "block 0" if plan.trunk == 1 else f"blocks 0-{plan.trunk - 1}"
        lines.append(f"  trunk    {blocks}, {_trunk_heads(plan)}, computed once")
    for i, phrase in enumerate(plan.branch_text()):
        lines.append(f"  {'branch' if i == 0 else '':<8} {phrase}")
    if ensemble.engine == "host":
        lines.append("  engine   the host's own blocks, one for every stream")
    if ensemble.merged:
        lines.append(f"  averaged {', '.join(ensemble.merged)} (members were fine-tuned)")
    lines += _teachers(ensemble.record)
    lines += _cost_lines(ensemble)
    lines.append(f"  score    {_score(ensemble)}")
    lines += _calibration(ensemble)
    why = str(ensemble.record.get("novelty"))  # of `build`, which may have failed to fit it
    missing = why if why.startswith("not fitted") else "not fitted: call fit_novelty_(known data)"
    lines.append(f"  novelty  {ensemble.novelty or missing}")
    if ensemble.policy is not None:
        first, *rest = str(ensemble.policy).splitlines()
        lines += [f"  policy   {first}", *(f"         {line}" for line in rest)]
    if ensemble.mode != "fused":
        lines.append("  mode     members run one by one")
    return "\n".join(lines)


def _teachers(record: dict[str, Any]) -> list[str]:
    """Say who taught the members, if they were distilled or folded."""
    if record.get("made_by") == "fold":
        trunk = (
            "the mean of their weights" if record["trunk"] == "mean" else f"host {record['trunk']}"
        )
        hosts, examples = record["hosts"], record["examples"]
        return [f"  folded   from {hosts} hosts by {examples:,} examples, trunk {trunk}"]
    if record.get("made_by") != "distill":
        return []
    shares = record["shares"]
    teachers = len(shares[0])
    assignment = "one per member" if all(max(share) == 1 for share in shares) else "their mean"
    if teachers > 1 and len(shares) > 1 and assignment == "their mean":
        assignment = "several per member"
    words = f"{teachers} teacher{'s' * (teachers > 1)}" + (
        f", {assignment}" if teachers > 1 else ""
    )
    steps, examples = record["training"]["steps"], record["examples"]["data"]
    trunk = "trained" if record["settings"]["trunk_rate"] else "frozen"
    return [f"  taught   by {words}: {steps:,} steps on {examples:,} examples, trunk {trunk}"]


def _members(ensemble: Any) -> str:
    """Count the members, and the distinct ones where some are equal."""
    members, distinct = ensemble.members, len(ensemble.plan.ends)
    text = f"{members} member{'s' * (members > 1)}"
    if distinct == members:
        return text
    text += f", {distinct} distinct"
    reason = ensemble.record.get("equal_members")
    return f"{text}: {reason}" if reason else text


def _trunk_heads(plan: Plan) -> str:
    kept = [len(heads) for heads in plan.trunk_heads]
    of = plan.masks[0].shape[: plan.trunk]
    if tuple(kept) == of and len(set(of)) == 1:
        return f"all {of[0]} heads"
    span = str(kept[0]) if len(set(kept)) == 1 else f"{min(kept)}-{max(kept)}"
    return f"{span} of {max(of)} heads"


def counted_cost(ensemble: Any) -> tuple[CostRatio, str] | None:
    """Return the cost relative to the plain host and the counted shape, or None if unknown."""
    try:
        batch, shape = example_batch(ensemble._view.model)
        return cost(ensemble, batch).relative_to(cost(ensemble.unpruned_host(), batch)), shape
    except (HydraError, StopIteration):
        return None


def _cost_lines(ensemble: Any) -> list[str]:
    size = ensemble.parameter_bytes()
    memory = f"  memory   {size['memory'] / 2**20:.1f} MiB of weights"
    if size["packed"]:
        memory += f", {size['packed'] / 2**20:.1f} MiB of them packed copies for speed"
    counted = counted_cost(ensemble)
    if counted is None:
        return [memory]
    ratio, shape = counted
    return [
        f"  cost     {ratio.multiply_adds:.2f} x multiply-adds, {ratio.bytes_on_disk:.2f} x "
        f"parameters on disk, against the host ({shape})",
        memory,
    ]


def _calibration(ensemble: Any) -> list[str]:
    """Say what `build` measured on held-out data, before and after temperatures."""
    report = ensemble.record.get("decisions", {}).get("calibration")
    if not report:
        return []
    lines = []
    for who in ("ensemble", "host"):
        nll, ece = report[who]["NLL"], report[who]["ECE"]
        text = f"{who} NLL {nll[0]:.3f} -> {nll[1]:.3f}, ECE {ece[0]:.1f} -> {ece[1]:.1f} %"
        lines.append(text)
    lines[-1] += f" ({report['examples']} held-out examples, out of fold)"
    if "note" in report:
        lines.append(report["note"])
    return [f"  {'held out' if i == 0 else '':<8} {line}" for i, line in enumerate(lines)]


def _score(ensemble: Any) -> str:
    parts = [ensemble.score]
    if ensemble.temperature is not None:
        parts.append(f"temperature {ensemble.temperature:.2f}")
    if ensemble.member_temperatures is not None:
        temperatures = ", ".join(f"{t:.2f}" for t in ensemble.member_temperatures)
        parts.append(f"members' temperatures {temperatures}")
    if len(parts) == 1:
        parts.append("not calibrated")
    return ", ".join(parts)
