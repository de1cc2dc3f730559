"""Members by selection against circuits, Taylor, random and the best single pruned model.

    python experiments/select_members.py image --data DATA --cache CACHE
    python experiments/select_members.py text --data DATA --cache CACHE --model CHECKPOINTS/seed0
    python experiments/select_members.py page

`image` is DeiT-tiny on ImageNet, `text` is MiniLM on SST-2. Nothing is trained. Every draw takes
other validation examples; test data is never read by a search. Logits of candidates are computed
once above a shared trunk and kept in CACHE, so a stopped run goes on; results are written after
each draw. `page` writes docs/results/circuits.md.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import real_data
import select_data as data_of
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from hydra_ensembles._records import write_whole
from hydra_ensembles.costs.budget import Budget
from hydra_ensembles.criteria import gate_gradients
from hydra_ensembles.data.proxies import make_proxies
from hydra_ensembles.evaluation.metrics_ood import ood_figures
from hydra_ensembles.heads.masks import HeadMask, HeadScores
from hydra_ensembles.hosts import HostModel, host_model
from hydra_ensembles.search.ensemble_search import Candidates, search_members
from hydra_ensembles.search.layerwise import average_harm
from hydra_ensembles.search.objectives import as_objective, average_of, ece_of, effect, nll_of
from hydra_ensembles.search.pool import make_pool
from hydra_ensembles.search.prefix import Outputs, Prefix
from hydra_ensembles.search.select import EnsembleObjective, split_rows
from hydra_ensembles.uncertainty import fit_temperature, score_logits

RESULTS = Path(__file__).parent / "results"
SPLITS = Path(__file__).parent / "splits"
SCORES = ("msp", "energy")


class Bank:
    """Logits of masks on all data sets, computed above cached states when first asked for.

    Data sets are kept as one safetensors file each: `logits` [example, mask, class] in float16
    (float32 for few classes), `labels` where there are any; the masks in `masks.json`.
    """

    def __init__(
        self, host: HostModel, sets: Mapping[str, Any], trunk: int, folder: Path, labelled: set[str]
    ) -> None:
        self.host, self.sets, self.trunk, self.folder = host, dict(sets), trunk, folder
        self.labelled = labelled
        self.places: dict[HeadMask, int] = {}
        self.logits: dict[str, Tensor] = {}
        self.labels: dict[str, Tensor] = {}
        self._prefixes: dict[str, Prefix] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, pool: Sequence[HeadMask]) -> None:
        """Read or compute the logits of a pool on every data set."""
        listed = self.folder / "masks.json"
        rows = [mask.tolist() for mask in pool]
        if listed.exists() and json.loads(listed.read_text()) != rows:
            raise SystemExit(f"{listed} lists other masks: give another --cache, or delete it.")
        _write(listed, rows)
        self.places = {mask: i for i, mask in enumerate(pool)}
        for name in self.sets:
            path = self.folder / f"{name}.safetensors"
            if not path.exists():
                start = time.time()
                found = self._prefix(name).logits(list(pool))
                logits = found.logits[name]
                tensors = {"logits": logits.half() if logits.shape[-1] > 10 else logits}
                if name in found.labels:
                    tensors["labels"] = found.labels[name]
                beside = path.with_suffix(".partial")
                save_file({k: v.contiguous() for k, v in tensors.items()}, beside)
                os.replace(beside, path)
                del self._prefixes[name]
                print(f"{name}: {tuple(logits.shape)} in {time.time() - start:.0f} s", flush=True)
            with safe_open(path, "pt") as file:
                self.logits[name] = file.get_tensor("logits")
                if "labels" in file.keys():  # noqa: SIM118  (not a dict)
                    self.labels[name] = file.get_tensor("labels")

    def _prefix(self, name: str) -> Prefix:
        if name not in self._prefixes:
            labelled = [name] if name in self.labelled else []
            prefix = Prefix(self.host, {name: self.sets[name]}, labelled=labelled)
            for layer in range(self.trunk):
                prefix.advance(torch.ones(self.host.head_counts[layer], dtype=torch.bool))
            self._prefixes[name] = prefix
        return self._prefixes[name]

    def need(self, masks: Sequence[HeadMask]) -> None:
        """Compute masks that are not known yet on all data sets."""
        new = [mask for mask in dict.fromkeys(masks) if mask not in self.places]
        if not new:
            return
        for name in self.sets:
            found = self._prefix(name).logits(new).logits[name]
            self.logits[name] = torch.cat([self.logits[name], found.to(self.logits[name])], 1)
        self.places.update({mask: len(self.places) + i for i, mask in enumerate(new)})

    def members(self, name: str, masks: Sequence[HeadMask]) -> Tensor:
        """Return [example, member, class]."""
        return self.logits[name][:, [self.places[mask] for mask in masks]].float()


class Drawn(Candidates):
    """A pool on one draw of validation examples."""

    def __init__(
        self, bank: Bank, rows: Mapping[str, list[tuple[str, Tensor]]], origins: Any
    ) -> None:
        places = [bank.places[mask] for mask in origins]
        self.origins = dict(origins)
        logits = {
            name: torch.cat([bank.logits[s][index][:, places] for s, index in parts]).float()
            for name, parts in rows.items()
        }
        labels = torch.cat([bank.labels[s][index] for s, index in rows["id"]])
        self.outputs = Outputs(logits, {"id": labels})

    def add(self, pool: Mapping[HeadMask, str]) -> None:
        """Nothing to add: the pool is fixed here, so that draws share it."""


def judge(
    bank: Bank, masks: Sequence[HeadMask], test: str, families: Sequence[str], temperature: float
) -> dict[str, Any]:
    """Return an ensemble's test figures, raw and with one temperature."""
    labels = bank.labels[test]
    result: dict[str, Any] = {"temperature": temperature}
    raw = {name: bank.members(name, masks) for name in (test, *families)}
    for kind, divide in (("raw", 1.0), ("scaled", temperature)):
        own = raw[test] / divide
        mean = own.softmax(-1).mean(1)
        figures: dict[str, Any] = {
            "accuracy": 100 * float((mean.argmax(-1) == labels).double().mean()),
            "nll": float(nll_of(own, labels).mean()),
            "ece": 100 * ece_of(own, labels),
        }
        for score in SCORES:
            inside = score_logits(own, score)
            for family in families:
                found = ood_figures(inside, score_logits(raw[family] / divide, score), name=family)
                figures[f"{family}/{score}"] = {
                    "AUROC": 100 * found["AUROC"],
                    "FPR95": 100 * found["FPR95"],
                }
        result[kind] = figures
    return result


