"""Run the hosts of the novelty tables once; keep token summaries and logits of every data set.

    python experiments/novelty_features.py imagenet --data DATA --checkpoints CKPT --cache CACHE

Every data set becomes one file `CACHE/novelty/<task>/<set>.safetensors`: `readout` and `mean` (the
readout token and the mean over unpadded tokens after every block, `[example, block, width]`),
`logits` and `features` (what the classifier reads) of the single model, `members` (logits of three
members fused above the shared trunk), and `labels`. All detectors read these files, so that they
see the same features. One pass per set; a stopped run goes on with the sets that are missing.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import real_data
import select_data
import torch
import torch.nn.functional as F
from real_data import ImageSet, TextSet
from table_runs import kept
from torch import Tensor, nn

from hydra_ensembles import HeadMask, fuse
from hydra_ensembles.data.corruptions import corrupt, corrupt_texts
from hydra_ensembles.data.demo import digits
from hydra_ensembles.data.proxies import make_proxies
from hydra_ensembles.data.running import split_batch
from hydra_ensembles.hosts import host_model

TASKS = ("imagenet", "cifar10", "sst2", "clinc150", "digits")
SEVERITIES = (1, 3, 5)
IMAGE_SHIFTS = (
    *("gaussian_noise", "defocus_blur", "motion_blur", "fog", "contrast"),
    *("elastic_transform", "pixelate", "jpeg_compression"),
)
TEXT_SHIFTS = ("typos", "keyboard", "swap_letters", "drop_letters", "drop_words", "swap_words")
BRANCHED = {"imagenet": 2, "cifar10": 2, "sst2": 1, "clinc150": 1, "digits": 2}


@dataclass(frozen=True)
class Task:
    """A host and its data sets, each a function that makes batches when it is needed."""

    model: nn.Module
    sets: dict[str, Callable[[], Iterable[Any]]]


class Summaries:
    """Token summaries after every block and what the classifier reads, by hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.blocks: list[Tensor] = []
        self.handles = [
            block.module.register_forward_hook(self._keep) for block in host_model(model).blocks
        ]

    def _keep(self, module: nn.Module, args: Any, output: Any) -> None:
        self.blocks.append(output[0] if isinstance(output, tuple) else output)

    def remove(self) -> None:
        """Take the hooks away."""
        for handle in self.handles:
            handle.remove()


def classifier_of(model: nn.Module) -> nn.Module:
    """Return the linear layer that gives the logits."""
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]


def masks(model: nn.Module, branched: int) -> list[HeadMask]:
    """Return three members that lose a third of the heads of the last blocks, in turn."""
    full = HeadMask.full(model)
    found = []
    for member in range(3):
        mask = full
        for layer in range(len(full))[-branched:]:
            heads = len(full[layer])
            mask = mask.with_layer(layer, [head % 3 != member for head in range(heads)])
        found.append(mask)
    return found


@torch.no_grad()
def extract(model: nn.Module, batches: Iterable[Any], branched: int) -> dict[str, Tensor]:
    """Run the single model and the fused members over data; see the top of this file."""
    ensemble = fuse(model, masks(model, branched)).eval()
    summaries, read = Summaries(model), []
    hook = classifier_of(model).register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    trunk_end = len(summaries.handles) - branched - 1
    trunk: list[Tensor] = []
    # the members' trunk is the single model's: it runs once
    for block in ensemble.body.trunk:
        block.forward = lambda hidden, *args, **kwargs: (
            (trunk[0],) if ensemble.body.family.norm == "post" else trunk[0]
        )
    parts: dict[str, list[Tensor]] = {}
    for batch in batches:
        args, kwargs, labels = split_batch(batch)
        for seen in (summaries.blocks, read, trunk):
            seen.clear()
        output = model(*args, **kwargs)
        states = summaries.blocks
        trunk.append(states[trunk_end])
        mask = kwargs.get("attention_mask")
        weight = torch.ones(states[0].shape[:2]) if mask is None else mask.float()
        weight = weight / weight.sum(1, keepdim=True)
        features = read[-1] if read[-1].ndim == 2 else read[-1][:, 0]
        row = {
            "readout": torch.stack([state[:, 0] for state in states], 1),
            "mean": torch.stack([(state * weight[..., None]).sum(1) for state in states], 1),
            "logits": output if isinstance(output, Tensor) else output.logits,
            "features": features,
            "members": ensemble.member_logits(batch),
        }
        if labels is not None:
            row["labels"] = labels.long()
        for name, value in row.items():
            parts.setdefault(name, []).append(value.clone())
    hook.remove()
    summaries.remove()
    found = {name: torch.cat(values) for name, values in parts.items()}
    linear = classifier_of(model)
    return {**found, "weight": linear.weight.detach(), "bias": linear.bias.detach()}


