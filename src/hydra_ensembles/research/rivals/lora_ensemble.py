"""LoRA-Ensemble: one frozen backbone, low-rank updates for each member (Muehlematter et al.)."""

from __future__ import annotations

import copy

import torch
from torch import nn

from ...registry import imported
from ...training import finetune
from .parts import MemberStack, attention_linears
from .task import Task, baselines


@baselines.register("lora-ensemble")
def lora_ensemble(host: nn.Module, task: Task, *, rank: int = 4, train: bool = True) -> nn.Module:
    """Fine-tune low-rank updates of the attention projections, one seed per member.

    W_m = W + B_m A_m with A_m random and B_m = 0 at the start, for W_Q, W_K, W_V and W_O
    (Muehlematter et al., 2024, "LoRA-Ensemble", arXiv 2405.14438; through peft). Every member
    starts as the host; backbone and classifier stay frozen and are stored once. Members run one by
    one, so that a prediction costs M passes: the saving is in memory.

    Args:
        host: A trained classifier.
        task: Needs `train`.
        rank: Of the updates.
        train: Whether to fine-tune at all.
    """
    if rank < 1:
        raise ValueError(f"rank={rank}: expected at least 1.")
    data = task.need("train")
    peft, starts = imported("peft", "This rival", "rivals"), []
    for seed in task.seeds:
        model = copy.deepcopy(host)
        config = peft.LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=attention_linears(model), lora_dropout=0.0
        )
        with torch.random.fork_rng(devices=[]):  # peft draws A from the global generator
            torch.manual_seed(seed)
            peft.inject_adapter_in_model(config, model)
        starts.append(model)
    if train:
        trained = finetune(
            starts, data, seed=task.seeds, parameters=r"\.lora_[AB]\.", **task.training()
        )
        starts = [member.model for member in trained]
    shared = dict(starts[0].named_parameters())
    for member in starts[1:]:  # the backbone is stored once
        for name, parameter in member.named_parameters():
            if ".lora_" not in name:
                parameter.data = shared[name].data
    return MemberStack(starts)
