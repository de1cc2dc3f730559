"""`predict`: files or standard input to JSON lines, with uncertainty and when to abstain."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...errors import DataError
from .. import options
from ..exits import Stop
from ..show import say

if TYPE_CHECKING:
    from ...uncertainty.abstaining import Abstention
    from ..loading import Loaded


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
    limit: options.Limit = None,
    split: options.Split = None,
    text_column: options.TextColumn = None,
    label_column: options.LabelColumn = None,
    labels: options.Labels = None,
    class_names: options.ClassNames = None,
    batch_size: options.BatchSize = 32,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    seed: options.Seed = 0,
    config: options.Config = None,
) -> None:
    """Predict files or standard input, one JSON object a line, as they come.

    What cannot be read becomes a line with "error" and abstains; the exit code is then 3.
    """
    from ..loading import check_sources, load_model, load_set

    if risk is not None and held_out is None:
        raise Stop("--risk needs --held-out DATA: labelled examples to fit the threshold on.", 2)
    check_sources(held_out)
    loaded = load_model(model, device=device, dtype=dtype, class_names=class_names)
    if alarm is not None:
        _check_alarm(loaded, alarm)
    rule = None
    if risk is not None and held_out is not None:
        data = load_set(
            loaded,
            held_out,
            limit=limit,
            seed=seed,
            split=split,
            text_column=text_column,
            label_column=label_column,
            labels=labels,
            batch_size=batch_size,
        )
        rule = fit_rule(loaded, data, risk, conformal, alarm)
        say(str(rule), json=True)
        if rule.coverage == 0:
            say(
                "No threshold keeps this risk on the held-out data: everything abstains.", json=True
            )
    lines = items(loaded, files or ["-"], text_column)
    failed = total = 0
    with ExitStack() as stack:
        target = sys.stdout
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            target = stack.enter_context(output.open("w", encoding="utf-8"))
        while batch := list(islice(lines, batch_size)):
            for record in answers(loaded, batch, rule, threshold, alarm, probabilities):
                total += 1
                failed += "error" in record
                target.write(json_module.dumps(record, ensure_ascii=False) + "\n")
            target.flush()  # a reader sees every batch as it is done
    if failed:
        raise Stop(
            f"{failed} of {total} inputs could not be read; their lines say why, the others are "
            "answered.",
            3,
        )
    if not total:
        raise Stop("There was nothing to predict: no file, no line.", 3)


def _check_alarm(loaded: Loaded, alarm: float) -> None:
    if not 0 < alarm < 1:
        raise Stop(f"--alarm {alarm}: expected a number between 0 and 1, such as 0.05.", 2)
    if getattr(loaded.model, "novelty", None) is None:
        raise Stop(
            "--alarm needs a model that knows its data: build one with hydra build, or call "
            "ensemble.fit_novelty_(known) and save it again.",
            2,
        )


def fit_rule(
    loaded: Loaded, data: Any, risk: float, conformal: bool, alarm: float | None = None
) -> Abstention:
    """Fit the threshold on held-out data, by the model's own score."""
    import torch

    from ...data.running import split_batch
    from ...uncertainty.abstaining import fit_abstention

    scores, errors, novelty = [], [], []
    name = "msp"
    for batch in data:
        truth = split_batch(batch)[2]
        if truth is None:
            raise DataError("The held-out data has no labels, which a threshold is fitted on.")
        answer = predict_batch(loaded, batch)
        name = answer.score
        scores.append(answer.uncertainty)
        errors.append(answer.label != truth)
        novelty.append(answer.novelty)
    method = "conformal" if conformal else "empirical"
    return fit_abstention(
        torch.cat(scores),
        torch.cat(errors),
        risk=risk,
        method=method,
        score=name,
        novelty=None if alarm is None else torch.cat(novelty),
        alarm=alarm,
    )


def predict_batch(loaded: Loaded, batch: Any) -> Any:
    """Predict a batch with any model, an ensemble by its own score and temperatures."""
    from ...data.running import evaluating, member_logits
    from ...fusion.ensemble import HydraEnsemble
    from ...uncertainty import predict_from_logits

    if isinstance(loaded.model, HydraEnsemble):
        return loaded.model.predict(batch).cpu()
    with evaluating(loaded.model):
        return predict_from_logits(member_logits(loaded.model, batch).float()).cpu()