# --- images


def image_shifts(images: ImageSet, size: int) -> dict[str, Callable[[], ImageSet]]:
    """Return mild changes of labelled images."""

    def changed(function: Callable[[Tensor], Tensor]) -> Callable[[], ImageSet]:
        def make() -> ImageSet:
            pixels = function(images.floats(size=size)).clamp(0, 1)
            return ImageSet((pixels * 255).round().to(torch.uint8), images.labels)

        return make

    def light_blur(pixels: Tensor) -> Tensor:
        kernel = torch.tensor([1.0, 2.0, 1.0])
        kernel = (kernel[:, None] * kernel / 16).expand(3, 1, 3, 3)
        return F.conv2d(F.pad(pixels, (1,) * 4, mode="replicate"), kernel, groups=3)

    return {
        "mild-mirrored": changed(lambda pixels: pixels.flip(-1)),
        "mild-brighter": changed(lambda pixels: pixels * 1.15),
        "mild-jpeg40": changed(lambda pixels: torch.stack([jpeg(p, 40) for p in pixels])),
        "mild-blur": changed(light_blur),
    }


def jpeg(pixels: Tensor, quality: int) -> Tensor:
    """Encode and decode an image `[3, H, W]` in [0, 1]."""
    import io

    import numpy as np
    from PIL import Image

    file = io.BytesIO()
    array = (pixels.permute(1, 2, 0) * 255).round().byte().numpy()
    Image.fromarray(array).save(file, "JPEG", quality=quality)
    with Image.open(file) as image:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255


