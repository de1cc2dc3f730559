"""How a host calls its blocks: capture the arguments, replace blocks, read the states out.

Everything that runs a host's blocks uses these helpers, so that masks, rotary positions and tuples
are handled in one place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..data.batches import main_output
from ..errors import UnsupportedModelError
from ..tasks import Task, task_of
from .block import Block
from .families import Family
from .multihead_attention import opened

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class HostView:
    """A model and where its blocks are: what it takes to run the model around its blocks.

    Args:
        model: The model.
        family: The family of its blocks.
        blocks_path: Path of the `nn.ModuleList` or `nn.Sequential` that holds them.
        forms: The form of each block's output.
    """

    def __init__(
        self, model: nn.Module, family: Family, blocks_path: str, forms: Sequence[Form] = ()
    ) -> None:
        self.model, self.family, self.blocks_path = model, family, blocks_path
        self.name = type(model).__name__
        if forms:
            self.forms = forms

    @cached_property
    def forms(self) -> Sequence[Form]:
        """The form of each block's output."""
        return [Form()] * len(list(self.blocks_list.children()))

    @cached_property
    def task(self) -> Task:
        """What the model's outputs mean."""
        return task_of(self.model)

    def read(self, output: Any) -> Tensor:
        """Return the tensor that the task reads in an output of the model, `[batch, ...]`."""
        return main_output(output, self.task.fields)

    @property
    def blocks_list(self) -> nn.Module:
        """The `nn.ModuleList` or `nn.Sequential` that holds the blocks."""
        return self.model.get_submodule(self.blocks_path)

    def replace_blocks_(self, blocks: Sequence[nn.Module]) -> None:
        """Replace the blocks by other modules, in place."""
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
        """Replace the list of blocks by another list, in place."""
        parent, _, name = self.blocks_path.rpartition(".")
        setattr(self.model.get_submodule(parent), name, blocks_list)


class ClosedAttentionError(UnsupportedModelError):
    """Raised when an attention layer passes its output projection's weights to a function."""


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional parameters of a module's forward, without `self`."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD)


# --- what a block returns -------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """The form of a block's output: a tensor, or a tuple or list whose first entry is the states.

    Attributes:
        kind: None for a bare tensor, else `tuple` or `list`.
        rest: The entries after the states.
    """

    kind: type | None = None
    rest: tuple[Any, ...] = ()

    def fill(self, states: Tensor) -> Any:
        """Return states in this form."""
        return states if self.kind is None else self.kind((states, *self.rest))

    @property
    def hands_on(self) -> bool:
        """Whether a block passes more than its states to the blocks above (e.g. a shared bias)."""
        return any(value is not None for value in self.rest)

    def __str__(self) -> str:
        return "" if self.kind is None else f"{self.kind.__name__} {len(self.rest)}"

    @classmethod
    def parse(cls, text: str) -> Form:
        """Read what `str` wrote; all entries after the states are None."""
        kind, _, rest = text.partition(" ")
        return cls({"tuple": tuple, "list": list}[kind], (None,) * int(rest)) if text else cls()


def states_of(output: Any) -> tuple[Tensor, Form]:
    """Split a block's output into its states and their form."""
    if isinstance(output, Tensor):
        return output, Form()
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0], Form(type(output), tuple(output[1:]))
    raise UnsupportedModelError(
        f"A block returned a {type(output).__name__}: expected a tensor, or a tuple that starts "
        "with the hidden states."
    )


# --- what a block receives ------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockCall:
    """One call of a block by its host.

    Attributes:
        hidden: The states that entered it [batch, tokens, width].
        keyword: The keyword of the states; None if they were the first positional argument.
        args, kwargs: All other arguments.
        form: The form of its output.
        output: The states that it returned, if they were captured.
    """

    hidden: Tensor
    keyword: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: Form = Form()
    output: Tensor | None = None

    @property
    def given(self) -> Any:
        """All arguments except the states."""
        return (self.args, self.kwargs)

    @property
    def shape(self) -> str:
        """The shapes and types of all arguments, with the values that are not tensors."""

        def describe(value: Any) -> Any:
            return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else str(value)

        return str(pytree.tree_map(describe, self.given))

    def call(self, module: nn.Module, hidden: Tensor | None = None) -> Any:
        """Call a module as the host called the block, on these or other states."""
        x = self.hidden if hidden is None else hidden
        if self.keyword is None:
            return module(x, *self.args, **self.kwargs)
        return module(*self.args, **{self.keyword: x}, **self.kwargs)

    def run(self, module: nn.Module, hidden: Tensor | None = None) -> Tensor:
        """Call a module and return its states."""
        return states_of(self.call(module, hidden))[0]