def items(loaded: Loaded, files: Iterable[str], column: str | None) -> Iterator[dict[str, Any]]:
    """Yield inputs: `{"file": ...}` for pictures, `{"text": ...}` for texts."""
    from ...data.folders import SUFFIXES
    from ...data.table_files import read_table
    from ...data.texts import TEXT_COLUMNS

    for file in files:
        path = Path(file)
        if file == "-":
            yield from _from_lines(sys.stdin, text=loaded.tokenizer is not None)
        elif loaded.tokenizer is None:
            if path.is_dir():
                found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
                yield from ({"file": str(each)} for each in found)
            else:
                yield {"file": file}
        else:
            table = read_table(path)
            name = column or next((c for c in TEXT_COLUMNS if c in table), None)
            if name not in table:
                raise DataError(f"{path} has no text column; name one of {', '.join(table)}.")
            yield from ({"text": str(text)} for text in table[name])


def _from_lines(lines: Iterable[str], *, text: bool) -> Iterator[dict[str, Any]]:
    key = "text" if text else "file"
    for number, line in enumerate(lines, start=1):
        line = line.rstrip("\r\n")
        if not line.strip():
            continue
        if not line.lstrip().startswith("{"):
            yield {key: line}
            continue
        try:
            record = json_module.loads(line)
        except ValueError:
            record = {}
        if key in record:
            yield record  # other fields, an id say, come back in the answer
        else:
            yield {"line": number, "error": f"expected a JSON object with {key!r}"}


def answers(
    loaded: Loaded,
    batch: list[dict[str, Any]],
    rule: Abstention | None,
    threshold: float | None,
    alarm: float | None,
    probabilities: bool,
) -> Iterator[dict[str, Any]]:
    """Answer a batch of inputs in order; what cannot be read gets an error in its place."""
    import torch

    from ...data.folders import _read, image_batch

    inputs: list[Any] = []
    for item in batch:
        if "error" in item:
            inputs.append(None)
        elif loaded.tokenizer is not None:
            inputs.append(item["text"])
        else:
            try:
                inputs.append(_read(Path(item["file"]), loaded.transform))
            except DataError as error:
                item["error"] = str(error).split(". Replace")[0]
                inputs.append(None)
    good = [value for value in inputs if value is not None]
    prediction: Any = iter(())
    if good:
        if loaded.tokenizer is not None:
            ready: Any = dict(
                loaded.tokenizer(good, padding=True, truncation=True, return_tensors="pt")
            )
        else:
            ready = image_batch(torch.stack(good), None, loaded.key)
        prediction = iter(predict_batch(loaded, ready))
    for item, value in zip(batch, inputs, strict=True):
        if value is None:
            yield {**item, "abstain": True}
            continue
        answer = next(prediction)
        number = int(answer.label)
        record = {
            **item,
            "label": loaded.class_name(number),
            "class": number,
            "probability": round(float(answer.confidence), 6),
            "uncertainty": float(answer.uncertainty),
            "score": answer.score,
        }
        if answer.novelty is not None:
            record["novelty"] = round(float(answer.novelty), 6)
            record["novelty_score"] = float(answer.novelty_score)
        reasons = _reasons(answer, rule, threshold, alarm)
        if reasons is not None:
            record["abstain"] = bool(reasons)
            if reasons:
                record["why"] = reasons
        if probabilities:
            record["probabilities"] = [round(p, 6) for p in answer.probabilities[0].tolist()]
        yield record


def _reasons(
    answer: Any, rule: Abstention | None, threshold: float | None, alarm: float | None
) -> str | None:
    """Say why an answer is withheld, nothing when it is given; None without any rule."""
    if rule is not None:
        return rule.reasons(answer.uncertainty, answer.novelty)[0]
    if threshold is None and alarm is None:
        return None
    unsure = threshold is not None and not float(answer.uncertainty) <= threshold
    new = alarm is not None and not float(answer.novelty) <= 1 - alarm
    return " and ".join(["too unsure"] * unsure + ["too new"] * new)
