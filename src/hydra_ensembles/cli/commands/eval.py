"""`eval`: how good, how calibrated, how aware of what it does not know; with a report."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import options
from ..inputs import READING, Reading, named, reads_data
from ..output import (
    dumps,
    is_first,
    print_json,
    results_table,
    say,
    sizes,
    write_config,
    write_text,
)

if TYPE_CHECKING:
    from ...evaluation import Results


@reads_data()
def command(
    models: options.Models,
    data: options.Data,
    ood: options.Ood = None,
    corruption: Annotated[
        list[str] | None, typer.Option(help="Also evaluate under a corruption; repeatable.")
    ] = None,
    severity: Annotated[int, typer.Option(min=1, max=5, help="Severity of the corruptions.")] = 3,
    attack: Annotated[
        list[str] | None,
        typer.Option(help="Also evaluate under an attack, fgsm or pgd; repeatable."),
    ] = None,
    epsilon: Annotated[
        float, typer.Option(min=0, help="Largest change of a pixel by attacks, in 255ths.")
    ] = 8.0,
    score: Annotated[
        str | None,
        typer.Option(help="Uncertainty for all models; by default each one's own."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(help="Labelled data, none of it tested, to calibrate models that are not."),
    ] = None,
    bootstrap: Annotated[
        int | None,
        typer.Option(
            min=0, help="Bootstrap draws for 95 % intervals; 1000 by default, fewer on large data."
        ),
    ] = None,
    output: options.Output = Path("hydra-results"),
    html: Annotated[bool, typer.Option("--report/--no-report", help="Write report.html.")] = True,
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Evaluate models on labelled data, on outliers and under shifts; compare them; write a report.

    Attacks are white-box: each model meets the images that were changed against itself.

    Results of each model are saved as soon as they are there. The report's head maps and examples
    are those of the first model. It is compared with each of the others by paired intervals.
    """
    from ...data import adversarial, corrupted
    from ...evaluation import evaluate
    from ...fusion import HydraEnsemble
    from ...report.sections import verdicts
    from ..class_names import calibrated
    from ..models import check_sources
    from ..report_data import cost_of, extreme_examples
    from .report import make_report

    check_sources(data, ood)
    check_sources(calibration)
    resolved = write_config(output, begin=True)
    results: list[Results] = []
    costs: dict[str, float] = {}
    facts: dict[str, Any] = {}
    scaled: dict[str, bool] = {}
    for given in models:
        name, place = named(given)
        loaded, known, outliers = reading.load(place, data, ood, fused=True)
        say(f"Evaluating {name} on {sizes(known, outliers)}", json=json)
        tested = loaded.model
        own_score = tested.score if isinstance(tested, HydraEnsemble) else None
        scaled[name] = any(  # a policy and sets belong to the probabilities as they are
            getattr(tested, key, None) is not None
            for key in ("temperature", "member_temperatures", "calibrator", "policy", "sets")
        )
        if calibration is not None and not scaled[name]:
            tested = calibrated(loaded.model, reading.load_known(loaded, calibration))
            scaled[name] = True
        shifts = {
            kind: corrupted(known, kind, severity=severity, seed=reading.seed)
            for kind in corruption or ()
        }
        for kind in [kind for part in attack or () for kind in part.split(",")]:
            shifts[kind] = adversarial(
                loaded.model, known, attack=kind, epsilon=epsilon / 255, seed=reading.seed
            )
        found = evaluate(
            tested,
            known,
            ood=outliers or None,
            shifts=shifts,
            score=score or own_score,
            bootstrap=bootstrap,
            progress=not json,
            name=name,
            seed=reading.seed,
        )
        if not is_first():  # its results are those of the first process
            continue
        write_config(output)
        plain = "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip("-.")
        found.save(output / f"results-{plain or 'model'}.json")
        results.append(found)
        ratio = cost_of(loaded.model, next(iter(known)))
        if ratio is not None:
            costs[name] = ratio
        if not facts:
            examples = extreme_examples(loaded, found, known, outliers)
            facts = {"model": loaded.model, "examples": examples}
    if not is_first():
        return
    write_text(output / "costs.json", dumps(costs))
    write_text(output / "examples.json", dumps([e.to_dict() for e in facts["examples"]]))
    if json:
        print_json({r.name: {**r.figures, "cost": costs.get(r.name)} for r in results})
    else:
        results_table(results, costs)
        for line in verdicts(results):
            typer.echo(line)
    if len(set(scaled.values())) > 1:
        without = ", ".join(name for name, has in scaled.items() if not has)
        say(
            f"No temperature was fitted for {without}: NLL and calibration also compare that. Give "
            "--calibration DATA to fit one.",
            json=json,
        )
    if html:
        make_report(
            output / "report.html",
            results,
            model=facts["model"],
            costs=costs,
            examples=facts["examples"],
            settings=resolved,
        )
        say(f"Report: {output / 'report.html'}", json=json)
