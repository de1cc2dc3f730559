"""Packed-Ensembles: M narrow networks in one, by grouped linear layers (Laurent et al., 2023)."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModelError
from ...hosts import host_model
from ...hosts.probes import modules_after_blocks
from ...registry import imported
from ...training import finetune
from .parts import Folded, block_linears, need_classifier, replace_
from .task import Task, baselines


class PackedProjections(nn.Module):
    """A packed linear for hosts that make queries, keys and values at once, rows [q | k | v]."""

    def __init__(self, layer: nn.Module, members: int) -> None:
        super().__init__()
        self.layer = layer
        self.members = members

    def forward(self, x: Tensor) -> Tensor:
        """Map `[..., width]` to `[..., 3 width]`, members side by side in each third."""
        return self.layer(x).unflatten(-1, (self.members, 3, -1)).transpose(-3, -2).flatten(-3)


@baselines.register("packed-ensemble")
def packed_ensemble(host: nn.Module, task: Task) -> nn.Module:
    """Split the host's width among members that never mix, and train them together.

    y = concat_m(x_m W_m^T): every linear of the blocks, every norm and the classifier become M
    groups (Laurent et al., 2023, "Packed-Ensembles", arXiv 2210.09184).

    **It cannot start from pretrained weights**: dense matrices have no such groups, so blocks,
    norms and classifier are initialised and trained from scratch on `train`; only the embedding is
    the host's. The published width factor alpha is the host's own width here: for alpha = 2, pass a
    host that is twice as wide (its weights do not matter).

    Args:
        host: A classifier whose shape is taken; width and heads must divide by `members`.
        task: Needs `train`; give many more epochs than fine-tuning wants.
    """
    layers = imported("torch_uncertainty.layers", "This rival", "rivals")
    data, members = task.need("train"), task.members
    model = copy.deepcopy(host)
    view = host_model(model)
    if any(count % members for count in (view.width, *view.head_counts)):
        raise UnsupportedModelError(
            f"A host of width {view.width} with {view.head_counts} heads cannot be packed into "
            f"{members} members: width and heads must divide by it. Choose another number of "
            "members, or pass a host of another width."
        )
    if any(norm is not None for site in view.sites for norm in site.head_norms):
        raise UnsupportedModelError("Norms within heads (qk_norm) cannot be packed.")
    last = need_classifier(model, data, task.name)
    fused = {id(s.packed) for s in view.sites if isinstance(s.packed, nn.Linear)}
    after = set(modules_after_blocks(view))
    paths = block_linears(model) + [
        n for n in after if n != last and isinstance(model.get_submodule(n), nn.Linear)
    ]
    inside = view.blocks_path + "."
    norms = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.LayerNorm) and (name.startswith(inside) or name in after)
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(task.seed)
        for path in [*paths, last]:
            old = model.get_submodule(path)
            assert isinstance(old, nn.Linear)
            new = layers.PackedLinear(
                old.in_features,
                old.out_features,
                alpha=1,
                num_estimators=members,
                bias=old.bias is not None,
                last=path == last,
            )
            replace_(model, path, PackedProjections(new, members) if id(old) in fused else new)
        for path, norm in norms:
            width = norm.normalized_shape[-1]
            # `first`: only then does the layer norm each member separately (0.13)
            new_norm = layers.PackedLayerNorm(width, members, alpha=1, eps=norm.eps, first=True)
            replace_(model, path, new_norm)
    packed = Folded(model, members, repeat=False)
    return finetune(packed, data, seed=task.seed, **task.training())[0].model
