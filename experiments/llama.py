"""HIES on real language models; makes docs/results/llama.md.

    python experiments/llama.py --data DATA --work WORK      # resumes, one mask at a time
    python experiments/llama.py --page                       # the page only, from the record

SmolLM2-135M is pruned by HIES, HIS and at random: heads are scored on a calibration draw, ranked
over all layers together, gated in one shot and never fine-tuned. Every mask is measured on the
perplexity of 20,480 tokens in windows of 512; the first draw also on 300 questions of ARC-Easy.
The unpruned Gemma-3-270m stands beside it.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from lab import plainly
from lab.language_models import load_gemma, load_smollm
from lab.records import this_commit
from lab.sets import data_root, need
from torch import Tensor

import hydra_ensembles as hydra
from hydra_ensembles._records import write_whole
from hydra_ensembles.criteria.weights import RandomOrder

ROOT = Path(__file__).parent.parent
CRITERIA = ("hies", "his", "random")
RATIOS = (0.1, 0.3, 0.5)
SIZES = {"windows": 20, "window": 512, "questions": 300, "calibration": 32, "tokens": 128}
"""Windows are per source (AG News, XQuAD); calibration texts are cut to `tokens`."""


def texts(data: Path) -> dict[str, list[str]]:
    """Return news items and encyclopedia paragraphs, each source in a fixed shuffled order."""
    with need(data / "text/ood/ag_news_test.csv").open(newline="", encoding="utf-8") as file:
        news = [f"{row[1]}. {row[2]}".replace("\\", " ") for row in csv.reader(file)]
    paragraphs = need(data / "text/xquad_en/paragraphs.jsonl").read_text(encoding="utf-8")
    contexts = [json.loads(line)["context"] for line in paragraphs.splitlines()]
    found = {"AG News": news, "XQuAD": contexts}
    for source in found.values():
        random.Random(0).shuffle(source)
    return found


def windows(tokenizer: Any, items: list[str], size: int) -> Iterator[list[int]]:
    """Join texts by blank lines and cut the tokens into windows."""
    tokens: list[int] = []
    for text in items:
        tokens += tokenizer(text + "\n\n", add_special_tokens=False)["input_ids"]
        while len(tokens) >= size:
            yield tokens[:size]
            tokens = tokens[size:]


def arc_questions(data: Path, tokenizer: Any, count: int) -> list[tuple[list[int], list, int]]:
    """Return (prompt ids, ids of the choices, number of the right one) of ARC-Easy questions."""
    rows = json.loads(need(data / "text/arc/ARC-Easy-test.json").read_text())
    random.Random(1).shuffle(rows)
    found = []
    for row in rows:
        question, _, rest = row["instruction"].partition("\n\n")
        question = question.partition("question: ")[2]
        body = rest.partition("\n\n")[0]
        choices = [c.strip() for c in re.split(r"Answer\d+: ", body)[1:]]
        if len(choices) < 3 or len(question) > 220:
            continue
        prompt = tokenizer(f"Question: {question}\nAnswer:")["input_ids"]
        answers = [tokenizer(f" {c}", add_special_tokens=False)["input_ids"] for c in choices]
        found.append((prompt, answers, int(row["answer"].removeprefix("answer")) - 1))
        if len(found) == count:
            break
    return found


class Yardsticks:
    """What every mask is measured with; the same examples for all."""

    def __init__(self, model: Any, tokenizer: Any, data: Path) -> None:
        self.model = model
        first = tokenizer("a")["input_ids"][0]
        self.start = first if first == tokenizer.bos_token_id else None  # as the model was trained
        self.windows, self.calibration = [], []
        for items in texts(data).values():
            half = len(items) // 2  # calibration reads other texts than the windows do
            cut = windows(tokenizer, items[half:], SIZES["window"])
            self.windows += [next(cut) for _ in range(SIZES["windows"])]
            self.calibration += list(windows(tokenizer, items[:half][:300], SIZES["tokens"]))
        self.questions = arc_questions(data, tokenizer, SIZES["questions"])

    def draw(self, seed: int) -> list[dict[str, Tensor]]:
        """Draw calibration batches: texts that are their own next-token labels."""
        rows = random.Random(100 + seed).sample(self.calibration, SIZES["calibration"])
        return [{"input_ids": part, "labels": part} for part in torch.tensor(rows).split(8)]

    @torch.no_grad()
    def losses(self) -> list[float]:
        """Return the mean loss of every window's tokens."""
        found = []
        for window in self.windows:
            ids = torch.tensor([window if self.start is None else [self.start, *window]])
            hidden = self.model.base_model(ids, use_cache=False).last_hidden_state[0, :-1]
            found.append(float(F.cross_entropy(self.model.lm_head(hidden), ids[0, 1:])))
        return found

    @torch.no_grad()
    def answers(self) -> list[int]:
        """Return the likeliest choice of every question."""
        return [self._answer(prompt, choices) for prompt, choices, _ in self.questions]

    def _answer(self, prompt: list[int], choices: list[list[int]]) -> int:
        """Score all choices in one pass over the question."""
        ids, positions = list(prompt), list(range(len(prompt)))
        owner = [-1] * len(prompt)
        for number, choice in enumerate(choices):
            ids += choice[:-1]  # the last token of a choice predicts nothing
            positions += range(len(prompt), len(prompt) + len(choice) - 1)
            owner += [number] * (len(choice) - 1)
        owners, places = torch.tensor(owner), torch.tensor(positions)
        sees = (owners[None] == -1) | (owners[None] == owners[:, None])
        sees &= places[None] <= places[:, None]
        hidden = self.model.base_model(
            torch.tensor([ids]),
            attention_mask=sees[None, None],
            position_ids=places[None],
            use_cache=False,
        ).last_hidden_state[0]
        read, wanted, start = [], [], len(prompt)
        for choice in choices:
            read += [len(prompt) - 1, *range(start, start + len(choice) - 1)]
            wanted += choice
            start += len(choice) - 1
        scores = F.log_softmax(self.model.lm_head(hidden[read]), -1)
        each = scores.gather(1, torch.tensor(wanted)[:, None])[:, 0]
        sums = torch.stack([part.sum() for part in each.split([len(c) for c in choices])])
        return int(sums.argmax())


