"""Labels of every task in files and data sets: several per text, numbers, tags of words, answers.

| task | labels of one row |
|---|---|
| multi-label | names or class numbers: a list, or separated by `|`; empty for none |
| regression | a number; several as a list, or separated by `|` |
| token classification | `tokens` and their `tags`, lists of one length; CoNLL: `word TAG` lines |
| question answering | `question`, `context`, `answers` (`text` and `answer_start`, lists; SQuAD) |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import DataError
from ..tasks import IGNORED, Embedding, MultiLabel, Regression, Spans, Task
from .batches import Batch
from .class_names import Names, class_finder, encode_labels, first_spellings, pick_column
from .text_files import LABEL_COLUMNS, TextBatches, read_table, read_texts

BETWEEN = "|"
"""Separates several labels or numbers in one text."""
TOKEN_COLUMNS, TAG_COLUMNS = ("tokens", "words"), ("tags", "ner_tags", "labels", "label")
CONLL = (".conll", ".bio", ".iob", ".iob2")
"""Endings of files with one word and its tag per line, and a blank line after each sentence."""
CUT_OFF = 10**6
"""The position of an answer that is not among the tokens: it was cut off with its text."""


def has_own_labels(task: Task | None) -> bool:
    """Return whether a task's labels are anything but one class per text."""
    return task is not None and (task.by_token or not task.classifies)


def task_file(file: str | Path, tokenizer: Any, task: Task, **options: Any) -> TextBatches:
    """Read a table of texts, or a CoNLL file, with the labels of a task (see `task_table`)."""
    path = Path(file).expanduser()
    table = read_conll(path) if path.suffix.lower() in CONLL else read_table(path)
    return task_table(table, table.__getitem__, tokenizer, task, where=str(path), **options)


def task_table(
    names: Collection[str],
    read: Callable[[str], Sequence[Any]],
    tokenizer: Any,
    task: Task,
    *,
    where: str,
    labels: bool,
    text_column: str | None,
    pair_column: str | None,
    label_column: str | None,
    class_names: Names | None,
    classes: int | None,
    max_length: int | None,
    batch_size: int,
    stored: Callable[[str], Sequence[str] | None] = lambda column: None,
) -> TextBatches:
    """Make data of a table with the labels of a task.

    Args:
        names: Names of its columns.
        read: What reads a column by name.
        tokenizer: The host's.
        task: What the labels are.
        where: Where they are, for errors.
        labels: False leaves them out.
        text_column, pair_column, label_column: By default found under their usual names.
        class_names: Names in the order of the host's classes.
        classes: Number of the model's classes, labels or numbers, if known.
        max_length: Most tokens per text.
        batch_size: Texts per batch.
        stored: Returns the names of a column's numbers, where the data has them.
    """
    options: dict[str, Any] = {"max_length": max_length, "batch_size": batch_size}
    if isinstance(task, Spans):
        return _questions(names, read, tokenizer, where, labels, label_column, **options)
    if task.by_token and text_column is None and any(name in names for name in TOKEN_COLUMNS):
        return _tagged(
            names, read, tokenizer, where, labels, label_column, class_names, stored, **options
        )
    if task.by_token and labels:
        raise _missing(where, "'tokens', a list of words,", names)
    found: Tensor | None = None
    info: dict[str, Any] = {}
    if labels and not isinstance(task, Embedding):  # nothing is learnt from labels of vectors
        usual = (*LABEL_COLUMNS, "score") if isinstance(task, Regression) else LABEL_COLUMNS
        column = pick_column(label_column, names, usual, "label", where)
        known = stored(column)
        found, info = encode_task_labels(
            list(read(column)), task, class_names or known, where=where, classes=classes
        )
    return read_texts(
        names,
        read,
        tokenizer,
        where=where,
        text_column=text_column,
        pair_column=pair_column,
        labels=found,
        info=info,
        **options,
    )


