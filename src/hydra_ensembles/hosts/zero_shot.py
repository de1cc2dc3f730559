"""A CLIP-like dual encoder as an ordinary image classifier: its image tower is the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import UnsupportedModelError
from .negative_labels import common_nouns, log_share, negative_embeddings

DEFAULT_TEMPLATES = ("a photo of a {}.",)


@dataclass
class ZeroShotOutput:
    """What a `ZeroShotClassifier` returns.

    Attributes:
        logits: Scaled cosines [batch, class]; with negative labels, less a number per image.
        image_embeds: Normalised image embeddings [batch, width].
        loss: Cross-entropy, when labels were given.
    """

    logits: Tensor
    image_embeds: Tensor | None = None
    loss: Tensor | None = None


class PooledTower(nn.Module):
    """A vision model, its pooled output (else its class token) and a projection."""

    def __init__(self, vision_model: nn.Module, projection: nn.Module) -> None:
        super().__init__()
        self.vision_model = vision_model
        self.projection = projection

    def forward(
        self,
        pixel_values: Tensor,
        pixel_attention_mask: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
    ) -> Tensor:
        """Embed images: [batch, channels, height, width] (SigLIP 2: patches) to [batch, width]."""
        if spatial_shapes is None:
            output = self.vision_model(pixel_values)
        else:
            output = self.vision_model(pixel_values, pixel_attention_mask, spatial_shapes)
        if isinstance(output, Tensor):  # a timm tower without a head
            pooled = output[:, 0] if output.dim() == 3 else output
        else:
            pooler = getattr(output, "pooler_output", None)
            pooled = output.last_hidden_state[:, 0] if pooler is None else pooler
        return self.projection(pooled)


class ZeroShotClassifier(nn.Module):
    """Classify images by the nearest class name, with a dual encoder.

    The text embeddings are computed once, here; the text tower is not kept. `logits` are scaled
    cosines, exp(logit_scale) * cos(image, class); every function of this library takes the result
    as a host whose image tower can be pruned.

    Args:
        dual_encoder: Hugging Face `CLIPModel`, `SiglipModel`, `Siglip2Model`,
            `VisionTextDualEncoderModel` or an open_clip model. (SigLIP's sigmoid becomes a softmax
            over the classes; its logit bias is the same for all of them.)
        class_names: One name per class.
        templates: Prompts with a `{}` for the name; embeddings are averaged over them.
        tokenizer: Texts to the text tower's inputs.
        encode_text: Embeds a list of texts, [texts, width] (e.g. by a masked mean).
        batch_size: Texts embedded at once.
        negatives: Words that name none of the classes (see `negative_labels.py`), or True for a
            list of common nouns: the least similar half of them becomes negative labels. A number
            per image is then taken from its logits, so that the exponentials of its logits add up
            to the share that the classes have beside the negative labels. The score `neglabel`
            reads it, and so does `energy`; probabilities stay.

    Example:
        >>> host = ZeroShotClassifier(clip, ["cat", "dog"], ["a photo of a {}."], tokenizer)
        >>> host(pixel_values).logits
    """

    main_input_name = "pixel_values"

    def __init__(
        self,
        dual_encoder: nn.Module,
        class_names: Sequence[str],
        templates: Sequence[str] = DEFAULT_TEMPLATES,
        tokenizer: Callable[..., Any] | None = None,
        *,
        encode_text: Callable[[list[str]], Tensor] | None = None,
        batch_size: int = 256,
        negatives: bool | Sequence[str] = False,
    ) -> None:
        super().__init__()
        if not class_names:
            raise ValueError("class_names is empty: give one name per class.")
        encode = encode_text or _text_encoder(dual_encoder, tokenizer)

        def embed(names: list[str]) -> Tensor:
            return _class_embeddings(encode, names, list(templates), batch_size)

        embeddings, others = embed(list(class_names)), None
        if negatives is not False:
            words = common_nouns() if negatives is True else negatives
            others = negative_embeddings(words, class_names, embeddings, embed)
        device = next(dual_encoder.parameters()).device
        self._set_up(
            _image_tower(dual_encoder),
            embeddings.to(device),
            dual_encoder.logit_scale.detach().exp(),  # type: ignore[operator]
            list(class_names),
            None if others is None else others.to(device),
        )

    def _set_up(
        self,
        tower: nn.Module,
        embeddings: Tensor,
        scale: Tensor,
        names: list[str],
        negatives: Tensor | None,
    ) -> None:
        self.image_tower = tower
        self.class_names = names
        self.register_buffer("text_embeddings", embeddings)
        self.register_buffer("negative_embeddings", negatives)
        self.register_buffer("logit_scale", scale.clone())

    @classmethod
    def from_parts(
        cls,
        image_tower: nn.Module,
        text_embeddings: Tensor,
        scale: Tensor,
        class_names: list[str],
        negative_embeddings: Tensor | None = None,
    ) -> ZeroShotClassifier:
        """Make a classifier from an image tower and precomputed embeddings.

        Args:
            image_tower: Embeds images.
            text_embeddings: Of the class names, `[class, width]`.
            scale: What multiplies the cosines.
            class_names: One name per class.
            negative_embeddings: Of negative labels by group, `[group, word, width]`.
        """
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._set_up(image_tower, text_embeddings, scale, class_names, negative_embeddings)
        return self

    @property
    def id2label(self) -> dict[int, str]:
        """Class index to name."""
        return dict(enumerate(self.class_names))

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        pixel_attention_mask: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
    ) -> ZeroShotOutput:
        """Return scaled cosines [batch, class]; the last two inputs are SigLIP 2's."""
        places = () if spatial_shapes is None else (pixel_attention_mask, spatial_shapes)
        images = F.normalize(self.image_tower(pixel_values, *places), dim=-1)
        scaled: Tensor = self.logit_scale * images  # type: ignore[operator]
        logits = scaled @ self.text_embeddings.t()  # type: ignore[operator]
        if self.negative_embeddings is not None:
            groups: Tensor = self.negative_embeddings  # type: ignore[assignment]
            others = (scaled @ groups.flatten(0, 1).t()).unflatten(-1, groups.shape[:2])
            logits = logits.log_softmax(-1) + log_share(logits, others)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return ZeroShotOutput(logits=logits, image_embeds=images, loss=loss)


