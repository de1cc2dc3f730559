"""Summarize an ensemble: what was built, at a glance."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._tables import table
from ..costs.cost_record import CostRatio
from ..costs.formula import cost
from ..errors import HydraError
from ..evaluation.results import Results
from ..evaluation.tables import compare_table
from ..heads.stream_plan import Plan
from ..hosts.example_inputs import example_batch
from ..tasks import MultiClass

if TYPE_CHECKING:
    from .ensemble import HydraEnsemble


def summarize_html(ensemble: HydraEnsemble) -> str:
    """Describe an ensemble as a table for notebooks: what `summarize` says, line by line."""
    title, *lines = summarize(ensemble).splitlines()
    # what stands in columns in a terminal would run together here
    rows = [[line[2:10].strip(), re.sub(" {2,}", " · ", line[11:].strip())] for line in lines]
    return table(title, [], rows, texts=2)


def summarize(ensemble: HydraEnsemble) -> str:
    """Describe an ensemble in a few lines: members, heads, branch, cost, score."""
    plan = ensemble.plan
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
    if "auto" in ensemble.record:
        lines.append(f"  chosen   {ensemble.record['auto']['why']}")
    lines += [
        f"  {'outliers' if i == 0 else '':<8} {line}" for i, line in enumerate(_traded(ensemble))
    ]
    lines += _readouts(ensemble)
    lines += _teachers(ensemble.record)
    lines += _cost_lines(ensemble)
    lines.append(f"  score    {_score(ensemble)}")
    lines += _calibration(ensemble)
    if "disagreement" in ensemble.record:
        lines.append(f"  alarm    {ensemble.record['disagreement']['sentence']}")
    why = str(ensemble.record.get("novelty"))  # of `build`, which may have failed to fit it
    missing = why if why.startswith("not fitted") else "not fitted: call fit_novelty_(known data)"
    lines.append(f"  novelty  {ensemble.novelty or missing}")
    if ensemble.policy is not None:
        first, *rest = str(ensemble.policy).splitlines()
        lines += [f"  policy   {first}", *(f"         {line}" for line in rest)]
    if ensemble.sets is not None:
        first, *rest = str(ensemble.sets).splitlines()
        lines += [f"  sets     {first}", *(f"         {line}" for line in rest)]
    if not isinstance(ensemble.task, MultiClass) or ensemble.task.by_token:
        lines.insert(1, f"  task     {ensemble.task.title}")
    if ensemble.mode != "fused":
        lines.append("  mode     members run one by one")
    return "\n".join(lines)


def _traded(ensemble: HydraEnsemble) -> list[str]:
    """Say what members and temperatures do to detection by MSP, if outliers were given."""
    found = [ensemble.record.get("detection"), ensemble.record.get("calibration", {}).get("traded")]
    return [one["sentence"] for one in found if one]


def _readouts(ensemble: HydraEnsemble) -> list[str]:
    """Say what linear readouts of the last block answer, if there are any."""
    words = []
    if ensemble.member_readout is not None:
        words.append("each member is linear in the last block's features")
    if ensemble.student is not None:
        words.append("a student answers, members give the disagreement")
    return [f"  readout  {'; '.join(words)}"] if words else []


def _teachers(record: dict[str, Any]) -> list[str]:
    """Say who taught the members, if they were distilled or folded; what was pruned."""
    if record.get("made_by") == "prune":
        kept = [
            f"{sum(kept for kept, _ in record[units]):,} of {sum(n for _, n in record[units]):,} "
            f"{units}"
            for units in ("heads", "neurons")
        ]
        return [f"  pruned   to {record['cost']:.3f} x: {', '.join(kept)}"]
    lines = _teachers(record["fold"]) if "fold" in record else []
    if record.get("made_by") == "fold":
        trunk = (
            "the mean of their weights" if record["trunk"] == "mean" else f"host {record['trunk']}"
        )
        hosts, examples = record["hosts"], record["examples"]
        return [f"  folded   from {hosts} hosts by {examples:,} examples, trunk {trunk}"]
    if record.get("made_by") != "distill":
        return lines
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
    return [
        *lines,
        f"  taught   by {words}: {steps:,} steps on {examples:,} examples, trunk {trunk}",
    ]


def _members(ensemble: HydraEnsemble) -> str:
    """Count the members, and the distinct ones where some are equal."""
    members, distinct = ensemble.members, len(ensemble.plan.ends)
    text = f"{members} member{'s' * (members > 1)}"
    if distinct == members or ensemble.member_readout is not None:
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


def counted_cost(ensemble: HydraEnsemble) -> tuple[CostRatio, str] | None:
    """Return the cost relative to the plain host and the counted shape, or None if unknown."""
    try:
        batch, shape = example_batch(ensemble._view.model)
        return cost(ensemble, batch).relative_to(cost(ensemble.unpruned_host(), batch)), shape
    except (HydraError, StopIteration):
        return None


def _cost_lines(ensemble: HydraEnsemble) -> list[str]:
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


def _calibration(ensemble: HydraEnsemble) -> list[str]:
    """Say what `build` measured on held-out data, before and after temperatures."""
    report = ensemble.record.get("calibration", {}).get("figures")
    if not report:
        return []
    lines = []
    if "ensemble" not in report:  # numbers: nothing to compare with
        return [f"  held out {report['why']}"]
    for who in ("ensemble", "host"):
        nll, ece = report[who]["NLL"], report[who]["ECE"]
        text = f"{who} NLL {nll[0]:.3f} -> {nll[1]:.3f}, ECE {ece[0]:.1f} -> {ece[1]:.1f} %"
        lines.append(text)
    lines[-1] += f" ({report['examples']} held-out examples, out of fold)"
    lines += [report[key] for key in ("note", "why") if key in report]
    return [f"  {'held out' if i == 0 else '':<8} {line}" for i, line in enumerate(lines)]


def _score(ensemble: HydraEnsemble) -> str:
    parts = [ensemble.score]
    if ensemble.temperature is not None:
        parts.append(f"temperature {ensemble.temperature:.2f}")
    if ensemble.member_temperatures is not None:
        temperatures = ", ".join(f"{t:.2f}" for t in ensemble.member_temperatures)
        parts.append(f"members' temperatures {temperatures}")
    if ensemble.calibrator is not None:
        parts.append(ensemble.task.calibrators[ensemble.calibrator.name])
    if len(parts) == 1:
        parts.append("not calibrated")
    return ", ".join(parts)


# The model card of a saved ensemble: what it is, what it costs, what was measured.
TASKS = {
    "ForImageClassification": "image-classification",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForAudioClassification": "audio-classification",
    "ForVideoClassification": "video-classification",
}
"""The hub's name for a host's task, by the suffix of the host's class name."""


