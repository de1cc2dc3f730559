"""What golden values are made of: groups of arrays, computed through the public names only.

Weights and inputs are seeded per host, so that a group does not depend on the others. Hosts compute
in float64: then a value that moves by more than 1e-6 was computed by another formula, while another
order of the same sums moves it by 1e-12. Two kinds of groups are in float32, as users have them:
`single` and `program`; there another order of sums moves values by up to 1e-5.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask, HydraEnsemble
from tests import zoo
from tests.golden import adapter

Values = dict[str, np.ndarray]
ZOO = [f"zoo/{name}" for name in zoo.MAKERS]
SHARP = [f"sharp/{name}" for name in zoo.SHARP]
LANGUAGE_MODELS = ("zoo/gpt2", "zoo/llama")
ENCODERS = (
    "zoo/clip-vision",
    "zoo/clip-text",
    "sharp/clip_text",
    "sharp/open_clip_visual",
    "sharp/open_clip_text",
)
HOST_ENGINE_ONLY = ("sharp/open_clip_text",)
SHARP_IMAGES = ("sharp/vit", "sharp/timm", "sharp/timm_qk_norm", "sharp/open_clip_visual")
WAYS = {
    "fused": {"engine": "fused"},
    "host": {"engine": "host"},
    "loop": {"engine": "fused", "mode": "loop"},
}
"""The two engines, and members one by one."""
CRITERIA = ["random", "magnitude", "taylor", "his", "entropy", "hies", "fisher"]
CLASSES_KEPT = 12
"""Classes of a language model that are stored, of 99."""


def host(name: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Make a host of the zoo, seeded; zero-shot classifiers embed their classes when made."""
    size, _, kind = name.partition("/")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return (zoo.make(kind) if size == "zoo" else zoo.sharp(kind)).to(dtype).eval()
    finally:
        torch.set_default_dtype(before)


def batch(name: str, count: int, seed: int, dtype: torch.dtype = torch.float64) -> Any:
    """Return a seeded batch for a host."""
    size, _, kind = name.partition("/")
    if size == "zoo":
        made = zoo.batch(kind, size=count, seed=seed)
        return made if isinstance(made, dict) else made.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    if name in SHARP_IMAGES:
        return torch.randn(count, 3, 16, 16, generator=generator).to(dtype)
    ids = torch.randint(3, zoo.VOCABULARY, (count, 7), generator=generator)
    if kind == "open_clip_text":  # it pads on its own and takes no mask
        return {"input_ids": ids}
    mask = torch.tensor([[int(t < 7 - (i * 2) % 5) for t in range(7)] for i in range(count)])
    return {"input_ids": ids * mask, "attention_mask": mask}


def labelled(inputs: Any, labels: Tensor) -> Any:
    """Return a batch with labels."""
    return {**inputs, "labels": labels} if isinstance(inputs, dict) else (inputs, labels)


def masks(model: nn.Module, structure: str) -> list[HeadMask]:
    """Return masks of three members that part in the last block or in the first, or of one."""
    rows = [len(row) for row in HeadMask.full(model)]

    def keep(heads: int, dropped: int) -> list[bool]:
        return [head != dropped % heads for head in range(heads)]

    def last(heads: int, member: int) -> list[bool]:
        return [head in (member % heads, (member + 1) % heads) for head in range(heads)]

    if structure == "apart":
        return [HeadMask([keep(heads, m + i) for i, heads in enumerate(rows)]) for m in range(3)]
    trunk = [[True] * rows[0], *(keep(heads, 1) for heads in rows[1:-1])]
    members = range(1 if structure == "one" else 3)
    return [HeadMask([*trunk, last(rows[-1], member)]) for member in members]


