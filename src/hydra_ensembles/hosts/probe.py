"""Ask a host by running its parts: does a block compute what we think, which tokens are read?

A wrong guess would give a wrong result, so nothing here is guessed: a block is compared with our
own arithmetic on random states, and the readout is what the host's own code takes a gradient of.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .multihead import opened

if TYPE_CHECKING:
    from .host import Block, HostModel

Inputs = dict[str, Tensor]


@dataclass(frozen=True)
class Readout:
    """Which tokens of the last block the classifier reads.

    Attributes:
        tokens: The first tokens that it reads (1 for a class token), or None for all tokens.
        positions: For a readout that depends on the sample: the inputs to positions [batch].
        folds: Whether the host's code after the blocks takes members as a larger batch.
        why: How this was found.
    """

    tokens: int | None
    folds: bool
    why: str
    positions: Callable[[dict[str, Any]], Tensor] | None = None

    def __str__(self) -> str:
        if self.positions is not None:
            return "the end-of-text token of each sample"
        if self.tokens is None:
            return "all tokens"
        return "token 0" if self.tokens == 1 else f"tokens 0-{self.tokens - 1}"


ALL_TOKENS = Readout(None, folds=False, why="the model could not be probed: all tokens are kept")


class _Stub(nn.Module):
    """Stands in for all blocks of a host and returns what it is told."""

    def __init__(self, answer: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.answer(hidden)


@contextmanager
def _instead_of_blocks(host: HostModel, answer: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let the host run its own embeddings and head around a stub."""
    parent_path, _, name = host.blocks_path.rpartition(".")
    parent = host.model.get_submodule(parent_path)
    original = getattr(parent, name)
    was_training = host.model.training
    host.replace_blocks_([_Stub(answer)])
    host.model.eval()
    try:
        yield
    finally:
        setattr(parent, name, original)
        host.model.train(was_training)


def check_block(block: Block) -> str | None:
    """Compare a block's own forward with our arithmetic on random states; None when they agree."""
    from . import block_math

    module = copy.deepcopy(block.module).eval().float()
    twin = type(block)(block.index, module, block.attention, block.family)
    twin.attention = type(block.attention)(block.index, module, block.family)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 5, twin.attention.weights().query.shape[-1], generator=generator)
    x = x.to(next(module.parameters()).device)
    try:
        with torch.no_grad(), opened([twin.attention.module]):
            theirs = module(x, **_no_mask(module))
            theirs = theirs[0] if isinstance(theirs, tuple) else theirs
            ours = block_math.forward(twin, x, causal=twin.attention.causal)
    except Exception as error:  # any failure of the host's code means: not what we think
        return f"its block cannot be run by itself ({type(error).__name__}: {error})"
    difference = float((theirs - ours).abs().max())
    if difference > 1e-4 * max(1.0, float(theirs.abs().max())):
        return (
            f"its block computes something else than {block.family.norm}-norm attention and MLP "
            f"(largest difference {difference:.2g} on random states)"
        )
    return None


def _no_mask(module: nn.Module) -> dict[str, None]:
    """Some blocks ask for a mask even when there is none."""
    names = inspect.signature(type(module).forward).parameters
    return {name: None for name in ("attention_mask", "attn_mask") if name in names}


def find_readout(host: HostModel) -> Readout:
    """Find which tokens of the last block reach the output, by the gradient of the host's own code.

    The rule holds only when it is the same for differing inputs and the host gives the same answer
    from those tokens alone; otherwise all tokens are kept.
    """
    rule = host.family.readout
    if rule == "all":
        return Readout(None, folds=_folds(host, None), why="the family says so")
    if isinstance(rule, tuple):
        tokens = max(rule) + 1
        return Readout(tokens, folds=_folds(host, tokens), why="the family says so")
    positions = _end_of_text(host.model)
    if positions is not None:
        return Readout(None, folds=False, why="the host reads the end of text", positions=positions)
    seen = [_read_tokens(host, inputs) for inputs in _examples(host.model)]
    if not seen or any(tokens is None for tokens in seen):
        return ALL_TOKENS if not seen else Readout(None, _folds(host, None), "it pools all tokens")
    tokens = max(count for count in seen if count is not None)
    if len(set(seen)) > 1 or not _same_from_few(host, tokens):
        return Readout(None, _folds(host, None), why="the tokens read depend on the input")
    return Readout(tokens, _folds(host, tokens), why="probed: nothing else reaches the output")


def run_around(
    host: HostModel,
    args: Any,
    kwargs: dict[str, Any],
    answer: Callable[[Tensor], Tensor],
) -> Any:
    """Run a host's own embeddings and head around `answer`, which stands for all its blocks."""
    with _instead_of_blocks(host, answer):
        return host.model(*args, **kwargs)


def _run(host: HostModel, inputs: Inputs, answer: Callable[[Tensor], Tensor]) -> Tensor:
    from .host import main_output

    with _instead_of_blocks(host, answer):
        return main_output(
            host.model(**inputs) if inputs.keys() != {"x"} else host.model(inputs["x"])
        )


