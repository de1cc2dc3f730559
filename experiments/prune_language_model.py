"""Perplexity of a language model pruned by `hydra.prune`, with and without its refit.

    python experiments/prune_language_model.py --data DATA --work WORK     # SmolLM2-135M
    python experiments/prune_language_model.py --model gemma               # Gemma-3-270m

Units are scored and refitted on windows of news and encyclopedia text, without labels; perplexity
is that of other windows of the same sources. Rows are added to docs/results/prune-llama.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from lab import plainly
from lab.language_models import load_gemma, load_smollm
from lab.records import PAGES, this_commit
from lab.sets import data_root
from llama import texts, windows

import hydra_ensembles as hydra
from hydra_ensembles._records import write_whole
from hydra_ensembles.costs import choose_units
from hydra_ensembles.criteria import score_units
from hydra_ensembles.heads import prune_units_
from hydra_ensembles.refit.unit_pruning import perplexity

RECORD = PAGES / "prune-llama.json"
JUDGED, SIZE = 8, 256
"""Windows that judge, and the tokens of a window."""


def sets(tokenizer: Any, data: Path, count: int) -> tuple[list[Any], list[Any]]:
    """Return `count` windows that fit and those that judge, from both sources in equal parts."""
    fitted, judged = [], []
    for items in texts(data).values():
        found = windows(tokenizer, items, SIZE)
        ids = [torch.tensor([next(found)]) for _ in range((JUDGED + count) // 2)]
        batches = [{"input_ids": one, "attention_mask": torch.ones_like(one)} for one in ids]
        judged += batches[: JUDGED // 2]
        fitted += batches[JUDGED // 2 :]
    return fitted, judged


def main() -> None:
    """Prune to each budget, measure, keep the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--work", type=Path, default=os.environ.get("HYDRA_WORK", "work"))
    parser.add_argument("--model", choices=("smollm", "gemma"), default="smollm")
    parser.add_argument("--budgets", nargs="+", type=float, default=[0.9, 0.75])
    parser.add_argument("--windows", type=int, default=96, help="of 256 tokens, to fit")
    args = parser.parse_args()
    model, tokenizer = (load_smollm if args.model == "smollm" else load_gemma)(Path(args.work))
    fitted, judged = sets(tokenizer, data_root(args.data), args.windows)
    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    dense = perplexity(model, judged)
    scores = score_units(model, fitted, criterion="energy", progress=False)
    for budget in args.budgets:
        mask = choose_units(model, scores, max_cost=budget, batch=fitted[0])
        cut = perplexity(prune_units_(copy.deepcopy(model), mask), judged)
        started = time.perf_counter()
        pruned = hydra.prune(model, fitted, max_cost=budget, progress=False)
        row = {
            "cost": round(pruned.hydra_record["cost"], 3),
            "dense": round(dense, 2),
            "pruned only": round(cut, 2),
            "pruned and refitted": round(perplexity(pruned, judged), 2),
            "minutes": round((time.perf_counter() - started) / 60, 1),
            "commit": this_commit(),
        }
        record.setdefault(args.model, {})[f"{budget}, {args.windows * SIZE} tokens"] = row
        print(args.model, budget, row, flush=True)
        write_whole(RECORD, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    plainly(main)
