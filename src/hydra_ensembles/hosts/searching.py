"""Find the attention of blocks that no named family describes, by the names of its linears.

Every library calls them one of a few names. What is found is only a guess: `HostModel` believes it
after numbers have shown it (see `proving`).
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .family import Family

FOUND = "found"
"""Name of families that were found and not described."""

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
"""What queries, keys and values are called where each has a linear of its own."""

PACKED = ("qkv", "qkv_proj", "Wqkv", "query_key_value", "c_attn", "in_proj", "to_qkv", "qkv_lin")
"""What one linear for all three is called."""

OTHERS = ("q_b_proj", "kv_b_proj", "q_proj", "q_a_proj", "qk")
"""Linears that tell an attention whose queries and keys are made in another way."""

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
"""What the output projection is called, in or beside the attention module."""

CROSS = ("cross", "encoder_attn", "encdecattention", "crossattention")
"""Parts of names of attention over another sequence: its heads are left alone."""


def describe_block(block: nn.Module) -> Family | None:
    """Describe a block by the names of its parts, or None when it has not exactly one attention.

    Paths are those of this block; blocks of one list must agree on them.
    """
    found = list(attentions(block))
    return found[0] if len(found) == 1 else None


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
    """Return which children make queries, keys and values; empty when some are made otherwise."""
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
    """Return the path of the output projection: in the attention module, else beside it."""
    beside = path.rpartition(".")[0]
    for place in dict.fromkeys((path, beside)):
        for name in OUTPUT:
            whole = f"{place}.{name}" if place else name
            try:
                module = block.get_submodule(whole)
            except AttributeError:
                continue
            if _is_linear(module):
                return whole
    return None


def _is_linear(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    named = isinstance(module, nn.Linear) or type(module).__name__ in ("Conv1D", "FalconLinear")
    return named and getattr(weight, "ndim", 0) == 2
