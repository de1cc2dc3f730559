"""LoRA-Ensemble: one frozen backbone, low-rank updates for each member (Muehlematter et al.)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ...training import finetune
from .member_stack import MemberStack
from .surgery import attention_linears
from .task import Task, baselines, missing


@baselines.register("lora-ensemble")
def lora_ensemble(host: nn.Module, task: Task, *, rank: int = 4, train: bool = True) -> nn.Module:
    """Fine-tune low-rank updates of the attention projections, each member on its own seed.

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
    starts = [_with_adapters(host, rank, seed) for seed in task.seeds]
    if train:
        trained = finetune(
            starts, data, seed=task.seeds, parameters=r"\.lora_[AB]\.", **task.training()
        )
        starts = [member.model for member in trained]
    return MemberStack(_sharing_backbone(starts))


def _with_adapters(host: nn.Module, rank: int, seed: int) -> nn.Module:
    peft = _peft()
    model = copy.deepcopy(host)
    config = peft.LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules=attention_linears(model), lora_dropout=0.0
    )
    with torch.random.fork_rng(devices=[]):  # peft draws A from the global generator
        torch.manual_seed(seed)
        peft.inject_adapter_in_model(config, model)
    return model


def _sharing_backbone(members: list[nn.Module]) -> list[nn.Module]:
    """Let every member use the first one's frozen tensors."""
    shared = dict(members[0].named_parameters())
    for member in members[1:]:
        for name, parameter in member.named_parameters():
            if ".lora_" not in name:
                parameter.data = shared[name].data
    return members


def _peft() -> Any:
    try:
        import peft
    except ImportError as error:
        raise missing("peft") from error
    return peft