def corrupted_images(
    images: ImageSet, size: int, name: str, severity: int, count: int
) -> Callable[[], ImageSet]:
    """Return images under a corruption."""

    def make() -> ImageSet:
        some = images.subset(torch.arange(0, len(images), len(images) // count)[:count])
        pixels = corrupt(some.floats(size=size), name, severity=severity)
        return ImageSet((pixels * 255).round().to(torch.uint8), some.labels)

    return make


def letters(count: int = 400, *, size: int = 224) -> ImageSet:
    """Draw lines of random letters with PIL's own font, dark on light."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    draw = torch.Generator().manual_seed(0)
    pictures = []
    for _ in range(count):
        grey, ink, points, lines = torch.rand(4, generator=draw).tolist()
        picture = Image.new("L", (size, size), int(255 - 90 * grey))
        font = ImageFont.load_default(size=int(size * (0.1 + 0.35 * points)))
        rows = []
        for _ in range(1 + int(3 * lines)):
            codes = torch.randint(65, 91, (8,), generator=draw).tolist()
            rows.append("".join(map(chr, codes)))
        ImageDraw.Draw(picture).text((4, 4), "\n".join(rows), fill=int(90 * ink), font=font)
        pictures.append(torch.from_numpy(np.array(picture))[None])
    return ImageSet(torch.stack(pictures))


def small_digits(count: int = 500) -> ImageSet:
    """Return scikit-learn's handwritten digits of 8 x 8."""
    from sklearn.datasets import load_digits

    images = torch.tensor(load_digits().images[:count])[:, None] / 16 * 255
    return ImageSet(images.round().to(torch.uint8))


def proxies(images: ImageSet, size: int) -> dict[str, Callable[[], Iterable[Any]]]:
    """Return outliers made of known images."""
    made = make_proxies(images.batches(size=size, batch_size=25))
    return {f"proxy-{name}": lambda data=data: data for name, data in made.items()}


def batched(
    sets: dict[str, Callable[[], ImageSet]], size: int
) -> dict[str, Callable[[], Iterable[Any]]]:
    """Make batches of image sets when they are asked for."""
    return {
        name: lambda make=make: make().batches(size=size, batch_size=25)
        for name, make in sets.items()
    }


def imagenet(args: argparse.Namespace) -> Task:
    """DeiT-tiny as it is; known images are the first and second of every class."""
    root, cache = args.data, args.cache / "images"

    def part(name: str) -> ImageSet:
        return real_data.imagenet(root, name, cache=cache)

    test = part("test")
    sets: dict[str, Callable[[], ImageSet]] = {
        "known-0": lambda: part("calibration"),
        "known-1": lambda: part("validation"),
        "test": lambda: test,
        "textures-validation": lambda: real_data.textures(root, "validation", cache=cache),
        "mnist": lambda: real_data.mnist(root).subset(range(300)).unlabelled(),
        "textures-test": lambda: real_data.textures(root, "test", cache=cache),
        "cifar10": lambda: real_data.cifar10(root).subset(range(600)).unlabelled(),
        "letters": lambda: letters(300),
        "digits8": lambda: small_digits(300),
        "noise": lambda: real_data.noise(150),
    }
    late = image_shifts(test.subset(range(0, 1000, 4)), 224)
    for severity in SEVERITIES:
        for name in IMAGE_SHIFTS:
            late[f"shift-{name}-{severity}"] = corrupted_images(test, 224, name, severity, 100)
    sample = part("calibration").subset(range(0, 1000, 8))
    return Task(
        select_data.deit(root),
        {**batched(sets, 224), **proxies(sample, 224), **batched(late, 224)},
    )


def cifar10(args: argparse.Namespace) -> Task:
    """DeiT-tiny fine-tuned at 96 x 96; known images are test images that it has not seen."""
    from finetune_cifar10 import load_host

    root = args.data
    whole = real_data.cifar10(root)
    test = whole.subset(range(1000))
    sets: dict[str, Callable[[], ImageSet]] = {
        "known-0": lambda: whole.subset(range(2000, 7000)),
        "test": lambda: test,
        "textures-validation": lambda: real_data.textures(
            root, "validation", cache=args.cache / "images"
        ),
        "mnist": lambda: real_data.mnist(root).subset(range(500)).unlabelled(),
        "textures-test": lambda: real_data.textures(root, "test", cache=args.cache / "images"),
        "tinyimagenet": lambda: real_data.tinyimagenet(root).subset(range(800)).unlabelled(),
        "letters": lambda: letters(300, size=96),
        "digits8": lambda: small_digits(300),
        "noise": lambda: real_data.noise(150, size=32),
    }
    late = image_shifts(test.subset(range(300)), 32)
    for severity in SEVERITIES:
        for name in IMAGE_SHIFTS:
            late[f"shift-{name}-{severity}"] = corrupted_images(test, 32, name, severity, 100)
    sample = whole.subset(range(2000, 2125))
    model = load_host(args.checkpoints / "cifar10" / f"seed{args.seed}")
    return Task(model, {**batched(sets, 96), **proxies(sample, 96), **batched(late, 96)})


# --- texts


def clinc150(root: Path) -> dict[str, TextSet]:
    """Load CLINC150: its parts in scope with intents numbered by name, and out of scope."""
    rows = json.loads((root / "text" / "clinc150" / "data.json").read_text())
    names = sorted({intent for _, intent in rows["train"]})
    found = {
        part: TextSet([text for text, _ in rows[part]], [names.index(y) for _, y in rows[part]])
        for part in ("train", "val", "test")
    }
    for part in ("oos_train", "oos_val", "oos_test"):
        found[part] = TextSet([text for text, _ in rows[part]])
    return found


def arc(root: Path) -> TextSet:
    """Load the questions of ARC-Easy without their answers."""
    rows = json.loads((root / "text" / "arc" / "ARC-Easy-test.json").read_text())
    questions = [
        row["instruction"].split("question: ", 1)[1].split("\n\nAnswer1")[0] for row in rows
    ]
    return TextSet(questions)


def text_changes(texts: TextSet, count: int) -> dict[str, TextSet]:
    """Return mild changes of labelled texts and corruptions by severity."""
    some = texts.sample(count, seed=1)
    found = {
        "mild-upper": TextSet([text.upper() for text in some.texts], some.labels),
        "mild-no-stop": TextSet([text.rstrip(" .?!") for text in some.texts], some.labels),
        "mild-typo": TextSet(corrupt_texts(some.texts, "typos", severity=1), some.labels),
        "mild-word-order": TextSet(
            corrupt_texts(some.texts, "swap_words", severity=1), some.labels
        ),
    }
    for name in TEXT_SHIFTS:
        for severity in SEVERITIES:
            changed = corrupt_texts(some.texts, name, severity=severity)
            found[f"shift-{name}-{severity}"] = TextSet(changed, some.labels)
    return found


def text_task(model: nn.Module, tokenizer: Any, sets: dict[str, TextSet], known: TextSet) -> Task:
    """Make batches of texts, sorted by length, and proxies of some known texts."""
    batches: dict[str, Callable[[], Iterable[Any]]] = {
        name: lambda texts=texts: texts.by_length().batches(tokenizer)
        for name, texts in sets.items()
    }
    some = known.sample(200).by_length().batches(tokenizer)
    for name, data in make_proxies(some).items():
        batches[f"proxy-{name}"] = lambda data=data: data
    return Task(model, batches)


def text_host(folder: Path) -> tuple[nn.Module, Any]:
    """Load a fine-tuned MiniLM and its tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(folder)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def sst2(args: argparse.Namespace) -> Task:
    """MiniLM fine-tuned on SST-2; known sentences were kept aside from its training."""
    root = args.data
    parts = [real_data.sst2(root, part) for part in ("calibration", "validation", "reserve")]
    known = TextSet(
        [text for part in parts for text in part.texts],
        [label for part in parts for label in part.labels or []],
    )
    test = real_data.sst2(root)
    clinc = clinc150(root)
    sets = {
        "known-0": known,
        "test": test,
        "trec": real_data.trec(root, "train").sample(500),
        "ag-news": real_data.ag_news(root).sample(500),
        "multi30k": real_data.multi30k(root).sample(500),
        "intents": TextSet(clinc["test"].sample(500).texts),
        "arc": arc(root).sample(400),
        "movie-reviews": real_data.movie_reviews(root).sample(400).unlabelled(),
        **text_changes(test, 400),
    }
    model, tokenizer = text_host(args.checkpoints / "sst2" / f"seed{args.seed}")
    return text_task(model, tokenizer, sets, known)


def clinc(args: argparse.Namespace) -> Task:
    """MiniLM fine-tuned on 150 intents; known questions are the validation part."""
    root = args.data
    parts = clinc150(root)
    both = TextSet(parts["oos_train"].texts + parts["oos_val"].texts)
    sets = {
        "known-0": parts["val"],
        "test": parts["test"].sample(1500),
        "trec": real_data.trec(root, "train").sample(500),
        "oos-validation": both,
        "oos-test": parts["oos_test"],
        "ag-news": real_data.ag_news(root).sample(500),
        "multi30k": real_data.multi30k(root).sample(500),
        "sst2": TextSet(real_data.sst2(root).sample(500).texts),
        **text_changes(parts["test"], 400),
    }
    model, tokenizer = text_host(args.checkpoints / "clinc150" / f"seed{args.seed}")
    return text_task(model, tokenizer, sets, parts["val"])


# --- digits


def demo_digits(args: argparse.Namespace) -> Task:
    """A small ViT trained on the digits on the spot, as `hydra demo` does."""
    from digits_rivals import HOST_EPOCHS, HOST_RATE, SHAPE

    from hydra_ensembles.hosts.tiny_vit import TinyViT
    from hydra_ensembles.training import finetune

    data = digits(SHAPE.image_size, seed=args.seed)
    torch.manual_seed(args.seed)
    model = TinyViT(SHAPE)
    finetune(
        model,
        data.train,
        epochs=HOST_EPOCHS,
        learning_rate=HOST_RATE,
        seed=args.seed,
        progress=False,
    )
    sets: dict[str, Any] = {"known-0": data.validation, "test": data.test}
    sets |= {"scribbles": data.outliers, **data.ood}
    return Task(
        model.eval(), {name: lambda batches=batches: batches for name, batches in sets.items()}
    )


MAKERS: dict[str, Callable[[argparse.Namespace], Task]] = {
    "imagenet": imagenet,
    "cifar10": cifar10,
    "sst2": sst2,
    "clinc150": clinc,
    "digits": demo_digits,
}


def folder_of(cache: Path, task: str, seed: int) -> Path:
    """Return where a task's files lie."""
    return cache / "novelty" / (task if seed == 0 else f"{task}-seed{seed}")


def read(cache: Path, task: str, *, seed: int = 0) -> dict[str, dict[str, Tensor]]:
    """Read all sets of a task."""
    from safetensors.torch import load_file

    files = sorted(folder_of(cache, task, seed).glob("*.safetensors"))
    if not files:
        raise SystemExit(
            f"No features of {task}: run experiments/novelty_features.py {task} first."
        )
    return {file.stem: load_file(file) for file in files}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data", type=Path, default=None)
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="*", help="names of sets")
    args = parser.parse_args()
    args.data = real_data.data_root(args.data)
    task = MAKERS[args.task](args)
    folder = folder_of(args.cache, args.task, args.seed)
    for name, make in task.sets.items():
        if args.only and name not in args.only:
            continue
        kept(
            folder / f"{name}.safetensors",
            lambda make=make: extract(task.model, make(), BRANCHED[args.task]),
        )


if __name__ == "__main__":
    main()
