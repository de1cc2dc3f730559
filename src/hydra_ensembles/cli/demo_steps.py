"""The steps of the demo: small models, one that they are distilled into, figures of all."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer

from .._records import check_same_run
from .output import dumps, print_json, results_table, say, step, write_text

SURE = 0.9
"""Confidence at which a person would believe an answer."""

PARTS = (0.4, 0.2, 0.4)
"""Shares of the digits that train, validate and test: 719 test digits tell models apart better than
the usual 359."""

CORRUPTIONS, SEVERITY = ("gaussian_noise", "gaussian_blur", "contrast"), 1
"""Mild ones: digits that a person still reads without effort."""

SINGLE, WARM, KNOWS, HYDRA, DEEP = ROWS = (
    "single",
    "single + temperature",
    "single + novelty",
    "Hydra",
    "Deep Ensemble",
)
DIGITS = {
    "cls/Acc": "Acc",
    "cls/NLL": "NLL",
    "cal/aECE": "aECE",
    "sc/AURC": "AURC",
    "fail/AUROC": "wrong\nAUROC",
    "shift/mean/cls/NLL": "corrupted\nNLL",
}
"""The columns about digits. Calibration has bins of equally many digits: of bins of equal width
all but the last hold a handful each, and the figure is mostly noise."""
OUTLIERS = {
    "ood/mean/AUROC": "by MSP",
    "ood/mean/mutual-information/AUROC": "by members'\ndisagreement",
    "ood/mean/novelty/AUROC": "by\nnovelty",
    "ood/letters/AUROC": "letters\nby MSP",
    "ood/letters/novelty/AUROC": "letters by\nnovelty",
}
"""The columns about outliers, each by one score for all models."""

LEGEND = (
    "Each single adds to the one above it; all but the first have a temperature. Cost\n"
    "counts multiply-adds: fused models compute only the token that is read. NLL is\n"
    "in nats, all else in %. aECE: gap between confidence and accuracy. AURC: error\n"
    "rate, averaged over how much is answered. Wrong AUROC: are wrong answers less\n"
    "sure? Corrupted: mild noise, blur and low contrast. AUROC 50 is chance.\n"
)

COLUMNS = {
    "cls/Acc": "accuracy",
    "cls/NLL": "NLL",
    "cal/aECE": "calibration",
    "sc/AURC": "AURC",
    "fail/AUROC": "wrong AUROC",
    "shift/mean/cls/NLL": "corrupted NLL",
    "ood/mean/AUROC": "outliers by MSP",
    "ood/mean/mutual-information/AUROC": "outliers by disagreement",
    "ood/mean/novelty/AUROC": "outliers by novelty",
    "ood/letters/novelty/AUROC": "letters by novelty",
}
"""What the verdicts compare, like with like: the same score for both models."""


@dataclass(frozen=True)
class DemoRun:
    """What the demo makes.

    Attributes:
        data: The digits.
        ensemble: The model that the teachers were distilled into.
        knows: The first teacher, with novelty and a temperature.
        shares: How often the first teacher is sure about images that are not digits, by kind.
        results: Of the models in `ROWS`.
        costs: Their multiply-adds relative to a single model.
    """

    data: Any
    ensemble: Any
    knows: Any
    shares: dict[str, float]
    results: list[Any]
    costs: dict[str, float]


def run(
    output: Path,
    *,
    epochs: int,
    members: int,
    max_cost: float,
    bootstrap: int | None,
    seed: int,
    quiet: bool,
) -> DemoRun:
    """Train small models, distil them into one, evaluate all; resume from what is in the folder."""
    from ..data import digits

    data = digits(16, parts=PARTS, seed=seed)
    step(f"1/4 Training {members} small Vision Transformers on the digits", json=quiet)
    teachers = [
        train(data, output, epochs=epochs, seed=number, quiet=quiet)
        for number in range(seed, seed + members)
    ]
    shares = too_sure(teachers[0], data.ood)
    say(
        f"    Share of non-digit images that one model classifies with over {SURE:.0%} confidence:",
        json=quiet,
    )
    for name, share in shares.items():
        say(f"    {share:8.0%} of {name}", json=quiet)
    step(f"2/4 Distilling them into one model of {members} members, one teacher each", json=quiet)
    ensemble = distilled(
        teachers, data, output, epochs=epochs, max_cost=max_cost, seed=seed, quiet=quiet
    )
    say(str(ensemble), json=quiet)
    knows = with_novelty(teachers[0], data.validation)
    step(f"3/4 Evaluating on test digits and {len(data.ood)} kinds of outliers", json=quiet)
    results, costs = evaluated(
        ensemble, knows, teachers, data, output, bootstrap=bootstrap, seed=seed, quiet=quiet
    )
    return DemoRun(data, ensemble, knows, shares, results, costs)


def train(data: Any, output: Path, *, epochs: int, seed: int, quiet: bool) -> Any:
    """Train one model, resuming from its checkpoint in the output folder."""
    from ..hosts.tiny_vit import TinyViT
    from ..training import Settings, finetune

    step(f"    model of seed {seed}", json=quiet)
    trained = finetune(
        TinyViT(seed=seed),
        list(data.train),
        settings=Settings(weight_decay=0.05),
        epochs=epochs,
        learning_rate=2e-3,
        seed=seed,
        folder=output / "training" / f"seed-{seed}",
        progress=not quiet,
    )
    return trained[0].model.eval()


def too_sure(model: Any, ood: dict[str, Any]) -> dict[str, float]:
    """Return how often one model is sure about images that are not digits, by kind."""
    from ..data.model_runs import collect_logits
    from ..uncertainty import mean_probability

    shares = {}
    for name, data in ood.items():
        confidence = mean_probability(collect_logits(model, data)[0]).amax(-1)
        shares[name] = float((confidence > SURE).double().mean())
    return shares


def answer(shares: dict[str, float], knows: Any, hydra: Any) -> list[str]:
    """Set what novelty calls new, without and with members, beside what one model was sure of."""
    heads = f"{'':<14}{'one model is':>16}{'called new by':>20}{'called new':>14}"
    lines = [heads, f"{'':<14}{f'over {SURE:.0%} sure':>16}{KNOWS:>20}{'by Hydra':>14}"]
    for name, share in shares.items():
        key = f"ood/{name}/novelty/Caught_5"
        lines.append(f"{name:<14}{share:>16.0%}{knows[key]:>20.0%}{hydra[key]:>14.0%}")
    key = "novelty/Alarms_5"
    alarms = f"{'test digits':<14}{'–':>16}{knows[key]:>20.0%}{hydra[key]:>14.0%}"
    return [*lines, f"{alarms}   (5% expected)", ""]


def with_novelty(model: Any, validation: Any) -> Any:
    """Fuse one model with all its heads and fit novelty: what novelty needs, no ensemble."""
    from ..fusion.fuse_members import fuse
    from ..heads.head_mask import HeadMask

    return fuse(model, [HeadMask.full(model)]).fit_novelty_(validation, progress=False)


def distilled(
    teachers: list[Any],
    data: Any,
    output: Path,
    *,
    epochs: int,
    max_cost: float,
    seed: int,
    quiet: bool,
) -> Any:
    """Distil one teacher per member; the whole small model is trained, not only its branch.

    `epochs` are those of a teacher; four views of each digit want nearly twice as many.
    """
    from ..training import DISTILL, distill

    return distill(
        teachers[0],
        teachers,
        list(data.train),
        members=len(teachers),
        max_cost=max_cost,
        validation=data.validation,
        settings=replace(DISTILL, trunk_rate=1.0),
        epochs=round(1.8 * epochs),
        learning_rate=2e-3,
        seed=seed,
        folder=output / "training" / "distilled",
        progress=not quiet,
    )


def evaluated(
    ensemble: Any,
    knows: Any,
    teachers: list[Any],
    data: Any,
    output: Path,
    *,
    bootstrap: int | None,
    seed: int,
    quiet: bool,
) -> tuple[list[Any], dict[str, float]]:
    """Evaluate single model, ensemble and Deep Ensemble; save and return results and costs.

    Args:
        ensemble: The ensemble.
        knows: The single model `with_novelty`; it gets its temperature here.
        teachers: The single models, the first one being the single.
        data, output, bootstrap, seed, quiet: See `run`.
    """
    from ..data import corrupted
    from ..evaluation import evaluate
    from .class_names import Calibrated
    from .report_data import cost_of

    warm = Calibrated(teachers[:1], data.validation)
    knows.temperature = warm.temperature
    apart = [with_novelty(teacher, data.validation) for teacher in teachers]
    models = (
        Calibrated(teachers[:1]),
        warm,
        knows,
        ensemble,
        Calibrated(apart, data.validation),
    )
    batch = next(iter(data.test))
    fused = cost_of(knows, batch) or 0.0
    prices = (1.0, 1.0, fused, cost_of(ensemble, batch) or 0.0, fused * len(teachers))
    shifts = {
        name: corrupted(data.test, name, severity=SEVERITY, seed=seed, mean=data.mean, std=data.std)
        for name in CORRUPTIONS
    }
    results = []
    for name, model in zip(ROWS, models, strict=True):
        found = evaluate(
            model,
            data.test,
            ood=data.ood,
            shifts=shifts,
            score=["msp", "mutual-information"] if name in (HYDRA, DEEP) else "msp",
            bootstrap=bootstrap,
            progress=not quiet,
            name=name,
            seed=seed,
        )
        found.save(output / results_file(name))
        results.append(found)
    return results, dict(zip(ROWS, prices, strict=True))


def results_file(name: str) -> str:
    """Return the name of the file that keeps a model's results."""
    return f"results-{name.lower().replace(' + ', '-').replace(' ', '-')}.json"


