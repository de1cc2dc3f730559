"""Probe a host by running its parts: does a block compute what we think, which tokens are read?

A wrong guess would give a wrong result, so nothing is guessed. A block is called with the host's
arguments and compared with our own arithmetic. The readout is the tokens that get a gradient
through the host's own code.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import UnsupportedModelError
from .block import Block
from .block_arguments import read_arguments
from .block_calls import BlockCall, HostView, Inputs, parameter_names, run_around
from .example_inputs import examples, text_config
from .head_weights import linear_weight
from .multihead_attention import opened

TOLERANCE = 2e-4
"""Relative to a block's largest output, on random float32 weights; real errors are far larger."""

_NUMBERS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index"})


@dataclass(frozen=True)
class Readout:
    """Which tokens of the last block the classifier reads.

    Attributes:
        tokens: Number of leading tokens that it reads (1 for a class token), or None for all.
        positions: Maps the inputs to positions [batch], if the readout depends on the sample.
        folds: Whether the host's code after the blocks accepts members as a larger batch.
        why: How this was determined.
    """

    tokens: int | None
    folds: bool
    why: str
    positions: Callable[[dict[str, Any]], Tensor] | None = None

    @property
    def has_token(self) -> bool:
        """Whether the classifier reads a token of its own, not the mean of all."""
        return self.tokens is not None or self.positions is not None

    def __str__(self) -> str:
        if self.positions is not None:
            last = getattr(self.positions, "func", None) is _last_positions
            return f"the {'last real' if last else 'end-of-text'} token of each sample"
        if self.tokens is None:
            return "all tokens"
        return "token 0" if self.tokens == 1 else f"tokens 0-{self.tokens - 1}"


@dataclass(frozen=True)
class Pooling:
    """Which tokens of the last block a classifier that reads all of them averages.

    Attributes:
        own: Number of leading tokens that it reads beside the mean (a class token), or 0.
        start: The first token of the mean.
    """

    own: int
    start: int


# --- blocks ---------------------------------------------------------------------------------------


def check_block(block: Block, call: BlockCall, rotary: str | None = None) -> str | None:
    """Say how a block, as the host calls it, differs from our arithmetic; None if they agree.

    Both run with random weights, so that every bias, position and scale matters: freshly
    initialised weights would hide some of them.
    """
    twin = Block.of(block.index, randomized(block.module), block.family)
    site, call = twin.attention, random_states(call)
    try:
        read = read_arguments(
            parameter_names(twin.module)[1:],
            call.args,
            call.kwargs,
            call.hidden,
            rotary=rotary,
            heads=site.num_heads,
            grid=site.grid,
        )
    except UnsupportedModelError as error:
        return str(error)
    if call.form.hands_on:
        return "its blocks answer with more than their states"
    try:
        with torch.no_grad(), opened([site.module]):
            theirs = call.run(twin.module)
            causal = site.causal if read.causal is None else read.causal
            ours = twin.forward(call.hidden, read, causal=causal)
    except Exception as error:  # any failure of the host's code counts as a difference
        return f"its block cannot be called on its own ({type(error).__name__}: {error})"
    difference = largest_difference(theirs, ours)
    if not difference <= TOLERANCE:
        return (
            f"its block computes something else than {block.family.norm}-norm attention and MLP "
            f"(off by {difference:.2g} of its largest output on random weights)"
        )
    return None


def largest_difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference relative to the largest value; infinite if shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    return float((a - b).abs().max()) / max(1.0, float(b.abs().max()))


def randomized(module: nn.Module, seed: int = 0) -> nn.Module:
    """Copy a module with random parameters, large enough for every part to matter, in float32."""
    twin = copy.deepcopy(module).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            if parameter.dim() >= 2:
                parameter.copy_(noise * 1.5 * max(1, parameter.shape[-1]) ** -0.5)
            elif name.endswith("bias"):
                parameter.copy_(noise * 0.3)
            else:
                parameter.copy_(1.0 + 0.3 * noise)
    return twin


def random_states(call: BlockCall, seed: int = 0) -> BlockCall:
    """Return a call with random states in float32, its other arguments in float32 too."""

    def in_float32(value: Any) -> Any:
        floats = isinstance(value, Tensor) and value.is_floating_point()
        return value.float() if floats else value

    args, kwargs = pytree.tree_map(in_float32, call.given)
    return replace(
        call, hidden=_states(call.hidden, seed).float(), args=args, kwargs=kwargs, output=None
    )


def bare_call(block: Block) -> BlockCall:
    """Make a call without arguments, for a host that we cannot run."""
    width = linear_weight(block.attention.output).shape[0]
    x = torch.zeros(2, 5, width, device=next(block.module.parameters()).device)
    names = {"attention_mask", "attn_mask"}.intersection(parameter_names(block.module))
    return BlockCall(x, None, (), dict.fromkeys(names))


