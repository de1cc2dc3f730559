"""`demo`: every step on embedded data, in a few minutes, without downloads."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options
from ..show import print_json, results_table, say, write_config, write_text


def command(
    output: options.Output = Path("hydra-demo"),
    epochs: Annotated[int, typer.Option(min=1, help="Of training, for each model.")] = 25,
    members: Annotated[int, typer.Option(min=1, help="Of the Hydra ensemble.")] = 3,
    deep: Annotated[int, typer.Option(min=1, help="Models of the Deep Ensemble.")] = 3,
    max_cost: Annotated[
        float, typer.Option(help="Bound on multiply-adds relative to the single model.")
    ] = 1.07,
    bootstrap: Annotated[int, typer.Option(min=0, help="Draws for 95 % intervals.")] = 200,
    seed: options.Seed = 0,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Train a small ViT on digits, build an ensemble of it, compare and report.

    Training checkpoints and results are kept in OUTPUT: the same command goes on after a stop.
    """
    import torch

    from ...builder import build
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
    say(f"1/5 Training {deep} small Vision Transformers on the digits", json=json)
    models = _train(data, output, epochs=epochs, seeds=range(seed, seed + deep), quiet=json)
    single = models[0]
    names = dict(enumerate(data.class_names))

    say(
        f"2/5 Building a Hydra ensemble of {members} members from the first, no training", json=json
    )
    ensemble = build(
        single,
        data.validation,
        ood={"scribbles": data.outliers},
        members=members,
        max_cost=max_cost,
        score="msp",
        seed=seed,
        folder=output / "state",
        progress=not json,
    )
    ensemble.id2label = names
    ensemble.transform = tiny_vit_transform(single.shape)
    ensemble.save_pretrained(output / "ensemble")
    host = fuse(single, [HeadMask.full(single)])
    host.id2label, host.transform = names, ensemble.transform
    host.save_pretrained(output / "single")
    say(str(ensemble), json=json)

    say("3/5 Teaching its branch to be unsure about outliers made of the digits", json=json)
    trained = _teach(ensemble, data, output, seed=seed, quiet=json)
    trained.id2label, trained.transform = names, ensemble.transform
    trained.save_pretrained(output / "trained")

    say("4/5 Evaluating on test digits and five kinds of outliers", json=json)
    from ...baselines.member_stack import MemberStack

    rivals = {
        "Hydra": ensemble,
        "Hydra, trained": trained,
        "single": single,
        f"Deep Ensemble of {deep}": MemberStack(models),
    }
    batch = next(iter(data.test))
    costs = {name: cost_of(rivals[name], batch) or 0.0 for name in ("Hydra", "Hydra, trained")}
    costs |= {"single": 1.0, f"Deep Ensemble of {deep}": float(deep)}
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
        found.save(output / f"results-{name.lower().replace(', ', '-').replace(' ', '-')}.json")
        results.append(found)
    write_text(output / "costs.json", _dump(costs))

    say("5/5 Writing the report", json=json)
    shape = Loaded(ensemble, "Hydra", class_names=data.class_names)
    shown = extreme_examples(shape, results[0], data.test, data.ood)
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
        typer.echo(
            f"{len(data.test.indices)} test digits, one seed: a point of difference is chance; "
            "the report has intervals."
        )
    say(f"Report: {page}   Ensemble: {output / 'ensemble'}", json=json)


def _train(data: Any, output: Path, *, epochs: int, seeds: Any, quiet: bool) -> list[Any]:
    """Train one model for each seed, resuming from checkpoints in the output folder."""
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


def _teach(ensemble: Any, data: Any, output: Path, *, seed: int, quiet: bool) -> Any:
    """Train the branch with proxies as outliers, and fit a temperature on validation data."""
    from ...data.running import collect_logits
    from ...training import finetune_branch
    from ...uncertainty import fit_temperature

    if len(ensemble.plan.ends) == 1:  # one member, or equal ones: nothing branches
        return ensemble
    trained: Any = finetune_branch(
        ensemble,
        list(data.train),
        outliers="auto",
        outlier_weight=0.1,
        distill=0.5,
        epochs=5,
        learning_rate=1e-3,
        seed=seed,
        folder=output / "training" / "branch",
        progress=not quiet,
    ).model
    logits, labels = collect_logits(trained, data.validation)[:2]
    assert labels is not None
    trained.temperature = fit_temperature(logits, labels)
    return trained


def _dump(value: Any) -> str:
    import json

    return json.dumps(value, indent=2)
