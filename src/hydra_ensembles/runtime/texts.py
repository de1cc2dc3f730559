"""Texts as token ids, by the tokenizer file in an exported folder. The package tokenizers only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import DataError, FormatError
from ..registry import imported

PARTS = {"input_ids": "ids", "attention_mask": "attention_mask", "token_type_ids": "type_ids"}
"""Inputs that a tokenizer makes, and what an encoding calls them."""

PLACES = {"sequence_ids": "sequence_ids", "word_ids": "word_ids", "offset_mapping": "offsets"}
"""What locates answers in texts, and what an encoding calls it."""

PAIR = {"text": ("text", "text_pair"), "question": ("question", "context")}
"""Keys of an input that is two texts."""

MOST_CHARACTERS = 10**6
"""A longer text is refused: all of it would be tokenized to keep a few hundred tokens."""


class Texts:
    """From texts to the arrays that an exported model takes, padded to the longest of them.

    Args:
        content: A `tokenizer.json`, as text.
        settings: The preprocessing of a contract.
        inputs: Names of the inputs to make.
    """

    def __init__(self, content: str, settings: Mapping[str, Any], inputs: Sequence[str]) -> None:
        tokenizers = imported("tokenizers", "Reading texts", "export")
        self._inputs, self._reads = tuple(inputs), str(settings.get("reads", "text"))
        self._template: str | None = settings["template"]
        self._longest = int(settings["max_length"])
        self._pad, self._side = int(settings["pad_id"]), settings["padding_side"]
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(content)
        except Exception as error:  # the package raises plain Exception for a file it cannot read
            raise FormatError(f"Cannot read the tokenizer: {str(error)[:200]}.") from None
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        if self._template is None:
            self._tokenizer.enable_truncation(
                self._longest,
                strategy="only_second" if self._reads == "question" else "longest_first",
                direction=settings["truncation_side"],
            )
            self._tokenizer.enable_padding(
                pad_id=self._pad, pad_token=settings["pad_token"], direction=self._side
            )

    def __call__(self, items: Sequence[Any]) -> dict[str, Any]:
        """Tokenize texts; return the arrays by input, each `[batch, tokens]` of int64.

        An input is a text; two texts are `{"text": ..., "text_pair": ...}`. Questions are
        `{"question": ..., "context": ...}`. Where answers have places in texts, these come along:
        the texts, and the names in `PLACES`.
        """
        texts = [self._checked(item) for item in items]
        try:
            if self._template is not None:
                return self._prompts(texts)
            encodings = self._tokenizer.encode_batch(texts)
        except (UnicodeError, TypeError) as error:  # a lone surrogate
            raise DataError(f"Cannot tokenize the texts: {error}.") from error
        except Exception as error:  # the package raises plain Exception for a question too long
            raise DataError(f"Cannot tokenize the texts: {str(error)[:200]}.") from error
        made: dict[str, Any] = {
            name: np.array([getattr(e, PARTS[name]) for e in encodings], dtype=np.int64)
            for name in self._inputs
            if name in PARTS
        }
        if self._reads != "text":
            made["texts"] = [text if isinstance(text, str) else text[1] for text in texts]
            for name, part in PLACES.items():
                rows = [
                    [-1 if place is None else place for place in getattr(e, part)]
                    for e in encodings
                ]
                made[name] = np.array(rows, dtype=np.int64)
        return made

    def _checked(self, item: Any) -> Any:
        """Return a text, or two texts as a tuple; raise when an input is neither."""
        names = PAIR.get(self._reads, ())
        texts: tuple[Any, ...] = (item,)
        if names and isinstance(item, Mapping) and self._template is None:
            known = all(name in item for name in names)
            texts = tuple(item[name] for name in names) if known else (item,)
        if self._reads == "question" and len(texts) < 2:
            raise DataError(
                f"Found a {type(item).__name__} where a question was expected: this model reads "
                "{'question': ..., 'context': ...}."
            )
        for text in texts:
            if not isinstance(text, str):
                raise DataError(
                    f"Found a {type(text).__name__} where a text was expected: this model reads "
                    "strings."
                )
            if len(text) > MOST_CHARACTERS:
                raise DataError(
                    f"A text of {len(text)} characters is longer than {MOST_CHARACTERS}. Cut it."
                )
        return texts if len(texts) > 1 else item

    def _prompts(self, texts: Sequence[str]) -> dict[str, np.ndarray]:
        """Put texts into the prompt; a long one is cut at its end, the prompt's words stay."""
        assert self._template is not None
        before, after = self._template.split("{}")
        rows = [self._prompt(text, before, after) for text in texts]
        ids = np.full((len(rows), max(map(len, rows))), self._pad, dtype=np.int64)
        mask = np.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)], mask[number, : len(row)] = row, 1
        made = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
        return {name: made[name] for name in self._inputs}

    def _prompt(self, text: str, before: str, after: str) -> list[int]:
        def encode(part: str, special: bool = False) -> list[int]:
            return list(self._tokenizer.encode(part, add_special_tokens=special).ids)

        ids = encode(before + text + after, special=True)
        if len(ids) <= self._longest:
            return ids
        start, end = encode(before, special=True), encode(after)
        room = max(0, self._longest - len(start) - len(end))
        return start + encode(text)[:room] + end
