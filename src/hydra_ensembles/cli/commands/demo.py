"""`demo`: the whole story on embedded digits, in about two minutes, without network."""

from __future__ import annotations

import json as plain
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from .. import demo_steps as steps
from .. import options
from ..output import print_json, results_table, say, step, write_config, write_text


def command(
    output: options.Output = Path("hydra-demo"),
    epochs: Annotated[int, typer.Option(min=1, help="Of training, for each model.")] = 25,
    members: Annotated[int, typer.Option(min=1, help="Members, each with a teacher.")] = 3,
    max_cost: Annotated[
        float, typer.Option(help="Bound on multiply-adds relative to the single model.")
    ] = 1.07,
    bootstrap: Annotated[int, typer.Option(min=1, help="Draws for 95 % intervals.")] = 1000,
    seed: options.Seed = 0,
    seeds: Annotated[
        str | None,
        typer.Option(help="Only the table, on several seeds: 0,1,2 or 0-4. Resumable."),
    ] = None,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Train small ViTs on digits, distil them into one model, compare and report.

    Training checkpoints and results are kept in OUTPUT: the same command goes on after a stop.
    """
    import torch

    from ...data import digits
    from ..models import Loaded, tiny_vit_transform
    from ..report_data import extreme_examples
    from .report import make_report

    torch.set_num_threads(1)  # the model is too small to gain from more, and busy machines lose
    output.mkdir(parents=True, exist_ok=True)
    resolved = write_config(output)
    if seeds is not None:
        from ..demo_steps import numbers, run_seeds

        run_seeds(
            numbers(seeds),
            output,
            epochs=epochs,
            members=members,
            max_cost=max_cost,
            as_json=json,
        )
        return
    data = digits(16, parts=steps.PARTS, seed=seed)
    names = dict(enumerate(data.class_names))
    step(f"1/4 Training {members} small Vision Transformers on the digits", json=json)
    several = range(seed, seed + members)
    teachers = steps.train(data, output, epochs=epochs, seeds=several, quiet=json)
    single = teachers[0]
    shares = steps.too_sure(single, data.ood)
    for line in steps.problem(shares):
        say(line, json=json)

    step(f"2/4 Distilling them into one model of {members} members, one teacher each", json=json)
    ensemble = steps.taught(
        single,
        teachers,
        data,
        output,
        epochs=epochs,
        max_cost=max_cost,
        seed=seed,
        quiet=json,
    )
    say(str(ensemble), json=json)
    knows = steps.with_novelty(single, data.validation)

    step(f"3/4 Evaluating on test digits and {len(data.ood)} kinds of outliers", json=json)
    results, costs = steps.evaluated(
        ensemble, knows, teachers, data, output, bootstrap=bootstrap, seed=seed, quiet=json
    )
    for name, model in {"ensemble": ensemble, "single": knows}.items():
        model.id2label = names
        model.transform = tiny_vit_transform(single.shape)
        model.save_pretrained(output / name)
    write_text(output / "costs.json", plain.dumps(costs, indent=2))

    step("4/4 Writing the report", json=json)
    shape = Loaded(ensemble, "Hydra", class_names=data.class_names)
    hydra = results[steps.ROWS.index(steps.HYDRA)]
    shown = extreme_examples(shape, hydra, data.test, data.ood)
    write_text(
        output / "examples.json", plain.dumps([example.to_dict() for example in shown], indent=2)
    )
    page = make_report(
        output / "report.html",
        [hydra, *(result for result in results if result is not hydra)],
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
        on = f"{len(data.test.indices)} digits"
        results_table(results, costs, figures=steps.DIGITS)
        typer.echo("Outliers, AUROC:")
        results_table(results, figures=steps.OUTLIERS)
        typer.echo(steps.LEGEND)
        told = {
            rival: {column: "?" if v == "cannot be told" else v for column, v in columns.items()}
            for rival, columns in steps.verdicts(results).items()
        }
        for line in (
            *steps.verdict_table("Hydra is, compared with", told),
            f"By paired 95 % intervals; ?: cannot be told on {on}.",
            "",
            *steps.answer(shares, results[steps.ROWS.index(steps.KNOWS)], hydra),
            *steps.conclusion(results, costs, on),
        ):
            typer.echo(line)
        typer.echo("One seed: the report has intervals; --seeds 0-4 shows the tables on five.")
    say(f"Report: {page}   Ensemble: {output / 'ensemble'}", json=json)
    say("Next, your own model: hydra-ensembles try MODEL --data FOLDER", json=json)
