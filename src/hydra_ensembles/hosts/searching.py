"""Find the attention of blocks that no named family describes, by the names of its linears.

Libraries use only a few names for them. A match is only a guess: `HostModel` accepts it after a
numerical check.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .family import Family

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
    "o_proj",
    "out_proj",
    "out_lin",
    "output.dense",
    "linear_out",
    "c_proj",
    "proj",
    "projection",
    "dense",
    "wo",
    "Wo",
    "o",
    "out",
    "to_out.0",
    "to_out",
)
"""Names of the output projection, in the attention module or next to it."""

CROSS = ("cross", "encoder_attn", "encdecattention", "crossattention")
"""Parts of names of attention over another sequence: its heads are left alone."""


def describe_block(block: nn.Module) -> Family | None:
    """Describe a block by the names of its parts; None unless it has exactly one attention.

    All blocks of a list must have the same paths.
    """
    candidates = list(attentions(block))
    return candidates[0] if len(candidates) == 1 else None


def attentions(block: nn.Module) -> Iterator[Family]:
    """Yield a description of every self-attention in a block."""
    for path, module in block.named_modules():
        if any(word in path.lower() for word in CROSS):
            continue
        inputs = _inputs(module)
        if inputs is None:
            continue
        output = _output(block, path)
        if output is None:
            continue
        inside = f"{path}." if path else ""
        paths = {role: inside + name for role, name in inputs.items()}
        yield Family(
            name=FOUND,
            output=output,
            query=paths.get("query", ()),
            key=paths.get("key", ()),
            value=paths.get("value", ()),
            packed=paths.get("packed", ()),
            fusable=False,
        )


def _inputs(module: nn.Module) -> dict[str, str] | None:
    """Return the children that make queries, keys and values; empty if not all have one."""
    children = {name for name, child in module.named_children() if _is_linear(child)}
    for names in SEPARATE:
        if children.issuperset(names):
            return dict(zip(("query", "key", "value"), names, strict=True))
    for name in PACKED:
        if name in children:
            return {"packed": name}
    if children.intersection(OTHERS):
        return {}
    return None


def _output(block: nn.Module, path: str) -> str | None:
    """Return the path of the output projection: in the attention module, else next to it."""
    beside = path.rpartition(".")[0]
    for place in dict.fromkeys((path, beside)):
        for name in OUTPUT:
            full_path = f"{place}.{name}" if place else name
            try:
                module = block.get_submodule(full_path)
            except AttributeError:
                continue
            if _is_linear(module):
                return full_path
    return None


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    named = isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D", "FalconLinear")
    return named and getattr(weight, "ndim", 0) == 2