def circuits(
    bank: Bank, drawn: Drawn, rows: Mapping[str, Tensor], layers: Sequence[int], keep: int
) -> list[HeadMask]:
    """Find three circuits (id-loss, ood-auroc, average) of the branched layers, knocked out."""
    full = HeadMask.full(bank.host)
    result = []
    for objective in ("id-loss", "ood-auroc", "average"):
        fixed, kept = full, full
        for layer in layers:
            heads = bank.host.head_counts[layer]
            off = [fixed.with_layer(layer, torch.arange(heads) != h) for h in range(heads)]
            outputs = drawn_outputs(bank, drawn, [fixed, *off]).examples(rows)
            goals = (
                average_of("msp", ["ood"]) if objective == "average" else [as_objective(objective)]
            )
            base = outputs.candidate(0)
            tables = [
                torch.tensor([effect(g, outputs.candidate(h + 1), base)[0] for h in range(heads)])
                for g in goals
            ]
            harms = average_harm(tables) if len(tables) > 1 else tables[0]
            row = HeadScores([harms]).top_k(keep)[0]
            kept, fixed = kept.with_layer(layer, row), fixed.with_layer(layer, ~row)
        result.append(kept)
    return result


def drawn_outputs(bank: Bank, drawn: Drawn, masks: Sequence[HeadMask]) -> Outputs:
    """Return the logits of any masks on a draw's examples."""
    bank.need(masks)
    return Drawn(bank, drawn.rows, dict.fromkeys(masks, "")).outputs  # type: ignore[attr-defined]


