"""The page and pictures of `experiments/pruning.py`, from the JSON records alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl

from hydra_ensembles.evaluation.intervals import Interval
from hydra_ensembles.evaluation.pruning_sweep_results import PruneSweep, write_text
from hydra_ensembles.report.pruning_figures import (
    plot_alpha,
    plot_head_scores,
    plot_prune_sweep,
    plot_rank_correlation,
    plot_shift_gaps,
)

mpl.use("Agg")
import matplotlib.pyplot as plt

AUTO = "hies(alpha='auto')"
LINES = ("random", "magnitude", "taylor", "his", "entropy", AUTO)
METRICS = ("cls/Acc", "stability")
OTHERS = {"cls/NLL": 3, "cal/ECE": 3, "ood/mean/AUROC": 3}
PAPER = (
    "For comparison, the paper's GLUE means at 10 / 30 / 50 % pruned: quality HIES 86.50 / 85.20 "
    "/ 81.43 against HIS 86.42 / 84.47 / 79.50, stability 96.20 / 91.90 / 83.91 against 96.38 / "
    "90.00 / 77.23; ViT-L accuracy at 10 / 20 / 30 %: 88.4 / 82.7 / 47.7 against 88.9 / 55.2 / "
    "12.8. Those models have 144 to 384 heads; ours have 72 and 36, so one head is 1.4 and 2.8 % "
    "of all."
)


def write_page(out: Path) -> None:
    """Draw all pictures and write `pruning.md`."""
    names = [name for name in ("sst2", "deit") if (out / f"pruning-{name}.json").exists()]
    sweeps = {name: PruneSweep.from_json(out / f"pruning-{name}.json") for name in names}
    gaps = {}
    for name in names:
        path = out / f"pruning-shift-{name}.json"
        if path.exists():
            gaps[name] = json.loads(path.read_text())
    parts = [_head(sweeps)]
    for name, sweep in sweeps.items():
        parts.append(_sweep(name, sweep, out))
    parts.append(_proposition(gaps, out))
    write_text(out / "pruning.md", "\n\n".join(parts) + "\n")


def _head(sweeps: dict[str, PruneSweep]) -> str:
    sizes = "; ".join(
        f"{s.model}: {s.examples} test examples, {s.draws} draws of {s.calibration_examples}, "
        f"{len(s.outcomes)} distinct masks"
        for s in sweeps.values()
    )
    findings = "\n".join(f"- {line}" for s in sweeps.values() for line in _findings(s))
    return f"""# Which heads can go: criteria compared on two real models

Made by one command (it resumes, and draws from the JSON beside this page):

```
python experiments/pruning.py --data DATA --checkpoint CHECKPOINTS/sst2/seed0 --work WORK
```

Heads are scored on a calibration draw, ranked **over all layers together**, pruned in one shot
and never fine-tuned. Figures are means over the draws; ± is half of the 95 % interval: for
accuracy and stability a bootstrap over draws *and* test examples, for the rest Student's t over
the draws. Equal masks are measured once. *Stability* is the share of examples whose predicted
class is that of the unpruned model. {sizes}. Test images are a stratified subset, to keep the
sweep affordable on one core; test sentences are the whole dev set.

## What was found

{findings}

{PAPER}"""


def _findings(sweep: PruneSweep) -> list[str]:
    """Say in words what the paired intervals allow to say."""
    lines = []
    for metric, word in (("cls/Acc", "accuracy"), ("stability", "stability")):
        told = []
        for ratio in (0.3, 0.5):
            d = sweep.difference(AUTO, "his", ratio, metric)
            told.append(f"{ratio:.0%} pruned {_points(d)} ({_verdict(d)})")
        lines.append(
            f"{sweep.model}: HIES (alpha chosen) minus HIS, {word}: " + "; ".join(told) + "."
        )
    best = {
        ratio: max(sweep.criteria, key=lambda c, r=ratio: sweep.interval(c, r).value)
        for ratio in sweep.ratios
    }
    by_ratio = ", ".join(f"{ratio:.0%}: {_nice(name)}" for ratio, name in best.items())
    lines.append(f"{sweep.model}: highest mean accuracy at {by_ratio}.")
    return lines


def _points(d: Interval) -> str:
    return f"{100 * d.value:+.1f} points [{100 * d.low:+.1f}, {100 * d.high:+.1f}]"


def _verdict(d: Interval) -> str:
    if d.low == d.high == 0:
        return "the same masks: alpha is 1 in every draw"
    if d.low > 1e-9:
        return "HIES better"
    return "HIS better" if d.high < -1e-9 else "no difference can be told"


def _nice(name: str) -> str:
    return {AUTO: "HIES (alpha chosen)", "hies": "HIES (alpha 0.5)"}.get(name, name)


def _sweep(name: str, sweep: PruneSweep, out: Path) -> str:
    pictures = _pictures(name, sweep, out)
    base = sweep.baseline
    chosen = ", ".join(n.removeprefix("hies(alpha=").rstrip(")") for n in sweep.score_names[AUTO])
    tables = [sweep.markdown(metric) for metric in METRICS]
    tables += [
        sweep.markdown(metric, digits=digits, percent=False) for metric, digits in OTHERS.items()
    ]
    return f"""## {sweep.model}

