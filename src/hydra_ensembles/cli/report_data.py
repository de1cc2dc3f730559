"""What a report shows besides figures: examples (images or texts) and the counted cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import HydraError

if TYPE_CHECKING:
    from ..evaluation import Results
    from ..prediction import Prediction
    from ..report.examples import Example
    from .models import Loaded

EACH = 6
MOST_TEXTS = 200
"""Texts among which examples of tokens are looked for."""


def cost_of(model: Any, batch: Any) -> float | None:
    """Return a model's multiply-adds relative to its own unpruned host; None when not countable."""
    from ..costs.formula import cost
    from ..fusion.ensemble import HydraEnsemble

    if not isinstance(model, HydraEnsemble):
        return 1.0
    try:
        ratio = cost(model, batch).relative_to(cost(model.unpruned_host(), batch))
    except HydraError:
        return None
    return ratio.multiply_adds


def extreme_examples(
    loaded: Loaded, results: Results, known: Any, outliers: dict[str, Any], *, each: int = EACH
) -> list[Example]:
    """Return the newest, wrong, least and most certain test examples, and familiar outliers.

    Every example is shown once, in the first group that it belongs to.
    """
    from ..report.sections import NEWEST_HEADING
    from ..tasks import task_of

    if task_of(loaded.model).by_token:  # the columns are of tokens
        return text_examples(loaded, known, each=each)
    column = f"score:{results.scores[0]}"
    found: list[Example] = []
    taken: set[int] = set()
    if "score:novelty" in results.examples["id"]:
        newest = results.examples["id"]["score:novelty"].argsort(descending=True, stable=True)
        rows = first_untaken(newest.tolist(), each, taken)
        pairs = zip(_alarms(results, "id", rows), _why_new(loaded, known, rows), strict=True)
        notes = ["\n".join([alarm, *why]) for alarm, why in pairs]
        found += describe(loaded, known, rows, NEWEST_HEADING, "test", notes=notes)
    scores = results.examples["id"][column]
    order = scores.argsort(stable=True).tolist()
    if "correct" in results.examples["id"]:
        wrong = (~results.examples["id"]["correct"].bool()).nonzero().flatten()
        sure = wrong[scores[wrong].argsort(stable=True)].tolist()
        bad = {"Wrong, and surest of it": sure}
    else:
        bad = {"Furthest off": furthest(results.examples["id"])}
    for title, ranked in {**bad, "Least sure": order[::-1], "Surest": order}.items():
        rows = first_untaken(ranked, each, taken)
        found += describe(loaded, known, rows, title, "test")
    for name, data in outliers.items():
        familiar = results.examples[f"ood/{name}"][column].argsort(stable=True)
        rows = familiar[: each // 2].tolist()
        notes = _alarms(results, f"ood/{name}", rows)
        title = f"Outliers ({name}) that it is surest of"
        found += describe(loaded, data, rows, title, name, labelled=False, notes=notes)
    return found


def furthest(columns: Any) -> list[int]:
    """Return the examples of numbers whose answers are furthest off, in order."""
    off = (columns["values"] - columns["targets"]).abs().mean(1)
    order: list[int] = off.argsort(descending=True, stable=True).tolist()
    return order


def text_examples(loaded: Loaded, data: Any, *, each: int) -> list[Example]:
    """Return the least sure and the surest of the first texts of a model that answers by token."""
    from ..data.loaders import indexable
    from ..fusion.policy_data import answer_of

    source = indexable(data)
    part = source.subset(range(min(source.count, MOST_TEXTS)))
    unsure = [
        float(row.uncertainty[row.real].max())
        for batch in part
        for row in answer_of(loaded.model, batch)
    ]
    order = sorted(range(len(unsure)), key=unsure.__getitem__)
    found = describe(loaded, source, order[:each], "Surest", "test")
    return found + describe(loaded, source, order[::-1][:each], "Least sure", "test")


def first_untaken(ranked: list[int], count: int, taken: set[int]) -> list[int]:
    """Return the first rows that are not taken yet, and take them: an example is shown once."""
    rows = [row for row in ranked if row not in taken][:count]
    taken.update(rows)
    return rows


def _alarms(results: Results, name: str, rows: list[int]) -> list[str]:
    """Say which examples an alarm level of 5 % calls new; nothing where novelty is not fitted."""
    alarm = results.examples[name].get("alarm")
    if alarm is None:
        return []
    return ["called new" if bool(alarm[row]) else "not called new" for row in rows]


def _why_new(loaded: Loaded, data: Any, rows: list[int]) -> list[list[str]]:
    """Name the nearest known example of each row, and the facts that no known example has."""
    from ..data.loaders import indexable

    source = indexable(data)
    part = source.subset(rows, batch_size=len(rows))
    files = getattr(source, "files", None)
    raw = [files[source.indices[row]] for row in rows] if files else getattr(part, "texts", None)
    evidence = loaded.model.why_novel(next(iter(part)), neighbours=1, raw=raw)
    return [
        [f"nearest: {name or f'known example {place}'}", *evidence.lines(i)]
        for i in range(len(rows))
        for place, name, _ in evidence.nearest(i)
    ]


def describe(
    loaded: Loaded,
    data: Any,
    rows: list[int],
    group: str,
    name: str,
    *,
    labelled: bool = True,
    answer: Prediction | None = None,
    notes: Sequence[str] = (),
) -> list[Example]:
    """Return examples as a page shows them.

    Args:
        loaded: The model; asked about the examples unless there is an `answer`.
        data: What they are of.
        rows: Their positions.
        group: Their heading.
        name: Of the data, where its examples have no names.
        labelled: Whether labels mean something to the model.
        answer: What was said about these rows.
        notes: A line for each.
    """
    from ..data.batches import images_of, labels_of
    from ..data.eval_mode import evaluating
    from ..data.loaders import indexable
    from ..data.model_runs import answering_logits
    from ..fusion.policy_data import answer_of
    from ..report.examples import Example, image_address
    from ..tasks import task_of
    from ..uncertainty import predict_from_logits
    from .example_answers import answer_in_words

    if not rows:
        return []
    source = indexable(data)
    part = source.subset(rows, batch_size=len(rows))
    batch = next(iter(part))
    task = task_of(loaded.model)
    if answer is None and (task.by_token or not task.classifies):
        answer = answer_of(loaded.model, batch)
    if answer is None:
        with evaluating(loaded.model):
            answer = predict_from_logits(answering_logits(loaded.model, batch).float().cpu())
    images, labels = images_of(batch), labels_of(batch) if labelled else None
    texts = getattr(part, "texts", None)
    files = getattr(source, "files", None)
    mean, std = (getattr(loaded.transform, key, 0.5) for key in ("mean", "std"))
    found = []
    for place, row in enumerate(rows):
        where = f"{name} {row}"
        if files is not None:
            file = files[source.indices[row]]
            where = f"{file.parent.name}/{file.name}" if notes else file.name
        elif texts is not None and notes:
            where = f"row {source.indices[row] + 1}"  # of the file, whatever was sampled of it
        label = None if labels is None else labels[place]
        ids = batch["input_ids"][place] if texts is not None else None
        said = answer_in_words(loaded, answer[place], label, ids)
        found.append(
            Example(
                group=group,
                **said,
                source=where,
                image="" if images is None else image_address(images[place], mean=mean, std=std),
                text="" if texts is None else texts[place],
                note=notes[place] if notes else "",
            )
        )
    return found
