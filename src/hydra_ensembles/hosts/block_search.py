"""Find the stack of blocks to prune, in a model of any library.

Blocks that no registered family describes are searched by the names of their linears, of which
libraries use only a few. A match is only a guess: `HostModel` accepts it after a numerical check.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..errors import UnsupportedModelError
from .families import Family, families, first_path
from .head_weights import is_linear

FOUND = "found"
"""Name of families that were found by search, not registered."""

SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("q_lin", "k_lin", "v_lin"),
    ("query_proj", "key_proj", "value_proj"),
    ("linear_q", "linear_k", "linear_v"),
    ("wq", "wk", "wv"),
    ("Wq", "Wk", "Wv"),
    ("to_q", "to_k", "to_v"),
)
"""Names of queries, keys and values if each has its own linear."""

PACKED = ("qkv", "qkv_proj", "Wqkv", "query_key_value", "c_attn", "in_proj", "to_qkv", "qkv_lin")
"""Names of one linear for all three."""

OTHERS = ("q_b_proj", "kv_b_proj", "q_proj", "q_a_proj", "qk")
"""Linears of an attention that makes its queries and keys in another way."""

OUTPUT = (
    *("o_proj", "out_proj", "out_lin", "output.dense", "linear_out", "c_proj", "proj"),
    *("projection", "dense", "wo", "Wo", "o", "out", "to_out.0", "to_out"),
)
"""Names of the output projection, in the attention module or next to it."""

CROSS = ("cross", "encoder_attn", "encdecattention", "crossattention")
"""Parts of names of attention over another sequence: its heads are left alone."""


def describe_block(block: nn.Module) -> Family | None:
    """Describe a block by the names of its parts; None unless it has exactly one attention."""
    candidates = list(attentions(block))
    return candidates[0] if len(candidates) == 1 else None


def attentions(block: nn.Module) -> Iterator[Family]:
    """Yield a description of every self-attention in a block."""
    for path, module in block.named_modules():
        if any(word in path.lower() for word in CROSS):
            continue
        inputs = _inputs(module)
        output = None if inputs is None else _output(block, path)
        if inputs is not None and output is not None:
            parts = {role: f"{path}.{name}".lstrip(".") for role, name in inputs.items()}
            yield Family(name=FOUND, output=output, fusable=False, **parts)  # type: ignore[arg-type]


def _inputs(module: nn.Module) -> dict[str, str] | None:
    """Return the children that make queries, keys and values; empty if not all have one."""
    children = {name for name, child in module.named_children() if is_linear(child)}
    for names in SEPARATE:
        if children.issuperset(names):
            return dict(zip(("query", "key", "value"), names, strict=True))
    for name in PACKED:
        if name in children:
            return {"packed": name}
    return {} if children.intersection(OTHERS) else None


def _output(block: nn.Module, path: str) -> str | None:
    """Return the path of the output projection: in the attention module, else next to it."""
    for place in dict.fromkeys((path, path.rpartition(".")[0])):
        for name in OUTPUT:
            candidate = first_path(block, f"{place}.{name}".lstrip("."))
            if candidate is not None and is_linear(block.get_submodule(candidate)):
                return candidate
    return None


_IMAGE_TOWERS = ("image_tower", "vision_model", "visual", "vision_tower")
_NOT_TEXT = (*_IMAGE_TOWERS, "vision_encoder", "audio_tower", "audio_model")
_READS_TEXT = ("ForSequenceClassification", "ForTokenClassification")


@dataclass(frozen=True)
class Stack:
    """One list of blocks.

    Attributes:
        family: The family of its blocks.
        path: Path of the list in the model.
        blocks: The blocks, bottom to top.
        others: Paths of the model's other stacks, whose heads are left alone.
    """

    family: Family
    path: str
    blocks: tuple[nn.Module, ...]
    others: tuple[str, ...] = ()


def find_stack(model: nn.Module, family: Family | None = None) -> Stack:
    """Find the blocks of a model: by a given family, by the registered ones, else by their names.

    Raises:
        UnsupportedModelError: When there is none, or several are possible; the message says what
            was found and what to do.
    """
    from . import transformers_families  # noqa: F401  (it registers its families)

    _refuse_wrapped(model)
    tried = [family] if family is not None else [families[name] for name in families]
    stacks = [stack for candidate in tried for stack in _described(model, candidate)]
    # families may share the names of their attention parts
    stacks.sort(key=lambda stack: not _names_all(stack))
    if family is None:
        stacks += _searched(model, {stack.path for stack in stacks})
    if not stacks:
        raise UnsupportedModelError(_why_none(model, family))
    chosen = _choose(model, stacks)
    for part, reason in _NOT_COMPUTED.items():
        if part in type(chosen.blocks[0]).__name__:
            raise UnsupportedModelError(f"{type(model).__name__} is not supported: {reason}.")
    return chosen


_NOT_COMPUTED = {
    "Reformer": "its layers are reversible and are not called as blocks, so gates have no effect",
    "Qwen3_5Vision": "its text blocks mix linear attention with attention, and the only stack of "
    "attention blocks is the vision tower, which texts do not pass",
    "ResPostBlock": "its norms stand after each branch, inside the residual sum",
}
"""Blocks that we would compute wrongly, by a part of their class's name, and why."""