Unpruned: accuracy {base["cls/Acc"]:.1%}, NLL {base["cls/NLL"]:.3f}, ECE {base["cal/ECE"]:.1%},
OOD AUROC (MSP) {base["ood/mean/AUROC"]:.3f}. {sum(next(iter(sweep.scores.values())).shape)}
heads. `entropy` keeps the heads of low entropy (HIES with alpha 0); `his` is HIES with alpha 1.
Alpha chosen on held-out data in each draw: {chosen}.

![Accuracy and stability over pruning ratios]({pictures["curves"]})

{tables[0]}

{tables[1]}

Paired differences (same draws, same examples):

{_differences(sweep)}

![Accuracy and stability over alpha]({pictures["alpha"]})

![NLL, ECE and OOD AUROC over pruning ratios]({pictures["others"]})

<details><summary>NLL, ECE and OOD AUROC as tables</summary>

{tables[2]}

{tables[3]}

{tables[4]}

</details>

![Heat maps of the scores, mean over draws]({pictures["heat"]})

![Rank correlation between criteria]({pictures["ranks"]})"""


def _differences(sweep: PruneSweep) -> str:
    lines = [
        "| difference | figure | " + " | ".join(f"{r:.0%}" for r in sweep.ratios) + " |",
        "|---|---|" + "---|" * len(sweep.ratios),
    ]
    pairs = [(AUTO, other) for other in ("his", "entropy", "magnitude", "random")]
    pairs += [(one, "his") for one in ("hies", "taylor", "fisher") if one in sweep.criteria]
    for one, other in pairs:
        for metric in METRICS:
            cells = [_points(sweep.difference(one, other, r, metric)) for r in sweep.ratios]
            cells = [cell.replace(" points", "") for cell in cells]
            title = f"{_nice(one)} - {_nice(other)}"
            lines.append(f"| {title} | {metric} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _pictures(name: str, sweep: PruneSweep, out: Path) -> dict[str, str]:
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    for ax, metric in zip(axes, METRICS, strict=True):
        plot_prune_sweep(sweep, metric, criteria=[c for c in LINES if c in sweep.criteria], ax=ax)
    _one_legend(figure, axes)
    figure.suptitle(sweep.model, fontsize=11)
    found = {"curves": _save(figure, out, f"pruning-{name}-curves.png")}

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for ax, metric in zip(axes, METRICS, strict=True):
        plot_alpha(sweep, {0.0: "entropy", 0.5: "hies", 1.0: "his"}, metric=metric, ax=ax)
    _one_legend(figure, axes)
    figure.suptitle(sweep.model, fontsize=11)
    found["alpha"] = _save(figure, out, f"pruning-{name}-alpha.png")

    figure, axes = plt.subplots(1, 3, figsize=(14, 3.9), layout="constrained")
    for ax, metric in zip(axes, OTHERS, strict=True):
        plot_prune_sweep(sweep, metric, criteria=[c for c in LINES if c in sweep.criteria], ax=ax)
    _one_legend(figure, axes)
    figure.suptitle(sweep.model, fontsize=11)
    found["others"] = _save(figure, out, f"pruning-{name}-others.png")

    shown = ("magnitude", "his", "entropy", "hies")
    wide = max(sweep.scores["his"].shape) > 6
    grid = (2, 2) if wide else (1, 4)
    size = (11, 6) if wide else (11, 4.6)
    figure, axes = plt.subplots(*grid, figsize=size, layout="constrained")
    for ax, key in zip(axes.flat, shown, strict=True):
        low = " (low is kept)" if key in sweep.lower_is_kept else ""
        plot_head_scores(sweep.scores[key], title=key + low, ax=ax)
    found["heat"] = _save(figure, out, f"pruning-{name}-scores.png")

    scores = {key: table for key, table in sweep.scores.items() if key not in ("random", AUTO)}
    ax = plot_rank_correlation(scores, lower_is_kept=sweep.lower_is_kept)
    ax.set_title(sweep.model, fontsize=10)
    found["ranks"] = _save(ax.figure, out, f"pruning-{name}-ranks.png")
    return found


def _one_legend(figure: Any, axes: Sequence[Any]) -> None:
    """Put one legend below all axes, where it hides nothing."""
    handles, labels = axes[0].get_legend_handles_labels()
    for ax in axes:
        ax.get_legend().remove()
    names = [_nice(label) for label in labels]
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)


def _save(figure: Any, out: Path, name: str) -> str:
    figure.savefig(out / name, dpi=130)
    plt.close(figure)
    return name


def _proposition(gaps: dict[str, Any], out: Path) -> str:
    parts = [
        """## Proposition 1, measured

