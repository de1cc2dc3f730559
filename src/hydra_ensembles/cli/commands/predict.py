"""`predict`: files or standard input to JSON lines, with uncertainty and a decision."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from ..._records import PARTIAL, holding, is_device, names_to_disk, place_of, writing
from ...prediction import FIELDS
from .. import options
from ..errors import Stop
from ..inputs import READING, Reading, reads_data
from ..output import is_first, say

if TYPE_CHECKING:
    from ...answer_each import BatchLimit
    from ...data.records import Record
    from ...uncertainty import Policy
    from ..models import Loaded

NOT_FINITE = "the model returned NaN or infinity"


@reads_data(leave_out=["skip_broken"])
def command(
    model: options.Model,
    files: Annotated[
        list[str] | None,
        typer.Argument(
            help="Images, folders of images, text files or Parquet files; - or none: lines of "
            "standard input (paths of images, texts, or JSON objects)."
        ),
    ] = None,
    risk: Annotated[
        float | None,
        typer.Option(help="Abstain so that at most this share is wrong; needs --held-out."),
    ] = None,
    held_out: Annotated[
        str | None, typer.Option(help="Labelled data that a policy is fitted on.")
    ] = None,
    guarantee: options.Guarantee = "conformal",
    delta: options.Delta = 0.1,
    threshold: Annotated[
        float | None, typer.Option(help="Abstain above this uncertainty, in place of --risk.")
    ] = None,
    alarm: Annotated[
        float | None,
        typer.Option(
            help="Abstain when newer than all but this share of --held-out, or of the known data."
        ),
    ] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Add all classes' probabilities.")
    ] = False,
    why: Annotated[
        bool,
        typer.Option(
            "--why",
            help="Add the evidence for novelty: terms, the nearest known examples, and facts such "
            "as a length that no known text has.",
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="JSONL file, standard output by default; of Parquet files, a folder.",
        ),
    ] = None,
    ray: Annotated[
        bool,
        typer.Option("--ray", help="Answer Parquet files in a pool of Ray Data actors."),
    ] = False,
    workers: Annotated[int, typer.Option(min=1, help="Actors of the pool.")] = 2,
    rows_per_part: Annotated[
        int,
        typer.Option(min=1, help="Least rows of each Parquet file that is written."),
    ] = 16384,
    reading: Reading = READING,
    config: options.Config = None,
) -> None:
    """Predict files or standard input, one JSON object per line, as they come.

    Every input gets its line, in order. What cannot be answered says why under "error"; the exit
    code is then 3. Blank lines and files of a folder that are not images say so under "skipped".
    An ensemble that was saved with a policy decides by it.

    Parquet files are answered in parts into the folder OUTPUT, every row exactly once; the same
    command goes on after a stop.
    """
    from ...answer_each import BatchLimit
    from ...data import processes
    from ...data.records import Form, batches, read_records, shared_answers
    from ...fusion import fit_policy
    from ...tasks import task_of
    from ...uncertainty import Policy
    from ..models import check_sources

    if ray or any(source.endswith(".parquet") for source in files or ()):
        if {risk, held_out, threshold, alarm} != {None} or why:
            raise Stop(
                "Rows of Parquet files are decided by the policy that was saved with MODEL, and "
                "without --why.",
                2,
            )
        if output is None or not files:
            raise Stop("Give Parquet files, and a folder for the answers with --output.", 2)
        from ...serving.bulk import predict_files

        totals = predict_files(
            model,
            files,
            output,
            column=reading.text_column,
            probabilities=probabilities,
            batch_size=reading.batch_size,
            rows_per_part=rows_per_part,
            device=reading.device,
            ray=ray,
            workers=workers,
        )
        say(
            f"{totals['rows']} rows in {totals['parts']} parts, {totals['computed']} of them "
            f"computed now: {output}"
        )
        return
    if risk is not None and held_out is None:
        raise Stop("--risk needs --held-out DATA: labelled examples to fit a policy on.", 2)
    if held_out is not None and risk is None and alarm is None:
        raise Stop("--held-out needs --risk or --alarm: what to guarantee on it.", 2)
    check_sources(held_out)
    loaded = reading.load_model(model)
    if alarm is not None and not 0 < alarm < 1:
        raise Stop(f"--alarm {alarm}: expected a number between 0 and 1, such as 0.05.", 2)
    if (alarm is not None or why) and getattr(loaded.model, "novelty", None) is None:
        raise Stop(
            f"{'--why' if why else '--alarm'} needs a model that knows its data: make one with "
            "hydra-ensembles build, or call ensemble.fit_novelty_(known) and save it again.",
            2,
        )
    policy: Policy | None = getattr(loaded.model, "policy", None)
    if held_out is not None:
        data = reading.load_known(loaded, held_out)
        policy = fit_policy(
            loaded.model, data, risk=risk, alarm=alarm, method=guarantee, delta=delta
        )
    elif threshold is not None or alarm is not None:
        policy = Policy(
            threshold=math.inf if threshold is None else threshold,
            novelty_threshold=math.inf if alarm is None else loaded.model.novelty.threshold(alarm),
            alarm=alarm,
            score=getattr(loaded.model, "score", task_of(loaded.model).default_score),
        )
        if hasattr(loaded.model, "policy"):
            loaded.model.policy = policy
    if policy is not None:
        say(str(policy), json=True)
    form = Form.of(
        task_of(loaded.model),
        text=loaded.tokenizer is not None,
        column=reading.text_column,
        pair=reading.pair_column,
    )
    records = read_records(files or ["-"], form)
    limit = BatchLimit("inputs")

    def answer(batch: list[Record]) -> list[dict[str, Any]]:
        return answer_records(
            loaded, batch, policy=policy, probabilities=probabilities, why=why, limit=limit
        )

    failed = total = skipped = 0
    with ExitStack() as stack:
        target = sys.stdout
        if output is not None and is_first():
            target = stack.enter_context(_written(output))
        if processes.size() == 1:
            answered: Iterator[list[Any]] = map(answer, batches(records, reading.batch_size))
        else:
            answered = shared_answers(records, answer, reading.batch_size)
        for rows in answered:
            for row in rows:
                total += 1
                failed += "error" in row
                skipped += "skipped" in row
                target.write(line_of(row, encoding=target.encoding))
            target.flush()  # a reader sees every batch as it is done
    if skipped:
        say(
            f"{skipped} skipped (blank lines, files that are not images): see their lines.",
            json=True,
        )
    if failed:
        raise Stop(
            f"{failed} of {total - skipped} inputs could not be answered; their lines say why, the "
            "others are answered.",
            3,
        )
    if total == skipped and is_first():
        raise Stop("There was nothing to predict: no file, no line.", 3)


def answer_records(
    loaded: Loaded,
    records: Sequence[Record],
    *,
    policy: Policy | None = None,
    probabilities: bool = False,
    why: bool = False,
    limit: BatchLimit | None = None,
) -> list[dict[str, Any]]:
    """Return a row per record: what comes back with it and the fields of its answer.

    Args:
        loaded: The model and what prepares its inputs.
        records: The records of one batch.
        policy: Of a model that is not an ensemble; an ensemble decides by its own.
        probabilities: Add all classes' probabilities.
        why: Add the evidence for novelty.
        limit: Remembers how many inputs fit in memory at once.
    """
    import torch

    from ...answer_each import InputError, answer_each
    from ...errors import DataError
    from ...fusion.inputs import prepare_texts
    from ...fusion.policy_data import answer_of
    from ...runtime.images import open_image
    from ...tasks import task_of

    model, tokenize = loaded.model, None if loaded.tokenizer is None else loaded.texts
    task = getattr(model, "task", None) or task_of(model)

    def prepare(record: Record) -> Any:
        if tokenize is not None:
            return record.value, record.value
        if loaded.transform is None:
            raise DataError(f"{loaded.name} does not say how it wants its images.")
        return record.value, loaded.transform(open_image(record.value))

    def predict(pairs: list[Any]) -> list[Any]:
        values, inputs = map(list, zip(*pairs, strict=True))
        if tokenize is None:
            images = torch.stack(inputs)
            batch: Any = images if loaded.key is None else {loaded.key: images}
        else:
            host = getattr(model, "host", model)
            config = getattr(model, "config", None)
            batch = prepare_texts(host, tokenize, config, task, inputs)
        if hasattr(model, "policy"):
            answer = model.predict(batch)
        else:
            answer = answer_of(model, batch)
            answer = answer if policy is None else policy.apply(answer)
        if "label" in task.prediction.FIELDS:
            answer = replace(answer, class_names=loaded.class_names)
        rows = answer.rows(probabilities=probabilities)
        finite = answer.finite.tolist()
        if why:
            texts = values if all(isinstance(value, str) for value in values) else None
            evidence = model.why_novel(batch, raw=texts)
            rows = [{**row, "evidence": evidence.to_dict(i)} for i, row in enumerate(rows)]
        return [
            row if good else InputError(NOT_FINITE) for row, good in zip(rows, finite, strict=True)
        ]

    asked = [r for r in records if r.error is None and r.skipped is None and r.value is not None]
    answers = iter(answer_each(predict, asked, prepare=prepare, most=limit))
    rows, fields = [], [*task.prediction.FIELDS, *(["evidence"] if why else [])]
    for record in records:
        row: Any = dict.fromkeys(fields)
        if record.skipped is not None:
            row["skipped"] = record.skipped
        elif record.error is not None or record.value is None:
            row["error"] = record.error or "there is no input"
        elif isinstance(answered := next(answers), InputError):
            row["error"] = answered.reason
        else:
            row = answered
        rows.append({**record.echo, **row})
    return rows


def line_of(row: dict[str, Any], *, encoding: str | None = "utf-8") -> str:
    """Return a row as one line of JSON in an encoding, whatever came back with it."""
    try:
        text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(row)
    except (ValueError, RecursionError) as error:
        kept = {key: row[key] for key in ("file", "line") if isinstance(row.get(key), (str, int))}
        empty = dict.fromkeys(FIELDS)
        text = json.dumps({**kept, **empty, "error": f"cannot be given back: {error}"})
    return text + "\n"


@contextmanager
def _written(output: Path) -> Iterator[TextIO]:
    """Open a file beside `output`; it gets that name when all lines are written."""
    output = place_of(output)
    if is_device(output):
        with writing(output), output.open("w", encoding="utf-8") as lines:
            yield lines
        return
    with holding(output, is_file=True), writing(output):
        beside = output.with_name(output.name + PARTIAL)  # to be seen: it can be read meanwhile
        with beside.open("w", encoding="utf-8") as lines:
            yield lines
            lines.flush()
            os.fsync(lines.fileno())
        os.replace(beside, output)
        names_to_disk(output.parent)
