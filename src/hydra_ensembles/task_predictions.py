"""The answers of tasks other than one class per input: the columns and fields that each adds.

Like `prediction`, this module imports neither torch nor anything of a task: columns are tensors or
numpy arrays, and rows are plain values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from .prediction import (
    DECIDED,
    FIELDS,
    MEMBERS,
    SET,
    SURE,
    ClassPrediction,
    Prediction,
    as_numpy,
    named,
)


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class MultiLabelPrediction(Prediction):
    """Any number of labels per input, each with its own probability.

    Attributes:
        probabilities: Mean of the members' sigmoids, `[batch, label]`.
        active: Whether a label is predicted, bool `[batch, label]`.
        label_uncertainty: Binary entropy of each label's probability in nats, `[batch, label]`.
        mutual_information: What the members disagree about, summed over labels, `[batch]`.
        disagreement: Share of member pairs and labels in which the decisions differ, `[batch]`.
        member_logits: The members' logits, temperatures applied, `[batch, member, label]`.
        student_logits: The logits of the one output that answers for the ensemble; None without.
    """

    FIELDS: ClassVar[Mapping[str, str]] = {
        "label": "names of the predicted labels; their numbers as text when they have no names",
        "class": "numbers of the predicted labels",
        "confidence": "probabilities of the predicted labels, in their order",
        **SURE,
        "mutual_information": "what the members disagree about, summed over labels, in nats",
        "disagreement": "share of member pairs and labels that are decided differently",
        **DECIDED,
        "set": f"names of the labels that may be true, the most probable first, {SET}",
    }

    probabilities: Any
    active: Any
    label_uncertainty: Any
    mutual_information: Any
    disagreement: Any
    member_logits: Any
    student_logits: Any = None

    @property
    def member_outputs(self) -> Any:
        """What the members gave, `[batch, member, label]`."""
        return self.member_logits

    @property
    def class_index(self) -> list[list[int]]:
        """Numbers of the predicted labels of each input."""
        rows = self.active.tolist()
        return [[label for label, active in enumerate(row) if active] for row in rows]

    @property
    def labels(self) -> list[Any]:
        """Names of the predicted labels of each input; their numbers as text without names."""
        return named(self.class_index, self.class_names)

    @property
    def confidence(self) -> list[list[float]]:
        """Probabilities of the predicted labels of each input."""
        rows = as_numpy(self.probabilities).tolist()
        return [
            [float(f"{row[label]:.7g}") for label in labels]
            for row, labels in zip(rows, self.class_index, strict=True)
        ]

    def _title(self) -> str:
        return f"{super()._title()}, {self.active.shape[-1]} labels"


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class RegressionPrediction(Prediction):
    """One or several numbers per input.

    Attributes:
        values: Mean of the members' numbers, `[batch, number]`.
        spread: Standard deviation of the members' numbers, `[batch, number]`; 0 for one member.
        sigma: Standard deviation of the true number around the answer, `[batch, number]`; None
            before `fit_calibrator`.
        member_values: The members' numbers, `[batch, member, number]`.
        student_values: The numbers of the one output that answers for the ensemble; None without.
    """

    FIELDS: ClassVar[Mapping[str, str]] = {
        "value": "the predicted number; a list of numbers when the model gives several",
        "spread": "standard deviation of the members' numbers, in the same form",
        "sigma": "standard deviation of the true number around the answer; null when not fitted",
        **SURE,
        **DECIDED,
        "set": f"[low, high] around the number; a list of them for several, {SET}",
    }

    values: Any
    spread: Any
    member_values: Any
    student_values: Any = None
    sigma: Any = None

    @property
    def member_outputs(self) -> Any:
        """What the members gave, `[batch, member, number]`."""
        return self.member_values

    @property
    def student_outputs(self) -> Any:
        """What a student gave that answers for the members; None without one."""
        return self.student_values

    def rows(self, *, probabilities: bool = False) -> list[dict[str, Any]]:
        """Return one dictionary of plain values per input: the keys of `FIELDS`."""
        rows = super().rows()
        names = ("value", "spread", *(("sigma",) if self.sigma is not None else ()))
        for name in names if self.values.shape[-1] == 1 else ():
            for row in rows:
                (row[name],) = row[name]
        return rows

    def _title(self) -> str:
        count = self.values.shape[-1]
        return f"{super()._title()}, {'1 number' if count == 1 else f'{count} numbers'} each"


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class EmbeddingPrediction(Prediction):
    """One vector per input.

    Attributes:
        embedding: Mean of the members' embeddings, `[batch, width]`.
        spread: Standard deviation of the members' embeddings, `[batch, width]`.
        member_embeddings: The members' embeddings, `[batch, member, width]`.
    """

    FIELDS: ClassVar[Mapping[str, str]] = {
        "embedding": "the members' mean vector",
        **SURE,
        **DECIDED,
    }
    HIDDEN: ClassVar[frozenset[str]] = Prediction.HIDDEN | {"embedding"}

    embedding: Any
    spread: Any
    member_embeddings: Any

    @property
    def member_outputs(self) -> Any:
        """What the members gave, `[batch, member, width]`."""
        return self.member_embeddings

    def _title(self) -> str:
        return f"{super()._title()}, {self.embedding.shape[-1]} numbers wide"


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class SpanPrediction(Prediction):
    """A span of a text per question, or that the text has no answer.

    Attributes:
        start, end: First and last token of the most probable span, int64 `[batch]`; both 0 where
            there is no answer.
        confidence: The span's probability among all spans that can be an answer, `[batch]`.
        no_answer: Probability that the text has no answer, `[batch]`.
        mutual_information, disagreement: As for classes, over spans, `[batch]`.
        able: Which tokens may be part of an answer, bool `[batch, token]`.
        member_logits: Start and end logits, temperatures applied, `[batch, member, 2, token]`.
        student_logits: Those of the one output that answers for the ensemble; None without.
        offsets: Places of the tokens in the texts, `[batch, token, 2]`; None where not known.
        texts: The texts that hold the answers; None where not known.
    """

    FIELDS: ClassVar[Mapping[str, str]] = {
        "answer": "the answer; empty when the text has none, null when the text is not known",
        "start": "first token of the answer; 0 when there is none",
        "end": "last token of the answer; 0 when there is none",
        "confidence": "probability of the answer",
        "no_answer": "probability that the text has no answer",
        **SURE,
        **MEMBERS,
        **DECIDED,
        "set": f"spans that may be right: answer, start, end, confidence, {SET}",
    }
    HIDDEN: ClassVar[frozenset[str]] = Prediction.HIDDEN | {"start", "end"}
    LISTS: ClassVar[tuple[str, ...]] = ("texts",)

    start: Any
    end: Any
    confidence: Any
    no_answer: Any
    mutual_information: Any
    disagreement: Any
    able: Any
    member_logits: Any
    student_logits: Any = None
    offsets: Any = None
    texts: Sequence[str] | None = None

    @property
    def member_outputs(self) -> Any:
        """What the members gave, `[batch, member, 2, token]`."""
        return self.member_logits

    @property
    def answer(self) -> list[str] | None:
        """The answers as texts, empty where there is none; None without the texts' offsets."""
        if self.texts is None or self.offsets is None:
            return None
        return [
            "" if (start, end) == (0, 0) else text[places[start][0] : places[end][1]]
            for text, places, start, end in zip(
                self.texts,
                self.offsets.tolist(),
                self.start.tolist(),
                self.end.tolist(),
                strict=True,
            )
        ]


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class TokenPrediction(ClassPrediction):
    """One class per token: `[batch, token]` where a classifier's answer is `[batch]`.

    Novelty is of the text. Padding is answered too; rows and entities leave it out.

    Attributes:
        real: Which tokens are answered, not padding or special tokens, bool `[batch, token]`.
        words: The word of each token, -1 for none, int64 `[batch, token]`; None where not known.
        offsets: Places of the tokens in the texts, `[batch, token, 2]`; None where not known.
        texts: The texts; None where not known.
    """

    FIELDS: ClassVar[Mapping[str, str]] = {
        "entities": "entities of the text: label, text, start, end, confidence, uncertainty",
        **{
            name: f"of each token: {meaning}"
            for name, meaning in FIELDS.items()
            if name not in (*DECIDED, "set")
        },
        "novelty": DECIDED["novelty"],
        "novelty_score": DECIDED["novelty_score"],
        "decision": f"of each token: {DECIDED['decision']}",
        "why": f"of each token: {DECIDED['why']}",
        "set": f"of each token: {FIELDS['set']}",
    }
    LISTS: ClassVar[tuple[str, ...]] = ("texts",)

    real: Any
    words: Any = None
    offsets: Any = None
    texts: Sequence[str] | None = None

    @property
    def entities(self) -> list[list[dict[str, Any]]]:
        """The entities of each text, as tags such as `B-LOC` and `I-LOC` say.

        A word has the tag of its first token. `start` and `end` are places in the text, or the
        first token and the one after the last where the text is not known; `confidence` is the
        lowest one of the words, `uncertainty` the highest.
        """
        return [self._entities(row) for row in range(len(self))]

    def _entities(self, row: int) -> list[dict[str, Any]]:
        real = as_numpy(self.real[row]).nonzero()[0]
        starts = real
        if self.words is not None:
            word = as_numpy(self.words[row])
            starts = np.asarray([t for t in real if t == 0 or word[t] != word[t - 1]], int)
        names, sure = self.labels[row], as_numpy(self.confidence[row])
        unsure = as_numpy(self.uncertainty[row])
        found = []
        for kind, first, last in sorted(
            entities_of([names[token] for token in starts]), key=lambda entity: entity[1]
        ):
            tokens = starts[first : last + 1]
            after = starts[last + 1] if last + 1 < len(starts) else real[-1] + 1
            final = int(real[real < after][-1])
            begin, end, text = int(tokens[0]), final + 1, None
            if self.offsets is not None:
                begin, end = (int(self.offsets[row][t][i]) for t, i in ((begin, 0), (final, 1)))
                text = None if self.texts is None else self.texts[row][begin:end]
            found.append(
                {
                    "label": kind,
                    "text": text,
                    "start": begin,
                    "end": end,
                    "confidence": float(f"{sure[tokens].min():.7g}"),
                    "uncertainty": float(f"{unsure[tokens].max():.7g}"),
                }
            )
        return found

    def rows(self, *, probabilities: bool = False) -> list[dict[str, Any]]:
        """Return one dictionary per text; columns by token are lists over the real tokens."""
        rows = super().rows(probabilities=probabilities)
        by_text = ("entities", "novelty", "novelty_score")
        for row, real in zip(rows, as_numpy(self.real), strict=True):
            for name, values in row.items():
                if name not in by_text and values is not None:
                    row[name] = [value for value, kept in zip(values, real, strict=True) if kept]
        return rows


def entities_of(tags: Sequence[str]) -> set[tuple[str, int, int]]:
    """Return type, first and last place of the entities in tags such as `B-LOC`, `I-LOC`, `O`.

    As conlleval and seqeval read them: an entity also starts with an `I-` after another type or
    none.
    """
    found: set[tuple[str, int, int]] = set()
    start, kind, before = 0, "", "O"
    for place, tag in enumerate([*tags, "O"]):
        prefix, _, own = tag.partition("-")
        own = own or "_"
        starts = prefix in "BS" or before in "OES" or own != kind
        if before != "O" and (prefix == "O" or starts):
            found.add((kind, start, place - 1))
        if prefix != "O" and starts:
            start = place
        before, kind = prefix, own
    return found


TASK_PREDICTIONS: Sequence[type[Prediction]] = (
    MultiLabelPrediction,
    RegressionPrediction,
    TokenPrediction,
    SpanPrediction,
    EmbeddingPrediction,
)
"""All answers of this module, for the tables of the documentation."""
