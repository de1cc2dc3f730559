"""Small inputs that a model takes, made from its config and its modules."""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..data.eval_mode import in_eval
from ..data.model_runs import device_of
from .block_calls import Inputs


def examples(model: nn.Module) -> list[Inputs]:
    """Make a few small inputs that differ, or none when we do not know what the model takes.

    Texts come without padding, reversed, and padded where the model knows its padding token.
    """
    device = device_of(model)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    main = getattr(model, "main_input_name", None)
    reads_text = main == "input_ids"
    if main in ("input_values", "input_features", "pixel_values_videos") or _frames(model):
        return [((), inputs) for inputs in _sounds_and_videos(model, str(main), device, dtype)]
    patches = _loose_patches(model)
    if patches is not None:
        return [((), patches)]
    size = None if reads_text else image_size(model)
    if size is not None:
        generator = torch.Generator().manual_seed(0)
        images = [torch.rand(2, *size, generator=generator).to(device, dtype) for _ in range(2)]
        if getattr(model, "main_input_name", None) == "pixel_values":
            return [((), {"pixel_values": image}) for image in images]
        return [((image,), {}) for image in images]
    config = text_config(model)
    vocabulary = getattr(config, "vocab_size", None)
    if isinstance(vocabulary, int) and vocabulary > 16:
        texts = _texts(config, device)
        if "MultipleChoice" in type(model).__name__:  # [batch, choice, token]
            chosen = [
                {n: v[:, None].repeat(1, 2, 1) for n, v in given.items()} for _, given in texts
            ]
            return [((), given) for given in chosen]
        return texts
    return []


def text_config(model: nn.Module) -> Any:
    """Return the config that describes a model's text part, where it has one."""
    config = getattr(model, "config", None)
    get = getattr(config, "get_text_config", None)
    return config if get is None else get()


def pad_token(model: nn.Module) -> int | None:
    """Return the token that pads a model's texts, where its config names it."""
    token = getattr(text_config(model), "pad_token_id", None)
    return token if isinstance(token, int) and token >= 0 else None


def _texts(config: Any, device: torch.device | None) -> list[Inputs]:
    special: set[int | None] = set()
    for name in ("pad", "eos", "bos"):
        token = getattr(config, f"{name}_token_id", None)
        special.update(token if isinstance(token, list) else [token])  # GLM has several ends
    tokens = range(2, min(40, config.vocab_size))
    usable = [token for token in tokens if token not in special][:12]
    rising = torch.tensor(usable, device=device).repeat(2, 1)
    rows = [rising, rising.flip(1), rising.roll(5, 1)]
    padding = getattr(config, "pad_token_id", None)
    if padding is None:  # a decoder without padding takes one text at a time
        return [((), _tokens(ids[:1])) for ids in rows]
    padded = rising.clone()
    padded[1, 9:] = padding
    mask = torch.ones_like(padded)
    mask[1, 9:] = 0
    if getattr(config, "is_encoder_decoder", False):  # it reads the end-of-text token of each row
        for ids in rows:
            ids[:, -1] = config.eos_token_id
        padded[0, -1] = padded[1, 8] = config.eos_token_id
    inputs = [((), _tokens(ids)) for ids in rows]
    return [*inputs, ((), {"input_ids": padded, "attention_mask": mask})]


def _sounds_and_videos(
    model: Any, main: str, device: torch.device | None, dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """Make inputs of the shapes in the configs of speech and video models."""
    config = model.config
    shape: tuple[int, ...] | None = None
    bands = getattr(config, "num_mel_bins", None)
    if main == "input_features" and getattr(config, "max_source_positions", None) and bands:
        shape = (bands, 2 * config.max_source_positions)  # Whisper takes a fixed length
    if main == "input_features" and hasattr(config, "feature_projection_input_dim"):
        shape = (16, config.feature_projection_input_dim)
    if main == "input_values" and hasattr(config, "time_stride") and bands:
        shape = (config.max_length, bands)  # a spectrogram
    elif main == "input_values" and hasattr(config, "conv_stride"):
        shape = (400 + 12 * math.prod(config.conv_stride),)
    frames = _frames(model)
    if frames:
        size = _pair(getattr(config, "image_size", getattr(config, "crop_size", 32)))
        channels = getattr(config, "num_channels", getattr(config, "in_chans", 3))
        shape = (frames, channels, *size)
    if shape is None:
        return []
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(2, *shape, generator=generator).to(device, dtype) for _ in range(2)]
    return [{main: values} for values in made]


