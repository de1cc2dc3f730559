"""`watch_attention`: observe a host's attention while it runs.

The host computes with its own backend, unchanged; we read what its softmax sees. There are three
ways, by structure:

1. Hugging Face: the model's attention function (eager, sdpa, flash, flex, or a user's own) is
   wrapped *under its own name*, so that its mask function and all that depends on the name stay.
   This is after rotary positions, and before the keys of grouped queries are repeated.
2. timm, open_clip and other modules that call `F.scaled_dot_product_attention`: that call is seen.
3. Modules that call a softmax over their own `[batch, heads, rows, keys]` scores: the scores are
   seen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import UnsupportedModelError
from ..hosts import HostModel
from ..hosts.attention_site import AttentionSite
from ..hosts.multihead_attention import opened

HIDDEN = -1e4
"""An additive mask at or below this hides a key: exp(-1e4) is 0 in every precision."""


@dataclass(frozen=True)
class AttentionView:
    """One layer's attention on one batch: softmax(scale * query . key + bias).

    Shapes: `query` [batch, heads, rows, width]; `key` [batch, heads or fewer, keys, width]
    (grouped queries share keys); `hidden` (True = left out) and `bias` (finite) [batch|1,
    heads|1, rows|1, keys] or None; `real_rows` [batch, rows], False where a query is padding, or
    None for none. `causal`: row t sees the keys 0..t. In a view of ready scores `query` holds
    them, [batch, heads, rows, keys], and `key` is None.
    """

    layer: int
    query: Tensor
    key: Tensor | None
    scale: float = 1.0
    hidden: Tensor | None = None
    bias: Tensor | None = None
    causal: bool = False
    real_rows: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of queries of a sample."""
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        """Number of keys of a sample."""
        return self.query.shape[3] if self.key is None else self.key.shape[2]

    def visible_keys(self) -> Tensor:
        """Count the keys that each row sees: float32 [batch|1, heads|1, rows]."""
        device = self.query.device
        count = torch.full((1, 1, self.rows), float(self.keys), device=device)
        if self.hidden is not None:
            rows = self.hidden
            if self.causal:
                rows = rows | later_keys(slice(0, self.rows), self.keys, device)
            count = (~rows).sum(-1).float().expand(*rows.shape[:2], self.rows)
        elif self.causal:
            count = torch.arange(1, self.rows + 1, device=device).clamp_max(self.keys).float()
            count = count[None, None]
        return count

    def counted_rows(self) -> Tensor:
        """Return which rows count, bool [batch|1, heads|1, rows]: not padding, two or more keys."""
        counted = self.visible_keys() >= 2
        return counted if self.real_rows is None else counted & self.real_rows[:, None]

    def scores(self, rows: slice) -> Tensor:
        """Compute the scores of some rows, float32 [batch, heads, rows, keys], hidden = -inf."""
        rows = slice(rows.start, min(rows.stop, self.rows))
        if self.key is None:
            scores = self.query[:, :, rows].float().clone()
        else:
            groups = self.query.shape[1] // self.key.shape[1]  # query heads that share a key
            key = self.key.repeat_interleave(groups, dim=1).float()
            scores = (self.query[:, :, rows].float() * self.scale) @ key.transpose(-1, -2)
        if self.bias is not None:
            scores += _some(self.bias, rows)
        if self.causal:
            scores.masked_fill_(later_keys(rows, self.keys, scores.device), float("-inf"))
        if self.hidden is not None:
            scores.masked_fill_(_some(self.hidden, rows), float("-inf"))
        return scores


def _some(mask: Tensor, rows: slice) -> Tensor:
    return mask if mask.shape[-2] == 1 else mask[:, :, rows]


def later_keys(rows: slice, keys: int, device: torch.device) -> Tensor:
    """Return which keys come after each of the given rows, bool [rows, keys]."""
    places = torch.arange(rows.start, rows.stop, device=device)
    return torch.arange(keys, device=device) > places[:, None]


