"""Rebuild a host from plain data: by name from an allow-list, not by import path."""

from __future__ import annotations

from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from ..errors import FormatError
from ..registry import imported
from .mlp_site import neurons_before, remove_neurons_, removed_neurons
from .prompt_classifier import PromptClassifier
from .zero_shot import PooledTower, ZeroShotClassifier

TOWERS = frozenset(
    {
        "ViTModel",
        "DeiTModel",
        "DeiTForImageClassificationWithTeacher",
        "Dinov2Model",
        "CLIPVisionModel",
        "CLIPVisionModelWithProjection",
        "CLIPVisionTransformer",
        "CLIPTextModel",
        "CLIPTextModelWithProjection",
        "SiglipVisionModel",
        "SiglipVisionTransformer",
        "Siglip2VisionModel",
        "DINOv3ViTModel",
    }
)
"""Classes that are built by name, in addition to classifiers and language models."""

_TABLES = (
    *(f"{kind}_CLASSIFICATION" for kind in ("SEQUENCE", "TOKEN", "IMAGE", "AUDIO", "VIDEO")),
    *("CAUSAL_LM", "MASKED_LM", "QUESTION_ANSWERING", "MULTIPLE_CHOICE"),
)
_FETCHES = frozenset({"TimmWrapperForImageClassification"})
"""Classes whose config may name something to download."""

_TIMM_ARGUMENTS = frozenset({"num_classes", "global_pool", "img_size"})
"""What `_common_arguments` writes: no other argument of a folder is passed on."""

_PLAIN_TIMM = {
    "VisionTransformer": "timm.models.vision_transformer",
    "VisionTransformerDistilled": "timm.models.deit",
}
"""Classes of timm that their parts fully describe, and their modules."""

_WHO = "This model"
"""Who needs a package, in the error for one that is missing."""

_AROUND = ("zero-shot", "pooled-tower", "prompt")
"""Our own classes around a host: what is inside describes its neurons."""

_NAMES_CODE = frozenset(
    {
        "auto_map",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
    }
)
"""Keys of a transformers config that may name code on the hub (a kernel, a module)."""


def known_class(name: Any) -> bool:
    """Return whether a class of transformers may be built by name.

    The list is the library's own tables of base models, classifiers, question answering and
    language models: a saved folder can name nothing else.
    """
    named = isinstance(name, str) and (name in TOWERS or name in _classifiers())
    return named and name not in _FETCHES


@cache
def _classifiers() -> frozenset[str]:
    auto = imported("transformers.models.auto.modeling_auto", _WHO, "transformers")
    tables = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in _TABLES]
    classes: set[str] = set()
    for table in (*tables, "MODEL_MAPPING_NAMES"):
        for names in getattr(auto, table).values():
            classes.update((names,) if isinstance(names, str) else names)
    return frozenset(classes)


def library_versions(*more: str) -> dict[str, str]:
    """Return the installed versions of this library, of torch and of the host libraries.

    Args:
        *more: Names of other packages to include.
    """
    versions = {}
    for name in ("hydra-ensembles", "torch", "transformers", "timm", "open_clip_torch", *more):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def describe_host(model: Any) -> dict[str, Any]:
    """Return plain data from which `rebuild_host` builds the same architecture."""
    description = _describe(model)
    removed = [] if description["library"] in _AROUND else removed_neurons(model)
    return description | ({"neurons": removed} if removed else {})


def _describe(model: Any) -> dict[str, Any]:
    name = type(model).__name__
    root = type(model).__module__.split(".")[0]
    if isinstance(model, ZeroShotClassifier):
        embeddings: Any = model.text_embeddings
        negatives: Any = model.negative_embeddings
        return {
            "library": "zero-shot",
            "class": name,
            "class_names": model.class_names,
            "width": embeddings.shape[1],
            "negatives": None if negatives is None else list(negatives.shape[:2]),
            "tower": describe_host(model.image_tower),
        }
    if isinstance(model, PooledTower):
        weight: Any = getattr(model.projection, "weight", None)
        shape = None if weight is None else [weight.shape[1], weight.shape[0]]
        return {
            "library": "pooled-tower",
            "class": name,
            "projection": shape and [*shape, model.projection.bias is not None],
            "vision": describe_host(model.vision_model),
        }
    if isinstance(model, PromptClassifier):
        return {
            "library": "prompt",
            "class": name,
            "class_names": model.class_names,
            "template": model.template,
            "label_tokens": model.label_ids,
            "max_length": model.max_length,
            "model": describe_host(model.lm),
        }
    if root == "transformers" and known_class(name):
        config = model.config
        return {
            "library": "transformers",
            "class": name,
            "config": config.to_dict(),
            "attention": getattr(config, "_attn_implementation", None),
            "pooler": getattr(model, "pooler", None) is not None,
        }
    if root == "timm" and name in _PLAIN_TIMM:
        patches = type(model.patch_embed).__name__ == "PatchEmbed"  # a hybrid has a ResNet there
        if patches and hasattr(model.blocks[0].mlp, "fc1"):
            return {"library": "timm", "class": name, "arguments": _timm_arguments(model)}
    facts = getattr(model, "pretrained_cfg", None) or {}
    architecture = facts.get("architecture") if isinstance(facts, dict) else facts.architecture
    if root == "timm" and isinstance(architecture, str):
        return {
            "library": "timm-name",
            "class": name,
            "architecture": architecture,
            "arguments": _common_arguments(model),
        }
    if root == "open_clip" and name == "VisionTransformer":
        return {"library": "open_clip", "class": name, "arguments": _open_clip_arguments(model)}
    if root == "hydra_ensembles" and name == "TinyViT":
        return {"library": "hydra-ensembles", "class": name, "shape": model.shape.to_dict()}
    return {"library": "custom", "class": name}


