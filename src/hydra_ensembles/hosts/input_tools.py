"""What prepares a host's inputs: its tokenizer or image transform, and where they are found."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..data.transforms import PROCESSOR_FILE, image_transform
from ..errors import DataError
from .prompt_classifier import PromptClassifier, PromptTokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "tokenizer.model")


def find_tokenizer(host: Any) -> Any:
    """Return a host's tokenizer: its own, or the one saved where the host came from; or None."""
    own = getattr(host, "tokenizer", None)
    if own is not None or isinstance(host, PromptClassifier):
        return own
    return _saved(host, "AutoTokenizer", TOKENIZER_FILES)


def find_transform(host: Any) -> Any:
    """Return a host's image transform: its own or the one saved where it came from; or None."""
    own = getattr(host, "transform", None)
    if own is not None and callable(own):
        return image_transform(own)
    try:
        return image_transform(host)  # timm and open_clip models know their transform
    except DataError:
        processor = _saved(host, "AutoImageProcessor", (PROCESSOR_FILE,))
        return None if processor is None else image_transform(processor)


def _saved(host: Any, kind: str, files: Iterable[str]) -> Any:
    """Load what is saved beside a host's weights, in its folder or the hub's cache; else None."""
    place = getattr(host, "name_or_path", None) or getattr(
        getattr(host, "config", None), "_name_or_path", None
    )
    if not isinstance(place, str) or not place:
        return None
    if not any((Path(place) / file).is_file() for file in files):
        from huggingface_hub import try_to_load_from_cache

        try:
            cached = [try_to_load_from_cache(place, file) for file in files]
        except ValueError:  # not the name of a repository
            return None
        if not any(isinstance(path, str) for path in cached):
            return None
    import transformers

    try:
        return getattr(transformers, kind).from_pretrained(
            place, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, ImportError, TypeError):
        return None


def prompted(host: Any, tokenizer: Any) -> Any:
    """Return the tokenizer for a host's texts, wrapped in the host's prompt if it has one."""
    if tokenizer is None or not isinstance(host, PromptClassifier):
        return tokenizer
    if host.tokenizer is None:  # loaded from a folder
        host.tokenizer = tokenizer
    return host.prompts


def token_limit(config: Any, tokenizer: Any) -> int | None:
    """Return the longest input of a host and its tokenizer in tokens, or None if unknown."""
    if isinstance(tokenizer, PromptTokenizer):
        return tokenizer.model_max_length
    limits = []
    most = getattr(tokenizer, "model_max_length", None)
    if isinstance(most, int) and most < 10**6:  # a larger value means: unknown
        limits.append(most)
    places = getattr(config, "max_position_embeddings", None)
    if isinstance(places, int):
        # RoBERTa-like models count positions from the padding id on
        kin = any(n in getattr(config, "model_type", "") for n in ("roberta", "camembert"))
        limits.append(places - (int(getattr(config, "pad_token_id", 1) or 0) + 1 if kin else 0))
    return min(limits, default=None)
