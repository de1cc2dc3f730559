"""Tutorial: turn a BERT classifier into an ensemble, with texts and outliers from files.

    python examples/bert.py

The host is tiny and trained here on made-up reviews, so this runs anywhere in seconds. For your own
model and data, use `AutoModelForSequenceClassification`, `AutoTokenizer` and your CSV, TSV or JSONL
files.
"""

from __future__ import annotations

import csv
import random
import tempfile
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

import hydra_ensembles as hydra
from hydra_ensembles.data import split, text_file

GOOD = ["wonderful", "moving", "clever", "charming", "brilliant", "funny"]
BAD = ["dull", "clumsy", "boring", "lifeless", "tedious", "empty"]
THINGS = ["film", "story", "plot", "cast", "script", "scene", "ending", "dialogue"]
OTHERS = ["river", "engine", "treaty", "harvest", "protein", "orbit", "market", "bridge"]


def write_reviews(path: Path, count: int, seed: int) -> None:
    """Write reviews, labelled good or bad by which kind of word is more frequent."""
    draw = random.Random(seed)
    with path.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for _ in range(count):
            label = draw.randrange(2)
            words = [draw.choice(GOOD if label else BAD) for _ in range(2)]
            words.append(draw.choice(BAD if label else GOOD))
            draw.shuffle(words)
            one, two = draw.choice(THINGS), draw.choice(THINGS)
            rows.writerow(
                [f"the {one} is {words[0]} and the {two} is {words[1]} but {words[2]}", label]
            )


def write_other_texts(path: Path, count: int, seed: int) -> None:
    """Write texts about other topics, one per line."""
    draw = random.Random(seed)
    lines = [" ".join(draw.choice(OTHERS + THINGS) for _ in range(9)) for _ in range(count)]
    path.write_text("\n".join(lines), encoding="utf-8")


def main(epochs: int = 6, folder: Path | None = None) -> dict[str, hydra.Results]:
    """Train a host, build an ensemble from it, compare both."""
    out = folder or Path(tempfile.mkdtemp())
    write_reviews(out / "train.csv", 600, seed=0)
    write_reviews(out / "held-out.csv", 400, seed=1)
    write_other_texts(out / "other.txt", 150, seed=2)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "is", "and", "but"]
    (out / "vocab.txt").write_text("\n".join([*words, *GOOD, *BAD, *THINGS, *OTHERS]))

    # 1. a host and its tokenizer; yours are pretrained
    tokenizer = BertTokenizer.from_pretrained(str(out))
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=6,
        intermediate_size=96,
        num_labels=2,
    )
    torch.manual_seed(0)
    train = text_file(out / "train.csv", tokenizer)
    model = hydra.finetune(
        BertForSequenceClassification(config),
        list(train),
        epochs=epochs,
        learning_rate=1e-3,
        progress=False,
    )[0].model.eval()
    print(hydra.explain(model))

    # 2. data of files: half to build on, half to test on
    held_out = text_file(out / "held-out.csv", tokenizer)
    parts = split(held_out, {"calibration": 0.5, "test": 0.5})
    others = split(text_file(out / "other.txt", tokenizer), {"search": 0.5, "test": 0.5})

    # 3. the ensemble; padding is masked in every member
    ensemble = hydra.build(
        model, parts["calibration"], ood={"other": others["search"]}, max_cost=1.25, progress=False
    )
    print(ensemble)
    hydra.verify(ensemble, next(iter(parts["test"])))

    # 4. both models
    results = {
        name: hydra.evaluate(
            found, parts["test"], ood={"other": others["test"]}, progress=False, name=name
        )
        for name, found in {"hydra": ensemble, "single": model}.items()
    }
    for result in results.values():
        print(result)

    # 5. a folder that has everything, for the command line too:
    #    hydra-ensembles predict bert-hydra reviews.csv
    ensemble.save_pretrained(out / "bert-hydra", tokenizer=tokenizer)
    answer = ensemble.predict(dict(tokenizer("the film is funny and clever", return_tensors="pt")))
    print(answer)
    return results


if __name__ == "__main__":
    main()