def rebuild_host(description: dict[str, Any]) -> nn.Module:
    """Build a host of the described architecture; its weights are arbitrary."""
    model = _rebuild(description)
    remove_neurons_(model, description.get("neurons", ()))
    return model


def _rebuild(description: dict[str, Any]) -> nn.Module:
    library, name = description.get("library"), description.get("class")
    if library == "zero-shot":
        width, negatives = description["width"], description["negatives"]
        return ZeroShotClassifier.from_parts(
            rebuild_host(description["tower"]),
            torch.zeros(len(description["class_names"]), width),
            torch.ones(()),
            list(description["class_names"]),
            None if negatives is None else torch.zeros(*negatives, width),
        )
    if library == "pooled-tower":
        projection: nn.Module = nn.Identity()
        if description["projection"] is not None:
            inputs, outputs, bias = description["projection"]
            projection = nn.Linear(inputs, outputs, bias=bias)
        return PooledTower(rebuild_host(description["vision"]), projection)
    if library == "prompt":
        return PromptClassifier.from_parts(
            rebuild_host(description["model"]),
            list(description["class_names"]),
            description["template"],
            description["label_tokens"],
            max_length=description["max_length"],
        )
    if library == "transformers":
        if not known_class(name):
            raise FormatError(
                f"The folder names the host class {name!r}, which is not on the list of classes "
                "that are built by name. Pass the model yourself: from_pretrained(..., host=model)."
            )
        # transformers 4 wraps a dual encoder's tower once more, and exports the wrapper only
        package, outer = imported("transformers", _WHO, "transformers"), str(name)
        if not hasattr(package, outer):
            outer = outer.replace("VisionTransformer", "VisionModel")
        cls = getattr(package, outer)
        config = cls.config_class.from_dict(_without_code(description["config"]))
        if description.get("attention") in ("eager", "sdpa"):
            config._attn_implementation = description["attention"]
        pooler = {"add_pooling_layer": description.get("pooler", True)}
        model = cls(config, **pooler if name in ("ViTModel", "DeiTModel") else {}).eval()
        return model if outer == name else getattr(model, "vision_model", model)
    if library == "timm":
        if name not in _PLAIN_TIMM:
            raise FormatError(f"Unknown timm class {name!r}: pass host= to from_pretrained.")
        kind = getattr(imported(_PLAIN_TIMM[name], _WHO, "timm"), name)
        return kind(**_with_layers(description["arguments"]))
    if library == "timm-name":
        timm = imported("timm", _WHO, "timm")
        architecture = description["architecture"]
        if not timm.is_model(architecture):
            raise FormatError(
                f"The installed timm has no model {architecture!r}. Install the version that the "
                "folder names, or pass host= to from_pretrained."
            )
        arguments = description["arguments"]
        if unknown := set(arguments) - _TIMM_ARGUMENTS:  # checkpoint_path would be read
            raise FormatError(
                f"The folder gives timm the arguments {', '.join(sorted(unknown))}, which are not "
                f"among {', '.join(sorted(_TIMM_ARGUMENTS))}. Save or download it again."
            )
        return timm.create_model(architecture, pretrained=False, **arguments)
    if library == "open_clip":
        transformer = imported("open_clip.transformer", _WHO, "openclip")
        arguments = dict(description["arguments"])
        if arguments.pop("quick_gelu"):
            arguments["act_layer"] = transformer.QuickGELU
        return transformer.VisionTransformer(**arguments)
    if library == "hydra-ensembles" and name == "TinyViT":
        tiny_vit = imported("hydra_ensembles.hosts.tiny_vit", _WHO, "all")
        return tiny_vit.TinyViT(tiny_vit.TinyViTConfig(**description["shape"]))
    raise FormatError(
        f"The host {name!r} is not of a library that we know: pass a model of the same "
        "architecture, from_pretrained(..., host=model)."
    )


_DEPTHS = frozenset({"num_hidden_layers", "n_layers", "n_layer", "num_layers", "depth", "layers"})


_NO_SIZES = ("theta", "_base", "factor", "_token_id", "_token_index")
"""Suffixes of settings that are not sizes, however large (e.g. rotary frequencies)."""

_LENGTHS = ("position_embeddings", "n_positions", "max_seq_len", "max_length", "sliding_window")
"""Suffixes of settings that are maximum lengths."""