def structure_of(module: nn.Module) -> Any:
    """Return what distinguishes blocks of different structure: classes, shapes, plain settings."""
    parts = []
    for path, inner in module.named_modules():
        plain = {
            name: value
            for name, value in vars(inner).items()
            if isinstance(value, (bool, int, float, str, type(None))) and name not in _NUMBERS
        }
        shapes = {name: tuple(p.shape) for name, p in inner.named_parameters(recurse=False)}
        parts.append((path, type(inner), str(sorted(plain.items())), str(shapes)))
    return tuple(parts)


# --- the readout ----------------------------------------------------------------------------------


def find_readout(host: HostView) -> Readout:
    """Find which tokens of the last block reach the output, by the gradient of the host's own code.

    A rule is used only if it is the same for different inputs and the host gives the same output
    from only those tokens; otherwise all tokens are kept.
    """
    positions = end_of_text(host.model)
    if positions is not None:
        return Readout(None, folds=False, why="the host reads the end of text", positions=positions)
    positions = last_token(host.model)
    why = "probed: nothing else reaches the output"
    if positions is not None and _reads_only(host, positions):
        return Readout(None, folds=False, why=why, positions=positions)
    found = list(examples(host.model))
    counts = [_read_tokens(host, inputs) for inputs in (*found, *_left_padded(found))]
    if not counts:
        return Readout(None, False, "the model could not be probed: all tokens are kept")
    if None in counts:
        return Readout(None, _folds(host, None), "it pools all tokens")
    tokens = max(count for count in counts if count is not None)
    if len(set(counts)) > 1 or not _same_from_few(host, tokens):
        return Readout(None, _folds(host, None), "the tokens read depend on the input")
    return Readout(tokens, _folds(host, tokens), why)


def _left_padded(found: Sequence[Inputs]) -> Iterator[Inputs]:
    """Yield the first example with a mask, its first token masked: some hosts read the next one."""
    for args, kwargs in found:
        mask = kwargs.get("attention_mask")
        if isinstance(mask, Tensor):
            mask = mask.clone()
            mask[..., 0] = 0
            yield args, {**kwargs, "attention_mask": mask}
            return


def _run(host: HostView, inputs: Inputs, answer: Callable[[Tensor], Tensor]) -> Tensor:
    return host.read(run_around(host, inputs, answer))


