"""Tiny models of timm (one of every kind of attention), torchvision and open_clip."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FLAT: dict[str, Any] = {
    "num_classes": 5,
    "img_size": 32,
    "patch_size": 8,
    "embed_dim": 32,
    "depth": 3,
    "num_heads": 4,
}
"""Arguments of a plain Vision Transformer; those that a constructor does not take are left out."""

_STAGES = {"num_classes": 5, "img_size": 64}
PLAIN = (
    "vit_tiny_patch16_224",
    "vit_base_patch16_gap_224",
    "vit_medium_patch16_reg1_gap_256",
    "vit_small_patch14_reg4_dinov2",
    "vit_base_patch16_siglip_224",
    "vit_base_patch16_siglip_gap_224",
    "vit_base_patch32_clip_quickgelu_224",
    "vit_base_patch16_clip_224",
    "aimv2_large_patch14_224",
    "vit_small_patch16_18x2_224",
    "vit_so150m_patch16_reg4_gap_256",
    "vit_base_patch14_reg1_tipsv2",
    "vit_base_patch16_rpn_224",
    "vit_huge_patch14_gap_224",
    "flexivit_small",
    "vit_base_patch16_plus_240",
    "deit_tiny_distilled_patch16_224",
    "deit3_small_patch16_224",
    "beit_base_patch16_224",
    "beitv2_base_patch16_224",
    "cait_xxs24_224",
    "convit_tiny",
    "eva02_tiny_patch14_224",
    "eva02_base_patch16_clip_224",
    "eva_large_patch14_196",
    "vit_small_patch16_dinov3",
    "vit_base_patch16_rope_224",
    "vit_base_patch16_rope_mixed_224",
    "vit_betwixt_patch16_rope_reg4_gap_256",
    "vit_pe_core_tiny_patch16_384",
    "vit_pe_spatial_tiny_patch16_512",
    "vit_pe_lang_large_patch14_448",
    "vit_small_patch16_rope_ape_224",
    "vit_relpos_small_patch16_224",
    "vit_srelpos_small_patch16_224",
    "vit_relpos_base_patch16_cls_224",
    "samvit_base_patch16_224",
    "deepseek_vit_412m",
    "qwen3_vit_88m",
    "gemma4_vit_167m",
    "naflexvit_base_patch16_gap",
    "naflexvit_base_patch16_siglip",
    "naflexvit_base_patch16_par_gap",
    "xcit_nano_12_p16_224",
    "xcit_tiny_12_p8_224",
    "tnt_s_patch16_224",
)

STAGED: dict[str, dict[str, Any]] = {
    "swin_tiny_patch4_window7_224": {
        "img_size": 32,
        "window_size": 2,
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
    },
    "swinv2_tiny_window8_256": {
        "img_size": 32,
        "window_size": 2,
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
    },
    "swinv2_cr_tiny_224": {
        "img_size": 64,
        "window_size": 4,
        "embed_dim": 16,
        "depths": (2, 2),
        "num_heads": (2, 4),
    },
    "davit_tiny": {"embed_dims": (16, 32), "depths": (1, 2), "num_heads": (2, 4)},
    "hiera_tiny_224": {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 2, 1)},
    "sam2_hiera_tiny": {"embed_dim": 16, "stages": (1, 1, 2, 1), "num_classes": 5},
    "mvitv2_tiny": {"embed_dim": 16, "depths": (1, 1, 1, 1), "num_heads": 1},
    "pit_ti_224": {"base_dims": (16, 16, 16), "depth": (1, 1, 2), "heads": (1, 2, 4)},
    "pvt_v2_b0": {"embed_dims": (8, 16, 20, 32), "depths": (1, 1, 1, 2)},
    "twins_svt_small": {"embed_dims": (16, 16, 16, 32), "depths": (1, 1, 1, 2)},
    "twins_pcpvt_small": {"embed_dims": (16, 16, 20, 32), "depths": (1, 1, 1, 2)},
    "levit_128s": {"img_size": 64},
    "tiny_vit_5m_224": {
        "embed_dims": (16, 16, 32, 32),
        "depths": (1, 1, 2, 1),
        "num_heads": (2, 2, 4, 4),
        "img_size": 64,
    },
    "crossvit_9_240": {"img_size": 240},
    "coat_lite_tiny": {"img_size": 64, "embed_dims": (16, 16, 16, 32)},
    "volo_d1_224": {"img_size": 64, "layers": (1, 1, 1, 1), "embed_dims": (16, 32, 32, 32)},
    "nest_tiny": {"img_size": 64, "embed_dims": (16, 16, 32), "depths": (1, 1, 2)},
    "gcvit_xxtiny": {"img_size": 224, "depths": (1, 1, 2, 1)},
    "visformer_tiny": {"img_size": 64},
    "caformer_s18": {"dims": (8, 16, 16, 32), "depths": (1, 1, 2, 1)},
    "coatnet_nano_rw_224": {"img_size": 64},
    "maxvit_rmlp_pico_rw_256": {"img_size": 256},
    "edgenext_xx_small": {},
    "efficientformer_l1": {},
    "efficientformerv2_s0": {},
    "efficientvit_b0": {},
    "efficientvit_m0": {},
    "mobilevit_xxs": {},
    "mobilevitv2_050": {},
    "fastvit_sa12": {},
    "nextvit_small": {},
    "repvit_m0_9": {},
    "shvit_s1": {},
    "swiftformer_xs": {},
    "iformer_t": {},
    "lowformer_b0": {},
    "csatv2": {"img_size": 512},
    "vitamin_small_224": {"img_size": 64, "depth": 3},
    "vit_small_r26_s32_224": {"img_size": 64, "depth": 3},
    "focalnet_tiny_srf": {"embed_dim": 16, "depths": (1, 1, 2, 1)},
    "botnet26t_256": {"img_size": 128},
    "resnet18": {},
    "convnext_atto": {},
    "mixer_s32_224": {"img_size": 64, "depth": 3},
}

_UNKNOWN = re.compile(
    r"unexpected keyword argument(?:\(s\): \[)? ?'(\w+)'|multiple values for .*'(\w+)'"
)


def cases() -> dict[str, tuple[str, str]]:
    """Return `name -> (library, model name)`."""
    found = {f"timm/{name}": ("timm", name) for name in (*PLAIN, *STAGED)}
    found |= {f"torchvision/{name}": ("torchvision", name) for name in TORCHVISION}
    return found | {f"open_clip/{name}": ("open_clip", name) for name in OPEN_CLIP}


def build(library: str, name: str) -> tuple[nn.Module, tuple[int, int]]:
    """Build one tiny model; return it with the height and width of its images."""
    if library == "torchvision":
        return TORCHVISION[name](), (32, 32)
    if library == "open_clip":
        return OPEN_CLIP[name](), (32, 32)
    return _timm(name)


def _timm(name: str) -> tuple[nn.Module, tuple[int, int]]:
    import timm

    asked = {**_STAGES, **STAGED[name]} if name in STAGED else dict(FLAT)
    wanted = asked.get("img_size", 64)
    while True:
        try:
            model = timm.create_model(name, **asked)
            break
        except TypeError as error:
            found = _UNKNOWN.search(str(error))
            unknown = found and (found[1] or found[2])
            if not unknown or asked.pop(unknown, None) is None:
                raise
    patch = getattr(model, "patch_embed", None)
    size = getattr(patch, "img_size", None) or wanted
    return model, (size, size) if isinstance(size, int) else tuple(size)


def images(size: tuple[int, int], seed: int = 0) -> Tensor:
    """Make three images."""
    return torch.randn(3, 3, *size, generator=torch.Generator().manual_seed(seed))


def _torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(32, 8, 3, 4, 32, 48, num_classes=5)


def _torchvision_swin() -> nn.Module:
    from torchvision.models import SwinTransformer

    return SwinTransformer([4, 4], 16, [2, 2], [2, 4], [2, 2], num_classes=5)


def _torchvision_maxvit() -> nn.Module:
    from torchvision.models import MaxVit

    return MaxVit((32, 32), 8, 4, [8, 8], [1, 1], 4, 0.0, num_classes=5)


def _open_clip(**more: Any) -> nn.Module:
    import open_clip

    import hydra_ensembles as hydra

    vision = {"layers": 3, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}
    text = {"context_length": 9, "vocab_size": 99, "width": 32, "heads": 4, "layers": 2}
    model = open_clip.CLIP(embed_dim=16, vision_cfg={**vision, **more}, text_cfg=text)

    def words(texts: list[str]) -> Tensor:
        rows = [[1, *(3 + ord(w[0]) % 90 for w in t.split()), 98] for t in texts]
        return torch.tensor([(row + [0] * 9)[:9] for row in rows])

    names = ["cat", "dog", "bird", "fish", "old horse"]
    return hydra.ZeroShotClassifier(model.eval(), names, ["a {}."], words)


TORCHVISION: dict[str, Callable[[], nn.Module]] = {
    "VisionTransformer": _torchvision_vit,
    "SwinTransformer": _torchvision_swin,
    "MaxVit": _torchvision_maxvit,
}
OPEN_CLIP: dict[str, Callable[[], nn.Module]] = {
    "CLIP": _open_clip,
    "CLIP-avg-pool": lambda: _open_clip(pool_type="avg"),
    "CLIP-layer-scale": lambda: _open_clip(ls_init_value=0.3),
    "CLIP-attentional-pool": lambda: _open_clip(attentional_pool=True, attn_pooler_heads=4),
}
