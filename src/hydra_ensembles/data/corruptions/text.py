"""Text corruptions on raw strings: typos, dropped words, swapped words, at five severities."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...errors import DataError
from ...registry import Registry
from .base import draw_seeds

TextCorruption = Callable[[str, float, random.Random], str]
Edit = Callable[[list[str], int, str, random.Random], None]
text_corruptions: Registry[TextCorruption] = Registry("text corruption")

CHARACTER_RATES = (0.02, 0.05, 0.10, 0.15, 0.25)  # share of the letters
WORD_RATES = (0.05, 0.10, 0.20, 0.35, 0.50)  # share of the words
_KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_PLACES = {key: (row, col) for row, keys in enumerate(_KEYBOARD) for col, key in enumerate(keys)}
_NEAR = {
    key: "".join(
        other
        for other, (r, c) in _PLACES.items()
        if other != key and abs(r - row) <= 1 and abs(c - col + (r - row) / 2) <= 1
    )
    for key, (row, col) in _PLACES.items()
}


def corrupt_texts(
    texts: Sequence[str], name: str, *, severity: int = 3, seed: int = 0
) -> list[str]:
    """Corrupt strings with a registered text corruption, one seed per example.

    Args:
        texts: the strings.
        name: `typos` (a mixture of the four below), `keyboard`, `swap_letters`, `drop_letters`,
            `insert_letters`, `drop_words`, `swap_words`.
        severity: 1 to 5: 2, 5, 10, 15, 25 % of the letters or 5, 10, 20, 35, 50 % of the words.
        seed: of the draw; the same for any order of calls.
    """
    function = text_corruptions[name]
    if severity not in range(1, 6):
        raise DataError(f"The severity is {severity}; expected 1 to 5.")
    rate = (WORD_RATES if name.endswith("words") else CHARACTER_RATES)[severity - 1]
    seeds = draw_seeds(len(texts), torch.Generator().manual_seed(seed)).tolist()
    return [
        function(text, rate, random.Random(one)) for text, one in zip(texts, seeds, strict=True)
    ]


def _wrong_key(characters: list[str], position: int, text: str, rng: random.Random) -> None:
    """Hit the key beside the right one."""
    characters[position] = _near_key(text[position], rng)


def _swap(characters: list[str], position: int, text: str, rng: random.Random) -> None:
    """Swap a letter with the next one, if that is a letter."""
    if text[position + 1 : position + 2].isalpha():
        pair = characters[position : position + 2]
        characters[position : position + 2] = pair[::-1]


def _drop(characters: list[str], position: int, text: str, rng: random.Random) -> None:
    """Leave a letter out."""
    characters[position] = ""


def _insert(characters: list[str], position: int, text: str, rng: random.Random) -> None:
    """Hit a neighbouring key as well."""
    characters[position] += _near_key(text[position], rng)


def _mistype(characters: list[str], position: int, text: str, rng: random.Random) -> None:
    """Mistype as people do: a wrong key, two letters swapped, one left out, one too many."""
    edit = (_wrong_key, _swap, _drop, _insert)[rng.randrange(4)]
    if edit is _swap and not text[position + 1 : position + 2].isalpha():
        edit = _insert
    edit(characters, position, text, rng)


def _near_key(character: str, rng: random.Random) -> str:
    other = rng.choice(_NEAR.get(character.lower(), string.ascii_lowercase))
    return other.upper() if character.isupper() else other


def _edited(text: str, rate: float, rng: random.Random, *, edit: Edit) -> str:
    """Edit a share of the letters; an edit may change any of the characters."""
    characters = list(text)
    for position, character in enumerate(text):
        if character.isalpha() and rng.random() < rate:
            edit(characters, position, text, rng)
    return "".join(characters)


for _name, _edit in {
    "keyboard": _wrong_key,
    "swap_letters": _swap,
    "drop_letters": _drop,
    "insert_letters": _insert,
    "typos": _mistype,
}.items():
    text_corruptions.register(_name)(partial(_edited, edit=_edit))


@text_corruptions.register("drop_words")
def drop_words(text: str, rate: float, rng: random.Random) -> str:
    """Leave words out, never all of them."""
    words = text.split()
    kept = [word for word in words if rng.random() >= rate]
    return " ".join(kept or words[:1])


@text_corruptions.register("swap_words")
def swap_words(text: str, rate: float, rng: random.Random) -> str:
    """Swap words with the next one."""
    words = text.split()
    position = 0
    while position + 1 < len(words):
        if rng.random() < rate:
            words[position : position + 2] = words[position + 1], words[position]
            position += 1
        position += 1
    return " ".join(words)
