"""`refit_`: what a pruned model keeps follows the dense model, block by block."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydra_ensembles.errors import DataError, FormatError, UnsupportedModelError
from hydra_ensembles.hosts import host_model
from hydra_ensembles.hosts.head_weights import linear_bias
from hydra_ensembles.hosts.mlp_site import cut_neurons_, mlp_site
from hydra_ensembles.refit import paired_states
from hydra_ensembles.refit.paired_states import PairedStates
from hydra_ensembles.refit.refit_run import SublayerFit, refit_
from hydra_ensembles.refit.sublayer import sublayers
from tests import zoo
from tests.refit.test_folding import perturbed

GROUPED = {
    **zoo.SMALL,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 99,
    "num_labels": 5,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 98,
}


def _phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForSequenceClassification

    return Phi3ForSequenceClassification(Phi3Config(**GROUPED))


def _gemma2() -> nn.Module:
    from transformers import Gemma2Config, Gemma2ForSequenceClassification

    return Gemma2ForSequenceClassification(Gemma2Config(**GROUPED, head_dim=8))


MORE: dict[str, Callable[[], nn.Module]] = {"phi3": _phi3, "gemma2": _gemma2}
FAMILIES = ["bert", "vit", "timm-unusual", "zero-shot-open-clip", "gpt2", "llama", "phi3", "gemma2"]
"""Post- and pre-norm, layer scale, closed attention, packed and gated, grouped queries, no biases,
norms after the layers."""


@cache
def host(name: str) -> nn.Module:
    if name not in MORE:
        return zoo.make(name)
    model = zoo.seeded(MORE[name])
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in path:
                parameter.mul_(1.0 / (parameter.std() * parameter.shape[-1] ** 0.5))
    return model


def batch(name: str, size: int = 20, seed: int = 1) -> Any:
    one = zoo.batch("llama" if name in MORE else name, size, seed)
    if name in MORE:
        one["input_ids"] *= one["attention_mask"]  # their padding token is 0
    return one


@cache
def data(name: str, batches: int = 10) -> list[Any]:
    return [batch(name, seed=seed) for seed in range(batches)]


@torch.no_grad()
def doubled(model: nn.Module) -> nn.Module:
    """Return a copy in which the second half of heads and neurons repeats the first half's inputs.

    What they write to the residual stream differs, so that none can be left out.
    """
    model = copy.deepcopy(model)
    for block in host_model(model).blocks:
        rows = [part for pair in block.attention._projections() for part in pair]
        site = mlp_site(block)
        for path in site.first:
            linear = block.module.get_submodule(path)
            weight = linear.weight.t() if type(linear).__name__ == "Conv1D" else linear.weight
            for part in (weight, linear_bias(linear)):
                rows += [None] if part is None else part.chunk(site.packed)
        for part in rows:
            if part is not None:
                part[len(part) // 2 :] = part[: len(part) // 2]
    return model


def halved(model: nn.Module, layers: range = range(9)) -> nn.Module:
    """Return a copy without the second half of the neurons, and of the heads where they can go."""
    model = copy.deepcopy(model)
    view = host_model(model)
    for block in view.blocks:
        if block.index in layers and view.why_not_prunable() is None:
            block.attention.cut_(list(range(block.attention.num_heads // 2)))
        if block.index in layers:
            cut_neurons_(block, range(mlp_site(block).neurons // 2))
    return model


def apart(a: nn.Module, b: nn.Module, inputs: Any) -> float:
    """Return the mean squared difference of two models' outputs, relative to their variance."""
    ours, theirs = zoo.run(a, inputs), zoo.run(b, inputs)
    if isinstance(inputs, dict) and ours.dim() == 3:  # padding
        kept = inputs["attention_mask"].bool()
        ours, theirs = ours[kept], theirs[kept]
    return float((ours - theirs).square().mean() / theirs.var())


@pytest.mark.parametrize("name", FAMILIES)
def test_heads_and_neurons_that_say_the_same_are_not_missed(name: str) -> None:
    dense = doubled(host(name))
    pruned, fresh = halved(dense), batch(name, seed=99)
    assert apart(pruned, dense, fresh) > 0.01
    fits = refit_(pruned, dense, data(name), progress=False)
    assert fits[0].part == ("mlp" if name == "phi3" else "attention")  # Phi-3 needs all its heads
    assert fits[0].ridge == 1e-8 and all(fit.error < 1e-6 for fit in fits)
    assert apart(pruned, dense, fresh) < 1e-8  # 1e-4 of the outputs