def encode_task_labels(
    values: Sequence[Any],
    task: Task,
    class_names: Names | None,
    *,
    where: str,
    classes: int | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """Turn the labels of rows into what the task's loss takes; return them with what is known.

    Args:
        values: The label of each row.
        task: What the labels are.
        class_names: Names in the order of the host's classes, or None.
        where: Where the labels are, for errors.
        classes: Number of the model's classes, labels or numbers, if known.
    """
    if isinstance(task, MultiLabel):
        return _several_labels(values, class_names, where, classes)
    if isinstance(task, Regression):
        return _numbers(values, where, classes), {"class_names": None}
    return encode_labels(values, class_names, where=where)


def _parts(value: Any) -> list[Any]:
    """Return the entries of a list, or of a text that separates them."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(BETWEEN) if part.strip()]
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _several_labels(
    values: Sequence[Any], names: Names | None, where: str, classes: int | None
) -> tuple[Tensor, dict[str, Any]]:
    known = None if names is None else first_spellings(names)
    count = classes or (None if known is None else len(known))
    if count is None:
        raise DataError(
            f"How many labels {where} has is not known. Give their names in the order of the "
            "model's labels with --class-names (class_names= in Python)."
        )
    find = None if names is None else class_finder(names)
    labels = torch.zeros(len(values), count)
    for row, value in enumerate(values):
        parts = _parts(value)
        if len(parts) == count and all(isinstance(p, float) and p in (0.0, 1.0) for p in parts):
            labels[row] = torch.tensor(parts)  # one yes or no for each label
            continue
        for part in parts:
            number = _number_of(part, find, known)
            if number is None or not 0 <= number < count:
                shown = ", ".join(known[:20]) if known else f"0 to {count - 1}"
                raise DataError(
                    f"Row {row + 1} of {where} has the label {part!r:.60}, which is none of the "
                    f"model's {count} labels ({shown}). Give names or class numbers, several "
                    f"separated by {BETWEEN!r} (in JSON as a list), or nothing for none."
                )
            labels[row, number] = 1.0
    return labels, {"class_names": known}


def _number_of(
    part: Any, find: Callable[[str], list[int]] | None, known: Sequence[str] | None
) -> int | None:
    """Return the number of one label: a whole number, or a name."""
    if isinstance(part, int):
        return int(part)
    if not isinstance(part, str):
        return None
    # a name is also found by what stands before its comma, which may be another label's
    places = [] if find is None or ("," in part and part not in (known or ())) else find(part)
    plain = part.removeprefix("LABEL_")
    if not places and plain.isdecimal():
        return int(plain)
    return places[0] if len(places) == 1 else None


def _numbers(values: Sequence[Any], where: str, count: int | None) -> Tensor:
    rows = []
    for row, value in enumerate(values):
        try:
            numbers = [float(part) for part in _parts(value)]
        except (TypeError, ValueError):
            numbers = []
        if not numbers or not all(map(math.isfinite, numbers)) or len(numbers) != (count or 1):
            expected = "a number" if (count or 1) == 1 else f"{count} numbers"
            raise DataError(
                f"Row {row + 1} of {where} has the label {value!r:.60}; regression expects "
                f"{expected} (several separated by {BETWEEN!r}, in JSON as a list)."
            )
        rows.append(numbers)
    found = torch.tensor(rows)
    return found[:, 0] if found.shape[1] == 1 else found


class TokenBatches(TextBatches):
    """Words and their tags; a word's first token has its tag, the others -100.

    Args:
        words: The words of each text.
        tags: Class numbers of the words `[example, word]`, padded by -100; or None.
        tokenizer: A fast one, which knows the word of each token.
    """

    def __init__(
        self, words: Sequence[Sequence[str]], tokenizer: Any, *, tags: Tensor | None, **options: Any
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                f"Tags of words need a fast tokenizer, which knows the word of each token; found "
                f"{type(tokenizer).__name__}."
            )
        self._words = [list(text) for text in words]
        super().__init__([" ".join(w) for w in words], tokenizer, labels=tags, **options)

    def with_texts(self, texts: Sequence[str]) -> TextBatches:
        """Return other texts without tags, which belong to the words."""
        return TextBatches(texts, self.tokenizer, info=self.info, max_length=self.max_length)

    def _encode(self, rows: Sequence[int]) -> Batch:
        encoded = self.tokenizer(
            [self._words[row] for row in rows],
            is_split_into_words=True,
            padding=True,
            truncation=True,
            max_length=self.max_length,
            return_tensors="pt",
        )
        if self._all_labels is None:
            return dict(encoded)
        labels = torch.full(encoded["input_ids"].shape, IGNORED)
        for place, row in enumerate(rows):
            before = None
            for token, word in enumerate(encoded.word_ids(place)):
                if word is not None and word != before:
                    labels[place, token] = self._all_labels[row, word]
                before = word
        return {**encoded, "labels": labels}


class QuestionBatches(TextBatches):
    """Questions about texts, with the characters of their answers.

    Args:
        questions, contexts: The texts.
        tokenizer: A fast one, which knows the places of tokens in the text.
        answers: First character and the one after the last, `[example, 2]`, -1 where the text does
            not answer; or None.
    """

    def __init__(
        self,
        questions: Sequence[str],
        contexts: Sequence[str],
        tokenizer: Any,
        *,
        answers: Tensor | None,
        **options: Any,
    ) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise DataError(
                "Questions need a fast tokenizer, which knows the places of tokens in the text; "
                f"found {type(tokenizer).__name__}."
            )
        super().__init__(questions, tokenizer, pairs=contexts, labels=answers, **options)

    def _encode(self, rows: Sequence[int]) -> Batch:
        assert self._pairs is not None
        encoded = self.tokenizer(
            [self._texts[row] for row in rows],
            [self._pairs[row] for row in rows],
            padding=True,
            truncation="only_second",
            max_length=self.max_length,
            return_tensors="pt",
            return_offsets_mapping=True,
        )
        places = encoded.pop("offset_mapping")
        if self._all_labels is None:
            return dict(encoded)
        found = torch.zeros(len(rows), 2, dtype=torch.long)
        for place, row in enumerate(rows):
            first, after = self._all_labels[row].tolist()
            if first >= 0:
                inside = torch.tensor([s == 1 for s in encoded.sequence_ids(place)])
                found[place] = _tokens_of(places[place], inside, first, after)
        return {**encoded, "start_positions": found[:, 0], "end_positions": found[:, 1]}


def _tokens_of(places: Tensor, inside: Tensor, first: int, after: int) -> Tensor:
    """Return the first and the last token of some characters; `CUT_OFF` for those not there."""
    starts = (inside & (places[:, 0] <= first) & (places[:, 1] > first)).nonzero()
    ends = (inside & (places[:, 0] < after) & (places[:, 1] >= after)).nonzero()
    found = [int(rows[0]) if len(rows) else CUT_OFF for rows in (starts, ends)]
    return torch.tensor(found)


def _questions(
    names: Collection[str],
    read: Callable[[str], Sequence[Any]],
    tokenizer: Any,
    where: str,
    labels: bool,
    label_column: str | None,
    **options: Any,
) -> TextBatches:
    for column in ("question", "context"):
        if column not in names:
            raise _missing(where, "'question' and 'context'", names)
    contexts = [str(text) for text in read("context")]
    answers = None
    if labels:
        column = label_column or next((n for n in ("answers", "answer") if n in names), "")
        if column not in names:
            raise _missing(where, "'answers'", names)
        starts = read("answer_start") if "answer_start" in names else [None] * len(contexts)
        rows = zip(read(column), starts, contexts, strict=True)
        answers = torch.tensor(
            [
                _answer(given, start, context, f"Row {row} of {where}")
                for row, (given, start, context) in enumerate(rows, start=1)
            ]
        )
    asked = [str(text) for text in read("question")]
    info = {"class_names": None}
    return QuestionBatches(asked, contexts, tokenizer, answers=answers, info=info, **options)


def _tagged(
    names: Collection[str],
    read: Callable[[str], Sequence[Any]],
    tokenizer: Any,
    where: str,
    labels: bool,
    label_column: str | None,
    class_names: Names | None,
    stored: Callable[[str], Sequence[str] | None],
    **options: Any,
) -> TextBatches:
    words = [list(text) for text in read(next(name for name in TOKEN_COLUMNS if name in names))]
    tags: Tensor | None = None
    info: dict[str, Any] = {"class_names": None}
    if labels:
        column = label_column or next((name for name in TAG_COLUMNS if name in names), "")
        if column not in names:
            raise _missing(where, "'tags', a list with one tag per word,", names)
        given, known = list(read(column)), stored(column)
        if known is not None and class_names is not None:  # by name, since the orders may differ
            given = [[known[tag] if isinstance(tag, int) else tag for tag in own] for own in given]
        tags, info = _tags(words, given, class_names or known, where)
    return TokenBatches(words, tokenizer, tags=tags, info=info, **options)


def _missing(where: str, what: str, names: Collection[str]) -> DataError:
    return DataError(f"{where} has no {what}. It has {', '.join(map(str, names))}.")


def _tags(
    words: list[list[str]], tags: list[Any], class_names: Names | None, where: str
) -> tuple[Tensor, dict[str, Any]]:
    """Return class numbers of words, padded by -100, and what the data says about them."""
    for row, (text, own) in enumerate(zip(words, tags, strict=True)):
        if not isinstance(own, (list, tuple)) or len(own) != len(text):
            found = len(own) if isinstance(own, (list, tuple)) else repr(own)[:40]
            raise DataError(
                f"Row {row + 1} of {where} has {len(text)} words and {found} tags: expected one "
                "tag per word."
            )
    flat = [tag for own in tags for tag in own]
    if class_names is None and any(isinstance(tag, str) for tag in flat):
        raise DataError(
            f"The tags of {where} are names, but the model has none. Give its tags in its order "
            "with --class-names (class_names= in Python)."
        )
    numbers, info = encode_labels(flat, class_names, where=where)
    padded = torch.full((len(words), max(map(len, words), default=0)), IGNORED)
    start = 0
    for row, own in enumerate(tags):
        padded[row, : len(own)] = numbers[start : start + len(own)]
        start += len(own)
    return padded, {**info, "assumed_order": None}


def _answer(given: Any, start: Any, context: str, where: str) -> list[int]:
    """Return the characters of an answer in its text; -1 and -1 where there is none."""
    text = given
    if isinstance(given, Mapping):  # as SQuAD has them: the first of several answers
        text, start = given.get("text"), given.get("answer_start")
    if isinstance(given, list) and given and isinstance(given[0], Mapping):
        text, start = given[0].get("text"), given[0].get("answer_start")
    if isinstance(text, (list, tuple)):
        text = text[0] if text else None
    if isinstance(start, (list, tuple)):
        start = start[0] if start else None
    if text is None or text == "":
        return [-1, -1]
    if start is None or start == "":
        start = context.find(text)
    start = int(start)
    if start < 0 or context[start : start + len(text)] != text:
        raise DataError(
            f"{where}: its answer {text!r:.60} is not in the context at character {start}. Check "
            "'answer_start'."
        )
    return [start, start + len(text)]


def read_conll(path: Path) -> dict[str, list[Any]]:
    """Read a file with one word and its tag per line, a blank line after each sentence."""
    table: dict[str, list[Any]] = {"tokens": [], "tags": []}
    for words, tags in _sentences(path):
        table["tokens"].append(words)
        table["tags"].append(tags)
    if not table["tokens"]:
        raise DataError(f"{path} holds no sentences.")
    return table


def _sentences(path: Path) -> Iterator[tuple[list[str], list[str]]]:
    words: list[str] = []
    tags: list[str] = []
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"Cannot read {path}: {error}.") from error
    for number, line in enumerate([*lines, ""], start=1):
        if line.strip() and not line.startswith("-DOCSTART-"):
            parts = line.split("\t") if "\t" in line else line.split()
            if len(parts) < 2:
                raise DataError(
                    f"Line {number} of {path} is {line!r:.60}; expected a word and its tag."
                )
            words.append(parts[0])
            tags.append(parts[-1].strip())
        elif words:
            yield words, tags
            words, tags = [], []
