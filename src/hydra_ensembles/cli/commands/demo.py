"""`demo`: the whole story on embedded digits, in about two minutes, without network."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options
from ..show import print_json, results_table, say, write_config, write_text

SURE = 0.9
"""Confidence at which a person would believe an answer."""


def command(
    output: options.Output = Path("hydra-demo"),
    epochs: Annotated[int, typer.Option(min=1, help="Of training, for each model.")] = 25,
    members: Annotated[int, typer.Option(min=1, help="Members, each with a teacher.")] = 3,
    max_cost: Annotated[
        float, typer.Option(help="Bound on multiply-adds relative to the single model.")
    ] = 1.07,
    bootstrap: Annotated[int, typer.Option(min=0, help="Draws for 95 % intervals.")] = 200,
    seed: options.Seed = 0,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Train small ViTs on digits, distil them into one model, compare and report.

    Training checkpoints and results are kept in OUTPUT: the same command goes on after a stop.
    """
    import torch

    from ...baselines.member_stack import MemberStack
    from ...data import digits
    from ...evaluation import evaluate
    from ...fusion.fusing import fuse
    from ...heads.masks import HeadMask
    from ..gather import cost_of, extreme_examples
    from ..loading import Loaded, tiny_vit_transform
    from .report import make_report

    torch.set_num_threads(1)  # the model is too small to gain from more, and busy machines lose
    output.mkdir(parents=True, exist_ok=True)
    resolved = write_config(output)
    data = digits(16, seed=seed)
    names = dict(enumerate(data.class_names))
    say(f"1/4 Training {members} small Vision Transformers on the digits", json=json)
    teachers = _train(data, output, epochs=epochs, seeds=range(seed, seed + members), quiet=json)
    single = teachers[0]
    for line in _too_sure(single, data.ood):
        say(line, json=json)

    say(f"2/4 Distilling them into one model of {members} members, one teacher each", json=json)
    ensemble = _distill(single, teachers, data, output, max_cost=max_cost, seed=seed, quiet=json)
    host = fuse(single, [HeadMask.full(single)])
    for name, model in {"ensemble": ensemble, "single": host}.items():
        model.id2label = names
        model.transform = tiny_vit_transform(single.shape)
        model.save_pretrained(output / name)
    say(str(ensemble), json=json)

    say(f"3/4 Evaluating on test digits and {len(data.ood)} kinds of outliers", json=json)
    deep = "Deep Ensemble"
    rivals = {
        "single": _scaled(single, data.validation),
        "Hydra": ensemble,
        deep: _scaled(MemberStack(teachers), data.validation),
    }
    costs = {"single": 1.0, "Hydra": cost_of(ensemble, next(iter(data.test))) or 0.0}
    costs[deep] = float(members)
    results = []
    for name, model in rivals.items():
        found = evaluate(
            model,
            data.test,
            ood=data.ood,
            bootstrap=bootstrap,
            progress=not json,
            name=name,
            seed=seed,
        )
        found.save(output / f"results-{name.lower().replace(' ', '-')}.json")
        results.append(found)
    write_text(output / "costs.json", _dump(costs))

    say("4/4 Writing the report", json=json)
    shape = Loaded(ensemble, "Hydra", class_names=data.class_names)
    shown = extreme_examples(shape, results[1], data.test, data.ood)
    write_text(output / "examples.json", _dump([example.to_dict() for example in shown]))
    page = make_report(
        output / "report.html",
        results,
        model=ensemble,
        costs=costs,
        examples=shown,
        settings=resolved,
        command=shlex.join(["hydra-ensembles", *sys.argv[1:]]),
        title="Hydra ensemble of a small ViT on digits",
    )
    if json:
        print_json({r.name: {**r.figures, "cost": costs[r.name]} for r in results})
    else:
        results_table(results, costs)
        for line in _verdict(*results):
            typer.echo(line)
        typer.echo(
            f"{len(data.test.indices)} test digits, one seed: the report has intervals; "
            "try --seed 1, 2, 3 and 4 as well."
        )
    say(f"Report: {page}   Ensemble: {output / 'ensemble'}", json=json)


def _train(data: Any, output: Path, *, epochs: int, seeds: Any, quiet: bool) -> list[Any]:
    """Train one model per seed, resuming from checkpoints in the output folder."""
    from ...hosts.tiny_vit import TinyViT
    from ...training import finetune

    batches = list(data.train)
    models = []
    for seed in seeds:
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


def _too_sure(model: Any, ood: dict[str, Any]) -> list[str]:
    """Say how often one model is sure about things that are no digits."""
    from ...data.running import collect_logits
    from ...uncertainty import mean_probability

    lines = ["    What one model does with things that are no digits:"]
    for name, data in ood.items():
        confidence = mean_probability(collect_logits(model, data)[0]).amax(-1)
        share = float((confidence > SURE).double().mean())
        lines.append(f"    {name:>12}: {share:4.0%} answered as a digit with over {SURE:.0%}")
    return lines


def _scaled(model: Any, validation: Any) -> Any:
    """Give a rival a temperature from the same validation data that calibrates the ensemble."""
    from torch import nn

    from ...data.running import collect_logits, member_logits_of
    from ...uncertainty import fit_temperature

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


def _distill(
    single: Any,
    teachers: list[Any],
    data: Any,
    output: Path,
    *,
    max_cost: float,
    seed: int,
    quiet: bool,
) -> Any:
    """Teach one member per teacher; the whole small model is trained, not only its branch."""
    from ...training import distill

    return distill(
        single,
        teachers,
        list(data.train),
        members=len(teachers),
        max_cost=max_cost,
        validation=data.validation,
        trunk_rate=1.0,
        epochs=25,
        learning_rate=2e-3,
        views=2,
        seed=seed,
        folder=output / "training" / "distilled",
        progress=not quiet,
    )


COLUMNS = {
    "cls/Acc": ("accuracy", 1),
    "cls/NLL": ("NLL", -1),
    "cal/ECE": ("ECE", -1),
    "fail/AUROC": ("failure AUROC", 1),
    "sc/AURC": ("AURC", -1),
}
"""What the verdict compares: figure, its name, and 1 where higher is better."""


def _verdict(single: Any, hydra: Any, deep: Any) -> list[str]:
    """Say in words where the ensemble is ahead and where it is behind."""
    hydra_detects = hydra.figures.get("ood/mean/novelty/AUROC", hydra["ood/mean/AUROC"])
    lines = []
    for other in (single, deep):
        better: list[str] = []
        worse: list[str] = []
        for key, (name, sign) in COLUMNS.items():
            gap = sign * (hydra[key] - other[key])
            if gap:
                (better if gap > 0 else worse).append(name)
        gap = hydra_detects - other["ood/mean/AUROC"]
        (better if gap > 0 else worse).append("outlier detection")
        lines.append(
            f"Hydra against {other.name}: better in {', '.join(better) or 'nothing'}"
            + (f"; behind in {', '.join(worse)}." if worse else ".")
        )
    return lines


def _dump(value: Any) -> str:
    import json

    return json.dumps(value, indent=2)
