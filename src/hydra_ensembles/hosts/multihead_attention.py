"""Open closed attention modules: call the output projection, so that it can be hooked.

`nn.MultiheadAttention`, WavLM's attention and torchvision's windows pass their weights to one
function: `out_proj` is never *called* and a hook there never fires. The forward in this file
computes the same with the same parameters. It is set on the instance, so that names, state dict and
class stay.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .attention import attend


def _forward(
    self: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    weights = self.in_proj_weight.chunk(3)
    biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
    heads = len(weights[0]) // self.head_dim
    q, k, v = (
        F.linear(x, weight, bias).unflatten(-1, (heads, self.head_dim))
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    mask = None if attn_mask is None else _additive(attn_mask, q.dtype)
    if mask is not None and mask.dim() == 3:  # [batch * heads, T, S]
        mask = mask.unflatten(0, (query.shape[0], -1))
    if key_padding_mask is not None:
        padding = _additive(key_padding_mask[:, None, None, :], q.dtype)
        mask = padding if mask is None else padding + mask
    return self.out_proj(_attend(self, q, k, v, mask)), None


def _attend(self: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    dropout = self.dropout if self.training else 0.0
    return attend(q, k, v, mask=mask, scale=self.head_dim**-0.5, dropout=dropout).flatten(2)


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask (True = hidden) into one that is added to the scores."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
    return mask.to(dtype)


def _wavlm(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None, gated_position_bias: Tensor
) -> tuple[Tensor, None]:
    """Compute what WavLM computes with `F.multi_head_attention_forward`."""
    q, k, v = (
        part(hidden_states).unflatten(-1, (-1, self.head_dim))
        for part in (self.q_proj, self.k_proj, self.v_proj)
    )
    mask = gated_position_bias.unflatten(0, (len(hidden_states), -1)).to(q.dtype)
    if attention_mask is not None:
        mask = mask.masked_fill(attention_mask.ne(1)[:, None, None], float("-inf"))
    return self.out_proj(_attend(self, q, k, v, mask)), None


def _shifted_window(self: Any, x: Tensor) -> Tensor:
    """Compute torchvision's window attention; W_O, which acts on single tokens, comes last."""
    from torchvision.models.swin_transformer import shifted_window_attention

    more = {"logit_scale": self.logit_scale} if hasattr(self, "logit_scale") else {}
    attended = shifted_window_attention(
        x,
        self.qkv.weight,
        torch.eye(self.proj.in_features, dtype=x.dtype, device=x.device),
        self.get_relative_position_bias(),
        self.window_size,
        self.num_heads,
        shift_size=self.shift_size,
        attention_dropout=self.attention_dropout,
        qkv_bias=self.qkv.bias,
        training=self.training,
        **more,
    )
    return F.dropout(self.proj(attended), p=self.dropout, training=self.training)


_WAVLM = "torch_multi_head_self_attention"
_WINDOWS = ("ShiftedWindowAttention", "ShiftedWindowAttentionV2")


def _open_method(module: nn.Module) -> tuple[str, Callable[..., Any]] | None:
    """Return the method of a closed module to replace, and its replacement; else None."""
    if isinstance(module, nn.MultiheadAttention):
        return "forward", _forward
    kind = type(module)
    if kind.__name__ in _WINDOWS and kind.__module__.startswith("torchvision."):
        return "forward", _shifted_window
    return (_WAVLM, _wavlm) if hasattr(type(module), _WAVLM) else None


def open_attention_(module: nn.Module) -> None:
    """Open a closed attention module in place; leave other modules as they are."""
    method = _open_method(module)
    if method is None:
        return
    if isinstance(module, nn.MultiheadAttention):
        if not module._qkv_same_embed_dim or not module.batch_first:
            raise UnsupportedModelError(
                "nn.MultiheadAttention with batch_first=False or with keys and values of another "
                "width is not supported. Build the model with batch_first=True."
            )
        if module.bias_k is not None or module.add_zero_attn:
            raise UnsupportedModelError(
                "nn.MultiheadAttention with add_bias_kv or add_zero_attn is not supported."
            )
    setattr(module, method[0], types.MethodType(method[1], module))


@contextmanager
def opened(modules: list[nn.Module]) -> Iterator[None]:
    """Temporarily open every closed attention among the modules."""
    changed = []
    for module in modules:
        method = _open_method(module)
        if method is not None and method[0] not in module.__dict__:
            open_attention_(module)
            changed.append((module, method[0]))
    try:
        yield
    finally:
        for module, name in changed:
            del module.__dict__[name]
