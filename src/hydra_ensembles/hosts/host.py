"""A host model seen through its blocks: what is prunable here, found by looking, not by names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..data.eval_mode import in_eval
from ..errors import UnsupportedModelError
from .arithmetic import Arithmetic, find_arithmetic, hands_bias, why_not_understood
from .attention_site import AttentionSite
from .block import Block
from .block_calls import (
    BlockCall,
    ClosedAttentionError,
    Form,
    HostView,
    Inputs,
    capture_calls,
    stand_ins,
)
from .block_search import find_stack
from .example_inputs import examples, text_config
from .families import Family
from .head_removal import why_not_cut
from .head_weights import linear_weight
from .mlp_site import MlpSite, find_neurons
from .probes import Readout, bare_call, find_readout, largest_difference, structure_of
from .reasons import at_layer, describe_parameters
from .shared_layers import unrolled


@dataclass(frozen=True)
class HostFacts:
    """What was found out about a host by running it; it holds for every copy of the model.

    Attributes:
        readout: Which tokens the classifier reads.
        forms: The form of each block's output.
        arithmetic: What our own arithmetic must know of its blocks.
    """

    readout: Readout
    forms: tuple[Form, ...]
    arithmetic: Arithmetic


@dataclass(frozen=True)
class _Passes:
    """Captured forward passes: the calls `[pass][layer]` and the inputs of the last pass."""

    calls: list[list[BlockCall]]
    inputs: Inputs | None = None
    why_none: str = "we do not know what inputs the model takes: pass batch=, one of your batches"
    why_closed: str | None = None


class HostModel(HostView):
    """A pretrained transformer and where its heads are.

    Args:
        model: A Hugging Face, timm or open_clip module, a `ZeroShotClassifier`, or any module whose
            blocks a registered or given `Family` describes.
        family: Describe the blocks yourself; by default every registered family is tried.
        facts: What is known from an equal model; by default the model is probed when needed.

    Attributes:
        model: The model; where its layers share weights (ALBERT), a twin with one block per call
            around the same parameters.
        shares_layers: Whether the given model's layers share weights.
        blocks: Its blocks, bottom to top.
        other_stacks: Paths of other stacks of blocks, whose heads are left alone.
    """

    def __init__(
        self, model: nn.Module, *, family: Family | None = None, facts: HostFacts | None = None
    ) -> None:
        twin = unrolled(model)  # layers that share weights: one block per call
        self.shares_layers = twin is not None
        model = model if twin is None else twin
        stack = find_stack(model, family)
        super().__init__(model, stack.family, stack.path)
        self.other_stacks = stack.others
        self.blocks = [Block.of(i, block, self.family) for i, block in enumerate(stack.blocks)]
        if facts is not None:
            self.readout, self.forms, self.arithmetic = facts.readout, facts.forms, facts.arithmetic

    @property
    def facts(self) -> HostFacts:
        """What was found out about the host; probes what is not known yet."""
        return HostFacts(self.readout, tuple(self.forms), self.arithmetic)

    @property
    def sites(self) -> list[AttentionSite]:
        """The attention layers, bottom to top."""
        return [block.attention for block in self.blocks]

    @property
    def original_mask(self) -> Any:
        """Which of its original heads an already pruned model keeps."""
        return getattr(self.model, "hydra_head_mask", None)

    @property
    def head_counts(self) -> tuple[int, ...]:
        """Heads of each layer that are there now."""
        return tuple(site.num_heads for site in self.sites)

    @property
    def neuron_counts(self) -> tuple[int, ...]:
        """Neurons of each layer that can be gated off; 0 where they stay (`why_no_neurons`)."""
        return tuple(0 if isinstance(site, str) else site.neurons for site in self.mlps)

    @cached_property
    def mlps(self) -> tuple[MlpSite | str, ...]:
        """The neurons of each layer, or the reason why they stay."""
        known: dict[Any, MlpSite | str] = {}
        result = []
        for block in self.blocks:
            key = structure_of(block.module)
            if key not in known:
                known[key] = find_neurons(block)
                if isinstance(known[key], str) and self.passes():  # by running the whole block
                    known[key] = find_neurons(block, self.passes()[0][block.index])
            found = known[key]
            result.append(found if isinstance(found, str) else replace(found, layer=block.index))
        return tuple(result)

    @property
    def width(self) -> int:
        """Model width d."""
        return linear_weight(self.sites[0].output).shape[0]

    def __len__(self) -> int:
        return len(self.blocks)

    # --- how the host calls its blocks -----------------------------------------------------------

    @cached_property
    def _passes(self) -> _Passes:
        calls, seen = [], None
        why_none, why_closed = _Passes.why_none, _Passes.why_closed
        for inputs in examples(self.model)[-2:]:  # of texts the padded one is the last
            try:
                calls.append(capture_calls(self, self.blocks, inputs))
                seen = inputs
            except UnsupportedModelError as error:
                why_none = str(error)
                why_closed = why_none if isinstance(error, ClosedAttentionError) else why_closed
            except Exception as error:  # the example does not suit this host
                failure = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                why_none = (
                    f"our example of an input does not suit it ({failure[:160]}): pass batch=, "
                    "one of your batches"
                )
        return _Passes(calls, seen, why_none, why_closed)

    def passes(self) -> list[list[BlockCall]]:
        """Return what the host passes to its blocks in forward passes: `[pass][layer]`.

        Example inputs are made where we know how; `observe` adds a real batch.
        """
        return self._passes.calls

    def observe(self, inputs: Inputs) -> list[BlockCall]:
        """Run the host on real inputs; remember and return what it passed to its blocks."""
        calls = capture_calls(self, self.blocks, inputs)
        self._passes = replace(self._passes, calls=[*self.passes()[-1:], calls], inputs=inputs)
        for name in ("forms", "arithmetic", "_proof", "_removal", "_hosting", "mlps"):
            vars(self).pop(name, None)  # found from the passes before
        return calls

    def why_closed(self) -> str | None:
        """Say why gates would have no effect, or None: as far as the host could be run."""
        return self._passes.why_closed

    @property
    def why_no_pass(self) -> str | None:
        """Say why the host's calls of its blocks could not be captured, or None."""
        return None if self.passes() else self._passes.why_none

    @property
    def seen(self) -> tuple[list[BlockCall], Inputs] | None:
        """A forward pass that was captured: the blocks' calls, and the host's inputs."""
        calls, inputs = self._passes.calls, self._passes.inputs
        return None if not calls or inputs is None else (calls[-1], inputs)

    @cached_property
    def forms(self) -> Sequence[Form]:
        """The form of each block's output, as far as the host could be run."""
        passes = self.passes()
        return [call.form for call in passes[-1]] if passes else [Form()] * len(self.blocks)

    @cached_property
    def readout(self) -> Readout:
        """Which tokens the classifier reads (see `probes.Readout`)."""
        return find_readout(self)

    # --- what can be done ------------------------------------------------------------------------

    def why_not_prunable(self) -> str | None:
        """Say why heads of the given model cannot be removed in place, or None."""
        if self.shares_layers:
            return (
                "its layers share one set of weights, so a head that goes in one layer would go "
                "in all; fuse() gives every layer its own"
            )
        return self.why_not_removable()

    def why_no_neurons(self) -> str | None:
        """Say why neurons of some block can neither be gated off nor removed, or None."""
        reasons = ((i, mlp) for i, mlp in enumerate(self.mlps) if isinstance(mlp, str))
        return next((at_layer(layer, reason) for layer, reason in reasons), None)

    def why_not_removable(self) -> str | None:
        """Say why heads cannot be removed physically, or None.

        Where the host could be run, a block without half of its heads is compared with one whose
        heads are gated off.
        """
        return self._removal

    @cached_property
    def _removal(self) -> str | None:
        reason = self._why_not_taken_apart()
        if reason is not None:
            return reason
        checked: set[Any] = set()
        passes = self.passes()  # without any, blocks are called on their own
        calls = passes[0] if passes else [bare_call(block) for block in self.blocks]
        for block, call in zip(self.blocks, calls, strict=True):
            site = block.attention
            group = max(1, site.num_heads // max(1, site.kv_heads))
            half = range(0, max(1, site.num_heads // group // 2) * group)
            key = structure_of(block.module)
            reason = site.why_not_removable()
            if reason is None and key not in checked and len(half) < site.num_heads:
                reason = why_not_cut(block, half, call)
                checked.add(key)
            if reason is not None:
                return at_layer(block.index, reason)
        return None

    def _why_not_taken_apart(self) -> str | None:
        """Say why the weights of some attention cannot be seen head by head, or None."""
        for block in self.blocks:
            site = block.attention
            reason = site.why_not_taken_apart()
            parameters = dict(block.module.named_parameters())
            by_head = [
                n for n in block.unknown_parameters() if site.num_heads in parameters[n].shape
            ]
            if reason is None and by_head:
                words = describe_parameters(by_head, of_attention=False)
                reason = f"its blocks also have {words}, which have a value for each head"
            if reason is not None:
                return at_layer(site.layer, reason)
        return None

    def why_not_fused(self) -> str | None:
        """Say why our own arithmetic cannot run the blocks, or None when it is proven equal."""
        return self._proof if isinstance(self._proof, str) else None

    @cached_property
    def arithmetic(self) -> Arithmetic:
        """What our own arithmetic must know of the blocks, once it was proven equal."""
        return Arithmetic() if isinstance(self._proof, str) else self._proof

    @cached_property
    def _proof(self) -> Arithmetic | str:
        """What our own arithmetic needs, proven on the captured passes; or why it does not do."""
        passes = self.passes()
        reason = self._why_not_taken_apart()
        if reason is not None:  # an argument explains it better than a failure does
            return why_not_understood(self.blocks, passes) or reason
        kinds = getattr(text_config(self.model), "layer_types", None)  # transformers' masks by kind
        found = find_arithmetic(self.blocks, passes, kinds if isinstance(kinds, list) else None)
        if isinstance(found, str):
            return found
        keeps = hands_bias(self.blocks, passes) or self.why_not_removable() is not None
        return replace(found, keeps_heads=keeps)

    def why_not_fusable(self) -> str | None:
        """Say why members cannot be fused, or None: by our arithmetic or by the host's own blocks.

        The host's own blocks need a forward pass in which their arguments are seen.
        """
        return None if self.why_not_fused() is None else self.why_not_hosted()

    def why_not_hosted(self) -> str | None:
        """Say why the host's own blocks cannot run as streams, or None.

        The host must be seen to run, and its output must depend only on the last block's states:
        members share the blocks below, which do not run again.
        """
        return self._hosting

    @cached_property
    @torch.no_grad()
    def _hosting(self) -> str | None:
        if self.seen is None:
            return self.why_no_pass
        calls, (args, kwargs) = self.seen
        last = calls[-1].output
        assert last is not None
        try:
            with stand_ins(self, lambda call: last):
                again = self.read(self.model(*args, **kwargs))
            whole = self.read(in_eval(self.model)(*args, **kwargs))
            same = largest_difference(again.float(), whole.float()) < 1e-3
        except Exception:  # its loop needs what only a real block returns
            same = False
        return (
            None if same else "the host's output depends on more than the states of its last block"
        )


def host_model(
    model: nn.Module | HostModel, *, family: Family | None = None, facts: HostFacts | None = None
) -> HostModel:
    """Look at a model: find its blocks, heads and readout (see `HostModel`).

    Raises:
        UnsupportedModelError: When no known family describes its blocks; the message says what was
            looked for and how to describe it.
    """
    if isinstance(model, HostModel):
        return model
    check_model(model)
    return HostModel(model, family=family, facts=facts)


def check_model(model: object) -> None:
    """Raise unless something is a model, before anything is asked of it."""
    if isinstance(model, nn.Module):
        return
    advice = "Are the arguments in their order: first the model, then the data?"
    if isinstance(model, str | os.PathLike):
        advice = (
            "Load it first, for example with AutoModelForSequenceClassification.from_pretrained "
            "of transformers, timm.create_model or hydra_ensembles.load."
        )
    raise UnsupportedModelError(
        f"Expected a model (a torch.nn.Module); found a {type(model).__name__}, {model!r:.60}. "
        f"{advice}"
    )


def describe_shape(shape: Sequence[int]) -> str:
    """Say `12 x 6` for equal layers, the list otherwise."""
    return f"{len(shape)} x {shape[0]}" if len(set(shape)) == 1 else str(list(shape))