def measure(args: argparse.Namespace) -> None:
    """Measure what the record does not hold yet."""
    torch.set_num_threads(args.threads)
    record = json.loads(args.out.read_text()) if args.out.exists() else {}
    if record.get("sizes", SIZES) != SIZES:
        raise SystemExit(f"{args.out} was measured with other sizes: delete it to start over.")
    record = {"sizes": SIZES, "rows": {}, **record}

    def keep(row: dict[str, Any], **figures: Any) -> None:
        row.update(figures, commit=this_commit())
        write_whole(args.out, json.dumps(record) + "\n")

    if "gemma" not in record:
        sticks = Yardsticks(*load_gemma(args.work), args.data)
        keep(record.setdefault("gemma", {}), losses=sticks.losses())
    model, tokenizer = load_smollm(args.work)
    sticks = Yardsticks(model, tokenizer, args.data)
    record["right"] = [answer for *_, answer in sticks.questions]
    whole = record.setdefault("unpruned", {})
    if "answers" not in whole:
        keep(whole, losses=sticks.losses(), answers=sticks.answers())
    heads = sum(hydra.HeadMask.full(model).shape)
    record["heads"] = heads
    for draw in range(args.draws):
        asked = [RandomOrder(seed=draw) if name == "random" else name for name in CRITERIA]
        tables = dict(
            zip(
                CRITERIA,
                hydra.score_heads(model, sticks.draw(draw), criterion=asked).values(),
                strict=True,
            )
        )
        for ratio in RATIOS:
            for name, scores in tables.items():
                row = record["rows"].setdefault(f"{name}/{ratio}/{draw}", {})
                mask = scores.top_k(heads - round(ratio * heads), scope="model")
                start = time.perf_counter()
                with hydra.gate(model, mask):
                    if "losses" not in row:
                        keep(row, losses=sticks.losses())
                    if "answers" not in row and draw == 0:
                        keep(row, answers=sticks.answers())
                row["layers_without_heads"] = sum(not bool(layer.any()) for layer in mask)
                print(
                    f"{name} {ratio} draw {draw}: {time.perf_counter() - start:.0f} s", flush=True
                )


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--work", type=Path, default=Path("work/llama"), help="for the weights")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/llama.json")
    parser.add_argument("--draws", type=int, default=2, help="draws of calibration data")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--page", action="store_true", help="write the page only")
    args = parser.parse_args()
    if not args.page:
        args.data = data_root(args.data)
        measure(args)
    from llama_page import write_page

    write_page(args.out)


if __name__ == "__main__":
    plainly(main)
