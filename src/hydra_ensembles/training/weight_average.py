"""`average_weights`: one model from several fine-tunings of the same pretrained one."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn


def average_weights(models: Sequence[nn.Module]) -> nn.Module:
    """Return a copy of the first model whose weights are the mean over all models.

    This is a uniform soup (Wortsman et al., 2022). For fine-tunings of one pretrained model it is
    often better than each of them, at the cost of one. Classifiers that started from different
    random weights do not average well: fit a temperature, or train a little further.

    Args:
        models: Models of one architecture. Floating-point tensors are averaged in float64; other
            tensors (counters, indices) are the first model's.

    Returns:
        A new model in the training or eval mode of the first. The given models are not changed.
    """
    if not models:
        raise ValueError("There are no models to average. Pass at least one.")
    states = [model.state_dict() for model in models]
    shapes = {name: tensor.shape for name, tensor in states[0].items()}
    for place, state in enumerate(states[1:], 1):
        other = {name: tensor.shape for name, tensor in state.items()}
        if other != shapes:
            differing = sorted(n for n in shapes | other if shapes.get(n) != other.get(n))
            name = differing[0]
            raise ValueError(
                f"Model {place} differs from the first in {name}: {other.get(name)}, expected "
                f"{shapes.get(name)}. Average fine-tunings of the same model."
            )
    result = copy.deepcopy(models[0])
    mean = {
        name: torch.stack([state[name].double() for state in states]).mean(0).to(tensor.dtype)
        if tensor.is_floating_point()
        else tensor
        for name, tensor in states[0].items()
    }
    result.load_state_dict(mean)
    return result
