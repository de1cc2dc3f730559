"""`eval`: how good, how calibrated, how aware of what it does not know; with a report."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import options
from ..inputs import READING, Reading, reads_data
from ..output import is_first, print_json, results_table, say, sizes, write_config, write_text

if TYPE_CHECKING:
    from ...evaluation import Results


@reads_data()
def command(
    models: options.Models,
    data: options.Data,
    ood: options.Ood = None,
    corruption: Annotated[
        list[str] | None, typer.Option(help="Also evaluate under a corruption; may be repeated.")
    ] = None,
    severity: Annotated[int, typer.Option(min=1, max=5, help="Of the corruptions.")] = 3,
    attack: Annotated[
        list[str] | None,
        typer.Option(help="Also evaluate under an attack, fgsm or pgd; may be repeated."),
    ] = None,
    epsilon: Annotated[
        float, typer.Option(min=0, help="Largest change of a pixel by attacks, in 255ths.")
    ] = 8.0,
    score: Annotated[
        str | None,
        typer.Option(help="Uncertainty for all models; by default each ensemble's own, else msp."),
    ] = None,
    calibration: Annotated[
        str | None,
        typer.Option(
            help="Labelled data, none of it tested: gives models without a temperature one, as "
            "ensembles have it."
        ),
    ] = None,
    bootstrap: Annotated[
        int | None,
        typer.Option(
            min=0, help="Draws for 95 % intervals; 0: none. By default 1000, fewer on large data."
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
    from ...evaluation import evaluate
    from ...report.sections import verdicts
    from ..class_names import Calibrated
    from ..models import check_sources
    from ..report_data import cost_of, extreme_examples
    from .report import make_report

    check_sources(data, ood)
    if calibration is not None:
        check_sources(calibration)
    output.mkdir(parents=True, exist_ok=True)
    resolved = write_config(output, begin=True)
    results: list[Results] = []
    costs: dict[str, float] = {}
    facts: dict[str, Any] = {}
    scaled: dict[str, bool] = {}
    for given in models:
        name, equals, place = given.partition("=")
        name, place = (name, place) if equals else (Path(given).name or given, given)
        loaded = reading.load_model(place)
        known = reading.load_known(loaded, data)
        outliers = reading.load_outliers(loaded, ood)
        say(f"Evaluating {name} on {sizes(known, outliers)}", json=json)
        tested = loaded.model
        scaled[name] = has_temperature(tested)
        if calibration is not None and not scaled[name]:
            tested = Calibrated([loaded.model], reading.load_known(loaded, calibration))
            scaled[name] = True
        found = evaluate(
            tested,
            known,
            ood=outliers or None,
            shifts={
                **_corrupted(known, corruption, severity, reading.seed),
                **_attacked(loaded.model, known, attack, epsilon, reading.seed),
            },
            score=score or score_of(loaded.model),
            bootstrap=bootstrap,
            progress=not json,
            name=name,
            seed=reading.seed,
        )
        if not is_first():  # its results are those of the first process
            continue
        write_config(output)
        found.save(output / f"results-{_file_name(name)}.json")
        results.append(found)
        ratio = cost_of(loaded.model, next(iter(known)))
        if ratio is not None:
            costs[name] = ratio
        if not facts:
            examples = extreme_examples(loaded, found, known, outliers)
            facts = {"model": loaded.model, "examples": examples}
    if not is_first():
        return
    write_text(output / "costs.json", _dump(costs))
    write_text(output / "examples.json", _dump([e.to_dict() for e in facts["examples"]]))
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
            command=shlex.join(["hydra-ensembles", *sys.argv[1:]]),
        )
        say(f"Report: {output / 'report.html'}", json=json)


def _corrupted(known: Any, names: Sequence[str] | None, severity: int, seed: int) -> dict[str, Any]:
    from ...data import corrupted

    return {name: corrupted(known, name, severity=severity, seed=seed) for name in names or ()}


def _attacked(
    model: Any, known: Any, names: Sequence[str] | None, epsilon: float, seed: int
) -> dict[str, Any]:
    from ...data import adversarial

    return {
        name: adversarial(model, known, attack=name, epsilon=epsilon / 255, seed=seed)
        for part in names or ()
        for name in part.split(",")
    }


def score_of(model: Any) -> str:
    """Return the score that `predict` reports for a model."""
    from ...fusion.ensemble import HydraEnsemble

    return model.score if isinstance(model, HydraEnsemble) else "msp"


def has_temperature(model: Any) -> bool:
    """Tell whether a model was calibrated when it was built."""
    degrees = [getattr(model, name, None) for name in ("temperature", "member_temperatures")]
    return any(given is not None for given in degrees)


def _file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in name).strip("-.") or "model"


def _dump(value: Any) -> str:
    import json

    return json.dumps(value, indent=2)
