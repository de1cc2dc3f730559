"""Proxies of token ids: shuffled words, token noise, foreign tokens, halves of two sentences.

Every proxy keeps the length, the special tokens and the padding of a sentence, and changes its
content.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...errors import DataError
from ..batches import Batch, describe
from .base import text_proxy


@dataclass(frozen=True)
class TokenContext:
    """Which ids are what, and a bank of sentences as partners.

    Args:
        special: ids that stay in place (padding is known from the attention mask).
        seen: distinct ids of the bank's content.
        foreign: ids of other scripts, by default ids that are not in the bank.
        continues: `[vocabulary]`, True where an id continues the word before it; empty when
            unknown.
        bank: contents of some sentences.
    """

    special: Tensor
    seen: Tensor
    foreign: Tensor
    continues: Tensor
    bank: list[Tensor]

    @classmethod
    def of(cls, bank: Batch, tokenizer: Any = None) -> TokenContext:
        """Read the ids' roles from the tokenizer, or guess them from a bank of sentences."""
        ids, mask = _ids_and_mask(bank)
        special = (
            torch.tensor(sorted(set(tokenizer.all_special_ids)), dtype=torch.long)
            if tokenizer is not None
            else _common_ends(ids, mask)
        )
        pairs = zip(ids, mask & ~torch.isin(ids, special), strict=True)
        contents = [row[content] for row, content in pairs if bool(content.any())]
        if not contents:
            raise DataError("The sentences hold only special tokens; there is nothing to change.")
        seen = torch.cat(contents).unique()
        tokens = _vocabulary(tokenizer)
        foreign = torch.tensor(
            [i for i, token in tokens.items() if _is_foreign(token)], dtype=torch.long
        )
        if not len(foreign):
            unseen = torch.ones(int(ids.max()) + 1, dtype=torch.bool)
            unseen[seen] = False
            unseen[special[special < len(unseen)]] = False
            foreign = unseen.nonzero().flatten()
        return cls(special, seen, foreign if len(foreign) else seen, _continues(tokens), contents)


def apply(make: Callable[..., Tensor], batch: Batch, seeds: Tensor, context: TokenContext) -> Batch:
    """Change the content of every sentence of a batch with its own seed."""
    ids, mask = _ids_and_mask(batch)
    changed = ids.clone()
    for row, seed in enumerate(seeds.tolist()):
        content = mask[row] & ~torch.isin(ids[row], context.special)
        if content.any():
            generator = torch.Generator().manual_seed(seed)
            changed[row, content] = make(ids[row, content], generator, context)
    return {**batch, "input_ids": changed.to(batch["input_ids"])}


@text_proxy("shuffle_words")
def shuffle_words(content: Tensor, generator: torch.Generator, context: TokenContext) -> Tensor:
    """Shuffle the words; pieces of a word stay together if the tokenizer marks them."""
    starts = torch.ones(len(content), dtype=torch.bool)
    if len(context.continues):
        starts = ~context.continues[content.clamp_max(len(context.continues) - 1)]
        starts[0] = True
    words = starts.cumsum(0) - 1
    order = torch.randperm(int(words[-1]) + 1, generator=generator)
    return content[order[words].argsort(stable=True)]


@text_proxy("token_noise")
def token_noise(content: Tensor, generator: torch.Generator, context: TokenContext) -> Tensor:
    """Replace 30 to 80 % of the tokens by random tokens from the data."""
    return _replaced(content, context.seen, 0.3, 0.8, generator)


@text_proxy("foreign")
def foreign(content: Tensor, generator: torch.Generator, context: TokenContext) -> Tensor:
    """Replace 50 to 100 % of the tokens by characters of other scripts, or by unseen ids."""
    return _replaced(content, context.foreign, 0.5, 1.0, generator)


@text_proxy("halves")
def halves(content: Tensor, generator: torch.Generator, context: TokenContext) -> Tensor:
    """Put the first half of the sentence before the last half of another."""
    number = int(torch.randint(len(context.bank), (1,), generator=generator))
    if torch.equal(context.bank[number], content):  # itself
        number = (number + 1) % len(context.bank)
    cut = (len(content) + 1) // 2
    tail = context.bank[number][len(context.bank[number]) // 2 :]
    while len(tail) < len(content) - cut:  # too short: continue with the next sentence
        number = (number + 1) % len(context.bank)
        tail = torch.cat([tail, context.bank[number]])
    return torch.cat([content[:cut], tail[: len(content) - cut]])


def _replaced(
    content: Tensor, pool: Tensor, low: float, high: float, generator: torch.Generator
) -> Tensor:
    rate = low + (high - low) * float(torch.rand((), generator=generator))
    other = pool[torch.randint(len(pool), content.shape, generator=generator)]
    chance = torch.rand(content.shape, generator=generator)
    chance[int(chance.argmin())] = 0.0  # at least one token changes
    return torch.where(chance < rate, other, content)


def _ids_and_mask(batch: Batch) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, Mapping) or "input_ids" not in batch:
        raise DataError(f"Expected a batch of token ids under 'input_ids'; {describe(batch)}.")
    ids = batch["input_ids"].cpu()
    mask = batch.get("attention_mask")
    return ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.cpu().bool()


def _common_ends(ids: Tensor, mask: Tensor) -> Tensor:
    """Return the ids that every sentence begins or ends with: what a tokenizer adds."""
    places = torch.arange(ids.shape[1]).expand_as(ids)
    firsts = ids.gather(1, places.masked_fill(~mask, ids.shape[1]).amin(1, True) % ids.shape[1])
    lasts = ids.gather(1, places.masked_fill(~mask, 0).amax(1, True))
    if len(ids) < 2:  # one sentence is not enough
        return torch.empty(0, dtype=torch.long)
    common = [ends[0, 0] for ends in (firsts, lasts) if bool((ends == ends[0]).all())]
    return torch.stack(common).unique() if common else torch.empty(0, dtype=torch.long)


def _vocabulary(tokenizer: Any) -> dict[int, str]:
    """Return the tokens by id, in the order of the ids.

    A fast tokenizer returns its vocabulary in hash order, which differs between processes.
    """
    get = getattr(tokenizer, "get_vocab", None)
    if not callable(get):
        return {}
    return dict(sorted((number, token) for token, number in get().items()))


def _is_foreign(token: str) -> bool:
    letters = [letter for letter in token if letter.isalpha()]
    # beyond Latin and its accents; byte-level vocabularies map bytes below this border
    return bool(letters) and all(ord(letter) > 0x2AF for letter in letters)


def _continues(tokens: Mapping[int, str]) -> Tensor:
    """Return which ids continue a word, by the marks of WordPiece (##), BPE or SentencePiece."""
    if not tokens:
        return torch.empty(0, dtype=torch.bool)
    continues = torch.zeros(max(tokens) + 1, dtype=torch.bool)
    marked = next((m for m in ("Ġ", "▁") if any(t.startswith(m) for t in tokens.values())), None)
    for number, token in tokens.items():
        continues[number] = not token.startswith(marked) if marked else token.startswith("##")
    return continues
