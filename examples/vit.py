"""Tutorial: turn a Vision Transformer of Hugging Face into an ensemble that knows when to abstain.

    python examples/vit.py

The host is tiny and trained here on digits, so this runs anywhere in seconds. For your own model
and data, use `AutoModelForImageClassification.from_pretrained(...)` and
`image_folder("calibration/", processor)`.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import ViTConfig, ViTForImageClassification

import hydra_ensembles as hydra
from hydra_ensembles.data import digits


def main(epochs: int = 20, folder: Path | None = None) -> dict[str, hydra.Results]:
    """Train a host, build an ensemble from it, compare both, save, load, abstain."""
    out = folder or Path(tempfile.mkdtemp())
    data = digits(16)

    # 1. a host; yours is pretrained
    config = ViTConfig(
        hidden_size=48,
        num_hidden_layers=4,
        num_attention_heads=6,
        intermediate_size=96,
        image_size=16,
        patch_size=4,
        num_channels=1,
        num_labels=10,
    )
    torch.manual_seed(0)
    host = ViTForImageClassification(config)
    model = hydra.finetune(
        host, list(data.train), epochs=epochs, learning_rate=2e-3, progress=False
    )[0].model.eval()
    print(hydra.explain(model))

    # 2. which heads matter? (only to look at: build does its own search)
    print(hydra.score_heads(model, data.validation, criterion="hies", progress=False))

    # 3. the ensemble, on data that the host was not trained on; nothing is trained
    ensemble = hydra.build(
        model, data.validation, ood={"scribbles": data.outliers}, max_cost=1.07, progress=False
    )
    print(ensemble)
    batch = next(iter(data.test))
    hydra.verify(ensemble, batch)  # the fused model equals its members one by one

    # 4. both models on test data and on outliers of kinds that the search has not seen
    results = {
        name: hydra.evaluate(found, data.test, ood=data.ood, progress=False, name=name)
        for name, found in {"hydra": ensemble, "single": model}.items()
    }
    print(hydra.compare(results["hydra"], results["single"], count=200))
    ratio = hydra.cost(ensemble, batch).relative_to(hydra.cost(model, batch))
    costs = {"hydra": ratio.multiply_adds, "single": 1.0}
    hydra.write_report(
        out / "report.html", list(results.values()), costs=costs, masks=ensemble.masks
    )

    # 5. saved and loaded
    ensemble.save_pretrained(out / "vit-hydra")
    ensemble = hydra.HydraEnsemble.from_pretrained(out / "vit-hydra")

    # 6. when to answer: P(answered and wrong) <= 5 %, P(a digit is called new) <= 5 %
    labelled, coming = (data.test.subset(range(part, data.test.count, 2)) for part in (0, 1))
    print(hydra.fit_policy(ensemble, labelled, risk=0.05, alarm=0.05, progress=False))
    print(ensemble.predict(next(iter(coming))).decision)
    return results


if __name__ == "__main__":
    main()