def take_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> BlockCall:
    """Separate a block's states from its other arguments; drop a decoder's empty cache.

    A block that runs more than once per pass would append to the cache each time.
    """
    rest = {name: without_cache(value) for name, value in kwargs.items()}
    if args and isinstance(args[0], Tensor):
        return BlockCall(args[0], None, tuple(without_cache(v) for v in args[1:]), rest)
    for name in ("hidden_states", "x", "src", "input", "inputs", "hidden"):
        if isinstance(rest.get(name), Tensor):
            hidden = rest.pop(name)
            return BlockCall(hidden, name, tuple(without_cache(v) for v in args), rest)
    raise UnsupportedModelError(
        f"A block was called with {len(args)} positional arguments and {', '.join(kwargs) or 'no'} "
        "keywords: no hidden states were found among them."
    )


def without_cache(value: Any) -> Any:
    """Return None for a decoder's empty key-value cache; refuse a filled one."""
    length = getattr(value, "get_seq_length", None)
    if length is None:
        return value
    if int(length()) > 0:
        raise UnsupportedModelError(
            "The inputs hold past keys and values: an ensemble runs whole sequences. Leave "
            "past_key_values out."
        )
    return None


@torch.no_grad()
def capture_calls(host: HostView, blocks: Sequence[Block], inputs: Inputs) -> list[BlockCall]:
    """Run a host and return how it called each of its blocks.

    Raises:
        UnsupportedModelError: When a block did not run exactly once, or never called its output
            projection (a gate there would have no effect).
    """
    calls: list[list[BlockCall]] = [[] for _ in blocks]
    projections = [0] * len(blocks)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        call = take_call(args, kwargs)  # drop the cache before the block can fill it
        if call.keyword is None:
            return (call.hidden, *call.args), call.kwargs
        return call.args, {call.keyword: call.hidden, **call.kwargs}

    def after(layer: int, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        states, form = states_of(output)
        rest = tuple(None if hasattr(v, "get_seq_length") else v for v in form.rest)  # no cache
        call = take_call(args, kwargs)
        calls[layer].append(replace(call, form=Form(form.kind, rest), output=states))

    def count(layer: int, *_: Any) -> None:
        projections[layer] += 1

    was_training = host.model.training
    host.model.eval()
    with ExitStack() as stack:
        stack.callback(host.model.train, was_training)
        stack.enter_context(opened([block.attention.module for block in blocks]))
        for layer, block in enumerate(blocks):
            module, output = block.module, block.attention.output
            for handle in (
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(partial(after, layer), with_kwargs=True),
                output.register_forward_hook(partial(count, layer)),
            ):
                stack.callback(handle.remove)
        host.model(*inputs[0], **inputs[1])
    for layer, seen in enumerate(calls):
        if len(seen) != 1:
            raise UnsupportedModelError(
                f"{host.name} runs its block {layer} {len(seen)} times in one pass: its layers "
                "share weights or are skipped, and members need blocks that run once each."
            )
        if not projections[layer]:
            raise ClosedAttentionError(
                f"{host.name} never calls the output projection of block {layer} as a module: it "
                "passes the weights to a function, so heads cannot be switched off there. Load it "
                'with another attn_implementation ("eager" or "sdpa"), or use the timm model of '
                "the same name, if there is one."
            )
    return [seen[0] for seen in calls]


def why_not_chained(calls: Sequence[BlockCall]) -> str | None:
    """Say where the host changes the states between its blocks; None if nowhere."""
    for layer, (below, above) in enumerate(pairwise(calls)):
        out = below.output
        if out is not above.hidden and (out is None or not torch.equal(out, above.hidden)):
            return f"the host changes the states between its blocks {layer} and {layer + 1}"
    return None


def repeat_for_streams(value: Any, streams: int, batch: int) -> Any:
    """Repeat a batch-shaped argument, also inside tuples, for streams folded into the batch."""
    if streams == 1:
        return value
    if isinstance(value, Tensor) and value.dim() >= 2 and value.shape[0] == batch:
        return value.repeat(streams, *[1] * (value.dim() - 1))
    if isinstance(value, (tuple, list)):
        return type(value)(repeat_for_streams(inner, streams, batch) for inner in value)
    return value


# --- the tokens that are read ---------------------------------------------------------------------


def take_rows(tokens: int | None, positions: Tensor | None) -> Callable[[Tensor], Tensor] | None:
    """Return a function that selects the tokens the classifier reads, or None if it reads all.

    Args:
        tokens: Number of leading tokens that are read, or None.
        positions: The token read per sample [batch]; streams are folded into the batch.
    """
    if positions is not None:

        def take(x: Tensor) -> Tensor:
            # len() would fix the size of an exported graph
            index = positions.repeat(x.shape[0] // positions.shape[0])
            return x[torch.arange(x.shape[0], device=x.device), index][:, None]

        return take
    return None if tokens is None else lambda x: x[:, :tokens]


def full_length(stream: Tensor, positions: Tensor | None, length: int) -> Tensor:
    """Put selected rows back at their positions, for a host that selects them itself."""
    if positions is None or stream.shape[1] == length:
        return stream
    states = stream.new_zeros(stream.shape[0], length, stream.shape[2])
    states[torch.arange(stream.shape[0], device=stream.device), positions] = stream[:, 0]
    return states


# --- running around the blocks --------------------------------------------------------------------


class StandIn(nn.Module):
    """Replaces a block: returns `answer`'s states in the block's form, and has its attributes.

    Hosts read attributes of their blocks (`attention_type` chooses a mask), so the block's own are
    exposed.
    """

    def __init__(self, block: nn.Module, answer: Callable[[BlockCall], Tensor], form: Form) -> None:
        super().__init__()
        self.__dict__["block"] = block  # not a submodule: it keeps its own place
        self.answer, self.form = answer, form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the states of `answer`."""
        return self.form.fill(self.answer(take_call(args, kwargs)))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)


class ShortList(nn.ModuleList):
    """Blocks that replace a longer list.

    Hosts that index their blocks by number (ALBERT) get one that passes the states on.
    """

    form = Form()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index >= len(self):
            return StandIn(self[0], attrgetter("hidden"), self.form)
        return super().__getitem__(index)


@contextmanager
def stand_ins(
    host: HostView,
    answer: Callable[[BlockCall], Tensor],
    note: Callable[[BlockCall], None] | None = None,
) -> Iterator[None]:
    """Let the host run its own embeddings and head around `answer`, which replaces its blocks.

    All blocks but the last pass their states on, and `note` gets their calls; the last returns
    `answer`.
    """

    def below(call: BlockCall) -> Tensor:
        if note is not None:
            note(call)
        return call.hidden

    original = host.blocks_list
    modules = list(original.children())
    forms = list(host.forms)
    if len(forms) != len(modules):  # one body replaces all blocks
        forms = forms[-1:] * len(modules)
    answers = [below] * (len(modules) - 1) + [answer]
    was_training = host.model.training
    host.replace_blocks_([StandIn(*one) for one in zip(modules, answers, forms, strict=True)])
    host.model.eval()
    try:
        yield
    finally:
        host.put_blocks_(original)
        host.model.train(was_training)


def run_around(host: HostView, inputs: Inputs, answer: Callable[[Tensor], Tensor]) -> Any:
    """Run a host's embeddings and head around `answer`, from the first states to the last."""
    with stand_ins(host, lambda call: answer(call.hidden)):
        return host.model(*inputs[0], **inputs[1])
