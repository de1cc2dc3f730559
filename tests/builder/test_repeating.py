"""Equal commands give equal bytes, in every process and for every hash seed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
texts = [" ".join(WORDS[(7 * i + 3 * j) % 13] for j in range(4 + i % 4)) for i in range(45)]
data = text_data(texts, tokenizer(), labels=[i % 3 for i in range(45)], batch_size=15)
for kind, model, data in (("text", "bert", data), ("images", "timm", pictures(45))):
    ensemble = build(sharp(model), data, members=2, max_cost=1.5, progress=False)
    ensemble.save_pretrained(f"{sys.argv[1]}/{kind}")
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


def test_equal_builds_give_equal_bytes(tmp_path):
    contents = []
    for seed in ("0", "1", "4242"):
        folder = tmp_path / seed
        subprocess.run(
            [sys.executable, "-c", BUILD, str(folder)],
            cwd=ROOT,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        contents.append({str(file.relative_to(folder)): file.read_bytes() for file in files})
    for kind in ("text", "images"):
        assert contents[0].keys() >= {f"{kind}/config.json", f"{kind}/model.safetensors"}
    assert contents[0] == contents[1] == contents[2]
