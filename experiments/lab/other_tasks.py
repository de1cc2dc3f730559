"""Tasks other than one class per text: GoEmotions, STS-B, WNUT17 and spans of SQuAD and XQuAD.

Splits, the same in every table: `calibration` are `HELD` rows of the training file drawn with seed
0, `train` are the others; `test` is the dev file (1,200 of GoEmotions' 5,426 comments and 1,000 of
STS-B's 1,500 pairs, drawn with seed 0). XQuAD's paragraphs are halved with seed 0: `train` has the
first half and SQuAD's questions, `calibration` a fifth of these paragraphs, and `test` is the
second half; paragraphs with a question that stands in both sets are never in `test`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydra_ensembles.data import Batches
from hydra_ensembles.tasks import IGNORED

from . import sets
from .sets import TextSet, need
from .tasks import Data, TextTask

TAGS = ["O"] + [
    f"{place}-{kind}"
    for kind in ("corporation", "creative-work", "group", "location", "person", "product")
    for place in "BI"
]
"""WNUT17's tags, in the order of the classes."""
HELD = {"goemotions": 800, "stsb": 600, "wnut17": 500}
FAR = {"trec": sets.trec, "ag-news": sets.ag_news, "multi30k": sets.multi30k}
SOME = 120
"""Outliers of each family."""


@dataclass(frozen=True)
class WordSet(TextSet):
    """Sentences of words that are split by spaces, with the number of a tag per word."""

    def tokens(self, tokenizer: Any) -> list[int]:
        """Count the tokens of each sentence."""
        words = [text.split(" ") for text in self.texts]
        return _lengths(tokenizer(words, is_split_into_words=True, truncation=True, max_length=64))

    def batches(self, tokenizer: Any, *, batch_size: int = 50, max_length: int = 64) -> Batches:
        """Make data for a host; the first token of a word has its tag, all others -100."""

        def load(rows: Sequence[int]) -> Any:
            encoded = tokenizer(
                [self.texts[row].split(" ") for row in rows],
                is_split_into_words=True,
                padding=True,
                truncation=True,
                max_length=max_length,
                return_tensors="pt",
            )
            labels = torch.full_like(encoded["input_ids"], IGNORED)
            for place, row in enumerate(rows):
                words = encoded.word_ids(place)
                for token, word in enumerate(words):
                    if word is not None and word != words[token - 1]:
                        labels[place, token] = self.labels[row][word] if self.labels else 0
            return {**encoded, "labels": labels}

        return Batches(load, range(len(self)), batch_size=batch_size)


@dataclass(frozen=True)
class SpanSet(TextSet):
    """Questions with their contexts (`pairs`); labels are texts and first letters of answers."""

    def tokens(self, tokenizer: Any) -> list[int]:
        """Return the letters of each context, by which lengths can be told."""
        return [len(context) for context in self.pairs or ()]

    def batches(self, tokenizer: Any, *, batch_size: int = 50, max_length: int = 320) -> Batches:
        """Make data for a host; an answer that was cut off, or is none, is at token 0."""

        def load(rows: Sequence[int]) -> Any:
            encoded = self.encoded(tokenizer, rows, max_length)
            places = encoded.pop("offset_mapping").tolist()
            ends = torch.zeros(len(rows), 2, dtype=torch.long)
            for place, row in enumerate(rows):
                assert self.labels is not None
                if self.labels[row]:
                    text, start = self.labels[row][0]
                    which = encoded.sequence_ids(place)
                    inside = [
                        token
                        for token, (low, high) in enumerate(places[place])
                        if which[token] == 1 and high > start and low < start + len(text)
                    ]
                    ends[place] = torch.tensor([inside[0], inside[-1]] if inside else [0, 0])
            return {**encoded, "start_positions": ends[:, 0], "end_positions": ends[:, 1]}

        return Batches(load, range(len(self)), batch_size=batch_size)

    def encoded(self, tokenizer: Any, rows: Sequence[int], max_length: int = 320) -> Any:
        """Tokenize some questions with their contexts."""
        assert self.pairs is not None
        return tokenizer(
            [self.texts[row] for row in rows],
            [self.pairs[row] for row in rows],
            padding=True,
            truncation="only_second",
            max_length=max_length,
            return_offsets_mapping=True,
            return_tensors="pt",
        )


def _lengths(encoded: Any) -> list[int]:
    return [len(tokens) for tokens in encoded["input_ids"]]


# --- files


def goemotions(root: Path, part: str) -> TextSet:
    """Load comments with 0 or 1 for each of 28 emotions."""
    path = need(root / "text" / "goemotions" / f"{part}.tsv")
    rows = [line.split("\t") for line in path.read_text(encoding="utf-8").splitlines()]
    labels = [[float(str(n) in row[1].split(",")) for n in range(28)] for row in rows]
    return TextSet([row[0] for row in rows], labels)


def emotions(root: Path) -> list[str]:
    """Return the names of GoEmotions' labels."""
    return need(root / "text" / "goemotions" / "emotions.txt").read_text().split()


def stsb(root: Path, part: str) -> TextSet:
    """Load pairs of sentences with their similarity, 0 to 5."""
    lines = need(root / "text" / "stsb" / f"{part}.tsv").read_text(encoding="utf-8").splitlines()
    rows = [line.split("\t") for line in lines[1:]]
    return TextSet([r[1] for r in rows], [[float(r[0])] for r in rows], pairs=[r[2] for r in rows])