def split_mask(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Split a mask (bool: True = seen; float: added) into hidden keys and a finite bias, 4-D."""
    if mask is None:
        return None, None
    mask = mask.detach()
    mask = mask[(None,) * (4 - mask.dim())]
    if not mask.is_floating_point():
        hidden, bias = ~mask.bool(), None
    else:
        hidden = mask <= HIDDEN
        bias = mask.float().masked_fill(hidden, 0.0)
        bias = bias if bool(bias.any()) else None
    return (hidden if bool(hidden.any()) else None), bias


Observer = Callable[[AttentionView], None]


class Watch:
    """Hands the attention of each layer to an observer; `real_rows` is set for each batch."""

    def __init__(self, host: HostModel, observer: Observer) -> None:
        self.host = host
        self.observer = observer
        self.real_rows: Tensor | None = None
        self.seen: set[int] = set()

    def attention_mask(self, mask: Any) -> None:
        """Take the padding from a batch's `attention_mask` [batch, rows], if it has one."""
        is_mask = isinstance(mask, Tensor) and mask.dim() == 2
        self.real_rows = mask.bool() if is_mask else None
        self.seen.clear()

    def see(
        self,
        site: AttentionSite,
        query: Tensor,
        key: Tensor | None,
        *,
        mask: Any = None,
        scale: float = 1.0,
        causal: bool = False,
    ) -> None:
        """Report one layer's attention."""
        if query.shape[1] != site.num_heads:
            return
        query = query.detach()
        hidden, bias = split_mask(query > HIDDEN if key is None else mask)
        real = self.real_rows if hidden is not None or mask is not None else None
        if real is not None and real.shape != (query.shape[0], query.shape[2]):
            real = None  # a dual encoder's batch may hold the mask of the other tower
        view = AttentionView(
            layer=site.layer,
            query=query,
            key=None if key is None else key.detach(),
            scale=scale,
            hidden=hidden,
            bias=bias,
            causal=causal and query.shape[2] > 1,
            real_rows=None if real is None else real.to(query.device),
        )
        self.seen.add(site.layer)
        with torch.no_grad():
            self.observer(view)

    def check(self) -> None:
        """Raise when a layer's attention was not seen in the last forward pass."""
        missing = [s.layer for s in self.host.sites if s.num_heads and s.layer not in self.seen]
        if missing:
            kind = type(self.host.sites[missing[0]].module).__name__
            raise UnsupportedModelError(
                f"The attention of layer {missing[0]} of {self.host.name} ({kind}) was not seen: "
                "it calls neither a registered attention function, nor "
                "F.scaled_dot_product_attention, nor a softmax over [batch, heads, rows, keys]. "
                "Attention entropy needs one of them; his, taylor, fisher and magnitude do not."
            )


@contextmanager
def watch_attention(host: HostModel, observer: Observer) -> Iterator[Watch]:
    """Call `observer` with every layer's `AttentionView` while the model runs.

    Call `attention_mask` of the result before, and `check` after each forward pass.
    """
    watch = Watch(host, observer)
    with ExitStack() as stack:
        named = [site for site in host.sites if _interface(site.module) is not None]
        others = [site for site in host.sites if _interface(site.module) is None]
        if named:
            stack.enter_context(_wrapped_functions(watch, named))
        if others:
            stack.enter_context(opened([site.module for site in others]))
            mode = stack.enter_context(_FunctionWatch(watch))
            for site in others:
                for handle in mode.follow(site):
                    stack.callback(handle.remove)
        yield watch


def _interface(module: nn.Module) -> Any:
    """Return the table of attention functions that a Hugging Face module reads, or None."""
    table = getattr(sys.modules.get(type(module).__module__), "ALL_ATTENTION_FUNCTIONS", None)
    named = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if named == "eager" and not hasattr(table, "get_interface"):
        return None  # transformers 4 calls it without the table: its softmax is seen instead
    return table if table is not None and isinstance(named, str) else None


@contextmanager
def _wrapped_functions(watch: Watch, sites: list[AttentionSite]) -> Iterator[None]:
    by_module = {id(site.module): site for site in sites}
    with ExitStack() as stack:
        tables = {}
        for site in sites:
            table = _interface(site.module)
            config: Any = site.module.config
            tables[id(table), config._attn_implementation] = table
        for (_, name), table in tables.items():
            local = table._local_mapping  # an override here leaves the library-wide table alone
            before = local.get(name)
            # "eager" is in no table: each module falls back on its own file's function
            inner = table.get(name)
            table[name] = _wrapper(watch, by_module, name, inner)
            if before is None:
                stack.callback(table.__delitem__, name)
            else:
                stack.callback(table.__setitem__, name, before)
        yield


def _wrapper(
    watch: Watch, by_module: dict[int, AttentionSite], name: str, inner: Any
) -> Callable[..., Any]:
    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any
    ) -> Any:
        mask = args[0] if args else options.pop("attention_mask", None)
        function = inner or sys.modules[type(module).__module__].eager_attention_forward
        site = by_module.get(id(module))
        if site is not None:
            for change in ("softcap", "s_aux"):
                if options.get(change) is not None:
                    raise UnsupportedModelError(
                        f"{type(module).__name__} changes its attention scores ({change}), so its "
                        "entropy is not computed. Use his, taylor, fisher or magnitude."
                    )
            causal = options.get("is_causal")
            causal = bool(getattr(module, "is_causal", True) if causal is None else causal)
            window = options.get("sliding_window") if "flash" in name else None
            seen, hides_all = _dense(mask, query, key, options.get("position_bias"))
            if window is not None and window < key.shape[2]:
                near = _near(query, key, window, causal)
                seen = near if seen is None else seen & near
            watch.see(
                site,
                query,
                key,
                mask=seen,
                scale=float(options.get("scaling") or query.shape[-1] ** -0.5),
                # eager hides by its mask only, as does every backend that is given a full one
                causal=causal and name != "eager" and not hides_all,
            )
        return function(module, query, key, value, mask, **options)

    return attend