def _states(hidden: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(hidden.shape, generator=generator).to(hidden)


def _read_tokens(host: HostModel, inputs: Inputs) -> int | None:
    """Return how many leading tokens are read, or None when all (or nothing sensible) are."""
    leaf: list[Tensor] = []

    def answer(hidden: Tensor) -> Tensor:
        leaf.append(_states(hidden).requires_grad_())
        return leaf[0]

    try:
        with torch.enable_grad():
            output = _run(host, inputs, answer)
            weights = _states(output, 1)
            (gradient,) = torch.autograd.grad((output * weights).sum(), leaf[0])
    except Exception:  # the host needs more than our example inputs: keep all tokens
        return None
    read = gradient.abs().amax(dim=(0, 2)).nonzero().flatten()
    tokens = int(read.max()) + 1 if len(read) else None
    return None if tokens is None or tokens > 4 or tokens >= gradient.shape[1] else tokens


def _same_from_few(host: HostModel, tokens: int) -> bool:
    """Check that the host answers the same from the first tokens alone."""
    try:
        for inputs in _examples(host.model):
            with torch.no_grad():
                whole = _run(host, inputs, _states)
                few = _run(host, inputs, lambda hidden: _states(hidden)[:, :tokens])
            if not torch.allclose(whole, few, atol=1e-5, rtol=1e-5):
                return False
    except Exception:  # the host's code needs every token
        return False
    return True


def _folds(host: HostModel, tokens: int | None) -> bool:
    """Check that the host's code after the blocks treats members as a larger batch."""

    def stream(hidden: Tensor, seed: int) -> Tensor:
        return _states(hidden, seed)[:, :tokens]

    try:
        for inputs in _examples(host.model):
            with torch.no_grad():
                apart = [_run(host, inputs, partial(stream, seed=seed)) for seed in (0, 1)]
                both = _run(host, inputs, lambda x: torch.cat([stream(x, 0), stream(x, 1)]))
            if not torch.allclose(both, torch.cat(apart), atol=1e-5, rtol=1e-5):
                return False
        return bool(_examples(host.model))
    except Exception:  # it looks at its inputs again after the blocks
        return False


def modules_after_blocks(host: HostModel) -> tuple[str, ...]:
    """Name the leaf modules that the host runs after its blocks (norm, pooler, classifier)."""
    called: list[str] = []
    started = False

    def answer(hidden: Tensor) -> Tensor:
        nonlocal started
        started = True
        return _states(hidden)

    def note(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if started and name not in called:
                called.append(name)

        return hook

    leaves = [
        (name, module)
        for name, module in host.model.named_modules()
        if not name.startswith(host.blocks_path)
        and any(True for _ in module.parameters())
        and not any(True for _ in module.children())
    ]
    handles = [module.register_forward_hook(note(name)) for name, module in leaves]
    try:
        for inputs in _examples(host.model)[:1]:
            with torch.no_grad():
                _run(host, inputs, answer)
    except Exception:  # it cannot be run on our example: nothing is known to come after
        return ()
    finally:
        for handle in handles:
            handle.remove()
    return tuple(called)


def _examples(model: nn.Module) -> list[Inputs]:
    """Make two small inputs that the model takes, or none when we do not know how."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    size = _image_size(model)
    if size is not None:
        name = getattr(model, "main_input_name", None)
        name = name if name == "pixel_values" else "x"
        generator = torch.Generator().manual_seed(0)
        images = [torch.rand(2, *size, generator=generator).to(device, dtype) for _ in range(2)]
        return [{name: image} for image in images]
    vocabulary = getattr(getattr(model, "config", None), "vocab_size", None)
    if isinstance(vocabulary, int) and vocabulary > 16:
        rising = torch.arange(2, 14, device=device).repeat(2, 1)
        return [
            {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            for ids in (rising, rising.flip(1), rising.roll(5, 1))
        ]
    return []


def example_batch(model: nn.Module, *, tokens: int = 128) -> tuple[Inputs | tuple[Tensor], str]:
    """Make one input of the usual size, for counting; say what it is."""
    inputs = next(iter(_examples(model)))
    if "input_ids" in inputs:
        longest = getattr(getattr(model, "config", None), "max_position_embeddings", tokens)
        ids = inputs["input_ids"][:1, :1].expand(1, max(1, min(tokens, longest - 2)))
        return {"input_ids": ids}, f"{ids.shape[1]} tokens"
    ((name, image),) = inputs.items()
    what = f"{image.shape[-2]} x {image.shape[-1]} pixels"
    return ((image[:1],) if name == "x" else {name: image[:1]}), what


def _image_size(model: nn.Module) -> tuple[int, int, int] | None:
    """Return channels, height and width of the images that a model takes, when it tells."""
    for module in model.modules():
        size = getattr(module, "img_size", None)  # timm's patch embedding
        projection = getattr(module, "proj", None)
        if size is not None and isinstance(projection, nn.Conv2d):
            return (projection.in_channels, *_pair(size))
        size = getattr(module, "image_size", None)  # open_clip's tower, Hugging Face's embeddings
        for name in ("conv1", "projection", "patch_embedding", "patch_embeddings"):
            projection = getattr(module, name, None)
            projection = getattr(projection, "projection", projection)
            if size is not None and isinstance(projection, nn.Conv2d):
                return (projection.in_channels, *_pair(size))
    config = getattr(model, "config", None)
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None)
    if size is None:
        return None
    return (getattr(config, "num_channels", 3), *_pair(size))


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _end_of_text(model: nn.Module) -> Callable[[dict[str, Any]], Tensor] | None:
    """Return the rule of CLIP's text tower: argmax of the ids (legacy), else the first EOS."""
    for module in model.modules():
        if hasattr(module, "eos_token_id") and hasattr(module, "final_layer_norm"):
            eos: Any = module.eos_token_id
            return partial(_end_positions, int(eos))
    return None


def _end_positions(eos: int, inputs: dict[str, Any]) -> Tensor:
    ids = inputs["input_ids"].to(torch.int)
    return (ids if eos == 2 else (ids == eos).int()).argmax(-1)
