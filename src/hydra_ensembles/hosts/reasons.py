"""Reasons in words that a user knows: ideas and modules, not arguments and tensors."""

from __future__ import annotations

import re
from collections.abc import Sequence

_SIZE = "the height and width of the image"
_ROTARY = "rotary positions"
_RELATIVE = "relative positions"
_ARGUMENTS = {
    "position_embeddings": _ROTARY,
    "rope": _ROTARY,
    "rotary_pos_emb": _ROTARY,
    "freqs_cis": _ROTARY,
    "sinusoidal_pos": _ROTARY,
    "position_bias": "a position bias shared by all blocks",
    "shared_rel_pos": "a relative-position bias shared by all blocks",
    "shared_rel_pos_bias": "a relative-position bias shared by all blocks",
    "relative_position_bias": "a relative-position bias",
    "relative_pos": _RELATIVE,
    "rel_pos": _RELATIVE,
    "relative_position_embeddings": _RELATIVE,
    "alibi": "a bias by distance",
    "resolution": "images of another size",
    "interpolate_pos_encoding": "positions to interpolate",
    "input_dimensions": _SIZE,
    "feat_size": _SIZE,
    "size": _SIZE,
    "height": _SIZE,
    "H": _SIZE,
    "q_global": "queries made from the whole image",
    "encoder_hidden_states": "the states of an encoder",
    "layout_inputs": "states of the page's layout",
    "is_index_masked": "windows of near tokens",
}
_PARTS = (
    (r"encoder_attn|cross_?attn|cross_?attention|EncDecAttention", "attention to an encoder"),
    (r"rel_?pos|relative|attention_bias|distance|pos_\w*proj|cpb_mlp|meta_mlp|rel_attn", _RELATIVE),
    (r"w2e|e2w|e2e", "attention between words and entities"),
    (r"proj_l|proj_w", "mixing of heads"),
    (r"adapter", "adapters"),
    (r"bottleneck", "bottlenecks"),
    (r"conv", "convolutions"),
    (r"gate", "gates"),
    (r"norm", "a norm over all heads"),
)
"""What the names of an attention's other parts mean, the first that matches."""


def knows_argument(name: str) -> bool:
    """Return whether there are words for an argument of a block."""
    return name in _ARGUMENTS


def describe_argument(name: str) -> str:
    """Say what an argument of a block means to a user."""
    return f"{_ARGUMENTS[name]} ({name!r})" if name in _ARGUMENTS else f"{name!r}"


def describe_parameters(names: Sequence[str], *, of_attention: bool) -> str:
    """Say what parameters are for, as far as their names show, and which modules hold them.

    Args:
        names: Paths of parameters within a block or an attention.
        of_attention: Whether they belong to an attention, whose norms run over all heads.
    """
    meanings = [m for pattern, m in _PARTS for name in names if re.search(pattern, name)]
    meanings = [m for m in meanings if of_attention or "norm" not in m]
    where = describe_modules(names)
    return f"{meanings[0] if meanings else 'other parts'} ({where})"


def describe_modules(names: Sequence[str], most: int = 3) -> str:
    """Name the modules of some parameters, a few of them."""
    paths = [name.removesuffix(".weight").removesuffix(".bias") for name in names]
    paths = list(dict.fromkeys(paths))
    if len(paths) > most:
        paths = list(dict.fromkeys(path.partition(".")[0] for path in paths))
    rest = len(paths) - most
    shown = ", ".join(paths[:most])
    return f"{shown} and {rest} more" if rest > 0 else shown


def at_layer(layer: int, reason: str) -> str:
    """Say at which layer a reason was found; the first one stands for all."""
    return reason if layer == 0 else f"layer {layer}: {reason}"
