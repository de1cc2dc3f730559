"""Negative labels: words beside the class names, so that an image of neither class finds one.

NegLabel (Jiang et al., ICLR 2024). Of a list of words those are kept that the class names resemble
least: of each word, the 95 % quantile of its similarity to the class names. With logits z = cosine
times scale of the classes c and of the negative labels j, in G groups,

    S(x) = mean over groups of sum_c e^{z_c} / (sum_c e^{z_c} + sum_{j in group} e^{z_j})

is the share of the class names, high for images of a class. Groups keep the noise of many words
from adding up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

KEPT = 0.5
"""Share of the words that are kept, the least similar ones."""
QUANTILE = 0.95
GROUP = 100
"""Negative labels in a group, as in the paper."""


@cache
def common_nouns() -> tuple[str, ...]:
    """Return 1,838 common English nouns: things, animals, plants, food, places, people."""
    return tuple(Path(__file__).with_name("common_nouns.txt").read_text("utf-8").split())


def least_similar(words: Tensor, classes: Tensor) -> Tensor:
    """Return the rows of the words to keep, in the order of their similarity to the class names.

    Args:
        words: Unit embeddings `[word, width]`.
        classes: Unit embeddings of the class names `[class, width]`.

    Returns:
        Row numbers; groups of one size share them out in turn.
    """
    similar = (words @ classes.T).quantile(QUANTILE, dim=1)
    kept = math.ceil(KEPT * len(words))
    groups = max(1, kept // GROUP)
    return similar.argsort(stable=True)[: max(1, kept - kept % groups)]


def negative_embeddings(
    words: Sequence[str],
    class_names: Sequence[str],
    classes: Tensor,
    embed: Callable[[list[str]], Tensor],
) -> Tensor:
    """Return the embeddings of the kept words by group, `[group, word, width]`.

    Args:
        words: Candidates; class names among them are left out.
        class_names: One name per class.
        classes: Their unit embeddings `[class, width]`.
        embed: Returns unit embeddings of names.
    """
    taken = {name.lower() for name in class_names}
    candidates = [word for word in dict.fromkeys(words) if word.lower() not in taken]
    if not candidates:
        raise ValueError(
            "negatives has no word that is not a class name: give a few hundred words, or True "
            "for the list that ships."
        )
    found = embed(candidates)
    rows = least_similar(found, classes)
    groups = max(1, len(rows) // GROUP)
    return found[rows].unflatten(0, (-1, groups)).transpose(0, 1).contiguous()


def log_share(logits: Tensor, negatives: Tensor) -> Tensor:
    """Return log S(x), `[batch, 1]`.

    Args:
        logits: Of the classes, `[batch, class]`.
        negatives: Logits of the negative labels, `[batch, group, word]`.
    """
    ahead = logits.logsumexp(-1, keepdim=True) - negatives.logsumexp(-1)
    return F.logsigmoid(ahead).logsumexp(-1, keepdim=True) - math.log(negatives.shape[1])
