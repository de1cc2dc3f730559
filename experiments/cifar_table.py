"""The CIFAR-10 table: DeiT-tiny at 96 x 96, its rivals, and Hydra with and without training.

    python experiments/finetune_cifar10.py --data DATA --out HOSTS
    python experiments/distill_cifar10.py --data DATA --hosts HOSTS
    python experiments/cifar_table.py search --data DATA --cache CACHE --hosts HOSTS
    python experiments/cifar_table.py table --data DATA --cache CACHE --hosts HOSTS

`search` chooses members on draws of validation data (results/select_cifar10.json), `table` judges
them beside the rivals and trains branches (results/table_cifar10.json). What is done is kept in
CACHE, so that a stopped run goes on. All outliers are brought to 32 x 32 first, as CIFAR-10 is.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any, ClassVar

import real_data
import select_members
import table_runs as runs
import torch
from distill_cifar10 import ROUNDS, Mixed
from finetune_cifar10 import MEAN, SIZE, STD, load_host, load_split, read_images
from real_data import ImageSet
from torch import Tensor, nn

from hydra_ensembles import fuse
from hydra_ensembles.costs.budget import Budget
from hydra_ensembles.data.corruptions import corrupted
from hydra_ensembles.data.proxies import make_proxies
from hydra_ensembles.hosts import host_model
from hydra_ensembles.search.pool import make_pool

SEEN, UNSEEN = ("textures",), ("tinyimagenet", "mnist")
SHIFTS = ("gaussian_noise", "defocus_blur", "contrast")
SEARCH_ROWS = 700  # of the 1,000 validation images; temperatures are fitted on the others
TRAIN_ROWS = 4000
CHOSEN = "Hydra select M=3"
PROXIES = ("corrupt", "shuffle", "mix", "blur", "tile")  # of the search


def image_sets(root: Path) -> dict[str, ImageSet]:
    """Load every set that a search or a table needs."""
    validation = real_data.cifar10(root, "validation")
    return {
        "search": validation.subset(range(SEARCH_ROWS)),
        "calibration": validation.subset(range(SEARCH_ROWS, len(validation))),
        "test": real_data.cifar10(root).subset(range(1200)),
        "textures-validation": real_data.textures(root, "validation", size=32),
        "textures": real_data.textures(root, "test", size=32),
        "tinyimagenet": real_data.tinyimagenet(root, size=32).subset(range(0, 2400, 8)),
        "mnist": real_data.mnist(root).subset(range(300)).unlabelled(),
    }


class Cifar:
    """The search: masks of the last two blocks, textures of two classes and proxies."""

    name = "cifar10"
    command = "python experiments/cifar_table.py search --data DATA --cache CACHE --hosts HOSTS"
    members = (1, 2, 3, 4, 5, 6, 7, 8)

    def __init__(self, args: argparse.Namespace) -> None:
        self.host = host_model(load_host(args.hosts / "seed0"))
        images = image_sets(args.data)
        self.sets: dict[str, Any] = {k: v.batches(size=SIZE) for k, v in images.items()}
        some = images["search"].subset(range(0, SEARCH_ROWS, 6)).batches(size=SIZE)
        made = make_proxies(some, PROXIES, mean=MEAN, std=STD)
        self.sets.update({f"proxy-{name}": data for name, data in made.items()})
        self.labelled = {"search", "calibration", "test"}
        one = images["test"].subset([0]).batches(size=SIZE)
        self.budget = Budget.of(self.host, next(iter(one)), args.max_cost)
        self.layers = [10, 11]
        self.pool = make_pool(self.host, self.layers)
        self.search: dict[str, Any] = {}
        self.gradient_data = images["search"].subset(range(0, 600, 6)).batches(size=SIZE)

    def draw(
        self, bank: select_members.Bank, draw: int
    ) -> tuple[dict[str, Any], list[str], list[str]]:
        """Take 80 % of everything."""
        generator = torch.Generator().manual_seed(draw)

        def some(name: str) -> tuple[str, Tensor]:
            size = len(bank.logits[name])
            return name, torch.randperm(size, generator=generator)[: int(0.8 * size)]

        rows = {"id": [some("search")], "ood/textures": [some("textures-validation")]}
        for name in bank.logits:
            if name.startswith("proxy-"):
                rows[f"ood/{name}"] = [some(name)]
        return rows, list(SEEN), list(UNSEEN)


class CifarTable(runs.Table):
    """DeiT-tiny on CIFAR-10."""

    name = "cifar10"
    title = "Images: DeiT-tiny at 96 x 96 on CIFAR-10"
    command = "python experiments/cifar_table.py table --data DATA --cache CACHE --hosts HOSTS"
    paper: ClassVar[dict[str, dict[str, float]]] = {
        "Hydra (Circ), CIFAR-100": {"AUROC": 89.43, "FPR95": 36.44},
        "Deep Ensembles, CIFAR-100": {"AUROC": 86.08, "FPR95": 38.67},
    }
    seen, unseen, shifts = SEEN, UNSEEN, SHIFTS
    trained_parameters = r"blocks\.1[01]\.|^norm\.|head"
    training: ClassVar[dict[str, Any]] = {"epochs": 2, "learning_rate": 1e-4, "distill": 0.5}
    plan: ClassVar[dict[str, runs.Branch]] = {
        "Hydra select M=3, trained": runs.Branch("select M=3"),
        "Hydra select M=3, trained with outliers": runs.Branch("select M=3", outliers=True),
        "single, trained with outliers": runs.Branch("host", outliers=True),
    }
    groups = (*runs.GROUPS, "distilled")
    weighed_on = "search"
    branched = (10, 11)
    branch_layers = (11, 10, 9, 8, 6)

    def __init__(self, args: argparse.Namespace) -> None:
        self.data, self.hosts = args.data, args.hosts
        super().__init__(args.cache, trained=args.trained)

    def load(self, seed: int) -> nn.Module:
        """Load a fine-tuned host."""
        return load_host(self.hosts / f"seed{seed}")

    def read_data(self) -> dict[str, Tensor]:
        """Read the test sets and corrupt 200 test images."""
        self.images = image_sets(self.data)
        names = ["calibration", "test", *SEEN, *UNSEEN]
        self.sets = {name: runs.labelled(self.images[name].batches(size=SIZE)) for name in names}
        labels = {
            name: images.labels for name, images in self.images.items() if images.labels is not None
        }
        some = self.images["test"].subset(range(200))
        assert some.labels is not None
        for kind in SHIFTS:
            data = corrupted(some.batches(size=SIZE), kind, severity=3, mean=MEAN, std=STD)
            self.sets[kind] = list(data)
            labels[kind] = some.labels
        self.one = next(iter(some.subset([0]).batches(size=SIZE)))
        return labels

    @property
    def choosing(self) -> dict[str, list[Any]]:
        """Return the images that the search saw."""
        return {"search": list(self.images["search"].batches(size=SIZE))}

    def distilled(self) -> None:
        """Add Hydra above a host that the Deep Ensemble taught, and that host alone."""
        host = host_model(load_host(self.hosts / "distilled"))
        trunks = runs.Trunks(host, self.cache.with_name("cifar10-distilled-trunks"))
        members = runs.keeping(host, runs.THIRDS, [11])

        def alone() -> dict[str, Tensor]:
            return {**runs.logits_of(host.model, self.sets), "cost": torch.tensor(1.0)}

        def fused() -> dict[str, Tensor]:
            model = fuse(host.model, members)
            return {**runs.logits_of(model, self.sets), "cost": self.cost(model)}

        self.add("single, distilled", [self.kept("distilled", alone)])
        self.add("Hydra M=3, distilled", [self.kept("distilled M=3", fused)])
        weight = self.outlier_weight(trunks, members, "distilled", taught=True)
        for title, masks, share, only in (
            ("Hydra M=3, distilled, trained", members, 0.0, None),
            ("Hydra M=3, distilled, trained with outliers", members, weight, None),
            ("single, distilled, trained with outliers", self.host_pair(11), weight, 0),
        ):
            found = [
                self.train(title, trunks, masks, share, draw, only=only, taught=True)
                for draw in range(self.draws)
            ]
            self.add(title, found)

    def taught_set(self) -> list[Any]:
        """Return flipped and mixed training images with the Deep Ensemble's probabilities."""
        images, labels = read_images(self.data / "cifar10", "data_batch_1")
        rows = load_split()["train"][::2]
        mixed = [inputs for inputs, _ in Mixed(images[rows], labels[rows], seed=len(ROUNDS))]

        def answers() -> dict[str, Tensor]:
            hosts = [self.load(seed) for seed in (0, 1, 2)]
            with torch.no_grad():
                means = [sum(h(x).softmax(-1) for h in hosts) / len(hosts) for x in mixed]
            return {"answers": torch.cat(means)}

        known = self.kept("taught", answers)["answers"]
        return list(zip(mixed, known.split([len(x) for x in mixed]), strict=True))

    def train_images(self, count: int) -> ImageSet:
        """Return images that the hosts were trained on."""
        rows = load_split()["train"]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:count]
        return real_data.cifar10(self.data, "train").subset([rows[i] for i in order.tolist()])

    def training_set(self) -> list[Any]:
        """Return images that the hosts were trained on."""
        return list(self.train_images(TRAIN_ROWS).batches(size=SIZE, batch_size=64))

    def outliers(self) -> list[Any]:
        """Return textures of two classes and proxies, what the search saw too."""
        some = self.images["search"].subset(range(0, SEARCH_ROWS, 6)).batches(size=SIZE)
        made = make_proxies(some, PROXIES, mean=MEAN, std=STD)
        textures = self.images["textures-validation"].batches(size=SIZE)
        return [batch for data in (textures, *made.values()) for batch in data]

    def rival_data(self, count: int) -> list[Any]:
        """Return images that the hosts were trained on."""
        return list(self.train_images(count).batches(size=SIZE, batch_size=32))

    def setup(self) -> list[str]:
        """Say how the table was made, of what is in it."""
        lines = [
            "Host: DeiT-tiny (12 blocks of 3 heads), three epochs on 9,000 CIFAR-10 images at "
            "96 x 96; `single` is seed 0, Deep Ensembles are the seeds 0, 1 and 2.",
            "Test: the first 1,200 test images. OOD: textures (seen family: two other classes are "
            "OOD validation), TinyImageNet without overlapping classes (300), MNIST (300), all "
            "brought to 32 x 32 first. Shifts: three corruptions of 200 test images, severity 3.",
            f"Search: {len(self.rows[CHOSEN][1])} draws of 80 % of {SEARCH_ROWS} validation "
            f"images, two texture classes and {len(PROXIES)} kinds of proxies; all 49 masks of the "
            "last two blocks. "
            "`circavg-single` is the third circuit alone, `taylor-single` the first Taylor mask.",
            "Temperatures: fitted for each row on 300 validation images that no search saw.",
            f"Trained branches: {self.draws} draws, {self.training['epochs']} epochs at "
            f"{self.training['learning_rate']} on {TRAIN_ROWS} images that the hosts were trained "
            "on, a bootstrap a member; half of each label is the untrained ensemble's own "
            "prediction at its temperature. With outliers: textures of two classes and proxies; "
            f"weight chosen on the {SEARCH_ROWS} search images: {self.weights.get('seed 0')}; "
            f"above the distilled host: {self.weights.get('distilled')}. `single, trained with "
            "outliers` is the unpruned model with the same training.",
            "Distilled: `distill_cifar10.py` starts from the mean of the three hosts' weights and "
            "learns Deep Ensembles' probabilities on their own training images, flipped and mixed, "
            "without labels: a fourth training, and one host in the end. Its members keep two of "
            "three heads of the last block, each another two, without a search; where they are "
            "trained, it is on 4,500 such images with Deep Ensembles' answers, no labels.",
            "Rivals were trained in a shrunken setting: one epoch on 500 training images from "
            "seed 0, three members (Laplace: 1,500 images). They might do better with more.",
            "Cost: counted multiply-adds of one image.",
        ]
        leave = [] if any("trained" in name for name in self.rows) else ["Trained branches"]
        leave += [] if any(name in self.rows for name in self.rivals) else ["Rivals were"]
        return [line for line in lines if not line.startswith(tuple(leave))]


def main() -> None:
    """Search, or make the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=["search", "table"])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--hosts", type=Path, required=True)
    parser.add_argument("--draws", type=int, default=6, help="draws of the search")
    parser.add_argument("--trained", type=int, default=5, help="draws of trained rows")
    parser.add_argument("--max-cost", type=float, default=1.07)
    parser.add_argument("--groups", nargs="+", default=CifarTable.groups, choices=CifarTable.groups)
    args = parser.parse_args()
    args.data = real_data.data_root(args.data)
    torch.set_num_threads(1)
    if args.step == "search":
        select_members.run_task(Cifar(args), args)
    else:
        CifarTable(args).run(args.groups)


if __name__ == "__main__":
    main()