Does pruning hurt shifted data more than clean data? The gap is DeltaL = L_shifted - L_clean; d
zeroes the pruned heads' columns of W_O. *Change* is the gap after minus before (± 1.96 standard
errors of paired differences) = gradient term + curvature term + remainder, where the gradient
term is (grad L_shifted - grad L_clean) . d and the curvature term d'(H_shifted - H_clean)d / 2,
both exact. Premises: (1) grad L_clean . d is within two standard errors of 0, (2) grad L_shifted
. d >= 0,
(3) d'(H_shifted - H_clean)d > 0."""
    ]
    for name, record in gaps.items():
        ax = plot_shift_gaps(record["gaps"])
        ax.set_title(record["model"], fontsize=10)
        picture = _save(ax.figure, out, f"pruning-{name}-shift.png")
        count = record["gaps"][0]["clean"]["examples"]
        parts.append(
            f"### {record['model']} ({count} examples, severity {record['severity']})\n\n"
            f"![Gap before and after pruning]({picture})\n\n{_gap_table(record['gaps'])}"
        )
    parts.append(_gap_words(gaps))
    return "\n\n".join(parts)


def _gap_table(gaps: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| shift | pruned by | L_clean before, after | L_shifted before, after | gap before | "
        "gap after | change | gradient | curvature | remainder | premises 1, 2, 3 | gap grows |",
        "|" + "---|" * 12,
    ]
    for g in gaps:
        premises = ("stationary", "shifted_gradient_not_negative", "curvature_grows")
        marks = ", ".join("yes" if g[key] else "no" for key in premises)
        losses = [f"{g[s]['before']:.3f}, {g[s]['after']:.3f}" for s in ("clean", "shifted")]
        lines.append(
            f"| {g['shift'].replace('_', ' ')} | {g['criterion']} {g['ratio']:.0%} | "
            + " | ".join(losses)
            + f" | {g['gap_before']:+.3f} | {g['gap_after']:+.3f} | {g['gap_change']:+.3f} ± "
            f"{1.96 * g['gap_change_error']:.3f} | {g['gradient_term']:+.3f} | "
            f"{g['curvature_term']:+.3f} | {g['remainder']:+.3f} | {marks} | "
            f"{'yes' if g['conclusion'] else 'no'} |"
        )
    return "\n".join(lines)


def _gap_words(gaps: dict[str, Any]) -> str:
    every = [gap for record in gaps.values() for gap in record["gaps"]]
    if not every:
        return "Not measured yet."
    premises = ("stationary", "shifted_gradient_not_negative", "curvature_grows")
    counts = [sum(gap[key] for gap in every) for key in premises]
    grows = sum(gap["gap_change"] > 1.96 * gap["gap_change_error"] for gap in every)
    shrinks = sum(gap["gap_change"] < -1.96 * gap["gap_change_error"] for gap in every)
    full = [gap for gap in every if all(gap[key] for key in premises)]
    kept = sum(gap["conclusion"] for gap in full)
    second = sum(abs(gap["remainder"]) > abs(gap["gap_change"] - gap["remainder"]) for gap in every)
    return (
        f"Of {len(every)} cases the first premise holds in {counts[0]}, the second in "
        f"{counts[1]}, the third in {counts[2]}, all three in {len(full)}"
        + (f" (where the gap grows in {kept})" if full else "")
        + f". The gap grows beyond its interval in {grows} cases and shrinks beyond it in "
        f"{shrinks}; in {second} the remainder is larger than what first and second order say, so "
        "that pruning this many heads is not a small step."
    )
