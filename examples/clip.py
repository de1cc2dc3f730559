"""Tutorial: a CLIP-like dual encoder as a zero-shot classifier, and an ensemble of its image tower.

    python examples/clip.py

The dual encoder is tiny and trained here on digits and their names, so this runs anywhere in
seconds. For your own model, use `CLIPModel`, `CLIPTokenizer` (or an open_clip model) and your class
names.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import BertTokenizer, CLIPConfig, CLIPModel

import hydra_ensembles as hydra
from hydra_ensembles.data import digits

NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
TEMPLATES = ["a photo of a {}", "a handwritten {}"]


def train(model: CLIPModel, tokenizer: BertTokenizer, batches: list, epochs: int) -> CLIPModel:
    """Pull images and their captions together (Radford et al., 2021), briefly."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    texts = [TEMPLATES[0].format(name) for name in NAMES]
    tokens = tokenizer(texts, padding=True, return_tensors="pt")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    for _ in range(epochs):
        for batch in batches:
            output = model(pixel_values=batch["pixel_values"], **inputs)
            loss = torch.nn.functional.cross_entropy(output.logits_per_image, batch["labels"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()


def main(epochs: int = 15, folder: Path | None = None) -> dict[str, hydra.Results]:
    """Train a dual encoder, classify by class names, build an ensemble from its image tower."""
    out = folder or Path(tempfile.mkdtemp())
    data = digits(16)
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *["a", "photo", "of", "handwritten"],
        *NAMES,
    ]
    (out / "vocab.txt").write_text("\n".join(words))

    # 1. a dual encoder and its tokenizer; yours are pretrained
    tokenizer = BertTokenizer.from_pretrained(str(out))
    sizes = {
        "hidden_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 96,
    }
    config = CLIPConfig(
        vision_config={**sizes, "image_size": 16, "patch_size": 4, "num_channels": 1},
        text_config={
            **sizes,
            "vocab_size": len(words),
            "bos_token_id": words.index("[CLS]"),
            "eos_token_id": words.index("[SEP]"),
            "pad_token_id": words.index("[PAD]"),
        },
        projection_dim=32,
    )
    torch.manual_seed(0)
    clip = train(CLIPModel(config), tokenizer, list(data.train), epochs)

    # 2. a classifier by names: text embeddings are computed once, the image tower is the host
    def tokenize(texts: list[str], **options: object) -> object:
        found = tokenizer(texts, **options)
        del found["token_type_ids"]
        return found

    model = hydra.ZeroShotClassifier(clip, NAMES, TEMPLATES, tokenize)
    print(hydra.explain(model))

    # 3. an ensemble of the image tower, without any training
    ensemble = hydra.build(
        model, data.validation, ood={"scribbles": data.outliers}, max_cost=1.25, progress=False
    )
    print(ensemble)
    hydra.verify(ensemble, next(iter(data.test)))

    # 4. both, by maximum softmax probability and by MCM (Ming et al., 2022)
    results = {
        name: hydra.evaluate(
            found, data.test, ood=data.ood, score=["msp", "mcm"], progress=False, name=name
        )
        for name, found in {"hydra": ensemble, "single": model}.items()
    }
    for name, result in results.items():
        msp, mcm = result["ood/mean/AUROC"], result["ood/mean/mcm/AUROC"]
        print(f"{name:<7} accuracy {result['cls/Acc']:.3f}  AUROC {msp:.3f} (msp) {mcm:.3f} (mcm)")
    ensemble.save_pretrained(out / "clip-hydra")
    return results


if __name__ == "__main__":
    main()