def _frames(model: nn.Module) -> int | None:
    """Return how many frames a video classifier takes, or None for other models."""
    config = getattr(model, "config", None)
    if not type(model).__name__.endswith("ForVideoClassification"):
        return None
    return getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)


def _loose_patches(model: nn.Module) -> dict[str, Tensor] | None:
    """Make patches with their places for models that take images of any shape (SigLIP 2)."""
    towers = (m for m in model.modules() if type(m).__name__.startswith("Siglip2"))
    config: Any = getattr(next(towers, None), "config", None)
    config = getattr(config, "vision_config", config)
    patches = getattr(config, "num_patches", None)
    if not isinstance(patches, int):
        return None
    side = math.isqrt(patches)
    device = device_of(model)
    generator = torch.Generator().manual_seed(0)
    width = config.num_channels * config.patch_size**2
    return {
        "pixel_values": torch.randn(2, side * side, width, generator=generator).to(device),
        "pixel_attention_mask": torch.ones(2, side * side, dtype=torch.long, device=device),
        "spatial_shapes": torch.tensor([[side, side]] * 2, device=device),
    }


def _tokens(ids: Tensor) -> dict[str, Tensor]:
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def example_batch(model: nn.Module, *, tokens: int = 128) -> tuple[Any, str]:
    """Make one input of the usual size, for counting; say what it is."""
    args, kwargs = next(iter(examples(model)))
    if "input_ids" in kwargs:
        longest = getattr(text_config(model), "max_position_embeddings", tokens)
        count, first = max(1, min(tokens, longest - 2)), kwargs["input_ids"][:1, ..., :1]
        ids = first.expand(*first.shape[:-1], count)
        return {"input_ids": ids}, f"{ids.shape[-1]} tokens"
    if len(kwargs) > 1:  # patches with their places
        one = {name: value[:1] for name, value in kwargs.items()}
        return one, f"{one['pixel_values'].shape[1]} patches"
    (image,) = args or kwargs.values()
    what = f"{image.shape[-2]} x {image.shape[-1]} pixels"
    return ((image[:1],) if args else dict.fromkeys(kwargs, image[:1])), what


def image_size(model: nn.Module) -> tuple[int, int, int] | None:
    """Return channels, height and width of the images that a model takes, if known."""
    for module in model.modules():
        size = getattr(module, "img_size", None)  # timm's patch embedding
        if size is not None and module is not model:
            whole = [m for m in module.modules() if isinstance(m, nn.Conv2d)]
            if whole:  # the first one: a hybrid has a ResNet there
                return (whole[0].in_channels, *_pair(size))
        size = getattr(module, "image_size", None)  # open_clip's tower, Hugging Face's embeddings
        for name in ("conv1", "projection", "patch_embedding", "patch_embeddings"):
            projection = getattr(module, name, None)
            projection = getattr(projection, "projection", projection)
            if size is not None and isinstance(projection, nn.Conv2d):
                return (projection.in_channels, *_pair(size))
    config = getattr(model, "config", None)
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", None)
    if size is not None:
        return (getattr(config, "num_channels", 3), *_pair(size))
    timm = hasattr(model, "pretrained_cfg")
    wanted = (m for m in model.modules() if m._parameters and not (timm and m is model))
    first = next(wanted, None)
    if config is None and isinstance(first, nn.Conv2d):  # it starts with a convolution: any size
        return (first.in_channels, *_fixed_size(model, first.in_channels))
    if getattr(model, "main_input_name", None) == "pixel_values":  # its config names no size
        return (getattr(config, "num_channels", 3), 64, 64)
    return None


def _fixed_size(model: Any, channels: int) -> tuple[int, int]:
    """Return the size that a timm model without a patch embedding insists on, else a small one."""
    shape = getattr(model, "tokens_spatial_shape", None)
    stride = getattr(model, "patch_stride", None)
    if shape is not None and stride is not None:  # Hiera
        return (shape[0] * stride[0], shape[1] * stride[1])
    facts = getattr(model, "pretrained_cfg", None) or {}
    if not isinstance(facts, dict) or not facts.get("fixed_input_size"):
        return (64, 64)
    if model not in _takes_small:
        _takes_small[model] = _takes(model, channels)
    return (64, 64) if _takes_small[model] else _pair(facts["input_size"][1:])


_takes_small: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
"""Models that take small images though they are published with one size."""


@torch.no_grad()
def _takes(model: nn.Module, channels: int) -> bool:
    parameter = next(model.parameters())
    image = torch.zeros(1, channels, 64, 64, dtype=parameter.dtype, device=parameter.device)
    try:
        in_eval(model)(image)
    except Exception:  # windows or positions of another size
        return False
    return True


def _pair(size: Any) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[1]))
