"""Measurements of `experiments/pruning.py`: the two real models, their data, sweeps and shift gaps.

Splits. SST-2: `experiments/splits/sst2.json` (calibration and validation sentences that no model
was trained on); figures on dev. ImageNet: of each class's three pictures the first (in the order
of `labels.csv`) is calibration, the second validation, the third test; figures on a seeded,
stratified subset of the test pictures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hydra_ensembles._records import write_whole
from hydra_ensembles.criteria import HeadImportanceEntropy, score_heads
from hydra_ensembles.data.corruptions import corrupted
from hydra_ensembles.data.folders import image_folder
from hydra_ensembles.data.splits import sample
from hydra_ensembles.data.texts import text_data
from hydra_ensembles.evaluation.pruning_sweep import prune_sweep
from hydra_ensembles.evaluation.pruning_sweep_results import PruneSweep
from hydra_ensembles.evaluation.shift_gap import pruning_shift_gap

RATIOS = (0.1, 0.2, 0.3, 0.5)
ALPHAS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
ALPHA_RATIOS = (0.3, 0.5)  # where alpha is chosen; the sweep itself takes all RATIOS
DRAWS = 5
CALIBRATION = 32
SHIFT_RATIOS = (0.3, 0.5)
SEVERITY = 3


@dataclass
class Setup:
    """One model with its data, all in memory."""

    name: str
    title: str
    model: nn.Module
    test: list[Any]
    calibration: Any
    held_out: list[Any]
    ood: dict[str, list[Any]]
    shift_clean: list[Any]
    shifts: dict[str, list[Any]]


def sst2(data: Path, checkpoint: Path, *, test_examples: int, shift_examples: int) -> Setup:
    """Return MiniLM fine-tuned on SST-2 and its data."""
    from transformers import AutoTokenizer, BertForSequenceClassification

    require(checkpoint / "model.safetensors", "fine-tune it with experiments/finetune_sst2.py")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = BertForSequenceClassification.from_pretrained(checkpoint).eval()
    split = json.loads((Path(__file__).parent / "splits" / "sst2.json").read_text())
    texts, labels = read_sst2(data / "text" / "sst2" / "train.tsv")
    dev, dev_labels = read_sst2(data / "text" / "sst2" / "dev.tsv")

    def part(rows: Sequence[int], size: int = 64) -> Any:
        return text_data(
            [texts[row] for row in rows],
            tokenizer,
            labels=[labels[row] for row in rows],
            max_length=64,
            batch_size=size,
        )

    def by_length(texts: Sequence[str], labels: Sequence[int] | None, size: int = 64) -> Any:
        order = sorted(range(len(texts)), key=lambda i: (len(texts[i]), i))  # little padding
        return text_data(
            [texts[i] for i in order],
            tokenizer,
            labels=None if labels is None else [labels[i] for i in order],
            max_length=64,
            batch_size=size,
        )

    trec = (data / "text" / "ood" / "TREC.test.all").read_text(encoding="latin-1").splitlines()
    captions = data / "text" / "ood" / "multi30k_test_2016_flickr.en.txt"
    test = sample(by_length(dev, dev_labels), test_examples, seed=0)
    some = sample(test, shift_examples, seed=0)
    some = some.subset(range(some.count), batch_size=32)
    return Setup(
        name="sst2",
        title="MiniLM-L6, SST-2",
        model=model,
        test=list(test),
        calibration=part(split["calibration"]),
        held_out=list(part(split["validation"][:200])),
        ood={
            "TREC": list(by_length([line.split(" ", 1)[1] for line in trec[:250]], None)),
            "captions": list(
                by_length(captions.read_text(encoding="utf8").splitlines()[:250], None)
            ),
        },
        shift_clean=list(some),
        shifts={
            name: list(corrupted(some, name, severity=SEVERITY)) for name in ("typos", "drop_words")
        },
    )


def deit(data: Path, *, test_examples: int, shift_examples: int) -> Setup:
    """Return DeiT-tiny on ImageNet and its data."""
    import timm
    from safetensors.torch import load_file

    weights = data / "deit-tiny" / "model.safetensors"
    require(weights, "pass --data, the folder that holds deit-tiny")
    model = timm.create_model("deit_tiny_patch16_224").eval()
    model.load_state_dict(load_file(weights))
    folder = data / "imagenet-val-3k"
    pictures = image_folder(
        folder / "images",
        labels=folder / "labels.csv",
        class_names=[str(i) for i in range(1000)],
        key=None,
        batch_size=50,
    )
    of_class: dict[int, list[int]] = {}
    for row, label in enumerate(pictures.labels.tolist()):
        of_class.setdefault(label, []).append(row)
    thirds = [[rows[i] for rows in of_class.values()] for i in range(3)]
    test = sample(pictures.subset(sorted(thirds[2])), test_examples, seed=0)
    some = sample(test, shift_examples, seed=0)
    some = some.subset(range(some.count), batch_size=25)
    textures = image_folder(data / "textures", labels=False, key=None, batch_size=50)
    kept = [row for row, file in enumerate(textures.files) if "cobwebbed" not in str(file)]
    return Setup(
        name="deit",
        title="DeiT-tiny, ImageNet-1k",
        model=model,
        test=list(test),
        calibration=pictures.subset(sorted(thirds[0])),
        held_out=list(sample(pictures.subset(sorted(thirds[1])), 100, seed=0)),
        ood={"textures": list(sample(textures.subset(kept), 100, seed=0))},
        shift_clean=list(some),
        shifts={
            name: list(corrupted(some, name, severity=SEVERITY))
            for name in ("gaussian_noise", "defocus_blur", "jpeg_compression")
        },
    )


def read_sst2(path: Path) -> tuple[list[str], list[int]]:
    """Return the texts and labels of an SST-2 file."""
    require(path, "pass --data, the folder that holds text/sst2")
    rows = [line.split("\t") for line in path.read_text(encoding="utf8").splitlines()[1:]]
    return [text.strip() for _, text in rows], [int(label) for label, _ in rows]


def require(path: Path, hint: str) -> None:
    """Stop with a clear message when a file is missing."""
    if not path.exists():
        raise SystemExit(f"{path} is missing: {hint}.")


def sweep(setup: Setup, work: Path, out: Path) -> PruneSweep:
    """Sweep all criteria over all ratios and draws; resumes mask by mask."""
    path = out / f"pruning-{setup.name}.json"
    if path.exists():
        return PruneSweep.from_json(path)
    result = prune_sweep(
        setup.model,
        setup.test,
        criteria=[
            "random",
            "magnitude",
            "his",
            "entropy",
            "hies",
            HeadImportanceEntropy("auto", alphas=ALPHAS, ratios=ALPHA_RATIOS),
        ],
        ratios=RATIOS,
        calibration=setup.calibration,
        calibration_examples=CALIBRATION,
        draws=DRAWS,
        ood=setup.ood,
        held_out=setup.held_out,
        resume=work / f"masks-{setup.name}.json",
    )
    result.model = setup.title
    result.to_json(path)
    return result


def shift_gaps(setup: Setup, out: Path) -> dict[str, Any]:
    """Measure Proposition 1 for Taylor and HIES; resumes mask by mask."""
    path = out / f"pruning-shift-{setup.name}.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"gaps": []}
    done = {(gap["criterion"], gap["ratio"]) for gap in found["gaps"]}
    examples = sample(setup.calibration, CALIBRATION, seed=0)
    tables = score_heads(setup.model, examples, criterion=["taylor", "hies"])
    for criterion, scores in tables.items():
        for ratio in SHIFT_RATIOS:
            if (criterion, ratio) in done:
                continue
            mask = scores.top_k(1 - ratio, scope="model")
            gaps = pruning_shift_gap(setup.model, mask, setup.shift_clean, setup.shifts)
            for shift, gap in gaps.items():
                record = {"criterion": criterion, "ratio": ratio, "shift": shift, **asdict(gap)}
                found["gaps"].append(record)
                print(setup.name, criterion, ratio, shift, gap, sep="\n", flush=True)
            write_json(path, {"model": setup.title, "severity": SEVERITY, **found})
    return json.loads(path.read_text())


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record whole."""
    write_whole(path, json.dumps(record, indent=1) + "\n")


SETUPS: dict[str, Callable[[Any], Setup]] = {
    "sst2": lambda args: sst2(args.data, args.checkpoint, test_examples=872, shift_examples=200),
    "deit": lambda args: deit(args.data, test_examples=300, shift_examples=50),
}


def measure(args: Any) -> None:
    """Make every JSON record that is not there yet."""
    torch.set_num_threads(args.threads)
    args.work.mkdir(parents=True, exist_ok=True)
    args.out.mkdir(parents=True, exist_ok=True)
    for name in args.only:
        records = [args.out / f"pruning-{name}.json", args.out / f"pruning-shift-{name}.json"]
        if all(record.exists() for record in records) and _complete(records[1]):
            continue
        setup = SETUPS[name](args)
        print(sweep(setup, args.work, args.out), flush=True)
        shift_gaps(setup, args.out)


def _complete(path: Path) -> bool:
    gaps = json.loads(path.read_text())["gaps"]
    return len({(gap["criterion"], gap["ratio"]) for gap in gaps}) == 2 * len(SHIFT_RATIOS)
