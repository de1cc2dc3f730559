"""What a report shows besides figures: examples (pictures or texts) and the counted cost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import HydraError

if TYPE_CHECKING:
    from ..evaluation import Results
    from ..report.examples import Example
    from .loading import Loaded

EACH = 6


def cost_of(model: Any, batch: Any) -> float | None:
    """Return a model's multiply-adds relative to its own unpruned host; None when not countable."""
    from ..costs.counting import cost
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
    """Return the most and least certain and the newest test examples, and familiar outliers."""
    column = f"score:{results.scores[0]}"
    order = results.examples["id"][column].argsort(stable=True).tolist()
    found = _describe(loaded, known, order[:each], "Most certain", "test")
    found += _describe(loaded, known, order[::-1][:each], "Least certain", "test")
    wrong = (~results.examples["id"]["correct"].bool()).nonzero().flatten()
    scores = results.examples["id"][column]
    sure = wrong[scores[wrong].argsort(stable=True)][:each].tolist()
    found += _describe(loaded, known, sure, "Wrong, and most certain of it", "test")
    if "score:novelty" in results.examples["id"]:
        newest = results.examples["id"]["score:novelty"].argsort(descending=True, stable=True)
        found += _describe(loaded, known, newest[:each].tolist(), "Newest", "test")
    for name, data in outliers.items():
        familiar = results.examples[f"ood/{name}"][column].argsort(stable=True)
        title = f"Outliers of {name} that it is most certain about"
        found += _describe(
            loaded, data, familiar[: each // 2].tolist(), title, name, labelled=False
        )
    return found


def _describe(
    loaded: Loaded, data: Any, rows: list[int], group: str, name: str, *, labelled: bool = True
) -> list[Example]:
    from ..data.batches import images_of, indexable, labels_of
    from ..data.running import evaluating, member_logits
    from ..report.examples import Example, picture_address
    from ..uncertainty import predict_from_logits

    if not rows:
        return []
    source = indexable(data)
    part = source.subset(rows, batch_size=len(rows))
    batch = next(iter(part))
    with evaluating(loaded.model):
        logits = member_logits(loaded.model, batch).float().cpu()
    answer = predict_from_logits(logits)
    images, labels = images_of(batch), labels_of(batch) if labelled else None
    texts = getattr(part, "texts", None)
    files = getattr(source, "files", None)
    mean, std = (getattr(loaded.transform, key, 0.5) for key in ("mean", "std"))
    found = []
    for place, row in enumerate(rows):
        where = f"{name} {row}"
        if files is not None:
            where = files[source.indices[row]].name
        found.append(
            Example(
                group=group,
                predicted=loaded.class_name(int(answer.label[place])),
                confidence=float(answer.confidence[place]),
                uncertainty=float(answer.uncertainty[place]),
                label="" if labels is None else loaded.class_name(int(labels[place])),
                source=where,
                picture=""
                if images is None
                else picture_address(images[place], mean=mean, std=std),
                text="" if texts is None else texts[place],
            )
        )
    return found