def _containers(model: nn.Module) -> Iterator[tuple[str, nn.ModuleList | nn.Sequential]]:
    for path, module in model.named_modules():
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module):
            yield path, module


def _described(model: nn.Module, family: Family) -> Iterator[Stack]:
    """Yield the stacks in which a family describes every block."""
    wanted = first_path(model, family.blocks) if family.blocks else None
    for path, container in _containers(model):
        blocks = tuple(container.children())
        here = wanted in (None, path)
        if here and all(family.resolve(block) is not None for block in blocks):
            yield Stack(family, path, blocks)


def _names_all(stack: Stack) -> bool:
    """Return whether a family also names the norms and the MLP of a stack's blocks."""
    family, block = stack.family, stack.blocks[0]
    parts = (family.norm1, family.norm2, *family.mlp_paths())
    return all(first_path(block, path) is not None for path in parts)


def _searched(model: nn.Module, known: set[str]) -> Iterator[Stack]:
    """Yield the stacks outside the known ones whose blocks have the usual names."""
    for path, container in _containers(model):
        if any(path == other or path.startswith(f"{other}.") for other in known):
            continue
        blocks = tuple(container.children())
        family = describe_block(blocks[0])
        if family is not None and all(family.resolve(block) is not None for block in blocks):
            yield Stack(family, path, blocks)


def _choose(model: nn.Module, stacks: list[Stack]) -> Stack:
    """Choose the only stack, or the one whose states a model of this kind reads."""
    by_path = {stack.path: stack for stack in reversed(stacks)}  # the first family of each path
    every = tuple(sorted(by_path))
    described = [path for path in every if by_path[path].family.name != FOUND]
    for tried in (list(every), described):  # registered families take precedence over guessed ones
        paths = _narrow(model, tried)
        if len(paths) == 1:
            others = tuple(path for path in every if path != paths[0])
            return replace(by_path[paths[0]], others=others)
    raise UnsupportedModelError(
        f"{type(model).__name__} has several stacks of attention blocks ({', '.join(every)}) and "
        "none is an image tower. Pass the tower that is meant, or a Family with blocks=<its path>."
    )


def _narrow(model: nn.Module, paths: list[str]) -> list[str]:
    """Drop stacks whose states a model of this kind does not read, while several remain."""
    for narrow in (
        _innermost,
        _of_the_task,
        _of_the_decoder,
        _without_class_attention,
        _last_stage,
        _of_the_image_tower,
    ):
        if len(paths) > 1:
            paths = narrow(model, paths) or paths
    return paths


def _innermost(model: nn.Module, paths: list[str]) -> list[str]:
    """Drop lists that contain other lists of blocks."""
    return [p for p in paths if not any(q.startswith(f"{p}.") for q in paths)]


def _of_the_task(model: nn.Module, paths: list[str]) -> list[str]:
    """Keep the text stacks of a text model that could read images or sounds too."""
    reads_text = type(model).__name__.endswith(_READS_TEXT)
    # dual encoders, of which the image tower is meant, have a scale of their logits
    dual = hasattr(model, "logit_scale")
    reads_text |= getattr(model, "main_input_name", "") == "input_ids" and not dual
    return [p for p in paths if not reads_text or not set(_NOT_TEXT) & set(p.split("."))]


def _of_the_decoder(model: nn.Module, paths: list[str]) -> list[str]:
    """Keep the decoder of an encoder-decoder: its states are what the classifier reads."""
    both = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return [path for path in paths if not both or "decoder" in path.split(".")]


def _without_class_attention(model: nn.Module, paths: list[str]) -> list[str]:
    """Drop blocks that only update the class token (CaiT, XCiT): they are the readout."""
    blocks = {path: next(model.get_submodule(path).children()) for path in paths}
    return [
        p for p in paths if not any("ClassAtt" in type(m).__name__ for m in blocks[p].modules())
    ]


def _last_stage(model: nn.Module, paths: list[str]) -> list[str]:
    """Keep the last of several stages (Swin): those below it belong to the trunk."""
    if len({re.sub(r"\d+", "*", path) for path in paths}) > 1:
        return paths
    return [max(paths, key=lambda path: [int(n) for n in re.findall(r"\d+", path)])]


def _of_the_image_tower(model: nn.Module, paths: list[str]) -> list[str]:
    """Keep the image tower of a dual encoder."""
    for tower in _IMAGE_TOWERS:
        inside = [path for path in paths if tower in path.split(".")]
        if len(inside) == 1:
            return inside
    return paths


