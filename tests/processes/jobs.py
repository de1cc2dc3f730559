"""What the tests run in one process and in several: the same call must give the same numbers.

`torchrun --standalone --nproc-per-node 3 -m tests.processes.jobs FOLDER NAME...` writes
`NAME-<rank>.json` into the folder.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

import hydra_ensembles as hydra
from hydra_ensembles._tensors import model_fingerprint
from hydra_ensembles.data import ImageTransform, processes
from hydra_ensembles.data.loaders import Batches, as_data
from hydra_ensembles.errors import HydraError
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig
from hydra_ensembles.research.head_roles import head_map
from hydra_ensembles.training import Settings, finetune_branch

CLASSES = 3


def host() -> nn.Module:
    """A small model whose every part matters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = TinyViT(
            TinyViTConfig(image_size=8, width=24, layers=3, heads=4, mlp_width=32, classes=CLASSES)
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape) * (0.4 if parameter.ndim > 1 else 0.2))
    return model.eval()


def pictures(count: int = 83, seed: int = 0) -> tuple[Tensor, Tensor]:
    """A number of images that no number of processes divides."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    x = torch.randn(count, 1, 8, 8, generator=generator)
    x[:, :, 0, 0] += labels[:, None].float()
    return x, labels


def listed(size: int = 7) -> list[tuple[Tensor, Tensor]]:
    """The same as a list of batches."""
    return list(zip(*(t.split(size) for t in pictures()), strict=True))


class Stream(IterableDataset):
    """Batches without a length; every pass reads all of them."""

    def __iter__(self) -> Iterator[Any]:
        return iter(listed())


def masks() -> list[hydra.HeadMask]:
    rows = ([1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1])
    return [hydra.HeadMask([[1] * 4, [1] * 4, row]) for row in rows]


def ensemble() -> hydra.HydraEnsemble:
    return hydra.fuse(host(), masks())


def every_kind_of_data() -> dict[str, Any]:
    """The same images as everything that data can be."""
    dataset = TensorDataset(*pictures())
    streamed = datasets.IterableDataset.from_generator(_rows).with_format("torch")
    return {
        "list": listed(),
        "batches": as_data(pictures(), batch_size=7),
        "loader": DataLoader(dataset, batch_size=7),
        "stream": Stream(),
        "loader of a stream": DataLoader(Stream(), batch_size=None),
        "generator": iter(listed()),
        "streaming data set": DataLoader(streamed, batch_size=7),
    }


def _rows() -> Iterator[dict[str, Any]]:
    for picture, label in zip(*pictures(), strict=True):
        yield {"pixel_values": picture.numpy(), "label": int(label)}


def evaluates(folder: Path) -> dict[str, Any]:
    """Figures and columns on every kind of data, with novelty, outliers and a temperature."""
    model = ensemble().fit_novelty_(listed(), progress=False)
    odd = as_data(torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(5)))
    found = {}
    for name, data in every_kind_of_data().items():
        results = hydra.evaluate(
            model, data, ood={"odd": odd}, temperature=listed(), bootstrap=20, progress=False
        )
        columns = {k: v.double().sum().item() for k, v in results.examples["id"].items()}
        found[name] = {"figures": results.figures, "intervals": results.intervals, **columns}
    assert model.novelty is not None
    return {"results": found, "novelty": model.novelty.ranks.values.double().sum().item()}


def scores(folder: Path) -> dict[str, Any]:
    tables = hydra.score_heads(
        host(), listed(), criterion=["taylor", "his", "hies", "fisher"], progress=False
    )
    return {name: table.tolist() for name, table in tables.items()}


def refuses(folder: Path) -> dict[str, Any]:
    """Errors are the same in all processes, and nobody waits for ever."""
    broken = listed()
    broken[5] = (broken[5][0] * float("nan"), broken[5][1])
    dataset = TensorDataset(*pictures())
    spread = DataLoader(dataset, batch_size=7, sampler=DistributedSampler(dataset, 2, 0))
    shuffled = Batches(
        lambda rows: tuple(t[rows] for t in pictures()),
        torch.randperm(83, generator=torch.Generator().manual_seed(processes.rank())).tolist(),
    )
    longer = [*listed(), *listed()[: processes.rank()]]
    cases: dict[str, Callable[[], Any]] = {
        "broken": lambda: hydra.evaluate(ensemble(), broken, progress=False),
        "shared": lambda: hydra.evaluate(ensemble(), spread, progress=False),
        "shuffled": lambda: hydra.evaluate(ensemble(), shuffled, progress=False),
        "longer": lambda: hydra.evaluate(ensemble(), (b for b in longer), progress=False),
        "empty": lambda: hydra.evaluate(ensemble(), [], progress=False),
    }
    return {name: _error(case) for name, case in cases.items()}


def _error(case: Callable[[], Any]) -> str:
    try:
        case()
    except HydraError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def builds(folder: Path) -> dict[str, Any]:
    """Members, cost, temperatures and novelty of three methods; one resumes what it has done."""
    data = as_data(pictures(120), batch_size=7)
    odd = {"odd": as_data(torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(5)))}
    found = {}
    for method in ("select", "circuit", "parts"):
        built = hydra.build(
            host(),
            data,
            ood=odd,
            method=method,
            members=2,
            max_cost=1.5,
            folder=folder / f"build-{method}",
            progress=False,
        )
        found[method] = {"record": built.record, "novelty": str(built.novelty)}
    mean = head_map(host(), id=data, edit="mean", progress=False)
    found["head map"] = {name: table.tolist() for name, table in mean.effects.items()}
    return found


def refits(folder: Path) -> dict[str, Any]:
    """What `prune` keeps and how it fits it, its file by file store, and the readouts of `fold`."""
    pruned: Any = hydra.prune(
        host(), listed(), max_cost=0.6, folder=folder / "prune", progress=False
    )
    record = pruned.hydra_record
    hosts = [host(), _rolled(1), _rolled(2)]
    folded = hydra.fold(
        hosts, listed(), readout="logits", student=True, max_cost=1.5, progress=False
    )
    return {
        "units": [record["heads"], record["neurons"]],
        "fits": [
            [fit[name] for name in ("layer", "rows", "error", "given_error")]
            for fit in record["layers"]
        ],
        "ridges": [fit["ridge"] for fit in record["layers"]],
        "logits": torch.cat([pruned(x) for x, _ in listed()]).tolist(),
        "files": sorted(path.name for path in (folder / "prune").glob("block*")),
        "folded": torch.cat([folded.predict(x).member_logits for x, _ in listed()]).tolist(),
    }


def trains(folder: Path) -> dict[str, Any]:
    """Weights to the bit where batches are cut alike, and up to rounding where they are not."""
    found: dict[str, Any] = {}
    teachers = [_rolled(place) for place in range(2)]
    for name, parts in {"cut": 3, "plain": 0}.items():
        settings = Settings(epochs=2, learning_rate=1e-3, views=2, distill=1.0, parts=parts)
        student = hydra.distill(
            host(),
            teachers,
            listed(),
            members=2,
            masks=masks()[:2],
            settings=settings,
            validation=listed()[:4],
            folder=folder / f"distill-{name}",
            progress=False,
        )
        found[name] = _described(student, student.record["training"]["history"])
    settings = Settings(epochs=2, learning_rate=1e-3, parts=3, towards_host=0.1, keep="best")
    (tuned,) = hydra.finetune(
        host(),
        listed(),
        settings=settings,
        validation=listed()[:4],
        folder=folder / "finetune",
        progress=False,
    )
    found["finetune"] = _described(tuned.model, tuned.history)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        dropping = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    settings = replace(settings, keep="last")
    (tuned,) = hydra.finetune(dropping, listed(), settings=settings, progress=False)
    found["dropout"] = _described(tuned.model, tuned.history)
    branch = finetune_branch(
        ensemble(),
        listed(),
        settings=Settings(epochs=1, learning_rate=1e-3, parts=3, bootstrap=True, distill=0.5),
        ood=[torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(5))],
        progress=False,
    )
    found["branch"] = _described(branch.model, branch.history)
    return found


def _rolled(place: int) -> nn.Module:
    """A teacher that contradicts the others."""
    model = host()
    with torch.no_grad():
        model.classifier.weight.copy_(model.classifier.weight.roll(place, 0))
    return model


def _described(model: nn.Module, history: Any) -> dict[str, Any]:
    logits = torch.cat([model(x) for x, _ in listed()])
    return {
        "fingerprint": model_fingerprint(model),
        "logits": logits.detach().tolist(),
        "history": history,
    }


def commands(folder: Path) -> dict[str, Any]:
    """Every command that runs a model over data; the first process writes and prints."""
    from hydra_ensembles.cli.main import main as run

    root = folder / "commands"
    processes.on_first(lambda: _shelf(root))
    data = ["--data", str(root / "pictures"), "--batch-size", "7"]
    made, said = str(root / "built"), io.StringIO()
    with redirect_stdout(said):
        codes = [
            run(["score", str(root / "host"), *data, "-o", str(root / "scores")]),
            run(["build", str(root / "host"), *data, "--max-cost", "1.5", "-o", made]),
            run(["eval", made, *data, "-o", str(root / "results"), "--no-report"]),
            run(["predict", made, str(root / "pictures"), "--batch-size", "7"]),
            run(["predict", made, str(root / "none"), "-o", str(root / "answers.jsonl")]),
        ]
    processes.wait()
    found = {
        "codes": codes,
        "scores": json.loads((root / "scores" / "scores-hies.json").read_text()),
        "results": json.loads((root / "results" / "results-built.json").read_text())["figures"],
        "masks": [m.tolist() for m in hydra.HydraEnsemble.from_pretrained(made).masks],
        "none": (root / "answers.jsonl").read_text().replace(str(root), ""),
    }
    lines = [line for line in said.getvalue().splitlines() if line.startswith("{")]
    return {**found, "lines": [line.replace(str(root), "") for line in lines]}


def _shelf(root: Path) -> None:
    """Save the host, and images by class."""
    model = hydra.fuse(host(), [hydra.HeadMask.full(host())])
    model.id2label = ["a", "b", "c"]
    model.transform = ImageTransform(
        size=8, crop=None, interpolation="bilinear", mean=(0.5,), std=(0.5,)
    )
    model.save_pretrained(root / "host")
    for number, (image, label) in enumerate(zip(*pictures(), strict=True)):
        path = root / "pictures" / "abc"[int(label)] / f"{number:03}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(((image[0] / 8 + 0.5).clamp(0, 1) * 255).byte().numpy()).save(path)


every = (evaluates, scores, refuses, builds, refits, trains, commands)
JOBS = {job.__name__: job for job in every}


def main(folder: str, names: list[str]) -> None:
    for name in names:
        result = JOBS[name](Path(folder))
        path = Path(folder) / f"{name}-{processes.rank()}.json"
        path.write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
