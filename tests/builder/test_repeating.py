"""Equal commands give equal bytes, in every process and for every hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = [
    *("the", "a", "film", "was", "very", "good", "bad", "dull", "bright", "and", "not", "so"),
    *("電", "影", "良", "悪", "長", "短", "кино", "день", "ночь"),
]
BUILD = """
import sys, torch
from hydra_ensembles import build
from hydra_ensembles.data import text_data
from tests.zoo import sharp
from tests.builder.test_building import pictures
from tests.builder.test_repeating import WORDS, tokenizer
kind, folder = sys.argv[1:]
if kind == "text":
    model = sharp("bert")
    texts = [" ".join(WORDS[(7 * i + 3 * j) % 13] for j in range(4 + i % 4)) for i in range(45)]
    data = text_data(texts, tokenizer(), labels=[i % 3 for i in range(45)], batch_size=15)
else:
    model, data = sharp("timm"), pictures(45)
ensemble = build(model, data, members=2, max_cost=1.5, progress=False)
ensemble.save_pretrained(folder)
"""


def tokenizer():
    """Make a fast tokenizer of a few words: its vocabulary is a hash table."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[UNK]": 2}
    vocabulary.update({word: 3 + i for i, word in enumerate(WORDS)})
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", cls_token="[CLS]", unk_token="[UNK]"
    )


@pytest.mark.parametrize("kind", ["text", "images"])
def test_equal_builds_give_equal_bytes(kind, tmp_path):
    contents = []
    for seed in ("0", "1", "4242"):
        folder = tmp_path / seed
        subprocess.run(
            [sys.executable, "-c", BUILD, kind, str(folder)],
            cwd=ROOT,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        contents.append({file.name: file.read_bytes() for file in sorted(folder.iterdir())})
    assert contents[0].keys() >= {"config.json", "model.safetensors"}
    assert contents[0] == contents[1] == contents[2]