def _refuse_wrapped(model: nn.Module) -> None:
    """Refuse unmerged adapters and quantised weights, and say what to do."""
    for path, module in model.named_modules():
        kind = type(module)
        if kind.__module__.startswith("peft.tuners"):
            raise UnsupportedModelError(
                f"{type(model).__name__} holds adapters that are not merged ({path}: "
                f"{kind.__name__}): heads are cut from the weights, where an adapter would stay "
                "behind. Merge them first: model = model.merge_and_unload()."
            )
        weight: Any = module._parameters.get("weight")
        quantised = weight is not None and not weight.is_floating_point()
        if quantised or kind.__name__ in _QUANTISED or kind.__module__ in _QUANTISING:
            raise UnsupportedModelError(
                f"{type(model).__name__} is quantised ({path}: {kind.__name__}): its heads cannot "
                "be cut. Load it without quantization_config (or call model.dequantize()), prune "
                "or fuse it, and quantise the result."
            )


_QUANTISED = frozenset({"Linear8bitLt", "Linear4bit", "QuantLinear", "WQLinear_GEMM", "HQQLinear"})
_QUANTISING = frozenset(
    {"torch.ao.nn.quantized.dynamic.modules.linear", "torch.ao.nn.quantized.modules.linear"}
)


def _why_none(model: nn.Module, family: Family | None) -> str:
    name = type(model).__name__
    for path, container in _containers(model):
        kinds = [describe_block(block) for block in container.children()]
        without = [i for i, kind in enumerate(kinds) if kind is None]
        if family is None and 0 < len(without) < len(kinds):
            inner = type(list(container.children())[without[0]]).__name__
            return (
                f"{name}: only {len(kinds) - len(without)} of the {len(kinds)} blocks at {path} "
                f"have attention heads (block {without[0]}, a {inner}, has none): all blocks of a "
                "stack must have them, so a hybrid of attention and other mixers is not supported."
            )
    for path, container in _containers(model):
        several = [candidate.output for candidate in attentions(next(container.children()))]
        if len(several) > 1 and family is None:
            return (
                f"{name}: every block at {path} has {len(several)} attention modules (with the "
                f"output projections {', '.join(map(str, several))}), and it is not clear whose "
                'heads are meant. Describe one of them: hydra.Family(name="mine", '
                f'blocks="{path}", output="{several[-1]}"), and pass it as family=.'
            )
    reason = _why_no_heads(model) if family is None else None
    if reason is not None:
        return f"{name} {reason}"
    stacks = [
        f"{path or '(the model)'} ({len(module)} x {type(next(module.children())).__name__})"
        for path, module in _containers(model)
    ]
    listed = "; ".join(stacks[:4]) if stacks else "no ModuleList or Sequential at all"
    looked = f"the family {family.name!r} names" if family else "the usual names of attention parts"
    return (
        f"{name}: in no list of blocks does every block have {looked}. Found: {listed}. If it is a "
        "transformer, describe one block: "
        'hydra.Family(name="mine", query="attn.q", key="attn.k", value="attn.v", '
        'output="attn.o", norm1="norm1", norm2="norm2", mlp="mlp"), and pass it as family= or to '
        "register_family()."
    )


def _why_no_heads(model: nn.Module) -> str | None:
    """Say why a model has no attention heads that can be switched off."""
    attention = [(path, module) for path, module in model.named_modules() if _is_attention(module)]
    if not attention:
        return (
            "has no attention heads, and hydra-ensembles prunes attention heads: it needs a "
            "transformer (a ViT or DeiT for images, a BERT or Llama for texts, say)."
        )
    path, module = attention[0]
    where = f"({type(module).__name__} at {path})"
    kinds = {type(child).__name__ for child in module.modules()}
    bare = [name for name, p in module.named_parameters(recurse=False) if p.dim() >= 3]
    if bare and "Linear" not in kinds:
        return (
            f"keeps the weights of its attention as bare parameters {where}: {', '.join(bare)}. "
            "There is no output projection module at which a head could be switched off. Use a "
            "model whose attention has linear layers (BERT, RoBERTa, DeBERTa)."
        )
    if any("Conv" in kind for kind in kinds):
        return (
            f"makes the queries, keys or output of its attention by convolutions {where}; heads "
            "are cut from linear layers. Use a model whose attention has them (ViT, DeiT, Swin; "
            "BERT, DistilBERT)."
        )
    return None


def _is_attention(module: nn.Module) -> bool:
    """Return whether a module is named an attention and holds weights."""
    name = type(module).__name__.lower()
    named = any(word in name for word in ("attention", "attn", "mla")) and "structure" not in name
    linears = (nn.Linear, nn.Conv1d, nn.Conv2d)
    return named and (
        any(isinstance(m, linears) for m in module.modules())
        or any(p.dim() >= 3 for p in module.parameters())
    )
