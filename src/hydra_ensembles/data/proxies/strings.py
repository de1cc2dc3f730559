"""Proxies of raw strings: shuffled words, token noise, foreign letters, halves of two texts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from ...registry import Registry
from ..corruptions.base import draw_seeds

StringProxy = Callable[[str, Sequence[str], random.Random], str]
string_proxies: Registry[StringProxy] = Registry("string proxy")

_SCRIPTS = (
    "абвгдежзийклмнопрстуфхцчшщыэюя",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "אבגדהוזחטיכלמנסעפצקרשת",
    "ابتثجحخدذرزسشصضطظعغفقكلمنهوي",
    "的一是不了在人有我他这个们中来上大为和国",
    "あいうえおかきくけこさしすせそたちつてとなに",
)


def proxy_texts(texts: Sequence[str], kind: str, *, seed: int = 0) -> list[str]:
    """Make outliers of in-distribution strings, one seed an example.

    Args:
        texts: the strings.
        kind: `shuffle_words`, `token_noise`, `foreign` or `halves`.
        seed: of the draw.
    """
    make = string_proxies[kind]
    seeds = draw_seeds(len(texts), torch.Generator().manual_seed(seed)).tolist()
    return [make(text, texts, random.Random(one)) for text, one in zip(texts, seeds, strict=True)]


@string_proxies.register("shuffle_words")
def shuffle_words(text: str, others: Sequence[str], rng: random.Random) -> str:
    """Shuffle the words."""
    words = text.split()
    rng.shuffle(words)
    return " ".join(words)


@string_proxies.register("token_noise")
def token_noise(text: str, others: Sequence[str], rng: random.Random) -> str:
    """Replace 30 to 80 % of the words by random words of the data."""
    rate = rng.uniform(0.3, 0.8)
    words = [
        rng.choice(rng.choice(others).split() or [word]) if rng.random() < rate else word
        for word in text.split()
    ]
    return " ".join(words)


@string_proxies.register("foreign")
def foreign(text: str, others: Sequence[str], rng: random.Random) -> str:
    """Replace 50 to 100 % of the letters by letters of one other script."""
    rate, script = rng.uniform(0.5, 1.0), rng.choice(_SCRIPTS)
    return "".join(
        rng.choice(script) if letter.isalpha() and rng.random() < rate else letter
        for letter in text
    )


@string_proxies.register("halves")
def halves(text: str, others: Sequence[str], rng: random.Random) -> str:
    """Put the first half of the words before the last half of another text."""
    words, partner = text.split(), rng.choice(others).split()
    return " ".join(words[: (len(words) + 1) // 2] + partner[len(partner) // 2 :])