def _states(hidden: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(hidden.shape, generator=generator).to(hidden)


def _read_tokens(host: HostView, inputs: Inputs) -> int | None:
    """Return the number of leading tokens that are read; None for all or if unclear."""
    try:
        gradient = _gradient_by_token(host, inputs)
    except Exception:  # the host needs more than our example inputs: keep all tokens
        return None
    read = gradient.amax(0).nonzero().flatten()
    tokens = int(read.max()) + 1 if len(read) else None
    return None if tokens is None or tokens > 4 or tokens >= gradient.shape[1] else tokens


def _reads_only(host: HostView, positions: Callable[[dict[str, Any]], Tensor]) -> bool:
    """Check that the host reads only the token of each sample that a rule gives."""
    inputs = [inputs for inputs in examples(host.model) if not inputs[0]]
    try:
        for _, kwargs in inputs:
            read = _gradient_by_token(host, ((), kwargs)) > 0  # [batch, tokens]
            expected = positions(kwargs)
            if read.shape[0] != len(expected) or not bool((read.sum(1) == 1).all()):
                return False
            if not torch.equal(read.int().argmax(1), expected):
                return False
    except Exception:  # the host needs more than our example inputs
        return False
    return bool(inputs)


def _gradient_by_token(host: HostView, inputs: Inputs) -> Tensor:
    """Return how much the output depends on each token of the last block [batch, tokens]."""
    leaf: list[Tensor] = []

    def answer(hidden: Tensor) -> Tensor:
        leaf.append(_states(hidden).requires_grad_())
        return leaf[0]

    with torch.enable_grad():
        output = _run(host, inputs, answer)
        (gradient,) = torch.autograd.grad((output * _states(output, 1)).sum(), leaf[0])
    return gradient.abs().amax(2)


def _same_from_few(host: HostView, tokens: int) -> bool:
    """Check that the host gives the same output from only the first tokens."""

    def few(hidden: Tensor) -> Tensor:
        return _states(hidden)[:, :tokens]

    return _agree(
        host, lambda inputs: _run(host, inputs, _states), lambda inputs: _run(host, inputs, few)
    )


def _folds(host: HostView, tokens: int | None) -> bool:
    """Check that the host's code after the blocks treats members as a larger batch."""

    def stream(seed: int, hidden: Tensor) -> Tensor:
        return _states(hidden, seed)[:, :tokens]

    def apart(inputs: Inputs) -> Tensor:
        return torch.cat([_run(host, inputs, partial(stream, seed)) for seed in (0, 1)])

    def both(inputs: Inputs) -> Tensor:
        return _run(host, inputs, lambda x: torch.cat([stream(0, x), stream(1, x)]))

    return _agree(host, apart, both)


@torch.no_grad()
def _agree(host: HostView, a: Callable[[Inputs], Tensor], b: Callable[[Inputs], Tensor]) -> bool:
    """Check that two ways to run the host around its blocks give the same on every example."""
    inputs = examples(host.model)
    try:
        return bool(inputs) and all(
            torch.allclose(a(one), b(one), atol=1e-5, rtol=1e-5) for one in inputs
        )
    except Exception:  # its code needs every token, or reads its inputs again
        return False


def find_pooling(host: HostView) -> Pooling | None:
    """Find which tokens a host averages, by the gradient of its own code; None if unclear.

    All real tokens from `start` on must be read. A class token that matters several times as much
    as the other tokens is read apart from the mean.
    """
    poolings = set()
    for inputs in examples(host.model):
        try:
            gradient = _gradient_by_token(host, inputs)
        except Exception:  # the host needs more than our example inputs
            return None
        mask = inputs[1].get("attention_mask")
        real = torch.ones_like(gradient) if mask is None else mask.to(gradient)
        if real.shape != gradient.shape:
            return None
        size = (gradient * real).sum(0) / real.sum(0).clamp_min(1)
        read = size.nonzero().flatten().tolist()
        if not read or read != list(range(read[0], int(real.amax(0).sum()))):
            return None
        own = int(read[0] == 0 and len(read) > 2 and size[0] > 4 * size[1:].median())
        poolings.add(Pooling(own, own or read[0]))
    return poolings.pop() if len(poolings) == 1 else None


def modules_after_blocks(host: HostView) -> tuple[str, ...]:
    """Return the paths of the leaf modules that run after the blocks (norm, pooler, classifier)."""
    called: dict[str, None] = {}
    started = False

    def answer(hidden: Tensor) -> Tensor:
        nonlocal started
        started = True
        return _states(hidden)

    def note(name: str, *_: Any) -> None:
        if started:
            called[name] = None

    leaves = [
        (name, module)
        for name, module in host.model.named_modules()
        if not name.startswith(host.blocks_path + ".")
        and any(True for _ in module.parameters())
        and not any(True for _ in module.children())
    ]
    handles = [module.register_forward_hook(partial(note, name)) for name, module in leaves]
    try:
        for inputs in examples(host.model)[:1]:
            with torch.no_grad():
                _run(host, inputs, answer)
    except Exception:  # it cannot be run on our example: nothing is known to come after
        return ()
    finally:
        for handle in handles:
            handle.remove()
    return tuple(called)


def end_of_text(model: nn.Module) -> Callable[[dict[str, Any]], Tensor] | None:
    """Return the rule of CLIP's text tower: argmax of the ids (legacy), else the first EOS."""
    for module in model.modules():
        if hasattr(module, "eos_token_id") and hasattr(module, "final_layer_norm"):
            eos: Any = module.eos_token_id
            return partial(_end_positions, int(eos))
    return None


def _end_positions(eos: int, inputs: dict[str, Any]) -> Tensor:
    ids = inputs["input_ids"].to(torch.int)
    return (ids if eos == 2 else (ids == eos).int()).argmax(-1)


def positions_rule(model: nn.Module) -> Callable[[dict[str, Any]], Tensor] | None:
    """Return the rule by which a host may read one token per sample, or None."""
    return end_of_text(model) or last_token(model)


def last_token(model: Any) -> Callable[[dict[str, Any]], Tensor] | None:
    """Return the rule of a decoder that classifies by the last real token of each sample."""
    if type(model).__name__ == "PromptClassifier":
        single = len(model.label_ids[0]) == 1  # longer labels are appended to the prompt
        return partial(_last_positions, None) if single else None
    if not type(model).__name__.endswith("ForSequenceClassification"):
        return None
    if not isinstance(getattr(model, "score", None), nn.Linear):
        return None
    config = text_config(model)
    return partial(_last_positions, getattr(config, "pad_token_id", None))


def _last_positions(padding: int | None, inputs: dict[str, Any]) -> Tensor:
    """Find the last token of each row that is not padding: by its id, else by the mask."""
    ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
    if ids is None:
        states = inputs["inputs_embeds"]  # hosts take the last one then
        return torch.full((states.shape[0],), states.shape[1] - 1, device=states.device)
    if padding is not None:
        mask = ids != padding
    places = torch.arange(ids.shape[1], device=ids.device)
    return places.expand_as(ids).max(1).values if mask is None else (mask * places).argmax(1)