@pytest.mark.parametrize("name", FAMILIES)
def test_the_error_falls_on_examples_that_were_not_seen(name: str) -> None:
    dense, fresh = perturbed(doubled(host(name)), 0), batch(name, 60, seed=99)
    first = 0 if name in MORE else 1  # those have two blocks
    before = halved(dense, range(first, 9))
    after = copy.deepcopy(before)
    fits = refit_(after, dense, data(name), progress=False)
    assert apart(after, dense, fresh) < 0.5 * apart(before, dense, fresh)
    assert {fit.layer for fit in fits} == set(range(first, len(host_model(dense))))
    changed = {n for n, p in after.state_dict().items() if not p.equal(before.state_dict()[n])}
    layers = {layer: sublayers(b, c) for layer, (b, c) in enumerate(calls(dense))}
    path = host_model(dense).blocks_path
    expected = {f"{path}.{layer}.{one.path}" for layer, some in layers.items() for one in some}
    assert {name.rpartition(".")[0] for name in changed} <= expected
    assert len({name.rpartition(".")[0] for name in changed}) == sum(
        f.ridge is not None for f in fits
    )


def calls(model: nn.Module) -> list[tuple[Any, Any]]:
    view = host_model(model)
    return list(zip(view.blocks, view.passes()[-1], strict=True))


@pytest.mark.parametrize("name", ["bert", "vit", "llama"])
def test_an_unpruned_model_stays_as_it_is(name: str) -> None:
    dense = host(name)
    same = copy.deepcopy(dense)
    assert refit_(same, dense, data(name), progress=False) == []
    assert all(p.equal(dense.state_dict()[n]) for n, p in same.state_dict().items())


def test_scales_are_found_and_norms_behind_a_layer_are_noticed() -> None:
    for block, call in calls(host("timm-unusual")):
        attention, mlp = sublayers(block, call)
        torch.testing.assert_close(attention.scale, block.module.ls1.gamma.double())
        torch.testing.assert_close(mlp.scale, block.module.ls2.gamma.double())
    for block, call in calls(host("gemma2")):
        assert [one.scale for one in sublayers(block, call)] == [None, None]


def test_padding_counts_for_nothing() -> None:
    dense = host("bert")

    def padded(one: dict[str, Tensor]) -> dict[str, Tensor]:
        ids, mask = (nn.functional.pad(one[k], (0, 5), value=0) for k in one)
        return {"input_ids": ids, "attention_mask": mask}

    first, second = halved(dense), halved(dense)
    a = refit_(first, dense, data("bert"), progress=False)
    b = refit_(second, dense, [padded(one) for one in data("bert")], progress=False)
    assert [f.rows for f in a] == [f.rows for f in b]
    for name, tensor in first.state_dict().items():
        torch.testing.assert_close(tensor, second.state_dict()[name], atol=1e-3, rtol=1e-3)


def test_in_the_last_block_the_tokens_that_are_read_count() -> None:
    dense, examples = host("vit"), [batch("vit", 40, seed=seed) for seed in range(5)]
    fits = refit_(halved(dense), dense, examples, progress=False)
    rows = {(f.layer, f.part): f.rows for f in fits}
    assert rows[1, "mlp"] == 200 * 17
    assert rows[2, "attention"] == rows[2, "mlp"] == 200  # two rows for 17 and 25 unknowns
    fits = refit_(halved(dense), dense, examples[:1], progress=False)
    rows = {(f.layer, f.part): f.rows for f in fits}
    assert rows[2, "attention"] == 40 and rows[2, "mlp"] == 40 * 17  # too few: all, unevenly


def test_a_few_read_tokens_weigh_as_much_as_the_rest_of_their_sequence() -> None:
    dense, one = host("phi3"), batch("phi3")
    states = PairedStates(dense, halved(dense), [one], 0)
    entered = states._enter(one)
    assert entered.read is not None
    lengths = one["attention_mask"].sum(1)
    assert entered.read.sum(1).eq(1).all()
    assert entered.read.int().argmax(1).equal(lengths - 1)
    states._read_rows = 200
    last = len(states.dense) - 1
    assert states.weights(entered, last - 1, 99).equal(entered.weights)
    assert states.weights(entered, last, 100).sum(1).eq(1).all()
    uneven = states.weights(entered, last, 101)
    assert uneven.sum(1).equal(2.0 * (lengths - 1))
    assert (uneven * entered.read).sum(1).equal(lengths - 1.0)