def host_values(name: str) -> Values:
    """Return what a host gives in every structure and by every engine."""
    model = host(name)
    weights = [p.detach().double() for p in model.parameters()]
    found: Values = {
        # if these differ, the host or torch's random numbers changed, not this library
        "weights": np.array([float(sum(w.abs().sum() for w in weights)), float(len(weights))])
    }
    ways: dict[str, dict[str, Any]] = WAYS
    if name in HOST_ENGINE_ONLY:  # and nobody knows what it takes
        ways = {"host": {"engine": "host", "batch": batch(name, 4, 1)}}
    for structure in ("branched", "apart", "one"):
        for way, options in ways.items():
            if way == "loop" and structure != "branched":
                continue
            ensemble = hydra.fuse(model, masks(model, structure), **options).eval()
            values = ensemble_values(name, ensemble)
            if way == next(iter(ways)) and structure == "branched":
                values |= {f"loaded/{k}": v for k, v in loaded_values(name, ensemble).items()}
            found |= {f"{way}/{structure}/{key}": value for key, value in values.items()}
    single = host(name, torch.float32)
    for way in [way for way in ways if way != "loop"]:
        ensemble = hydra.fuse(single, masks(single, "branched"), **ways[way]).eval()
        with torch.no_grad():
            logits = ensemble.member_logits(batch(name, 2, 1, torch.float32))
        found[f"single/{way}/raw_member_logits"] = adapter.array(logits[..., :CLASSES_KEPT])
    return found


def ensemble_values(name: str, ensemble: HydraEnsemble) -> Values:
    """Fit novelty, temperatures and a policy to an ensemble; return what it says about a batch."""
    inputs = asked(name)
    with torch.no_grad():
        logits = ensemble.member_logits(inputs)
    found = {"raw_member_logits": adapter.array(logits), "cost": adapter.counted(ensemble, inputs)}
    if name in ENCODERS:
        return found
    calibrate_(name, ensemble)
    found["uncertainty_by_score"] = adapter.uncertainty_by_score(ensemble, inputs)
    found["forward_logits"] = adapter.forward_logits(ensemble, inputs)
    if name in LANGUAGE_MODELS:
        found |= adapter.columns(ensemble.predict(inputs))
        wide = ("raw_member_logits", "member_logits", "forward_logits", "probabilities")
        return found | {key: found[key][..., :CLASSES_KEPT].copy() for key in wide}
    data = held_out(name, ensemble, range(20, 23))
    policy = hydra.fit_policy(ensemble, data, risk=0.1, alarm=0.2, progress=False)
    found["thresholds"] = adapter.thresholds(policy)
    return found | adapter.columns(ensemble.predict(inputs))


