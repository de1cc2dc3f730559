"""How far could any choice of three masks go? A look at the test data, to bound every search.

    python experiments/select_members.py image --data DATA --cache CACHE
    python experiments/select_ceiling.py --cache CACHE

Judges single masks and random triples of all 49 masks of DeiT-tiny's last two blocks **on the test
data** and reports the best gains over the host under constraints (raw, MSP). Nothing is chosen by
this: it tells what the pool of masks holds, whoever searches it. Writes
results/select_ceiling.json.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import tables
import torch
from safetensors.torch import load_file

from hydra_ensembles.search.objectives import auroc

SEEN = ("textures-bumpy", "textures-crosshatched")
UNSEEN = ("mnist", "cifar10", "noise")


def main() -> None:
    """Judge, and write the best of each kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--triples", type=int, default=2000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = args.cache / "image"
    masks = json.loads((folder / "masks.json").read_text())
    sets = {name: load_file(folder / f"{name}.safetensors") for name in ("test", *SEEN, *UNSEEN)}
    probabilities = {name: one["logits"].float().softmax(-1) for name, one in sets.items()}
    labels = sets["test"]["labels"]

    def figures(members: tuple[int, ...]) -> dict[str, float]:
        means = {name: p[:, list(members)].mean(1) for name, p in probabilities.items()}
        right = means["test"].argmax(-1) == labels
        own = means["test"][torch.arange(len(labels)), labels]
        found = {"accuracy": 100 * float(right.float().mean()), "nll": -float(own.log().mean())}
        sure = means["test"].amax(-1)
        for name in (*SEEN, *UNSEEN):
            found[name] = 100 * auroc(-sure, -means[name].amax(-1))
        return found

    full = next(i for i, mask in enumerate(masks) if all(all(row) for row in mask))
    host = figures((full,))
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(masks), (args.triples, 3), generator=generator).sort(1).values
    ensembles = [(i,) for i in range(len(masks))] + sorted({tuple(t) for t in drawn.tolist()})
    gains = []
    for members in ensembles:
        found = figures(members)
        gain: dict[str, Any] = {key: found[key] - host[key] for key in found}
        gain["seen"] = sum(gain[name] for name in SEEN) / len(SEEN)
        gain["unseen"] = sum(gain[name] for name in UNSEEN) / len(UNSEEN)
        gain["worst unseen"] = min(gain[name] for name in UNSEEN)
        gains.append(gain)
    able = [g for g in gains if g["accuracy"] >= -0.5]
    safe = [g for g in able if g["worst unseen"] >= -0.5]
    good = [g for g in safe if g["nll"] <= 0]
    record = {
        "command": "python experiments/select_ceiling.py --cache CACHE",
        "ensembles": len(ensembles),
        "meaning": "gains over the host on test data, MSP, raw; chosen by looking at the test data",
        "all goals (seen +5, unseen +1, NLL not worse)": sum(
            g["seen"] >= 5 and g["unseen"] >= 1 for g in good
        ),
        "largest gain on the seen family, accuracy >= -0.5": _best(able, "seen"),
        "largest gain on unseen families, accuracy >= -0.5": _best(able, "unseen"),
        "largest gain on the seen family, no unseen family below -0.5 either": _best(safe, "seen"),
        "largest gain on unseen families, none below -0.5, NLL not worse": _best(good, "unseen"),
        "largest gain on the seen family, none below -0.5, NLL not worse": _best(good, "seen"),
    }
    path = tables.RESULTS / "select_ceiling.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(path.read_text())


def _best(gains: list[dict[str, Any]], key: str) -> dict[str, float]:
    best = max(gains, key=lambda gain: gain[key])
    return {name: round(best[name], 3) for name in ("accuracy", "nll", "seen", "unseen")} | {
        "worst unseen": round(best["worst unseen"], 3)
    }


if __name__ == "__main__":
    main()