def remember_results(ensemble: HydraEnsemble, results: Results | list[Results]) -> None:
    """Keep figures in the ensemble's record, for its card."""
    several = [results] if isinstance(results, Results) else list(results)
    ensemble.record["results"] = [json.loads(result.to_json()) for result in several]


def make_card(ensemble: HydraEnsemble, name: str = "this-folder") -> str:
    """Write the model card of an ensemble that is called `name` on the hub."""
    host = type(ensemble.host).__name__
    parts = [
        _head(ensemble),
        f"# A Hydra ensemble of {host}",
        f"One model that is an ensemble of {_members(ensemble)}, in one forward pass. "
        "Every prediction comes with its uncertainty"
        + (" and the novelty of the input." if ensemble.novelty is not None else "."),
        _usage(ensemble, name),
        *_cost(ensemble),
        *_figures(ensemble.record.get("results", [])),
        *_classes(ensemble.id2label),
        f"## What was built\n\n```\n{ensemble}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def _head(ensemble: HydraEnsemble) -> str:
    """Return the hub's metadata: plain words, quoted where they come from a config."""
    lines = ["library_name: hydra-ensembles", "tags: [uncertainty, ensemble, pruning]"]
    host = type(ensemble.host).__name__
    task = next((tag for end, tag in TASKS.items() if host.endswith(end)), None)
    if task is not None:
        lines.insert(1, f"pipeline_tag: {task}")
    base = ensemble.name_or_path
    # a local path is not a model of the hub
    if re.fullmatch(r"\w[\w.-]*/[\w.-]+", base) and not Path(base).exists():
        lines.insert(1, f'base_model: "{base}"')
    return "\n".join(["---", *lines, "---"])


def _usage(ensemble: HydraEnsemble, name: str) -> str:
    says = "# .labels .probabilities .uncertainty .novelty .member_logits"
    if ensemble.novelty is None:
        says = says.replace(" .novelty", "")
    return f"""## Use

```python
import hydra_ensembles as hydra

ensemble = hydra.HydraEnsemble.from_pretrained("{name}")
answer = ensemble.predict(batch)  {says}
```"""


def _cost(ensemble: HydraEnsemble) -> list[str]:
    counted = counted_cost(ensemble)
    if counted is None:
        return []
    ratio, shape = counted
    return [
        "## Cost",
        f"| | of the plain host |\n|---|---:|\n"
        f"| multiply-adds, counted ({shape}) | {ratio.multiply_adds:.2f} x |\n"
        f"| size on disk | {ratio.bytes_on_disk:.2f} x |",
    ]


def _figures(saved: list[dict[str, Any]]) -> list[str]:
    if not saved:
        return ["## Results", "None were given: `ensemble.save_pretrained(folder, results=...)`."]
    results = [Results.from_json(json.dumps(record)) for record in saved]
    sizes = results[0].settings.get("examples", {})
    sets = ", ".join(f"{name} ({size:,})" for name, size in sizes.items())
    table = compare_table(results, rows="figures")
    words = "Rates are in percent; arrows point to the better side."
    return ["## Results", table, f"{words} Examples: {sets}." if sets else words]


def _classes(names: dict[int, str] | None) -> list[str]:
    if not names:
        return []
    plain = [" ".join(name.replace("`", "").split()) for name in list(names.values())[:20]]
    shown = ", ".join(f"`{name}`" for name in plain)
    more = f" and {len(names) - 20:,} more" if len(names) > 20 else ""
    return [f"## Classes\n\n{shown}{more}"]