def check_sizes(description: Any, *, layers: int, largest: int, key: str = "host") -> None:
    """Raise for a description with sizes that its weights cannot have, before it is built.

    Args:
        description: What `describe_host` returned, or a part of it.
        layers: Layers of the ensemble; another tower may have up to a few hundred.
        largest: The largest dimension of any of its tensors.
        key: Name of the part.
    """
    if isinstance(description, dict):
        for name, value in description.items():
            check_sizes(value, layers=layers, largest=largest, key=str(name))
    elif isinstance(description, list):
        for value in description:
            check_sizes(value, layers=layers, largest=largest, key=key)
    elif isinstance(description, (int, float)) and not isinstance(description, bool):
        if key.endswith(_NO_SIZES):
            return
        bound = max(layers, 512) if key in _DEPTHS else max(largest, 2**16)
        if key.endswith(_LENGTHS):  # rotary positions have no weights
            bound = max(bound, 2**24)
        if not abs(description) <= bound:  # NaN too
            raise FormatError(
                f"The folder describes a host with {key} = {description:.6g}, which its weights "
                f"do not have (at most {bound}). Save or download it again."
            )


def _without_code(config: Any) -> Any:
    """Remove keys that may name remote code from a config and its nested configs."""
    if isinstance(config, dict):
        kept = {key: value for key, value in config.items() if key not in _NAMES_CODE}
        return {key: _without_code(value) for key, value in kept.items()}
    return [_without_code(value) for value in config] if isinstance(config, list) else config


def _timm_arguments(model: Any) -> dict[str, Any]:
    """Read a timm Vision Transformer's arguments from its parts."""
    block = model.blocks[0]
    inner = block.mlp
    patch = model.patch_embed
    return {
        "img_size": list(patch.img_size),
        "patch_size": list(patch.patch_size),
        "in_chans": patch.proj.in_channels,
        "num_classes": model.num_classes,
        "global_pool": model.global_pool,
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "num_heads": model.embed_dim // block.attn.head_dim,
        "mlp_ratio": neurons_before(inner.fc2, inner.fc1.out_features) / model.embed_dim,
        "qkv_bias": block.attn.qkv.bias is not None,
        "qk_norm": not isinstance(block.attn.q_norm, nn.Identity),
        "init_values": None if isinstance(block.ls1, nn.Identity) else 1e-5,
        "class_token": getattr(model, "has_class_token", model.cls_token is not None),
        "no_embed_class": model.no_embed_class,
        "reg_tokens": getattr(model, "num_reg_tokens", 0),
        "pre_norm": not isinstance(model.norm_pre, nn.Identity),
        "fc_norm": not isinstance(model.fc_norm, nn.Identity),
        "dynamic_img_size": model.dynamic_img_size,
        "pool_include_prefix": getattr(model, "pool_include_prefix", False),
        "norm_eps": block.norm1.eps,
        "activation": type(inner.act).__name__,
    }


def _common_arguments(model: Any) -> dict[str, Any]:
    """Read the arguments that all timm models with these attributes take."""
    arguments: dict[str, Any] = {"num_classes": model.num_classes}
    if isinstance(getattr(model, "global_pool", None), str):
        arguments["global_pool"] = model.global_pool
    size = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if size is not None:
        arguments["img_size"] = list(size)
    return arguments


def _with_layers(arguments: dict[str, Any]) -> dict[str, Any]:
    """Turn plain arguments into timm's: a norm of the right epsilon, a known activation."""
    layers = imported("timm.layers", _WHO, "timm")
    known = {"GELU": nn.GELU, "QuickGELU": layers.QuickGELU, "SiLU": nn.SiLU, "ReLU": nn.ReLU}
    result = dict(arguments)
    epsilon, activation = result.pop("norm_eps"), result.pop("activation")
    if activation not in known:
        raise FormatError(f"Unknown activation {activation!r}: pass host= to from_pretrained.")
    return {
        **result,
        "img_size": tuple(result["img_size"]),
        "patch_size": tuple(result["patch_size"]),
        "norm_layer": partial(layers.LayerNorm, eps=epsilon),
        "act_layer": known[activation],
        "weight_init": "skip",
    }


def _open_clip_arguments(model: Any) -> dict[str, Any]:
    block = model.transformer.resblocks[0]
    width = model.transformer.width
    return {
        "image_size": list(model.image_size),
        "patch_size": list(model.patch_size),
        "width": width,
        "layers": len(model.transformer.resblocks),
        "heads": width // block.attn.head_dim,
        "mlp_ratio": neurons_before(block.mlp.c_proj, block.mlp.c_fc.out_features) / width,
        "ls_init_value": None if isinstance(block.ls_1, nn.Identity) else 1e-5,
        "output_dim": model.output_dim,
        "no_ln_pre": isinstance(model.ln_pre, nn.Identity),
        "pool_type": model.pool_type,
        "final_ln_after_pool": model.final_ln_after_pool,
        "quick_gelu": type(block.mlp.gelu).__name__ == "QuickGELU",
    }
