"""Draw 1,000 small calibration sets; compare NLL on the rest with and without a temperature.

    python experiments/calibration_draws.py --data DATA --sst2 HOSTS/sst2/seed0 --cache CACHE

Logits: MiniLM fine-tuned on SST-2 (872 dev sentences), DeiT-tiny (1,000 ImageNet images), a small
ViT on the digits (719). Sets of 5 to 200 examples (log-uniform), of three kinds: any examples
(three in five), examples that the model gets right, and examples of one class (of ImageNet, which
has one image per class here: of a hundred neighbouring classes). The temperature is fitted on the
set and judged on all other examples. `RULES` holds what was tried beside the library's rule. Writes
`experiments/results/calibration_draws.json`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lab import sets, tasks
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydra_ensembles._records import write_whole
from hydra_ensembles.data.model_runs import collect_logits
from hydra_ensembles.uncertainty.temperatures import GAUSS, LAPLACE, LEAST, find_temperature

RESULTS = Path(__file__).parent / "results" / "calibration_draws.json"
SOURCES = ("sst2", "imagenet", "digits")
KINDS = ("any", "any", "any", "all right", "one class")
GRID = torch.linspace(-3.9, 3.9, 261, dtype=torch.float64)
"""log T, for rules that are compared."""
ONE = len(GRID) // 2
Rule = Callable[[Tensor, Tensor], int]
"""A rule reads NLL `[example, grid]` and which examples are right; it answers with a grid place."""


@dataclass(frozen=True)
class Source:
    """Logits and labels of a model, and its NLL at every temperature of the grid."""

    logits: Tensor
    labels: Tensor
    nll: Tensor
    right: Tensor

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> Source:
        """Compute the NLL of every example at every temperature."""
        nll = torch.stack([_nll(logits, labels, math.exp(t)) for t in GRID.tolist()], 1)
        return cls(logits, labels, nll, logits.argmax(-1) == labels)


@dataclass(frozen=True)
class Draw:
    """A calibration set: where it is from, what kind, and its examples."""

    source: str
    kind: str
    rows: Tensor


def _nll(logits: Tensor, labels: Tensor, temperature: float) -> Tensor:
    logs = (logits.double() / temperature).log_softmax(-1)
    return -logs.gather(-1, labels[:, None])[:, 0]


def _model_and_data(name: str, args: argparse.Namespace) -> tuple[Any, Any]:
    root = sets.data_root(args.data) if name != "digits" else Path()
    if name == "imagenet":
        return tasks.deit_tiny(root).eval(), sets.imagenet(root, "test").batches()
    if name == "sst2":
        import transformers

        model = transformers.AutoModelForSequenceClassification.from_pretrained(args.sst2)
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.sst2)
        return model.eval(), sets.sst2(root, "dev").batches(tokenizer)
    from hydra_ensembles.data import digits
    from hydra_ensembles.hosts.tiny_vit import TinyViT
    from hydra_ensembles.training import Settings, finetune

    data = digits(16, seed=0)
    settings = Settings(epochs=10, learning_rate=2e-3, weight_decay=0.05)
    model = finetune(TinyViT(seed=0), list(data.train), settings=settings, progress=False)[0].model
    return model.eval(), [*data.validation, *data.test]


def load(name: str, args: argparse.Namespace) -> Source:
    """Return a source; its logits are computed once and kept in the cache."""
    path = args.cache / f"{name}.safetensors"
    if not path.exists():
        model, data = _model_and_data(name, args)
        logits, labels = collect_logits(model, data, name=name, progress=True)
        assert labels is not None
        args.cache.mkdir(parents=True, exist_ok=True)
        save_file({"logits": logits.contiguous(), "labels": labels}, path)
    kept = load_file(path)
    return Source.of(kept["logits"][:, 0], kept["labels"])


def draw(sources: dict[str, Source], count: int, seed: int) -> list[Draw]:
    """Draw calibration sets, from the sources and of the kinds in turn."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for number in range(count):
        name = SOURCES[number % len(SOURCES)]
        kind = KINDS[number // len(SOURCES) % len(KINDS)]
        labels = sources[name].labels
        share = float(torch.rand((), generator=generator))
        size = round(math.exp(math.log(5) + math.log(200 / 5) * share))
        pool = torch.arange(len(labels))
        if kind == "all right":
            pool = pool[sources[name].right]
        elif kind == "one class":
            group = labels // 100 if name == "imagenet" else labels
            chosen = group[torch.randint(len(labels), (), generator=generator)]
            pool = pool[group == chosen]
        rows = pool[torch.randperm(len(pool), generator=generator)[:size]]
        found.append(Draw(name, kind, rows.sort().values))
    return found


def maximum_likelihood(nll: Tensor, right: Tensor) -> int:
    """Follow the likelihood alone (what the library did before)."""
    return int(nll.sum(0).argmin())


def prior(penalty: Tensor) -> Rule:
    """Join a prior to the likelihood."""
    return lambda nll, right: int((nll.sum(0) + penalty).argmin())


def supported(rule: Rule, least: int) -> Rule:
    """Stay at 1 with too few examples, or when all are right."""
    return lambda nll, right: ONE if len(right) < least or bool(right.all()) else rule(nll, right)


def interval(rule_penalty: Tensor, gap: float) -> Rule:
    """Take the temperature nearest to 1 whose loss is within `gap` nats of the least."""

    def find(nll: Tensor, right: Tensor) -> int:
        loss = nll.sum(0) + rule_penalty
        return int(torch.where(loss <= loss.min() + gap, GRID.abs(), torch.inf).argmin())

    return find


NORMAL = {scale: GRID**2 / (2 * scale**2) for scale in (0.15, 0.25, 0.5)}
RULES: dict[str, Rule] = {
    "maximum likelihood": maximum_likelihood,
    "Gauss 0.5": prior(NORMAL[0.5]),
    "Gauss 0.25": prior(NORMAL[0.25]),
    "all right or < 10: 1": supported(maximum_likelihood, 10),
    "all right or < 10: 1, Gauss 0.5": supported(prior(NORMAL[0.5]), 10),
    "all right or < 10: 1, Gauss 0.25": supported(prior(NORMAL[0.25]), 10),
    "all right or < 10: 1, Gauss 0.15": supported(prior(NORMAL[0.15]), 10),
    "all right or < 10: 1, edge of the 95 % interval": supported(interval(0 * GRID, 1.92), 10),
    "all right or < 20: 1, Gauss 0.25": supported(prior(NORMAL[0.25]), 20),
    "all right or < 20: 1, Laplace 0.35": supported(prior(GRID.abs() / 0.35), 20),
    "all right or < 20: 1, Laplace 0.35 and Gauss 0.5": supported(
        prior(GRID.abs() / 0.35 + NORMAL[0.5]), 20
    ),
}


def figures(draws: list[Draw], before: list[float], after: list[float]) -> dict[str, Any]:
    """Summarise what a rule did to the NLL of the rest."""
    change = [b - a for a, b in zip(before, after, strict=True)]
    ratio = [b / a for a, b in zip(before, after, strict=True)]
    worst = max(range(len(draws)), key=ratio.__getitem__)

    def mean(rows: list[int]) -> float:
        return round(sum(change[i] for i in rows) / max(len(rows), 1), 4)

    return {
        "mean change of NLL": mean(list(range(len(draws)))),
        "worst ratio": round(ratio[worst], 4),
        "worst draw": f"{draws[worst].source}, {draws[worst].kind}, {len(draws[worst].rows)}",
        "draws over 10 %": sum(r > 1.1 for r in ratio),
        "change by source, any examples, more than 50": {
            name: mean(
                [
                    i
                    for i, d in enumerate(draws)
                    if d.source == name and d.kind == "any" and len(d.rows) > 50
                ]
            )
            for name in SOURCES
        },
    }


def judge(sources: dict[str, Source], draws: list[Draw], seed: int) -> dict[str, Any]:
    """Try the library's rule and the others on the same draws."""
    before, library, rest_nll = [], [], []
    for each in draws:
        source = sources[each.source]
        rest = torch.ones(len(source.labels), dtype=torch.bool)
        rest[each.rows] = False
        logits, labels = source.logits[each.rows], source.labels[each.rows]
        found = find_temperature(logits, labels).temperature
        rest_nll.append(source.nll[rest].mean(0))
        before.append(float(rest_nll[-1][ONE]))
        library.append(float(_nll(source.logits[rest], source.labels[rest], found).mean()))
    result = {"seed": seed, "draws": len(draws)}
    result["library"] = figures(draws, before, library)
    tried = {}
    for name, rule in RULES.items():
        after = [
            float(nll[rule(sources[d.source].nll[d.rows], sources[d.source].right[d.rows])])
            for d, nll in zip(draws, rest_nll, strict=True)
        ]
        tried[name] = figures(draws, before, after)
    result["tried"] = tried
    return result


def main() -> None:
    """Run, print and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="the real data (or HYDRA_DATA)")
    parser.add_argument("--sst2", help="folder of the fine-tuned SST-2 model")
    parser.add_argument("--cache", type=Path, required=True, help="where logits are kept")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    sources = {name: load(name, args) for name in SOURCES}
    result = judge(sources, draw(sources, args.count, args.seed), args.seed)
    record = {
        "command": "python experiments/calibration_draws.py --data DATA --sst2 MODEL --cache CACHE",
        "rule": {"laplace": LAPLACE, "gauss": GAUSS, "least": LEAST},
        "sources": {
            name: {
                "examples": len(source.labels),
                "accuracy": round(float(source.right.double().mean()), 4),
                "NLL": round(float(source.nll[:, ONE].mean()), 4),
                "best temperature": round(math.exp(GRID[source.nll.mean(0).argmin()]), 3),
                "NLL at best": round(float(source.nll.mean(0).min()), 4),
            }
            for name, source in sources.items()
        },
        **result,
    }
    text = json.dumps(record, indent=1)
    print(text)
    write_whole(args.out, text + "\n")
    library = result["library"]
    if library["mean change of NLL"] > 0.01 or library["draws over 10 %"]:
        raise SystemExit("a temperature made calibration worse")


if __name__ == "__main__":
    main()
