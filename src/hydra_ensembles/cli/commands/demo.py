"""`demo`: the whole story on embedded digits, in about two minutes, without network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import demo_steps as steps
from .. import options
from ..output import dumps, print_json, say, step, write_config, write_text


def command(
    output: options.Output = Path("hydra-demo"),
    epochs: Annotated[int, typer.Option(min=1, help="Training epochs per model.")] = 25,
    members: Annotated[int, typer.Option(min=1, help="Number of members, one teacher each.")] = 3,
    max_cost: Annotated[
        float, typer.Option(help="Bound on multiply-adds relative to the single model.")
    ] = 1.07,
    bootstrap: Annotated[
        int, typer.Option(min=1, help="Bootstrap draws for 95 % intervals.")
    ] = 1000,
    seed: options.Seed = 0,
    seeds: Annotated[
        str | None,
        typer.Option(help="Only the table, on several seeds: 0,1,2 or 0-4. Resumable."),
    ] = None,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Train small ViTs on digits, distil them into one model, compare and report.

    Progress is saved in OUTPUT: run the same command to resume.
    """
    import torch

    from ...data import ImageTransform
    from ...report.page import check_packages
    from ..models import Loaded
    from ..report_data import extreme_examples
    from .report import make_report

    check_packages()
    torch.set_num_threads(1)  # the model is too small to gain from more, and busy machines lose
    resolved = write_config(output)
    asked: dict[str, Any] = {"epochs": epochs, "members": members, "max_cost": max_cost}
    if seeds is not None:
        steps.run_seeds(steps.numbers(seeds), output, quiet=json, **asked)
        return
    run = steps.run(output, bootstrap=bootstrap, seed=seed, quiet=json, **asked)
    results, costs, data = run.results, run.costs, run.data
    shape = run.ensemble.host.shape
    half = (0.5,) * shape.channels
    transform = ImageTransform(shape.image_size, None, "bilinear", mean=half, std=half)
    for name, model in {"ensemble": run.ensemble, "single": run.knows}.items():
        model.id2label = dict(enumerate(data.class_names))
        model.transform = transform
        model.save_pretrained(output / name)
    write_text(output / "costs.json", dumps(costs))

    step("4/4 Writing the report", json=json)
    loaded = Loaded(run.ensemble, "Hydra", class_names=data.class_names)
    hydra = results[steps.ROWS.index(steps.HYDRA)]
    examples = extreme_examples(loaded, hydra, data.test, data.ood)
    write_text(output / "examples.json", dumps([example.to_dict() for example in examples]))
    page = make_report(
        output / "report.html",
        [hydra, *(result for result in results if result is not hydra)],
        model=run.ensemble,
        costs=costs,
        examples=examples,
        settings=resolved,
        title="Hydra ensemble of a small ViT on digits",
    )
    if json:
        print_json({r.name: {**r.figures, "cost": costs[r.name]} for r in results})
    else:
        on = f"{len(data.test.indices)} digits"
        steps.tables(results, costs)
        verdicts = {
            rival: {column: "?" if v == "inconclusive" else v for column, v in columns.items()}
            for rival, columns in steps.verdicts(results).items()
        }
        for line in (
            *steps.verdict_table("Hydra is, compared with", verdicts),
            f"By paired 95 % intervals; ?: inconclusive on {on}.",
            "",
            *steps.answer(run.shares, results[steps.ROWS.index(steps.KNOWS)], hydra),
            *steps.conclusion(results, costs, on),
            "One seed: the report has intervals; --seeds 0-4 shows the tables on five.",
        ):
            typer.echo(line)
    say(f"Report: {page}   Ensemble: {output / 'ensemble'}", json=json)
    say("Next, your own model: hydra-ensembles try MODEL --data FOLDER", json=json)