def taylor(
    gradients: Sequence[Tensor], layers: Sequence[int], keep: int, host: HostModel, seed: int
) -> HeadMask:
    """Prune by |E_x dL/dg_h| over half of the examples."""
    count = len(gradients[0])
    rows = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[: count // 2]
    scores = HeadScores([layer[rows].mean(0).abs() for layer in gradients]).top_k(keep)
    mask = HeadMask.full(host)
    for layer in layers:
        mask = mask.with_layer(layer, scores[layer])
    return mask


def random_mask(host: HostModel, layers: Sequence[int], keep: int, seed: int) -> HeadMask:
    """Keep heads of the branched layers at random."""
    chosen, mask = HeadMask.random(host, keep=keep, seed=seed), HeadMask.full(host)
    for layer in layers:
        mask = mask.with_layer(layer, chosen[layer])
    return mask


def run_draw(task: Any, bank: Bank, draw: int, origins: Mapping[HeadMask, str]) -> dict[str, Any]:
    """Search on one draw of validation data and judge every row on test data."""
    rows, seen, unseen = task.draw(bank, draw)
    drawn = Drawn(bank, rows, origins)
    drawn.rows = rows  # type: ignore[attr-defined]
    sizes = {name: len(logits) for name, logits in drawn.outputs.logits.items()}
    parts = split_rows(sizes, {"select": 0.6, "stop": 0.25, "temperature": 0.15}, seed=draw)
    budget, host = task.budget, bank.host
    option = budget.option(3)
    layers = list(range(option.branch_layer, len(host)))
    keep = min(option.keep_per_layer[layer] for layer in layers)
    searched = {"select": parts["select"], "hold": parts["stop"]}
    common = {"layers": task.layers, "rounds": 0, "seed": draw, **task.search}
    chosen = {
        f"select M={m}": search_members(drawn, budget, members=m, **searched, **common)
        for m in task.members
    }
    table = {
        "single": [HeadMask.full(host)],
        "random": [random_mask(host, layers, keep, 100 * draw + m) for m in range(3)],
        "taylor": [taylor(task.gradients, layers, keep, host, 100 * draw + m) for m in range(3)],
        "circuit": circuits(bank, drawn, parts["select"], layers, keep),
        **{name: list(found.masks) for name, found in chosen.items()},
    }
    bank.need([mask for masks in table.values() for mask in masks])
    result: dict[str, Any] = {"draw": draw, "seen": seen, "unseen": unseen, "rows": {}}
    for name, masks in table.items():
        tune = drawn_outputs(bank, drawn, masks).examples(parts["temperature"])
        temperature = fit_temperature(tune.logits["id"], tune.labels["id"])
        figures = judge(bank, masks, "test", [*seen, *unseen], temperature)
        figures["cost"] = budget.ratio(masks)
        figures["masks"] = [[mask[layer].int().tolist() for layer in task.layers] for mask in masks]
        if name in chosen:
            figures["held_out_gain"] = chosen[name].selection.held_out
            figures["intervals"] = chosen[name].selection.intervals
        result["rows"][name] = figures
    return result


class Images:
    """DeiT-tiny on ImageNet."""

    name = "image"
    members = (1, 2, 3, 4, 5, 6, 7, 8)

    def __init__(self, args: argparse.Namespace) -> None:
        self.host = host_model(data_of.deit(args.data))
        parts = data_of.imagenet(args.data)
        self.sets: dict[str, Any] = {name: parts[name] for name in ("validation", "test")}
        self.sets.update({f"textures-{k}": v for k, v in data_of.textures(args.data).items()})
        self.sets.update(data_of.other_images(args.data, 200))
        some = parts["validation"].subset(range(0, 1000, 4))
        # without the proxy "noise": noise is a family of the test, and must stay unseen
        kinds = ["corrupt", "shuffle", "mix", "blur", "tile", "sketch"]
        made = make_proxies(some, kinds, mean=data_of.MEAN, std=data_of.STD)
        self.sets.update({f"proxy-{name}": data for name, data in made.items()})
        self.labelled = set(parts)
        batch = next(iter(parts["test"].subset([0])))
        self.budget = Budget.of(self.host, batch, args.max_cost)
        self.layers = [10, 11]
        self.pool = make_pool(self.host, self.layers)
        self.search: dict[str, Any] = {}
        self.gradient_data = parts["calibration"].subset(range(0, 1000, 10))

    def draw(self, bank: Bank, draw: int) -> tuple[dict[str, Any], list[str], list[str]]:
        """Take 80 % of everything; two texture classes are of the search, two of the test."""
        generator = torch.Generator().manual_seed(draw)

        def some(name: str, share: float = 0.8) -> tuple[str, Tensor]:
            size = len(bank.logits[name])
            return name, torch.randperm(size, generator=generator)[: int(share * size)]

        rows = {
            "id": [some("validation")],
            "ood/textures": [some(f"textures-{kind}") for kind in data_of.TEXTURES[:2]],
        }
        for name in bank.logits:
            if name.startswith("proxy-"):
                rows[f"ood/{name}"] = [some(name)]
        seen = [f"textures-{kind}" for kind in data_of.TEXTURES[2:]]
        return rows, seen, ["mnist", "cifar10", "noise"]


class Texts:
    """MiniLM on SST-2."""

    name = "text"
    command = (
        "python experiments/select_members.py text --data DATA --cache CACHE --model HOSTS/seed0"
    )
    members = (1, 2, 3, 4, 5, 6, 7, 8)

    def __init__(self, args: argparse.Namespace) -> None:
        from transformers import AutoTokenizer, BertForSequenceClassification

        tokenizer = AutoTokenizer.from_pretrained(args.model)
        self.host = host_model(BertForSequenceClassification.from_pretrained(args.model).eval())
        texts = real_data.sst2_sets(args.data)
        self.sets: dict[str, Any] = {k: v.batches(tokenizer) for k, v in texts.items()}
        kinds = ["shuffle_words", "token_noise", "foreign", "halves"]
        made = make_proxies(self.sets["validation"], kinds, tokenizer=tokenizer)
        self.sets.update({f"proxy-{name}": data for name, data in made.items()})
        self.labelled = {name for name, data in texts.items() if data.labels is not None}
        median = texts["test"].subset([len(texts["test"]) // 2]).batches(tokenizer)
        self.budget = Budget.of(self.host, next(iter(median)), args.max_cost)
        self.layers = [5]  # three members that part below it cost more than 1.07
        from hydra_ensembles.criteria import score_heads

        some = self.sets["calibration"]
        tables = score_heads(self.host, some.subset(range(0, 500, 4)), criterion=["taylor", "hies"])
        self.pool = make_pool(self.host, self.layers, size=320, tables=tables)
        self.search: dict[str, Any] = {"beam": 2, "bags": 2}
        self.gradient_data = some.subset(range(0, 500, 2))

    def draw(self, bank: Bank, draw: int) -> tuple[dict[str, Any], list[str], list[str]]:
        """Take 80 % of the examples kept aside, and 400 questions."""
        generator = torch.Generator().manual_seed(draw)

        def some(name: str, share: float = 0.8) -> tuple[str, Tensor]:
            size = len(bank.logits[name])
            return name, torch.randperm(size, generator=generator)[: int(share * size)]

        rows = {
            "id": [some("validation"), some("calibration"), some("reserve")],
            "ood/trec": [some("trec-train")],
        }
        for name in bank.logits:
            if name.startswith("proxy-"):
                rows[f"ood/{name}"] = [some(name)]
        return rows, ["trec-test"], ["ag-news", "multi30k", "movie-reviews"]


def _write(path: Path, record: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(record, indent=1) + "\n")


def run(args: argparse.Namespace) -> None:
    """Run one of the tasks of this file."""
    torch.set_num_threads(args.threads)
    run_task(Images(args) if args.task == "image" else Texts(args), args)


def run_task(task: Any, args: argparse.Namespace) -> None:
    """Run the draws of a task that are not done yet."""
    bank = Bank(task.host, task.sets, task.layers[0], args.cache / task.name, task.labelled)
    bank.open(list(task.pool))
    stored = args.cache / task.name / "gradients.json"
    if not stored.exists():
        by_batch = [gate_gradients(task.host, batch) for batch in task.gradient_data]
        _write(stored, [torch.cat(layer).tolist() for layer in zip(*by_batch, strict=True)])
    task.gradients = [torch.tensor(rows) for rows in json.loads(stored.read_text())]
    path = RESULTS / f"select_{task.name}.json"
    record = json.loads(path.read_text()) if path.exists() else {"draws": []}
    command = f"python experiments/select_members.py {task.name} --data DATA --cache CACHE"
    command = getattr(task, "command", command)
    record.update(command=command, max_cost=args.max_cost, layers=task.layers, pool=len(task.pool))
    record["objective"] = EnsembleObjective().__dict__
    wanted = {f"select M={m}" for m in task.members}
    for draw in range(args.draws):
        if any(d["draw"] == draw and wanted <= d["rows"].keys() for d in record["draws"]):
            continue
        start = time.time()
        others = [d for d in record["draws"] if d["draw"] != draw]
        found = [*others, run_draw(task, bank, draw, task.pool)]
        record["draws"] = sorted(found, key=lambda d: d["draw"])
        _write(path, record)
        print(f"draw {draw} in {time.time() - start:.0f} s", flush=True)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", choices=["image", "text", "page"])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--cache", type=Path, default=Path("cache/select"))
    parser.add_argument("--draws", type=int, default=6)
    parser.add_argument("--max-cost", type=float, default=1.07)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.task == "page":
        import select_page

        select_page.write()
        return
    if args.data is None:
        raise SystemExit("Where is the data? Pass --data or set HYDRA_DATA.")
    args.data = Path(args.data)
    run(args)


if __name__ == "__main__":
    main()
