"""Text corruptions on raw strings: typos, dropped words, swapped words, at five severities."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Sequence

import torch

from ...errors import DataError
from ...registry import Registry
from .base import draw_seeds

TextCorruption = Callable[[str, float, random.Random], str]
text_corruptions: Registry[TextCorruption] = Registry("text corruption")

CHARACTER_RATES = (0.02, 0.05, 0.10, 0.15, 0.25)  # share of the letters
WORD_RATES = (0.05, 0.10, 0.20, 0.35, 0.50)  # share of the words
_KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")


def _neighbours() -> dict[str, str]:
    places = {key: (row, col) for row, keys in enumerate(_KEYBOARD) for col, key in enumerate(keys)}
    return {
        key: "".join(
            other
            for other, (r, c) in places.items()
            if other != key and abs(r - row) <= 1 and abs(c - col + (r - row) / 2) <= 1
        )
        for key, (row, col) in places.items()
    }


_NEAR = _neighbours()


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


def _letters(
    text: str, rate: float, rng: random.Random, edit: Callable[[list[str], int], None]
) -> str:
    """Call `edit(characters, position)` at a share of the letters; edits may change any element."""
    characters = list(text)
    for position, character in enumerate(text):
        if character.isalpha() and rng.random() < rate:
            edit(characters, position)
    return "".join(characters)


def _near_key(character: str, rng: random.Random) -> str:
    other = rng.choice(_NEAR.get(character.lower(), string.ascii_lowercase))
    return other.upper() if character.isupper() else other


@text_corruptions.register("keyboard")
def keyboard(text: str, rate: float, rng: random.Random) -> str:
    """Hit the key beside the right one."""

    def edit(characters: list[str], position: int) -> None:
        characters[position] = _near_key(text[position], rng)

    return _letters(text, rate, rng, edit)


@text_corruptions.register("swap_letters")
def swap_letters(text: str, rate: float, rng: random.Random) -> str:
    """Swap a letter with the next one."""

    def edit(characters: list[str], position: int) -> None:
        if position + 1 < len(text) and text[position + 1].isalpha():
            pair = characters[position : position + 2]
            characters[position : position + 2] = pair[::-1]

    return _letters(text, rate, rng, edit)


@text_corruptions.register("drop_letters")
def drop_letters(text: str, rate: float, rng: random.Random) -> str:
    """Leave letters out."""

    def edit(characters: list[str], position: int) -> None:
        characters[position] = ""

    return _letters(text, rate, rng, edit)


@text_corruptions.register("insert_letters")
def insert_letters(text: str, rate: float, rng: random.Random) -> str:
    """Hit a neighbouring key as well."""

    def edit(characters: list[str], position: int) -> None:
        characters[position] += _near_key(text[position], rng)

    return _letters(text, rate, rng, edit)


@text_corruptions.register("typos")
def typos(text: str, rate: float, rng: random.Random) -> str:
    """Mistype as people do: a wrong key, two letters swapped, one left out, one too many."""

    def edit(characters: list[str], position: int) -> None:
        kind = rng.randrange(4)
        if kind == 0:
            characters[position] = _near_key(text[position], rng)
        elif kind == 1 and position + 1 < len(text) and text[position + 1].isalpha():
            pair = characters[position : position + 2]
            characters[position : position + 2] = pair[::-1]
        elif kind == 2:
            characters[position] = ""
        else:
            characters[position] += _near_key(text[position], rng)

    return _letters(text, rate, rng, edit)


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
