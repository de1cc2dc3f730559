"""A host model seen through its blocks: what is prunable here, found by looking, not by names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..data.eval_mode import in_eval
from ..errors import UnsupportedModelError
from .arithmetic import Arithmetic, find_arithmetic, hands_bias, why_not_understood
from .attention_site import AttentionSite, linear_weight
from .block import Block
from .block_calls import (
    BlockCall,
    ClosedAttentionError,
    Form,
    Inputs,
    ShortList,
    capture_calls,
    main_output,
    stand_ins,
)
from .block_search import find_stack
from .example_inputs import examples, text_config
from .families import Family
from .head_removal import why_not_cut
from .probes import Readout, bare_call, find_readout, largest_difference, structure_of
from .reasons import at_layer, describe_parameters
from .shared_layers import unrolled


class HostModel:
    """A pretrained transformer and where its heads are.

    Args:
        model: A Hugging Face, timm or open_clip module, a `ZeroShotClassifier`, or any module whose
            blocks a registered or given `Family` describes.
        family: Describe the blocks yourself; by default every registered family is tried.

    Attributes:
        model: The model; where its layers share weights (ALBERT), a twin with one block per call
            around the same parameters.
        shares_layers: Whether the given model's layers share weights.
    """

    def __init__(self, model: nn.Module, *, family: Family | None = None) -> None:
        twin = unrolled(model)  # layers that share weights: one block per call
        self.shares_layers = twin is not None
        self.model = model = model if twin is None else twin
        self.name = type(model).__name__
        stack = find_stack(model, family)
        self.family, self.blocks_path, self.other_stacks = stack.family, stack.path, stack.others
        self.blocks = [Block.of(i, block, self.family) for i, block in enumerate(stack.blocks)]
        self._passes: list[list[BlockCall]] | None = None
        self._why_no_pass: str | None = None
        self._why_closed: str | None = None
        self._why_not_fused: tuple[str | None] | None = None
        self._removable: tuple[str | None] | None = None
        self._hosted: tuple[str | None] | None = None
        self._seen: Inputs | None = None
        self.arithmetic = Arithmetic()  # what our own needs to know, once it was proven equal

    @property
    def blocks_list(self) -> nn.Module:
        """The `nn.ModuleList` or `nn.Sequential` that holds the blocks."""
        return self.model.get_submodule(self.blocks_path)

    def replace_blocks_(self, blocks: Sequence[nn.Module]) -> None:
        """Put other modules in the place of the blocks, in place."""
        old: Any = self.blocks_list
        if isinstance(old, nn.Sequential):
            self.put_blocks_(nn.Sequential(*blocks))
        elif len(blocks) == len(old) and not isinstance(old, ShortList):
            self.put_blocks_(nn.ModuleList(blocks))
        else:
            short = ShortList(blocks)
            short.form = self.forms[-1]
            self.put_blocks_(short)

    def put_blocks_(self, blocks_list: nn.Module) -> None:
        """Put another list in the place of the list of blocks, in place."""
        parent, _, name = self.blocks_path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, blocks_list)

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
    def width(self) -> int:
        """Model width d."""
        return linear_weight(self.sites[0].output).shape[0]

    def __len__(self) -> int:
        return len(self.blocks)

    def why_not_prunable(self) -> str | None:
        """Say why heads of the given model cannot be removed in place, or None."""
        if self.shares_layers:
            return (
                "its layers share one set of weights, so a head that goes in one layer would go "
                "in all; fuse() gives every layer its own"
            )
        return self.why_not_removable()

    def why_not_removable(self) -> str | None:
        """Say why heads cannot be removed physically, or None.

        Where the host could be run, a block without half of its heads is compared with one whose
        heads are gated off.
        """
        if self._removable is None:
            self._removable = (self._why_not_removable(),)
        return self._removable[0]

    def _why_not_taken_apart(self) -> str | None:
        """Say why the weights of some attention cannot be seen head by head, or None."""
        for block in self.blocks:
            site = block.attention
            reason = site.why_not_taken_apart()
            if reason is not None:
                return at_layer(site.layer, reason)
            parameters = dict(block.module.named_parameters())
            by_head = [
                name
                for name in block.unknown_parameters()
                if site.num_heads in parameters[name].shape
            ]
            if by_head:
                words = describe_parameters(by_head, of_attention=False)
                reason = f"its blocks also have {words}, which have a value for each head"
                return at_layer(site.layer, reason)
        return None

    def _why_not_removable(self) -> str | None:
        reason = self._why_not_taken_apart()
        if reason is not None:
            return reason
        checked: set[Any] = set()
        passes = self.passes()  # without one, blocks run by themselves
        calls = passes[0] if passes else [bare_call(block) for block in self.blocks]
        for block, call in zip(self.blocks, calls, strict=True):
            group = max(1, block.attention.num_heads // max(1, block.attention.kv_heads))
            half = range(0, max(1, block.attention.num_heads // group // 2) * group)
            key = structure_of(block.module)
            reason = block.attention.why_not_removable()
            if reason is not None:
                return at_layer(block.index, reason)
            if key in checked or len(half) == block.attention.num_heads:
                continue
            reason = why_not_cut(block, half, call)
            if reason is not None:
                return at_layer(block.index, reason)
            checked.add(key)
        return None

    # --- how the host calls its blocks -----------------------------------------------------------

    def passes(self) -> list[list[BlockCall]]:
        """Return what the host hands to its blocks in forward passes: `[pass][layer]`.

        Example inputs are made where we know how; `observe` adds a real batch.
        """
        if self._passes is None:
            self._passes, self._seen = [], None
            for inputs in examples(self.model)[-2:]:  # of texts the padded one is the last
                try:
                    self._passes.append(capture_calls(self, inputs))
                    self._seen = inputs
                except Exception as error:  # the example does not suit this host
                    failure = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
                    self._why_no_pass = (
                        f"our example of an input does not suit it ({failure[:160]}): pass batch=, "
                        "one of your batches"
                    )
                    if isinstance(error, ClosedAttentionError):
                        self._why_closed = str(error)
                    if isinstance(error, UnsupportedModelError):
                        self._why_no_pass = str(error)
        return self._passes

    def observe(self, inputs: Inputs) -> list[BlockCall]:
        """Run the host on real inputs; remember and return what it handed to its blocks."""
        calls = capture_calls(self, inputs)
        self._passes, self._seen = [*self.passes()[-1:], calls], inputs
        self._why_not_fused = self._removable = self._hosted = None
        self.__dict__.pop("forms", None)
        return calls

    def why_closed(self) -> str | None:
        """Say why gates would have no effect, or None: as far as the host could be run."""
        self.passes()
        return self._why_closed

    @property
    def why_no_pass(self) -> str | None:
        """Say why the host's calls of its blocks could not be captured, or None."""
        if self.passes():
            return None
        return self._why_no_pass or (
            "we do not know what inputs the model takes: pass batch=, one of your batches"
        )

    @property
    def seen(self) -> tuple[list[BlockCall], Inputs] | None:
        """A forward pass that was captured: the blocks' calls, and the host's inputs."""
        passes = self.passes()
        return None if not passes or self._seen is None else (passes[-1], self._seen)

    @cached_property
    def forms(self) -> list[Form]:
        """The form of each block's answer, as far as the host could be run."""
        passes = self.passes()
        return [call.form for call in passes[-1]] if passes else [Form()] * len(self.blocks)

    # --- what can be done ------------------------------------------------------------------------

    def why_not_fused(self) -> str | None:
        """Say why our own arithmetic cannot run the blocks, or None when it is proven equal."""
        if self._why_not_fused is None:
            found = self._find_arithmetic()
            refused = isinstance(found, str)
            self.arithmetic = Arithmetic() if isinstance(found, str) else found
            self._why_not_fused = (found if refused else None,)  # type: ignore[assignment]
        assert self._why_not_fused is not None
        return self._why_not_fused[0]

    def _find_arithmetic(self) -> Arithmetic | str:
        passes = self.passes()
        reason = self._why_not_taken_apart()
        if reason is not None:  # an argument explains it better than a failure does
            return why_not_understood(self.blocks, passes) or reason
        found = find_arithmetic(self.blocks, passes, self._kinds())
        if isinstance(found, str):
            return found
        keeps = hands_bias(self.blocks, passes) or self.why_not_removable() is not None
        return replace(found, keeps_heads=keeps)

    def _kinds(self) -> list[str] | None:
        """Return what the config calls the kinds of layers, by which transformers chooses masks."""
        kinds = getattr(text_config(self.model), "layer_types", None)
        return kinds if isinstance(kinds, list) else None

    def why_not_fusable(self) -> str | None:
        """Say why members cannot be fused, or None: by our arithmetic or by the host's own blocks.

        The host's own blocks need a forward pass in which their arguments are seen.
        """
        return None if self.why_not_fused() is None else self.why_not_hosted()

    def why_not_hosted(self) -> str | None:
        """Say why the host's own blocks cannot run as streams, or None.

        The host must be seen to run, and to answer from the last block's states alone: members
        share the blocks below, which do not run again.
        """
        if self._hosted is None:
            reason = self.why_no_pass
            if reason is None and not self._answers_from_last():
                reason = "the host answers from more than the states of its last block"
            self._hosted = (reason,)
        return self._hosted[0]

    @torch.no_grad()
    def _answers_from_last(self) -> bool:
        last = self.passes()[-1][-1].output
        assert self._seen is not None and last is not None
        try:
            with stand_ins(self, lambda call: last):
                again = main_output(self.model(*self._seen[0], **self._seen[1]))
            whole = main_output(in_eval(self.model)(*self._seen[0], **self._seen[1]))
        except Exception:  # its loop needs what only a real block returns
            return False
        return largest_difference(again.float(), whole.float()) < 1e-3

    @cached_property
    def readout(self) -> Readout:
        """Which tokens the classifier reads (see `probe.Readout`)."""
        return find_readout(self)


def host_model(model: nn.Module | HostModel, *, family: Family | None = None) -> HostModel:
    """Look at a model: find its blocks, heads and readout.

    Raises:
        UnsupportedModelError: When no known family describes its blocks; the message says what was
            looked for and how to describe it.
    """
    return model if isinstance(model, HostModel) else HostModel(model, family=family)


def describe_shape(shape: Sequence[int]) -> str:
    """Say `12 x 6` for equal layers, the list otherwise."""
    return f"{len(shape)} x {shape[0]}" if len(set(shape)) == 1 else str(list(shape))