def _image_tower(dual_encoder: nn.Module) -> nn.Module:
    visual = getattr(dual_encoder, "visual", None)  # open_clip: its projection is inside
    if isinstance(visual, nn.Module):
        return visual
    vision, projection = (
        getattr(dual_encoder, name, None) for name in ("vision_model", "visual_projection")
    )
    if isinstance(vision, nn.Module) and isinstance(projection, nn.Module):
        return PooledTower(vision, projection)
    if isinstance(vision, nn.Module) and type(dual_encoder).__name__.startswith("Siglip"):
        return PooledTower(vision, nn.Identity())  # its pooled output is the embedding
    raise UnsupportedModelError(
        f"{type(dual_encoder).__name__} is not a dual encoder that we know: expected .vision_model "
        "and .visual_projection (Hugging Face) or .visual (open_clip)."
    )


def _text_encoder(
    dual_encoder: Any, tokenizer: Callable[..., Any] | None
) -> Callable[[list[str]], Tensor]:
    if tokenizer is None:
        raise ValueError("A tokenizer (or encode_text=) is needed to embed the class names.")
    device = next(dual_encoder.parameters()).device

    def encode(texts: list[str]) -> Tensor:
        if hasattr(dual_encoder, "encode_text"):
            return dual_encoder.encode_text(tokenizer(texts).to(device))
        # SigLIP was trained on texts of full length without a mask, and reads the last token
        siglip = type(dual_encoder).__name__.startswith("Siglip")
        length = dual_encoder.config.text_config.max_position_embeddings if siglip else None
        tokens = tokenizer(
            texts,
            padding="max_length" if siglip else True,
            truncation=True,
            max_length=length,
            return_tensors="pt",
        ).to(device)
        if siglip:
            tokens = {"input_ids": tokens["input_ids"]}
        features = dual_encoder.get_text_features(**tokens)
        return features if isinstance(features, Tensor) else features.pooler_output

    return encode


@torch.no_grad()
def _class_embeddings(
    encode: Callable[[list[str]], Tensor],
    names: list[str],
    templates: list[str],
    batch_size: int,
) -> Tensor:
    """Average the normalised embeddings of a class over the templates: [class, width]."""
    texts = [template.format(name) for name in names for template in templates]
    parts = [encode(texts[i : i + batch_size]) for i in range(0, len(texts), batch_size)]
    embeddings = F.normalize(torch.cat(parts).float(), dim=-1)
    mean = embeddings.unflatten(0, (len(names), len(templates))).mean(1)
    return F.normalize(mean, dim=-1).clone()