def _dense(
    mask: Any, query: Tensor, key: Tensor, bias: Tensor | None = None
) -> tuple[Tensor | None, bool]:
    """Return what a backend hides as a tensor, and whether later keys are hidden by it already."""
    if mask is not None and not isinstance(mask, Tensor):  # a BlockMask of flex attention
        from torch.nn.attention.flex_attention import create_mask

        rows, keys, device = query.shape[2], key.shape[2], query.device
        batch, heads = mask.shape[:2]
        return create_mask(mask.mask_mod, batch, heads, rows, keys, device=str(device)), True
    if mask is not None and mask.dim() == 2:  # flash attention: [batch, keys], 1 = real
        return mask.bool()[:, None, None, :], False
    if bias is None:
        return mask, mask is not None
    if mask is not None and not mask.is_floating_point():
        mask = torch.zeros_like(mask, dtype=bias.dtype).masked_fill(~mask, float("-inf"))
    return (bias if mask is None else bias + mask), mask is not None


def _near(query: Tensor, key: Tensor, window: int, causal: bool) -> Tensor:
    """Return which keys flash attention's sliding window shows, bool [1, 1, rows, keys]."""
    every = query.new_ones(1, 1, query.shape[2], key.shape[2], dtype=torch.bool)
    return every.triu(1 - window) if causal else every.triu(1 - window) & every.tril(window - 1)


class _FunctionWatch(TorchFunctionMode):
    """Sees attention and softmax calls that are made inside an attention module."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch
        self.site: AttentionSite | None = None

    def follow(self, site: AttentionSite) -> list[Any]:
        """Note when the module of a site runs."""

        def enter(*_: Any) -> None:
            self.site = site

        def leave(*_: Any) -> None:
            self.site = None

        module = site.module
        return [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.site is not None:
            if func is F.scaled_dot_product_attention:
                self._attention(self.site, *args, **kwargs)
            elif func in (torch.softmax, Tensor.softmax, F.softmax):
                dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
                if args[0].dim() == 4 and dim in (-1, 3):
                    self.watch.see(self.site, args[0], None)
        return func(*args, **kwargs)

    def _attention(
        self,
        site: AttentionSite,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> None:
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        self.watch.see(site, query, key, mask=attn_mask, scale=float(scale), causal=is_causal)
