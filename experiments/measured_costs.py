"""Measure what the rows of the tables cost: time ratios to the plain single model.

    python experiments/measured_costs.py --data DATA --hosts-text HOSTS --hosts-cifar HOSTS

Every table's models run interleaved on eight of its test examples, on an otherwise idle machine;
a ratio is the median of the paired ratios of all rounds (`hydra_ensembles.benchmark`).
One thread, as the tables were made: the cost page has two, which a busy machine disturbs more.
Members are those of the draw whose masks count dearest, as the column `cost` shows the dearest.
What is trained sees one batch, enough for its structure: speed does not depend on weights. Writes
results/measured_costs.json after each table; one that is there is skipped (`--again` redoes it).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import measured_rows
import real_data
import table_runs as runs
import tables
import torch
from cifar_table import CifarTable
from finetune_cifar10 import SIZE
from imagenet_table import SIX, ImagenetTable
from measured_rows import PLAIN, READOUT, SIZES, structure_of
from text_table import TextTable
from torch import Tensor, nn

from hydra_ensembles import HeadMask, fuse
from hydra_ensembles._records import write_whole
from hydra_ensembles.baselines import make_baseline
from hydra_ensembles.baselines.member_stack import Members
from hydra_ensembles.costs.counting import CostModel
from hydra_ensembles.evaluation.benchmarking import benchmark
from hydra_ensembles.hosts import HostModel, ZeroShotClassifier, host_model
from hydra_ensembles.training import finetune_branch

EXAMPLES = max(SIZES)
DEAR = ("Deep Ensembles", "MC dropout", "LoRA-Ensemble", "BatchEnsemble")
COMMAND = "python experiments/measured_costs.py --data DATA --hosts-text HOSTS --hosts-cifar HOSTS"
Structures = Iterator[tuple[str, Callable[[], nn.Module]]]


class FewTexts(TextTable):
    """The text table with eight sentences of median length: no padding blurs the comparison."""

    def read_data(self) -> dict[str, Tensor]:
        """Read eight sentences."""
        found = real_data.sst2(self.data).by_length()
        middle = len(found) // 2
        self.one = self.batches(found.subset(range(middle, middle + EXAMPLES)))[0]
        return {}


class FewSmallImages(CifarTable):
    """The CIFAR-10 table with eight images."""

    def read_data(self) -> dict[str, Tensor]:
        """Read eight images."""
        few = real_data.cifar10(self.data).subset(range(EXAMPLES))
        self.one = next(iter(few.batches(size=SIZE)))
        return {}


class FewImages(ImagenetTable):
    """The ImageNet table with eight images."""

    def read_data(self) -> dict[str, Tensor]:
        """Read eight images."""
        self.one = image_batch(self.data)
        return {}


def image_batch(root: Path) -> Any:
    """Return eight ImageNet test images with labels."""
    return next(iter(real_data.imagenet(root, "test").subset(range(EXAMPLES)).batches()))


def untied(host: HostModel, masks: Sequence[HeadMask], batch: Any) -> nn.Module:
    """Return an ensemble whose branch was trained, on one batch."""
    ensemble = fuse(host.model, list(masks))
    return finetune_branch(ensemble, [batch], epochs=1, progress=False).model.eval()


def untrained_rows(table: runs.Table) -> dict[str, list[list[HeadMask]]]:
    """Return the members of every row that needs no training, by draw."""
    chosen = list(runs.chosen_masks(table.search or table.name, table.host).values())
    found = {
        "taylor-single": [rows["taylor"][:1] for rows in chosen],
        "Hydra random": [rows["random"] for rows in chosen],
        "Hydra Taylor": [rows["taylor"] for rows in chosen],
        "Hydra Circ": [rows["circuit"] for rows in chosen],
    }
    for members in (1, 3, 6):
        key = f"select M={members}"
        found[f"Hydra {key}"] = [rows[key] for rows in chosen]
    return found


def structures(table: runs.Table) -> Structures:
    """Yield the structures of a table of a classifier by name, the plain model first."""
    host, batch = table.host, table.one
    yield PLAIN, lambda: host.model
    yield READOUT, lambda: fuse(host.model, [HeadMask.full(host)])
    for name, found in untrained_rows(table).items():
        yield name, lambda found=found: fuse(host.model, max(found, key=table.costs.ratio))
    for name, members in trained_members(table).items():
        yield f"{name}, trained", lambda members=members: untied(host, members, batch)
    rivals: dict[str, dict[str, Any]] = {
        title: {"name": name, "train": [batch] if rows else None}
        for title, (name, rows) in table.rivals.items()
    }
    if isinstance(table, ImagenetTable):
        outliers = {"name": "outlier-exposure", "validation": [batch], "ood": [batch]}
        rivals["outlier head (energy column)"] = outliers
    else:
        yield "Deep Ensembles", lambda: Members([table.load(seed) for seed in range(3)])
    if isinstance(table, CifarTable):
        yield (
            "Hydra M=3, distilled",
            lambda: fuse(host.model, runs.keeping(host, runs.THIRDS, [11])),
        )
    for title, options in rivals.items():
        yield (
            title,
            lambda options=options: make_baseline(
                host=host.model, epochs=1, members=3, progress=False, **options
            ),
        )


def trained_members(table: runs.Table) -> dict[str, list[HeadMask]]:
    """Return the members of every row whose branch is trained."""
    host = table.host
    if isinstance(table, ImagenetTable):
        return {"Hydra M=3": table.last(runs.THIRDS), "Hydra M=6": table.last(SIX)}
    result = {}
    chosen = runs.chosen_masks(table.search or table.name, host)
    planned = {structure_of(table.name, row) for row in table.plan}
    for members in (3, 6):
        if f"Hydra select M={members}, trained" not in planned:
            continue
        found = [table.distinct(rows[f"select M={members}"], d) for d, rows in chosen.items()]
        result[f"Hydra select M={members}"] = max(found, key=table.costs.ratio)
    if isinstance(table, CifarTable):
        result["Hydra M=3, distilled"] = runs.keeping(host, runs.THIRDS, [11])
    return result


def zeroshot_structures(root: Path) -> Structures:
    """Yield the structures of the zero-shot table; projections and texts are random."""
    from zeroshot_features import LAYERS, image_tower

    from hydra_ensembles.baselines.classifier_features import Featured
    from hydra_ensembles.baselines.vilu import FailureHead, ViLU
    from hydra_ensembles.hosts.zeroshot import PooledTower

    record = tables.read("zeroshot")
    if record is None:
        raise SystemExit("Make the zero-shot table first: members are read from it.")
    width = record["worlds"][0]["settings"]["width"]
    texts = torch.randn(500, width, generator=torch.Generator().manual_seed(0))

    def classifier(tower: nn.Module) -> nn.Module:
        projected = PooledTower(tower, nn.Linear(192, width))
        names = [str(number) for number in range(500)]
        parts = ZeroShotClassifier.from_parts(projected, texts, torch.tensor(10.0), names)
        return parts.requires_grad_(False).eval()

    host = host_model(classifier(image_tower(root)))
    costs = CostModel(host, (torch.zeros(1, 3, 224, 224),))

    def mask(rows: Sequence[Sequence[int]]) -> HeadMask:
        found = HeadMask.full(host)
        for layer, bits in zip(LAYERS, rows, strict=True):
            found = found.with_layer(layer, torch.tensor(bits).bool())
        return found

    yield PLAIN, lambda: host.model
    for row in record["rows"]:
        draws = [[mask(rows) for rows in draw] for draw in row.get("masks", ())]
        if draws:
            name = structure_of("zeroshot", row["name"])  # the first of those that share it
            yield name, lambda draws=draws: fuse(host.model, max(draws, key=costs.ratio))

    def vilu() -> nn.Module:
        tower = image_tower(root)
        single = classifier(fuse(tower, [HeadMask.full(host_model(tower))]))
        return ViLU(Featured(single, None), FailureHead(texts, hidden=256)).eval()

    yield "ViLU", vilu


def measure(found: Structures, batch: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Time all structures interleaved; dear ones apart, beside the plain model, in fewer rounds."""
    models: dict[str, nn.Module] = {}
    for name, make in found:
        if name not in models:
            models[name] = make().eval()
    dear = {name: model for name, model in models.items() if name in (PLAIN, *DEAR)}
    near = {name: model for name, model in models.items() if name not in DEAR}
    timed: dict[str, Any] = {}
    for group, rounds in ((near, args.rounds), (dear, max(1, args.rounds // 3))):
        if len(group) < 2:
            continue
        result = benchmark(
            group,
            batch,
            batch_sizes=SIZES,
            rounds=rounds,
            warmup=1,
            threads=args.threads,
            max_seconds=args.max_seconds,
            progress=False,
        )
        print(result, flush=True)
        for name in group:
            timed.setdefault(
                name,
                {
                    "counted": round(result.counted(name, SIZES[0]), 4),
                    "ratios": {s: [round(v, 4) for v in result.ratio(name, s)] for s in SIZES},
                    "rounds": {s: len(result[name, s].seconds) for s in SIZES},
                },
            )
    return {"command": COMMAND, "settings": result.settings, "structures": timed}


def tables_by_name(args: argparse.Namespace) -> dict[str, Callable[[], tuple[Structures, Any]]]:
    """Return how the structures and the batch of every table are made."""

    def fine_tuned(kind: type[runs.Table], hosts: Path | None) -> tuple[Structures, Any]:
        if hosts is None and kind is not FewImages:
            raise SystemExit(f"Where are the hosts of the {kind.name} table? See --help.")
        given = argparse.Namespace(data=args.data, cache=Path(), hosts=hosts, trained=1)
        table = kind(given)  # type: ignore[arg-type, call-arg]
        return structures(table), table.one

    return {
        "text": lambda: fine_tuned(FewTexts, args.hosts_text),
        "cifar10": lambda: fine_tuned(FewSmallImages, args.hosts_cifar),
        "imagenet": lambda: fine_tuned(FewImages, None),
        "zeroshot": lambda: (zeroshot_structures(args.data), image_batch(args.data)),
    }


def main() -> None:
    """Measure the tables that are missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--hosts-text", type=Path, help="hosts fine-tuned on SST-2")
    parser.add_argument("--hosts-cifar", type=Path, help="hosts fine-tuned on CIFAR-10")
    names = ["text", "cifar10", "imagenet", "zeroshot"]
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--max-seconds", type=float, default=60, help="a run and batch size")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--again", action="store_true", help="measure what is there already")
    parser.add_argument("--out", type=Path, default=measured_rows.RESULTS)
    args = parser.parse_args()
    args.data = real_data.data_root(args.data)
    makers = tables_by_name(args)
    for name in args.only:
        if args.again or name not in measured_rows.read(args.out):
            found = measure(*makers[name](), args)
            everything = {**measured_rows.read(args.out), name: found}
            text = json.dumps(dict(sorted(everything.items())), indent=1) + "\n"
            write_whole(args.out / measured_rows.NAME, text)


if __name__ == "__main__":
    main()