def compared(hydra: Any, other: Any) -> dict[str, str]:
    """Return the verdict on the ensemble by column, from paired intervals, like with like.

    Columns of which only one of the two has the figure are left out.
    """
    from ..evaluation import compare

    settings = hydra.settings
    found = compare(hydra, other, count=settings["bootstrap"] or None, seed=settings["seed"])
    return {name: found[key].verdict for key, name in COLUMNS.items() if key in found}


def verdicts(results: Sequence[Any]) -> dict[str, dict[str, str]]:
    """Return the ensemble's verdicts by rival and column."""
    hydra = results[ROWS.index(HYDRA)]
    return {other.name: compared(hydra, other) for other in results if other is not hydra}


def tables(results: Sequence[Any], costs: Mapping[str, float]) -> None:
    """Print the columns about digits, those about outliers, and what they mean."""
    results_table(results, costs, figures=DIGITS)
    typer.echo("Outliers, AUROC:")
    results_table(results, figures=OUTLIERS)
    typer.echo(LEGEND)


def verdict_table(title: str, rivals: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Set verdicts side by side, one column per rival."""
    # a name takes two lines: "single" above "+ novelty", "Deep" above "Ensemble"
    above = [name.split()[0] for name in rivals]
    below = [" ".join(name.split()[1:]) for name in rivals]
    lines = [f"{title:<24}" + "".join(f"{word:>14}" for word in above)]
    lines.append(f"{'':<24}" + "".join(f"{word:>14}" for word in below))
    for column in COLUMNS.values():
        cells = [rival.get(column, "–") for rival in rivals.values()]
        lines.append(f"{column:<24}" + "".join(f"{cell:>14}" for cell in cells))
    return [*lines, ""]


def conclusion(results: Sequence[Any], costs: Mapping[str, float], on: str) -> list[str]:
    """Say what novelty gives, what members give, and what neither does."""
    _, warm, knows, hydra, deep = results
    by_rival = verdicts(results)

    def listed(rival: str, verdict: str) -> str:
        names = [name for name, found in by_rival[rival].items() if found == verdict]
        return ", ".join(names) or f"nothing (inconclusive on {on})"

    novelty, msp = knows["ood/mean/novelty/AUROC"], warm["ood/mean/AUROC"]
    passed = 1 - max(model["ood/letters/novelty/Caught_5"] for model in (knows, hydra))
    sentences = (
        f"Novelty needs no ensemble: one model finds outliers at AUROC {100 * novelty:.1f} by "
        f"novelty, {100 * msp:.1f} by MSP.",
        f"Members, each with a teacher, improve on that in: {listed(KNOWS, 'better')}. A single "
        "student of the same teachers is level in NLL on clean digits (docs/results/ways.md).",
        f"Neither finds all letters: {passed:.0%} of them pass as digits. {deep.name} at "
        f"{costs[DEEP]:.2f}x is better than Hydra in: {listed(DEEP, 'worse')}.",
    )
    return [line for sentence in sentences for line in textwrap.wrap(sentence, 80)]


# The demo's table on several seeds: one folder per seed, finished ones are not run again.
def numbers(text: str) -> list[int]:
    """Read seeds: `0,1,2`, or `0-4`."""
    found: list[int] = []
    try:
        for part in text.split(","):
            first, dash, last = part.strip().partition("-")
            found += range(int(first), int(last) + 1) if dash else [int(first)]
    except ValueError:
        found = []
    if not found:
        raise typer.BadParameter(f"--seeds {text}: expected numbers such as 0,1,2 or 0-4.")
    return list(dict.fromkeys(found))


def run_seeds(seeds: Sequence[int], output: Path, *, quiet: bool, **settings: Any) -> None:
    """Run every seed, write `seeds.json`, print the mean table and how often verdicts fall."""
    from ..evaluation import Results

    runs: dict[int, tuple[list[Any], dict[str, float]]] = {}
    for seed in seeds:
        step(f"Seed {seed}", json=quiet)
        folder, asked = output / f"seed-{seed}", {"seed": seed, **settings}
        files, done = [folder / results_file(name) for name in ROWS], folder / "finished.json"
        if done.is_file() and all(file.is_file() for file in files):
            record = json.loads(done.read_bytes())
            check_same_run(done, record["settings"], asked)
            runs[seed] = [Results.load(file) for file in files], record["costs"]
        else:
            found = run(folder, **asked, bootstrap=None, quiet=quiet)
            runs[seed] = found.results, found.costs
            write_text(done, dumps({"settings": asked, "costs": found.costs}) + "\n")
        write_text(output / "seeds.json", dumps(summary(runs)) + "\n")
    if quiet:
        print_json(summary(runs))
        return
    _show(runs)
    say(f"All figures of all seeds: {output / 'seeds.json'}")


def summary(runs: dict[int, tuple[list[Any], Any]]) -> dict[str, Any]:
    """Return every figure by model and seed, and the verdicts by rival, column and seed."""
    figures: dict[str, dict[str, Any]] = {}
    told: dict[str, dict[str, dict[str, str]]] = {}
    for seed, (results, costs) in runs.items():
        for result in results:
            row = {**result.figures, "cost": costs[result.name]}
            figures.setdefault(result.name, {})[str(seed)] = row
        for rival, columns in verdicts(results).items():
            for column, verdict in columns.items():
                told.setdefault(rival, {}).setdefault(column, {})[str(seed)] = verdict
    return {"seeds": list(runs), "verdicts": told, "figures": figures}


def _show(runs: dict[int, tuple[list[Any], Any]]) -> None:
    from ..evaluation import Results

    several = [results for results, _ in runs.values()]
    means = []
    for same in zip(*several, strict=True):
        keys = set.intersection(*(set(result.figures) for result in same))
        figures = {key: sum(result[key] for result in same) / len(same) for key in keys}
        means.append(Results(name=same[0].name, figures=figures, settings=same[0].settings))
    costs = {
        name: sum(found[name] for _, found in runs.values()) / len(runs)
        for name in next(iter(runs.values()))[1]
    }
    typer.echo(f"Mean of {len(runs)} seed{'s' * (len(runs) > 1)}:")
    tables(means, costs)
    counts: dict[str, dict[str, str]] = {}
    for rival, columns in summary(runs)["verdicts"].items():
        for column, by_seed in columns.items():
            better, worse = (list(by_seed.values()).count(word) for word in ("better", "worse"))
            counts.setdefault(rival, {})[column] = f"{better} / {worse}"
    for line in verdict_table("Hydra better / worse vs", counts):
        typer.echo(line)
    typer.echo(
        f"Seeds (of {len(runs)}) on which the paired 95 % interval shows Hydra better / worse;\n"
        "the remaining seeds are inconclusive."
    )
