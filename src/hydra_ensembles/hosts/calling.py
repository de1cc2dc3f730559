"""How a host calls its blocks: capture the arguments, stand in for blocks, read the states out.

Everything that runs a host's blocks uses these helpers, so that a mask, a rotary position or a
tuple is treated in one place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .block import Block
from .family import Family
from .multihead import opened

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments."""


class Host(Protocol):
    """What calling a host needs of it: a `HostModel` has it."""

    model: nn.Module
    name: str
    family: Family
    blocks: list[Block]
    blocks_path: str

    @property
    def blocks_list(self) -> nn.Module:
        """The list that holds the blocks."""

    @property
    def forms(self) -> list[Form]:
        """The form of each block's answer."""

    @property
    def seen(self) -> tuple[list[BlockCall], Inputs] | None:
        """A forward pass that was captured: the blocks' calls, and the host's inputs."""

    def replace_blocks_(self, blocks: Sequence[nn.Module]) -> None:
        """Put other modules in the place of the blocks."""

    def put_blocks_(self, blocks_list: nn.Module) -> None:
        """Put another list in the place of the list of blocks."""


class ClosedAttentionError(UnsupportedModelError):
    """An attention layer hands its output projection's weights to a function."""


def main_output(output: Any) -> Tensor:
    """Return what a host is called for: its logits, else its embedding, else its last states."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "image_embeds", "text_embeds", "pooler_output", "last_hidden_state"):
        value = output.get(name) if isinstance(output, dict) else getattr(output, name, None)
        if isinstance(value, Tensor):
            return value
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0]
    raise UnsupportedModelError(
        f"The model returned {type(output).__name__}: expected a tensor or an object with .logits."
    )


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter."""
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def parameter_names(module: nn.Module) -> tuple[str, ...]:
    """Name the positional parameters of a module's forward, `self` left out."""
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    return tuple(p.name for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD)


# --- what a block returns -------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """The form of a block's answer: a tensor, or a tuple or list whose first entry is the states.

    Attributes:
        kind: None for a bare tensor, else `tuple` or `list`.
        rest: What stands after the states.
    """

    kind: type | None = None
    rest: tuple[Any, ...] = ()

    def fill(self, states: Tensor) -> Any:
        """Hand states to a host in this form."""
        return states if self.kind is None else self.kind((states, *self.rest))

    @property
    def hands_on(self) -> bool:
        """Whether a block hands more than its states to the blocks above (a shared bias, say)."""
        return any(value is not None for value in self.rest)

    def __str__(self) -> str:
        return "" if self.kind is None else f"{self.kind.__name__} {len(self.rest)}"

    @classmethod
    def parse(cls, text: str) -> Form:
        """Read what `str` gave; nothing stands after the states but None."""
        kind, _, rest = text.partition(" ")
        return cls({"tuple": tuple, "list": list}[kind], (None,) * int(rest)) if text else cls()


def states_of(output: Any) -> tuple[Tensor, Form]:
    """Take a block's answer apart: its states, and the form in which they came."""
    if isinstance(output, Tensor):
        return output, Form()
    if isinstance(output, (tuple, list)) and output and isinstance(output[0], Tensor):
        return output[0], Form(type(output), tuple(output[1:]))
    raise UnsupportedModelError(
        f"A block answered with a {type(output).__name__}: expected a tensor, or a tuple that "
        "starts with the hidden states."
    )


# --- what a block is handed -----------------------------------------------------------------------