def test_states_that_do_not_fit_in_memory_are_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dense = host("bert")
    whole, sharded = halved(dense, range(1, 9)), halved(dense, range(1, 9))
    a = refit_(whole, dense, data("bert"), progress=False)
    monkeypatch.setattr(paired_states, "STATES_BYTES", 40_000)
    b = refit_(sharded, dense, data("bert"), progress=False)
    assert a == [fit for fit in b if fit.layer]
    assert all(p.equal(sharded.state_dict()[n]) for n, p in whole.state_dict().items())


def test_fits_that_are_worse_on_held_out_tokens_are_not_used() -> None:
    dense = host("clip-vision")
    pruned = halved(dense, range(1, 2))
    second = pruned.vision_model.encoder.layers[2].mlp.fc2
    before = second.weight.clone()
    fits = refit_(pruned, dense, data("clip-vision", 5), progress=False)
    assert fits[-1].ridge is None and fits[-1].error == fits[-1].given_error
    assert second.weight.equal(before)
    assert all(fit.error < fit.given_error for fit in fits[:-1])


def _fit_once(folder: Path, examples: Any) -> tuple[nn.Module, list[SublayerFit]]:
    pruned = halved(host("bert"))
    return pruned, refit_(pruned, host("bert"), examples, folder=folder, progress=False)


class Deadly:
    """Data that ends its process in the middle of its fifth pass."""

    passes = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        for number, one in enumerate(data("bert")):
            if self.passes == 5 and number == 3:
                os.kill(os.getpid(), 9)
            yield one


def test_a_killed_run_resumes_with_equal_results(tmp_path: Path) -> None:
    code = (
        "from pathlib import Path\n"
        "from tests.refit.test_refit_run import *\n"
        "from tests.refit.test_refit_run import _fit_once\n"
        "paired_states.STATES_BYTES = 0\n"  # so that the data is read for every layer
        f"_fit_once(Path({str(tmp_path / 'killed')!r}), Deadly())\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == -9, ended.stderr
    names = sorted(path.name for path in (tmp_path / "killed").glob("block*"))
    assert 0 < len(names) < 6
    resumed, a = _fit_once(tmp_path / "killed", data("bert"))
    whole, b = _fit_once(tmp_path / "whole", data("bert"))
    assert a == b
    assert all(p.equal(whole.state_dict()[n]) for n, p in resumed.state_dict().items())


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    _fit_once(tmp_path, data("bert"))
    with pytest.raises(FormatError, match="the data has changed"):
        _fit_once(tmp_path, data("bert")[:5])
    with pytest.raises(FormatError, match="seed was 0, is 1"):
        refit_(
            halved(host("bert")),
            host("bert"),
            data("bert"),
            folder=tmp_path,
            seed=1,
            progress=False,
        )


def test_bad_data_and_models_are_refused() -> None:
    dense = host("vit")
    refuse = partial(refit_, halved(dense), dense, progress=False)
    with pytest.raises(DataError, match="no batches"):
        refuse([])
    with pytest.raises(DataError, match="4 examples, too few to hold some out"):
        refuse([batch("vit", 2), batch("vit", 2)])
    short = {"input_ids": torch.full((6, 3), 5)}
    with pytest.raises(DataError, match="18 tokens, too few to fit 17 unknowns"):
        refit_(halved(host("bert")), host("bert"), [short], progress=False)
    broken = batch("vit").clone()
    broken[3] = torch.nan
    with pytest.raises(DataError, match="NaN for 1 of 20 examples in batch 1"):
        refuse([batch("vit"), broken])
    with pytest.raises(DataError, match="inputs as the model takes them"):
        refuse([torch.zeros(20, 7, 16, 16)])
    with pytest.raises(UnsupportedModelError, match="3 and 2 blocks"):
        refit_(zoo.sharp("vit"), dense, data("vit"), progress=False)
    wild = halved(dense)
    with torch.no_grad():
        wild.vit.layers[0].mlp.fc1.bias.fill_(torch.inf)
    with pytest.raises(DataError, match="NaN or infinity"):
        refit_(wild, dense, data("vit"), progress=False)
