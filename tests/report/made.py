"""Real results of small linear models on drawn data, for pages and pictures."""

from __future__ import annotations

import torch
from torch import nn

from hydra_ensembles.evaluation import Results, evaluate
from hydra_ensembles.heads.head_mask import HeadMask
from hydra_ensembles.report.examples import Example, image_address

CLASSES, WIDTH = 4, 6
MASKS = [
    HeadMask([[1, 1, 1, 1], [1, 0, 0, 1], [0, 1, 0, 0]]),
    HeadMask([[1, 1, 1, 1], [0, 1, 1, 1], [1, 0, 0, 1]]),
    HeadMask([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]]),
]


def results_of(name: str, *, noise: float, seed: int = 0, bootstrap: int = 0) -> Results:
    """Evaluate a linear model, more or less disturbed, on drawn classes and drawn outliers."""
    draw = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(9))
    labels = torch.arange(240) % CLASSES
    inputs = centres[labels] + 1.3 * torch.randn(240, WIDTH, generator=draw)
    near = centres.mean(0) + 1.5 * torch.randn(150, WIDTH, generator=draw)
    far = 0.3 * torch.randn(120, WIDTH, generator=draw)
    model = nn.Linear(WIDTH, CLASSES)
    with torch.no_grad():
        model.weight.copy_(centres + noise * torch.randn(CLASSES, WIDTH, generator=draw))
        model.bias.copy_(-centres.square().sum(1) / 2)
    return evaluate(
        model,
        [(inputs, labels)],
        ood={"near": [(near,)], "far <b>": [(far,)]},
        bootstrap=bootstrap,
        progress=False,
        name=name,
    )


def three_results() -> list[Results]:
    """Return results of three models on the same data."""
    return [
        results_of("hydra", noise=0.1, bootstrap=100),
        results_of("single", noise=0.6, bootstrap=100),
        results_of("deep ensemble", noise=0.3, bootstrap=100),
    ]


def some_examples() -> list[Example]:
    """Return a picture, a text with mark-up in it, and an outlier."""
    image = image_address(torch.rand(1, 12, 12, generator=torch.Generator().manual_seed(0)))
    return [
        Example("most certain", "3", 0.999, 0.001, label="3", source="test 4", image=image),
        Example("least certain", "5", 0.31, 0.69, label="6", source="test 7", image=image),
        Example("outliers", "good", 0.9, 0.1, text="<script>alert('x')</script> & more"),
    ]
