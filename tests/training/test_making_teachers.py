"""Cheap teachers: plain hosts that differ, the host untouched, resumable."""

from __future__ import annotations

import copy
import sys
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import hydra_ensembles as hydra
from hydra_ensembles.data import as_data
from hydra_ensembles.errors import MissingDependencyError, UnknownNameError
from hydra_ensembles.training import make_teachers
from tests import zoo


@cache
def model(name: str) -> nn.Module:
    return zoo.make(name)


def data(name: str) -> Any:
    labels = torch.randint(5, (24,), generator=torch.Generator().manual_seed(0))
    inputs = zoo.batch(name, 24)
    batch = {**inputs, "labels": labels} if name in zoo.TEXTS else (inputs, labels)
    return as_data(batch, batch_size=8)


def make(how: str, name: str = "vit", **options: Any) -> list[nn.Module]:
    given = {"count": 2, "epochs": 2, "learning_rate": 5e-3, "progress": False, **options}
    return make_teachers(model(name), data(name), how=how, **given)


def answers(teacher: nn.Module, name: str) -> torch.Tensor:
    batch = zoo.batch(name)
    with torch.no_grad():
        return (teacher(**batch) if isinstance(batch, dict) else teacher(batch)).logits


@pytest.mark.parametrize("name", ["vit", "bert"])
@pytest.mark.parametrize("how", ["lora", "branch", "snapshots", "full"])
def test_teachers_are_plain_hosts_that_differ(how, name):
    before = copy.deepcopy(model(name).state_dict())
    first, second = make(how, name)
    assert type(first) is type(second) is type(model(name)) and not first.training
    assert first.state_dict().keys() == before.keys()
    assert all(torch.equal(v, before[k]) for k, v in model(name).state_dict().items())
    pair = [answers(t, name) for t in (first, second)]
    start = answers(model(name).eval(), name)
    assert min(float((a - start).abs().max()) for a in pair) > 1e-3
    assert float((pair[0] - pair[1]).abs().max()) > 1e-3
    again = make(how, name)[1]
    assert torch.equal(answers(again, name), pair[1])


def test_what_each_way_leaves_alone():
    start = model("vit").state_dict()

    def moved(how: str) -> set[str]:
        state = make(how, count=1, **({"branch_layer": 2} if how == "branch" else {}))[0]
        return {k for k, v in state.state_dict().items() if not torch.equal(v, start[k])}

    assert all("attention" in k or "classifier" in k or "layernorm." in k for k in moved("lora"))
    assert not any("layers.0" in k or "layers.1" in k or "embed" in k for k in moved("branch"))
    assert any("embed" in k for k in moved("full"))


def test_teachers_resume_and_teach(tmp_path):
    first = make("snapshots", folder=tmp_path)
    again = make("snapshots", folder=tmp_path)
    assert torch.equal(answers(first[1], "vit"), answers(again[1], "vit"))
    assert (tmp_path / "teacher-1" / "member-0" / "training.safetensors").exists()
    student = hydra.distill(
        model("vit"), first, data("vit"), members=2, max_cost=1.2, epochs=1, progress=False
    )
    assert student.members == 2


def test_bad_wishes_are_told():
    with pytest.raises(UnknownNameError, match="snapshots"):
        make("snapshot")
    with pytest.raises(ValueError, match="count=0"):
        make("lora", count=0)


def test_lora_updates_every_kind_of_projection():
    """Linear layers, GPT-2's transposed ones and a whole nn.MultiheadAttention."""
    for name, part in {"gpt2": "c_attn.weight", "open_clip_visual": "in_proj_weight"}.items():
        host = zoo.with_classes(name)
        batch = zoo.images() if name == "open_clip_visual" else zoo.texts()
        start = copy.deepcopy(host.state_dict())
        (teacher,) = make_teachers(
            host, [batch], how="lora", count=1, learning_rate=1e-2, progress=False
        )
        moved = {k for k, v in teacher.state_dict().items() if not torch.equal(v, start[k])}
        assert sum(part in k for k in moved) == len(hydra.HeadMask.full(host).tolist())
        assert not any("mlp" in k for k in moved)
        assert all(parameter.requires_grad for parameter in teacher.parameters())


def test_lora_without_peft_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(MissingDependencyError, match=r"hydra-ensembles\[train\]"):
        make("lora")
