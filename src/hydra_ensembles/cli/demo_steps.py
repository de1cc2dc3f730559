"""The steps of the demo: three small models, one that they teach, and the figures of all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .show import FIGURES, step

SURE = 0.9
"""Confidence at which a person would believe an answer."""

PARTS = (0.4, 0.2, 0.4)
"""Shares of the digits that train, validate and test: 719 test digits tell models apart better than
the usual 359."""

DEEP = "Deep Ensemble"
SHOWN = {
    "cal/aECE" if key == "cal/ECE" else key: "aECE" if key == "cal/ECE" else head
    for key, head in FIGURES.items()
}
"""The table's columns. Calibration is told by bins of equally many digits: of bins of equal width
all but the last hold a handful each, and the figure is mostly noise."""

LEGEND = (
    "Cost counts multiply-adds; NLL is in nats, all else in %. aECE: gap between confidence and\n"
    "accuracy. AURC: error rate, averaged over how much is answered. AUROC: does uncertainty (or\n"
    "novelty) rank wrong answers, or things that are no digits (OOD), above the rest? 50: chance.\n"
)

COLUMNS = {
    "cls/Acc": ("accuracy", 1),
    "cls/NLL": ("NLL", -1),
    "cal/aECE": ("calibration", -1),
    "fail/AUROC": ("failure AUROC", 1),
    "sc/AURC": ("AURC", -1),
}
"""What the verdict compares: figure, its name, and 1 where higher is better."""


def train(data: Any, output: Path, *, epochs: int, seeds: Any, quiet: bool) -> list[Any]:
    """Train one model per seed, resuming from checkpoints in the output folder."""
    from ..hosts.tiny_vit import TinyViT
    from ..training import finetune

    batches = list(data.train)
    models = []
    for number, seed in enumerate(seeds, start=1):
        step(f"    model {number} of {len(seeds)}", json=quiet)
        trained = finetune(
            TinyViT(seed=seed),
            batches,
            epochs=epochs,
            learning_rate=2e-3,
            weight_decay=0.05,
            seed=seed,
            folder=output / "training" / f"seed-{seed}",
            progress=not quiet,
        )
        models.append(trained[0].model.eval())
    return models


def too_sure(model: Any, ood: dict[str, Any]) -> dict[str, float]:
    """Return how often one model is sure about things that are no digits, by kind."""
    from ..data.running import collect_logits
    from ..uncertainty import mean_probability

    shares = {}
    for name, data in ood.items():
        confidence = mean_probability(collect_logits(model, data)[0]).amax(-1)
        shares[name] = float((confidence > SURE).double().mean())
    return shares


def problem(shares: dict[str, float]) -> list[str]:
    """Say what one model does with things that are no digits."""
    lines = [f"    Of things that are no digits, one model is over {SURE:.0%} sure that they are:"]
    return lines + [f"    {share:8.0%} of {name}" for name, share in shares.items()]


def answer(shares: dict[str, float], hydra: Any) -> list[str]:
    """Set what the ensemble calls new beside what one model was sure of."""
    lines = ["", f"No digits:      one model over {SURE:.0%} sure    Hydra calls them new"]
    for name, share in shares.items():
        lines.append(f"{name:<12} {share:18.0%} {hydra[f'ood/{name}/novelty/Caught_5']:24.0%}")
    return [*lines, f"test digits {'–':>19} {hydra['novelty/Alarms_5']:24.0%}   (5% expected)", ""]


def scaled(model: Any, validation: Any) -> Any:
    """Give a rival a temperature from the same validation data that calibrates the ensemble."""
    from torch import nn

    from ..data.running import collect_logits, member_logits_of
    from ..uncertainty import fit_temperature

    logits, labels = collect_logits(model, validation)
    assert labels is not None
    temperature = fit_temperature(logits, labels)

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return member_logits_of(self.model(*args, **kwargs)) / temperature

    return Scaled().eval()


def taught(
    single: Any,
    teachers: list[Any],
    data: Any,
    output: Path,
    *,
    epochs: int,
    max_cost: float,
    seed: int,
    quiet: bool,
) -> Any:
    """Teach one member per teacher; the whole small model is trained, not only its branch.

    `epochs` are those of a teacher; four views of each digit want nearly twice as many.
    """
    from ..training import distill

    return distill(
        single,
        teachers,
        list(data.train),
        members=len(teachers),
        max_cost=max_cost,
        validation=data.validation,
        trunk_rate=1.0,
        epochs=round(1.8 * epochs),
        learning_rate=2e-3,
        views=4,
        seed=seed,
        folder=output / "training" / "distilled",
        progress=not quiet,
    )


def evaluated(
    single: Any,
    ensemble: Any,
    teachers: list[Any],
    data: Any,
    output: Path,
    *,
    bootstrap: int,
    seed: int,
    quiet: bool,
) -> tuple[list[Any], dict[str, float]]:
    """Evaluate single model, ensemble and Deep Ensemble; save and return results and costs."""
    from ..baselines.member_stack import MemberStack
    from ..evaluation import evaluate
    from .gather import cost_of

    rivals = {
        "single": scaled(single, data.validation),
        "Hydra": ensemble,
        DEEP: scaled(MemberStack(teachers), data.validation),
    }
    costs = {"single": 1.0, "Hydra": cost_of(ensemble, next(iter(data.test))) or 0.0}
    costs[DEEP] = float(len(teachers))
    results = []
    for name, model in rivals.items():
        found = evaluate(
            model,
            data.test,
            ood=data.ood,
            bootstrap=bootstrap,
            progress=not quiet,
            name=name,
            seed=seed,
        )
        found.save(output / f"results-{name.lower().replace(' ', '-')}.json")
        results.append(found)
    return results, costs


def compared(hydra: Any, other: Any) -> dict[str, bool]:
    """Tell by column whether the ensemble is ahead; a tie is neither and left out."""
    gaps = {name: sign * (hydra[key] - other[key]) for key, (name, sign) in COLUMNS.items()}
    detects = hydra.figures.get("ood/mean/novelty/AUROC", hydra["ood/mean/AUROC"])
    gaps["outlier detection"] = detects - other["ood/mean/AUROC"]
    return {name: gap > 0 for name, gap in gaps.items() if gap}


def verdict(single: Any, hydra: Any, deep: Any) -> list[str]:
    """Say in words where the ensemble is ahead and where it is behind."""
    lines = []
    for other in (single, deep):
        ahead = compared(hydra, other)
        better = [name for name, wins in ahead.items() if wins]
        worse = [name for name, wins in ahead.items() if not wins]
        lines.append(
            f"Hydra against {other.name}: better in {', '.join(better) or 'nothing'}"
            + (f"; behind in {', '.join(worse)}." if worse else ".")
        )
    return lines
