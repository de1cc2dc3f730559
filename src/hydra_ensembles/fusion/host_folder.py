"""Save and load any model of this library: a plain host, pruned or not, or an ensemble.

A plain host is written as an ensemble of one member, so that there is one format: the same checks,
and every command reads the folder.
"""

from __future__ import annotations

import os

from torch import nn

from ..errors import UnsupportedModelError
from ..heads.head_mask import HeadMask
from .ensemble import HydraEnsemble
from .fuse_members import fuse

_PLAIN = "plain_host"
"""The field of a record that says that the folder holds a plain host."""


def as_ensemble(model: nn.Module) -> HydraEnsemble:
    """Return a plain host as an ensemble of one member, with the host's record.

    Example:
        >>> as_ensemble(pruned).predict(batch)
    """
    ensemble = fuse(model, [HeadMask.full(model)], readout_only=False)  # all blocks stay whole
    ensemble.record = {**getattr(model, "hydra_record", {}), _PLAIN: True}
    return ensemble


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Write a host, pruned or not, or an ensemble to a folder that `load` reads.

    `prune` removes other numbers of heads and neurons from every layer, which `save_pretrained` of
    transformers cannot describe. Here the folder says what was removed. Files are written beside
    their places and renamed, and their digests are checked when they are read. There is no pickle.

    Args:
        model: A host model or a `HydraEnsemble`.
        folder: Where to; it is created if it does not exist.

    Raises:
        UnsupportedModelError: When the model is neither.

    Example:
        >>> save(prune(model, inputs, max_cost=0.5), "half")
        >>> model = load("half")
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"Cannot save a {type(model).__name__}: expected a host model or a HydraEnsemble."
        )
    ensemble = model if isinstance(model, HydraEnsemble) else as_ensemble(model)
    ensemble.save_pretrained(folder)


def load(folder: str | os.PathLike[str]) -> nn.Module:
    """Load what `save` or `HydraEnsemble.save_pretrained` wrote.

    Args:
        folder: The folder, or the name of one on the hub.

    Returns:
        A plain host, of the class that was saved, if a plain host was saved; its `hydra_record`
        says how it was made. Otherwise a `HydraEnsemble`.

    Raises:
        FormatError: When the folder is incomplete, was changed, or is of another kind.

    Example:
        >>> model = load("half")
        >>> model(**batch).logits
    """
    ensemble = HydraEnsemble.from_pretrained(folder)
    if not ensemble.record.get(_PLAIN):
        return ensemble
    model = ensemble.member(0)
    vars(model)["hydra_record"] = {k: v for k, v in ensemble.record.items() if k != _PLAIN}
    return model