def asked(name: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return the batch that is answered: four ordinary examples and two that are not."""
    if name in LANGUAGE_MODELS:
        return batch(name, 2, 1)
    ordinary, strange = batch(name, 4, 1, dtype), batch(name, 2, 2, dtype)
    if not isinstance(ordinary, dict):
        return torch.cat([ordinary, 4 * strange])
    strange["input_ids"] = strange["input_ids"].flip(0)
    return {key: torch.cat([ordinary[key], strange[key]]) for key in ordinary}


def calibrate_(name: str, ensemble: HydraEnsemble, dtype: torch.dtype = torch.float64) -> None:
    """Set temperatures and a score, and fit novelty, with labels where the host has classes."""
    members = ensemble.members
    adapter.calibrate_(ensemble, 1.3, [1.0 + 0.25 * member for member in range(members)])
    ensemble.score = "entropy"
    classes = 3 if name.startswith("sharp/") else 5
    known = [batch(name, 10, seed, dtype) for seed in range(10, 14)]
    if name not in LANGUAGE_MODELS:
        known = [labelled(part, torch.arange(10) % classes) for part in known]
    ensemble.fit_novelty_(known, progress=False)


def held_out(
    name: str, ensemble: HydraEnsemble, seeds: range, dtype: torch.dtype = torch.float64
) -> list[Any]:
    """Return data with the ensemble's own classes as labels, wrong where it is least sure."""
    parts = []
    for seed in seeds:
        inputs = batch(name, 10, seed, dtype)
        answer = ensemble.predict(inputs)
        labels = torch.as_tensor(adapter.class_index(answer)).clone()
        unsure = torch.as_tensor(answer.uncertainty).argsort(descending=True)[:3]
        labels[unsure] = (labels[unsure] + 1) % 3
        parts.append(labelled(inputs, labels))
    return parts


def loaded_values(name: str, ensemble: HydraEnsemble) -> Values:
    """Save an ensemble with all that was fitted; return what the loaded one says."""
    with tempfile.TemporaryDirectory() as folder:
        ensemble.save_pretrained(folder)
        options = {"host": host(name)} if name.endswith("open_clip_text") else {}
        loaded = HydraEnsemble.from_pretrained(folder, **options).eval()
    inputs = asked(name)
    with torch.no_grad():
        logits = adapter.array(loaded.member_logits(inputs)[..., :CLASSES_KEPT])
    found = {"raw_member_logits": logits}
    if name in ENCODERS or name in LANGUAGE_MODELS:
        return found
    said = adapter.columns(loaded.predict(inputs))
    return found | {key: said[key] for key in ("probabilities", "novelty_score", "decision")}


def unlabelled_values(name: str) -> Values:
    """Return novelty that was fitted without labels, with a selective and an empirical policy."""
    model = host(name)
    ensemble = hydra.fuse(model, masks(model, "branched")).eval()
    known = [batch(name, 10, seed) for seed in range(10, 14)]
    ensemble.fit_novelty_(known, progress=False)
    found = adapter.columns(ensemble.predict(asked(name)))
    data = held_out(name, ensemble, range(20, 32))
    for method in ("selective", "empirical"):
        options = {"risk": 0.1, "alarm": 0.1, "method": method, "progress": False}
        policy = hydra.fit_policy(ensemble, data, **options)
        found[f"{method}_thresholds"] = adapter.thresholds(policy)
        found[f"{method}_decision"] = adapter.columns(ensemble.predict(asked(name)))["decision"]
    return found


def figures(name: str) -> Values:
    """Return all figures of `evaluate`, by name."""
    model = host(name)
    ensemble = hydra.fuse(model, masks(model, "branched")).eval()
    calibrate_(name, ensemble)
    data = [labelled(batch(name, 10, seed), torch.arange(10) % 3) for seed in range(30, 34)]
    results = hydra.evaluate(
        ensemble,
        data,
        ood={"other": [batch(name, 10, seed) for seed in range(40, 43)]},
        score=["msp", "energy"],
        bootstrap=0,
        progress=False,
    )
    return {key: np.array([value], dtype=np.float64) for key, value in dict(results).items()}


def head_scores(name: str) -> Values:
    """Return the scores of heads by every criterion, and the circuits of three conditions."""
    model = host(name)
    data = [labelled(batch(name, 8, seed), torch.arange(8) % 3) for seed in range(50, 53)]
    tables = hydra.score_heads(model, data, criterion=CRITERIA, progress=False)
    found = {key: adapter.table(scores) for key, scores in tables.items()}
    outliers = [batch(name, 8, seed) for seed in range(60, 62)]
    for condition in ("knockout", "keep", "none"):
        for objective in ("id-loss", "ood-auroc"):
            options = {"id": data, "objective": objective, "condition": condition, "keep": 0.5}
            if objective == "ood-auroc":
                options["ood"] = outliers
            mask = hydra.find_circuit(model, **options, progress=False)
            found[f"circuit/{objective}/{condition}"] = adapter.table(mask)
    circuit = adapter.effects(model, id=data, keep=0.5, progress=False)
    found["circuit/effects"] = adapter.table(circuit.effects)
    return found


def program_values(name: str) -> Values:
    """Return what an exported ONNX folder says, on prepared arrays and on raw inputs."""
    dtype = torch.float32
    model = host(name, dtype)
    ensemble = hydra.fuse(model, masks(model, "branched")).eval()
    ensemble.id2label = [f"class {number}" for number in range(5)]
    raw: list[Any]
    if name == "zoo/bert":
        ensemble.tokenizer = tokenizer()
        raw = ["a joy to watch", "no plot", "fine !"]
    else:
        ensemble.transform = image_processor()
        raw = list(pictures())
    calibrate_(name, ensemble, dtype)
    data = held_out(name, ensemble, range(20, 23), dtype)
    hydra.fit_policy(ensemble, data, risk=0.1, alarm=0.2, progress=False)
    inputs = asked(name, dtype)
    arrays = inputs if isinstance(inputs, dict) else {"pixel_values": inputs}
    with tempfile.TemporaryDirectory() as folder:
        hydra.export(ensemble, Path(folder) / "exported", example=arrays)
        program = adapter.load_exported(Path(folder) / "exported")
        found = adapter.columns(program.predict({k: v.numpy() for k, v in arrays.items()}))
        found |= {f"raw/{k}": v for k, v in adapter.columns(program.predict(raw)).items()}
    return found


def tokenizer() -> Any:
    """Return a real tokenizer of a few words, with BERT's special tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "joy", "to", "watch", "no", "plot", "fine"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=24, **names)


def image_processor() -> Any:
    """Return a real image processor for images of 16 by 16."""
    from transformers import ViTImageProcessor

    size = {"height": 16, "width": 16}
    return ViTImageProcessor(size=size, image_mean=[0.5] * 3, image_std=[0.3] * 3)


def pictures() -> Iterator[Any]:
    """Yield three images of other sizes than the host's."""
    from PIL import Image

    for seed, (height, width) in enumerate([(16, 16), (24, 20), (31, 40)]):
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        yield Image.fromarray(pixels)


@cache
def digits_model() -> tuple[nn.Module, list[Any], list[Any]]:
    """Return TinyViT with a classifier fitted to digits, digits to calibrate with, and outliers.

    The body is random; the classifier solves least squares in float64. So the model is the same on
    every machine, and no training is needed.
    """
    from sklearn.datasets import load_digits

    source = load_digits()
    images = torch.from_numpy(source.images).repeat_interleave(2, 1).repeat_interleave(2, 2)
    images, labels = images[:, None] / 8 - 1, torch.from_numpy(source.target)
    model = zoo.seeded(adapter.tiny_vit, sharpen=4.0).double()
    classifier, model.classifier = model.classifier, nn.Identity()
    with torch.no_grad():
        features = model(images[:900])
        features = torch.cat([features, torch.ones(900, 1).double()], 1)
        target = 6 * nn.functional.one_hot(labels[:900], 10).double()
        ridge = features.T @ features + 1e-2 * torch.eye(features.shape[1]).double()
        solution = torch.linalg.solve(ridge, features.T @ target)
        classifier.weight.copy_(solution[:-1].T)
        classifier.bias.copy_(solution[-1])
    model.classifier = classifier
    calibration = [(images[i : i + 50], labels[i : i + 50]) for i in range(900, 1100, 50)]
    outliers = [images[1200:1250].flip(1, 2).transpose(2, 3), -images[1250:1300]]
    return model, calibration, outliers


def built(method: str) -> Values:
    """Return the members that `build` chooses by a method, and what the ensemble says."""
    model, calibration, outliers = digits_model()
    ensemble = hydra.build(
        model,
        calibration,
        ood={"turned": [outliers[0]], "inverted": [outliers[1]]},
        method=method,
        members=3,
        max_cost=1.3,
        progress=False,
    )
    inputs = calibration[0][0][:6]
    ensemble.fit_novelty_(calibration, choose=False, progress=False)  # the usual sum, as recorded
    found = adapter.columns(ensemble.predict(inputs))
    for number, mask in enumerate(ensemble.masks):
        found[f"mask_{number}"] = adapter.table(mask)
    found["temperatures"] = adapter.temperatures(ensemble)
    found["score"] = np.array([adapter.SCORES.index(ensemble.score)])
    found["cost"] = adapter.counted(ensemble, inputs)
    return found


GROUPS: dict[str, Callable[[], Values]] = {
    **{name: lambda name=name: host_values(name) for name in [*ZOO, *SHARP]},
    **{
        f"{kind}/{name}": lambda make=make, name=name: make(name)
        for kind, make, names in [
            ("unlabelled", unlabelled_values, ("zoo/vit", "zoo/bert")),
            ("evaluate", figures, ("sharp/vit", "sharp/bert")),
            ("heads", head_scores, ("sharp/vit", "sharp/bert")),
            ("program", program_values, ("zoo/vit", "zoo/bert")),
        ]
        for name in names
    },
    **{
        f"build/{method}": lambda method=method: built(method)
        for method in ("select", "circuit", "taylor", "hies", "random")
    },
}
"""Functions that compute the values of a group."""


def tolerance(name: str) -> float:
    """Return how far a value may be from the stored one, absolute and relative."""
    if name.endswith("/weights"):
        return 1e-12
    if "single/" not in name and not name.startswith("program/"):
        return 1e-6
    # ranks of known data, and what is summed of their logarithms, hang on float32 distances
    return 1e-3 if name.endswith(("novelty", "novelty_score")) else 1e-5