@dataclass(frozen=True)
class BlockCall:
    """One call of a block by its host.

    Attributes:
        hidden: The states that entered it [batch, tokens, width].
        keyword: The name under which the states were handed over; None for the first position.
        args, kwargs: All other arguments.
        form: The form of its answer.
        output: The states that left it, where they were captured.
    """

    hidden: Tensor
    keyword: str | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: Form = Form()
    output: Tensor | None = None

    @property
    def given(self) -> Any:
        """All arguments beside the states."""
        return (self.args, self.kwargs)

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
    """Tell the states from the other arguments of a block; a decoder's empty cache is dropped.

    A block that runs more than once in a pass would append to the cache each time.
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
    """Return None for a decoder's key-value cache that is empty; refuse one that is not."""
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
def capture_calls(host: Host, inputs: Inputs) -> list[BlockCall]:
    """Run a host on some inputs and return what it handed to each of its blocks.

    Raises:
        UnsupportedModelError: When a block did not run exactly once, or never called its output
            projection (a gate there would have no effect).
    """
    calls: list[list[BlockCall]] = [[] for _ in host.blocks]
    projections = [0] * len(host.blocks)

    def note(layer: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            call = take_call(args, kwargs)
            states, form = states_of(output)
            rest = tuple(without_cache_of(value) for value in form.rest)
            calls[layer].append(replace(call, form=Form(form.kind, rest), output=states))

        return hook

    def before(layer: int) -> Callable[..., Any]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> Any:
            call = take_call(args, kwargs)  # the cache goes before the block can fill it
            if call.keyword is None:
                return (call.hidden, *call.args), call.kwargs
            return call.args, {call.keyword: call.hidden, **call.kwargs}

        return hook

    def count(layer: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            projections[layer] += 1

        return hook

    was_training = host.model.training
    host.model.eval()
    with ExitStack() as stack:
        stack.callback(host.model.train, was_training)
        stack.enter_context(opened([block.attention.module for block in host.blocks]))
        for block in host.blocks:
            module, output = block.module, block.attention.output
            pre, post = before(block.index), note(block.index)
            handles = [
                module.register_forward_pre_hook(pre, with_kwargs=True),
                module.register_forward_hook(post, with_kwargs=True),
                output.register_forward_hook(count(block.index)),
            ]
            for handle in handles:
                stack.callback(handle.remove)
        host.model(*inputs[0], **inputs[1])
    for layer, found in enumerate(calls):
        if len(found) != 1:
            raise UnsupportedModelError(
                f"{host.name} runs its block {layer} {len(found)} times in one pass: its layers "
                "share weights or are skipped, and members need blocks that run once each."
            )
        if not projections[layer]:
            raise ClosedAttentionError(
                f"{host.name} never calls the output projection of block {layer} as a module: it "
                "hands the weights to a function, so heads cannot be switched off there. Load it "
                'with another attn_implementation ("eager" or "sdpa"), or use the timm model of '
                "the same name, if there is one."
            )
    return [found[0] for found in calls]


def why_not_chained(calls: Sequence[BlockCall]) -> str | None:
    """Say where the host changes states between its blocks, or None where it hands them on."""
    for layer, (below, above) in enumerate(pairwise(calls)):
        out = below.output
        if out is not above.hidden and (out is None or not torch.equal(out, above.hidden)):
            return f"the host changes the states between its blocks {layer} and {layer + 1}"
    return None


def without_cache_of(value: Any) -> Any:
    """Leave a filled cache out of what a block returned."""
    return None if hasattr(value, "get_seq_length") else value


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
    """Return what takes the tokens that the classifier reads, or None when it reads all.

    Args:
        tokens: How many of the first tokens are read, or None.
        positions: The token that each sample reads [batch]; streams are folded into the batch.
    """
    if positions is not None:

        def take(x: Tensor) -> Tensor:
            # len() would fix the size of an exported graph
            index = positions.repeat(x.shape[0] // positions.shape[0])
            return x[torch.arange(x.shape[0], device=x.device), index][:, None]

        return take
    return None if tokens is None else lambda x: x[:, :tokens]


def full_length(stream: Tensor, positions: Tensor | None, length: int) -> Tensor:
    """Put rows that were read back at their places, for a host that looks for them itself."""
    if positions is None or stream.shape[1] == length:
        return stream
    whole = stream.new_zeros(stream.shape[0], length, stream.shape[2])
    whole[torch.arange(stream.shape[0], device=stream.device), positions] = stream[:, 0]
    return whole


# --- running around the blocks --------------------------------------------------------------------


class StandIn(nn.Module):
    """Stands in a block's place: answers as it is told, in the block's form, with its attributes.

    Hosts look at attributes of their blocks (`attention_type` chooses a mask), so those of the
    block are shown.
    """

    def __init__(self, block: nn.Module, answer: Callable[[BlockCall], Tensor], form: Form) -> None:
        super().__init__()
        self.__dict__["block"] = block  # not a submodule: it has its own place
        self.answer, self.form = answer, form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Answer with states."""
        return self.form.fill(self.answer(take_call(args, kwargs)))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["block"], name)


class ShortList(nn.ModuleList):
    """Blocks that stand for a longer list.

    Hosts that count their blocks (ALBERT does) find one that hands the states on after the last.
    """

    form = Form()

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index >= len(self):
            return StandIn(self[0], _hand_on, self.form)
        return super().__getitem__(index)


@contextmanager
def stand_ins(
    host: Host,
    answer: Callable[[BlockCall], Tensor],
    forms: Sequence[Form] | None = None,
    note: Callable[[BlockCall], None] | None = None,
) -> Iterator[None]:
    """Let the host run its own embeddings and head around `answer`, which stands for its blocks.

    The blocks below the last hand their states on, and `note` takes their calls; the last answers.
    """

    def below(call: BlockCall) -> Tensor:
        if note is not None:
            note(call)
        return call.hidden

    original = host.blocks_list
    modules = list(original.children())
    forms = list(forms or host.forms)
    if len(forms) != len(modules):  # one body stands for all blocks
        forms = forms[-1:] * len(modules)
    answers = [below] * (len(modules) - 1) + [answer]
    stands = [StandIn(m, a, f) for m, a, f in zip(modules, answers, forms, strict=True)]
    was_training = host.model.training
    host.replace_blocks_(stands)
    host.model.eval()
    try:
        yield
    finally:
        host.put_blocks_(original)
        host.model.train(was_training)


def _hand_on(call: BlockCall) -> Tensor:
    return call.hidden


def run_around(host: Host, inputs: Inputs, answer: Callable[[Tensor], Tensor]) -> Any:
    """Run a host's embeddings and head around `answer`: from entering to last states."""
    with stand_ins(host, lambda call: answer(call.hidden)):
        return host.model(*inputs[0], **inputs[1])