def wnut17(root: Path, part: str) -> WordSet:
    """Load sentences with a tag per word."""
    text = need(root / "text" / "wnut17" / f"{part}.conll").read_text(encoding="utf-8")
    found = [
        [line.split("\t") for line in block.splitlines() if line.strip()]
        for block in text.split("\n\n")
        if block.strip()
    ]
    return WordSet(
        [" ".join(word for word, _ in rows) for rows in found],
        [[TAGS.index(tag.strip()) for _, tag in rows] for rows in found],
    )


def questions(root: Path, name: str) -> tuple[list[int], SpanSet]:
    """Load `squad2_small` or `xquad_en`: the paragraph of each question, and the questions."""
    path = need(root / "text" / name / "paragraphs.jsonl")
    paragraphs = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [
        (place, asked["question"], paragraph["context"], asked.get("answers", ()))
        for place, paragraph in enumerate(paragraphs)
        for asked in paragraph["qas"]
    ]
    answers = [[(a["text"], a["answer_start"]) for a in given] for *_, given in rows]
    return [row[0] for row in rows], SpanSet(
        [row[1] for row in rows], answers, pairs=[row[2] for row in rows]
    )


# --- tasks


class HeldTask(TextTask):
    """A training file of which some rows are held back, and a dev file."""

    kind: str
    files: Any
    most: int | None = None

    def host(self, seed: int) -> nn.Module:
        """Load a fine-tuned host."""
        return host_class(self.kind).from_pretrained(self.host_folder(seed)).eval()

    def part(self, name: str) -> TextSet:
        """Return `train`, `calibration` or `test`."""
        if name == "test":
            found = self.files(self.data, "dev")
            return found if self.most is None else found.sample(self.most)
        rows = self.files(self.data, "train")
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        held = HELD[self.name]
        if name == "calibration":  # in the order of its batches
            return rows.subset(sorted(order[:held])).by_length()
        return rows.subset(sorted(order[held:]))

    @cached_property
    def test(self) -> Data:
        """The dev file, or a part of it."""
        return self.batches(self.part("test"))

    @cached_property
    def calibration(self) -> Data:
        """Rows that no host was trained on."""
        return self.batches(self.part("calibration"))

    @property
    def held_out(self) -> Data:
        """The same: tables draw from them."""
        return self.calibration

    def halves(self, draw: int) -> tuple[list[int], list[int]]:
        """Draw half of the calibration rows, which are known, and the other half."""
        count = HELD[self.name]
        order = torch.randperm(count, generator=torch.Generator().manual_seed(draw)).tolist()
        return sorted(order[: count // 2]), sorted(order[count // 2 :])

    def known(self, draw: int) -> Data:
        """Return the half of the calibration rows that novelty and `build` see."""
        return self.batches(self.part("calibration").subset(self.halves(draw)[0]))

    @cached_property
    def ood(self) -> dict[str, dict[str, Data]]:
        """Texts of other kinds."""
        found = {name: self.far(load(self.data).sample(SOME)) for name, load in FAR.items()}
        return {"far": {name: self.batches(texts) for name, texts in found.items()}}

    def far(self, texts: TextSet) -> TextSet:
        """Bring texts of another kind into the form of the task."""
        return texts.unlabelled()


class GoEmotions(HeldTask):
    """Comments with any of 28 emotions; 16 % have several."""

    name, kind, most = "goemotions", "multi-label", 1200
    files = staticmethod(goemotions)


class Stsb(HeldTask):
    """How alike are two sentences, 0 to 5?"""

    name, kind, most = "stsb", "regression", 1000
    files = staticmethod(stsb)

    def far(self, texts: TextSet) -> TextSet:
        """Pair each text with the next one."""
        return replace(texts, pairs=[*texts.texts[1:], texts.texts[0]])


class Wnut17(HeldTask):
    """Which words are names of six kinds?"""

    name, kind = "wnut17", "token-classification"
    files = staticmethod(wnut17)

    def far(self, texts: TextSet) -> TextSet:
        """Split into words, as the sentences are; all of them are tagged O."""
        words = [text.split() for text in texts.texts]
        return WordSet([" ".join(w) for w in words], [[0] * len(w) for w in words])


class Xquad(HeldTask):
    """Where in a paragraph does the answer stand, if anywhere?"""

    name, kind = "xquad", "question-answering"

    def part(self, name: str) -> TextSet:
        """Return a part; see the top of this file."""
        of, ours = questions(self.data, "xquad_en")
        _, others = questions(self.data, "squad2_small")
        order = torch.randperm(max(of) + 1, generator=torch.Generator().manual_seed(0)).tolist()
        shared = set(others.texts)
        both = {place for place, text in zip(of, ours.texts, strict=True) if text in shared}
        half = len(order) // 2
        held = set(order[: half // 5]) - both
        test = set(order[half:]) - both
        chosen = {"calibration": held, "test": test}.get(name)
        if chosen is not None:
            return ours.subset([row for row, place in enumerate(of) if place in chosen])
        rest = [row for row, place in enumerate(of) if place not in held | test]
        return ours.subset(rest) + others

    @cached_property
    def ood(self) -> dict[str, dict[str, Data]]:
        """None."""
        return {}


def host_class(kind: str) -> Any:
    """Return the class of transformers for a kind of task."""
    import transformers

    names = {
        "token-classification": "BertForTokenClassification",
        "question-answering": "BertForQuestionAnswering",
    }
    return getattr(transformers, names.get(kind, "BertForSequenceClassification"))


OTHER_TASKS: dict[str, type[HeldTask]] = {
    task.name: task for task in (GoEmotions, Stsb, Wnut17, Xquad)
}
