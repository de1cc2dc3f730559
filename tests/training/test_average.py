"""The mean of several models' weights."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hydra_ensembles.training import average_weights


def network(seed: int, width: int = 5) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def test_a_linear_model_of_mean_weights_is_the_mean_of_models() -> None:
    models = [nn.Linear(4, 3) for _ in range(3)]
    x = torch.randn(7, 4)
    mean = torch.stack([model(x) for model in models]).mean(0)
    torch.testing.assert_close(average_weights(models)(x), mean)


def test_models_stay_and_counters_are_the_first_ones() -> None:
    models = [network(0), network(1)]
    models[0](torch.randn(4, 3))
    before = {name: tensor.clone() for name, tensor in models[0].state_dict().items()}
    found = average_weights(models).state_dict()
    assert all(torch.equal(before[name], t) for name, t in models[0].state_dict().items())
    assert found["1.num_batches_tracked"] == 1
    assert not torch.equal(found["0.weight"], before["0.weight"])


def test_other_architectures_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Model 1 differs from the first in 0.bias: .*6.*5"):
        average_weights([network(0), network(0, width=6)])
    with pytest.raises(ValueError, match="no models"):
        average_weights([])
