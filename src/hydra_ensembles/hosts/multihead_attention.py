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
    weight, bias = self.in_proj_weight, self.in_proj_bias
    width = weight.shape[0] // 3
    parts = []
    for i, x in enumerate((query, key, value)):
        rows = slice(i * width, (i + 1) * width)
        y = F.linear(x, weight[rows], None if bias is None else bias[rows])
        parts.append(y.unflatten(-1, (width // self.head_dim, self.head_dim)).transpose(1, 2))
    q, k, v = parts
    if key_padding_mask is not None:
        hidden = key_padding_mask[:, None, None, :]
        hidden = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, float("-inf"))
        attn_mask = hidden if attn_mask is None else hidden + _additive(attn_mask, q.dtype)
    elif attn_mask is not None:
        attn_mask = _additive(attn_mask, q.dtype)
    if attn_mask is not None and attn_mask.dim() == 3:  # [batch * heads, T, S]
        attn_mask = attn_mask.unflatten(0, (query.shape[0], -1))
    x = F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=self.dropout if self.training else 0.0
    )
    return self.out_proj(x.transpose(1, 2).flatten(2)), None


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Turn a boolean mask (True = hidden) into one that is added to the scores."""
    if mask.dtype == torch.bool:
        return torch.zeros_like(mask, dtype=dtype).masked_fill(mask, float("-inf"))
    return mask.to(dtype)


def _wavlm(
    self: Any, hidden_states: Tensor, attention_mask: Tensor | None, gated_position_bias: Tensor
) -> tuple[Tensor, None]:
    """Compute what WavLM computes with `F.multi_head_attention_forward`."""
    parts = (self.q_proj, self.k_proj, self.v_proj)
    q, k, v = (
        part(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts
    )
    mask = gated_position_bias.unflatten(0, (len(hidden_states), -1)).to(q.dtype)
    if attention_mask is not None:
        mask = mask.masked_fill(attention_mask.ne(1)[:, None, None], float("-inf"))
    x = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0
    )
    return self.out_proj(x.transpose(1, 2).flatten(2)), None


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
    """Open a closed attention module in place; leave other modules alone."""
    method = _open_method(module)
    if method is None:
        return
    if isinstance(module, nn.MultiheadAttention):
        _check(module)
    setattr(module, method[0], types.MethodType(method[1], module))


def _check(module: nn.MultiheadAttention) -> None:
    if not module._qkv_same_embed_dim or not module.batch_first:
        raise UnsupportedModelError(
            "nn.MultiheadAttention with batch_first=False or with keys and values of another width "
            "is not supported. Build the model with batch_first=True."
        )
    if module.bias_k is not None or module.add_zero_attn:
        raise UnsupportedModelError(
            "nn.MultiheadAttention with add_bias_kv or add_zero_attn is not supported."
        )


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
