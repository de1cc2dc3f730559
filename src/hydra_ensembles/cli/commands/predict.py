"""`predict`: files or standard input to JSON lines, with uncertainty and when to abstain."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options
from ..exits import Stop
from ..reading import READING, Reading, reads_data
from ..show import say


@reads_data(leave_out=["skip_broken"])
def command(
    model: options.Model,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Pictures, folders of pictures or text files; - or none: lines of "
            "standard input (paths of pictures, texts, or JSON objects)."
        ),
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(help="Abstain so that at most this share is wrong; needs --held-out."),
    ] = None,
    held_out: Annotated[
        str | None, typer.Option(help="Labelled data that the threshold is fitted on.")
    ] = None,
    conformal: Annotated[
        bool,
        typer.Option("--conformal", help="Finite-sample guarantee: P(answered and wrong) <= risk."),
    ] = False,
    threshold: Annotated[
        float | None, typer.Option(help="Abstain above this uncertainty, in place of --risk.")
    ] = None,
    alarm: Annotated[
        float | None,
        typer.Option(help="Abstain when newer than all but this share of known data, as 0.05."),
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Add all classes' probabilities.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="JSONL file; standard output by default.")
    ] = None,
    reading: Reading = READING,
    config: options.Config = None,
) -> None:
    """Predict files or standard input, one JSON object per line, as they come.

    Every input gets its line, in order. What cannot be answered says why under "error" and
    abstains; the exit code is then 3. An ensemble that was saved with a rule abstains by it.
    """
    from ..answering import Answering, fit_rule, line_of
    from ..loading import check_sources
    from ..records import batches, read_records

    if risk is not None and held_out is None:
        raise Stop("--risk needs --held-out DATA: labelled examples to fit the threshold on.", 2)
    check_sources(held_out)
    loaded = reading.load_model(model)
    if alarm is not None:
        _check_alarm(loaded, alarm)
    rule = None
    if risk is not None and held_out is not None:
        data = reading.load_known(loaded, held_out)
        rule = fit_rule(loaded, data, risk, conformal, alarm)
    elif threshold is None and alarm is None:
        rule = getattr(loaded.model, "abstention", None)
    if rule is not None:
        say(str(rule), json=True)
        if rule.coverage == 0:
            say(
                "No threshold keeps this risk on the held-out data: everything abstains.", json=True
            )
    answers = Answering(loaded, rule, threshold, alarm, probabilities)
    text = loaded.tokenizer is not None
    records = read_records(files or ["-"], text=text, column=reading.text_column)
    failed = total = 0
    with ExitStack() as stack:
        target = sys.stdout
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            target = stack.enter_context(output.open("w", encoding="utf-8"))
        for batch in batches(records, reading.batch_size):
            for answer in answers(batch):
                total += 1
                failed += "error" in answer
                target.write(line_of(answer, encoding=target.encoding))
            target.flush()  # a reader sees every batch as it is done
    if failed:
        raise Stop(
            f"{failed} of {total} inputs could not be answered; their lines say why, the others "
            "are answered.",
            3,
        )
    if not total:
        raise Stop("There was nothing to predict: no file, no line.", 3)


def _check_alarm(loaded: Any, alarm: float) -> None:
    if not 0 < alarm < 1:
        raise Stop(f"--alarm {alarm}: expected a number between 0 and 1, such as 0.05.", 2)
    if getattr(loaded.model, "novelty", None) is None:
        raise Stop(
            "--alarm needs a model that knows its data: build one with hydra build, or call "
            "ensemble.fit_novelty_(known) and save it again.",
            2,
        )
