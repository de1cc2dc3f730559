"""What was built, at a glance."""

from __future__ import annotations

from typing import Any

from .plan import Plan


def summarize(ensemble: Any) -> str:
    """Describe an ensemble in a few lines."""
    plan: Plan = ensemble.plan
    lines = [f"HydraEnsemble of {type(ensemble.host).__name__}, {plan.members} members"]
    if plan.trunk:
        heads = sorted({len(h) for h in plan.trunk_heads})
        kept = f"{heads[0]}" if len(heads) == 1 else f"{heads[0]}-{heads[-1]}"
        blocks = "block 0" if plan.trunk == 1 else f"blocks 0-{plan.trunk - 1}"
        of = plan.masks[0].shape[0]
        lines.append(f"  trunk    {blocks}, {kept} of {of} heads, computed once")
    for i, phrase in enumerate(plan.branch_text()):
        lines.append(f"  {'branch' if i == 0 else '':<8} {phrase}")
    if ensemble.merged:
        lines.append(f"  averaged {', '.join(ensemble.merged)}")
    lines.append(f"  mode     {ensemble.mode}")
    return "\n".join(lines)
