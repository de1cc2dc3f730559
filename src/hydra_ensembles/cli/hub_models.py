"""Models of timm and transformers by name; where the hub cannot be reached, from its cache."""

from __future__ import annotations

import difflib
import logging
import os
import socket
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TooSlow
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ..errors import DataError, FormatError, UnsupportedModelError
from ..registry import imported
from ..tasks import Facts, refusal_of, task_of
from .checkpoints import WEIGHTS, advice, is_weights_file, read_weights
from .errors import Stop

HUB_PREFIXES = ("hf-hub:", "hf_hub:")
"""How timm calls models of the hub."""

PATIENCE = 5.0
"""Seconds to look up the hub's address."""

SAFE = {"trust_remote_code": False, "use_safetensors": True}
"""How weights of transformers are loaded: no code of the hub, no pickle."""

TENSORS_ONLY = {"use_safetensors": False, "weights_only": True}
"""How a folder that has only `pytorch_model.bin` is loaded: tensors, no other pickle."""


@contextmanager
def hub_access() -> Iterator[bool]:
    """Yield whether the hub can be reached; where it cannot, downloads look in the cache only.

    The hub's client would retry every file for half a minute and log every try.
    """
    from huggingface_hub import constants

    log = logging.getLogger("huggingface_hub")
    level, offline = log.level, constants.HF_HUB_OFFLINE
    reached = not offline and reachable(constants.ENDPOINT)
    constants.HF_HUB_OFFLINE = not reached
    log.setLevel(logging.ERROR)
    try:
        yield reached
    finally:
        constants.HF_HUB_OFFLINE = offline
        log.setLevel(level)


def reachable(endpoint: str) -> bool:
    """Tell whether an address has a known host; behind a proxy only the proxy knows, so yes."""
    address = urlsplit(endpoint)
    if address.scheme in urllib.request.getproxies() or not address.hostname:
        return True
    port = address.port or (443 if address.scheme == "https" else 80)
    # a thread, for looking up a name has no time limit of its own
    pool = ThreadPoolExecutor(1)
    try:
        pool.submit(socket.getaddrinfo, address.hostname, port).result(timeout=PATIENCE)
    except (OSError, TooSlow):
        return False
    finally:
        pool.shutdown(wait=False)
    return True


def not_cached(name: str) -> str:
    """Say that a model is neither reachable nor here, and what helps."""
    from huggingface_hub import constants

    why = (
        "HF_HUB_OFFLINE is set"
        if constants.HF_HUB_OFFLINE and os.environ.get("HF_HUB_OFFLINE")
        else f"{urlsplit(constants.ENDPOINT).hostname} cannot be reached"
    )
    return (
        f"Cannot load {name}: {why}, and it is not in the cache "
        f"{constants.HF_HUB_CACHE}. Give a folder with the model, or connect and try again."
    )


def is_timm_name(name: str) -> bool:
    """Tell whether a bare name, no folder and no other hub name, is one of timm's models."""
    plain = name.partition("@")[0]
    if plain.startswith(HUB_PREFIXES):
        return True
    if "/" in plain or ":" in plain or "_" not in plain or Path(name).exists():
        return False
    try:
        import timm
    except ImportError:
        return False
    return bool(timm.is_model(plain))


def load_timm(name: str) -> Any:
    """Make a timm model with pretrained weights, or with those of a file."""
    plain, weights = name.removeprefix("timm:"), None
    if "@" in plain and ":" not in plain.partition("@")[0]:  # hf-hub:NAME@REVISION is timm's own
        plain, _, file = plain.partition("@")
        path = Path(file).expanduser()
        if not path.is_file():
            raise DataError(f"There is no weights file {path} for timm:{plain}.")
        weights = read_weights(path)
    timm = imported("timm", name, "timm")
    if ":" not in plain:
        if not timm.is_model(plain):
            near = difflib.get_close_matches(plain.partition(".")[0], timm.list_models(), n=3)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise UnsupportedModelError(f"timm has no model {plain!r}.{hint}")
        if weights is not None:
            return _with_weights(timm, plain, weights, path)
    with hub_access() as reached:
        try:
            return timm.create_model(plain, pretrained=True)
        except Exception as error:  # timm raises many kinds for unknown names and no network
            if not reached and "local-dir:" not in plain:
                hint = f" Weights at hand: timm:{plain}@FILE (.safetensors, .pth, .bin)."
                raise UnsupportedModelError(not_cached(name) + hint) from error
            reason = " ".join(str(error).split())[:300]
            raise UnsupportedModelError(f"timm cannot make {plain!r}: {reason}") from error


def _with_weights(timm: Any, name: str, weights: dict[str, Any], file: Path) -> Any:
    """Make a model with the weights of a file, and as many classes as they have."""
    model = timm.create_model(name, pretrained=False)
    head = weights.get(f"{model.pretrained_cfg.get('classifier') or 'head'}.weight")
    if head is not None and len(head) != model.num_classes:
        model = timm.create_model(name, pretrained=False, num_classes=len(head))
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        reason = " ".join(lines[1:2] or lines)[:200]
        raise FormatError(f"The weights of {file} do not fit timm:{name}: {reason}") from error
    return model


def load_timm_folder(folder: Path, config: Mapping[str, Any]) -> Any:
    """Make a timm model from a folder: its config names the architecture."""
    if (folder / "model.safetensors").is_file():
        return load_timm(f"timm:local-dir:{folder}")
    timm = imported("timm", str(folder), "timm")
    files = sorted(path for path in folder.iterdir() if is_weights_file(path))
    if len(files) != 1:
        found = ", ".join(path.name for path in files) or "none"
        raise DataError(
            f"The timm folder {folder} needs one weights file; found {found}. Give "
            f"timm:{config['architecture']}@FILE."
        )
    model = _with_weights(timm, str(config["architecture"]), read_weights(files[0]), files[0])
    model.pretrained_cfg = {**model.pretrained_cfg, **config.get("pretrained_cfg", {})}
    return model


def load_transformers(name: str, names: list[str] | None) -> tuple[Any, bool, tuple[str, ...]]:
    """Load a classifier: the model, whether it reads texts, and its untrained weights."""
    folder = Path(name).expanduser()
    if folder.is_file():
        raise UnsupportedModelError(
            advice(folder)
            if is_weights_file(folder)
            else f"{name} is a file, not a model. Give a hub name, a folder or timm:NAME@FILE."
        )
    looks_local = name.startswith((".", "/", "~")) or name.count("/") > 1
    kind = "weights file" if name.lower().endswith(WEIGHTS) else "model folder"
    if not folder.is_dir() and (looks_local or kind == "weights file"):
        raise DataError(f"There is no {kind} {name}. Give a hub name, a folder or timm:NAME@FILE.")
    if folder.is_dir() and not (folder / "config.json").is_file():
        weights = sorted(path for path in folder.iterdir() if is_weights_file(path))
        raise UnsupportedModelError(
            f"The folder {name} has no config.json: expected what save_pretrained() of "
            "transformers or of hydra-ensembles writes."
            + (f" {advice(weights[0])}" if weights else "")
        )
    transformers = imported("transformers", name, "transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if folder.is_dir():
        return _classifier(transformers, name, names)
    with hub_access() as reached:
        try:
            return _classifier(transformers, name, names)
        except UnsupportedModelError as error:
            from huggingface_hub import try_to_load_from_cache

            if reached or isinstance(try_to_load_from_cache(name, "config.json"), str):
                raise
            raise UnsupportedModelError(not_cached(name)) from error


AUTO_CLASSES = {
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "embedding": "AutoModel",
}
"""Which class of transformers loads a task; classes, labels and numbers by what they read."""


def auto_class(built: str, config: Any, *, text: bool) -> str:
    """Name the class of transformers that loads a model, by what its config says."""
    found = AUTO_CLASSES.get(task_of(Facts(built, config)).name)
    if found is None or "MaskedLM" in built:
        return f"AutoModelFor{'Sequence' if text else 'Image'}Classification"
    return found


def _classifier(
    transformers: Any, name: str, names: list[str] | None
) -> tuple[Any, bool, tuple[str, ...]]:
    """Load a transformers classifier, or a dual encoder as one."""
    try:
        config = transformers.AutoConfig.from_pretrained(name, trust_remote_code=False)
        dual = hasattr(config, "vision_config") and hasattr(config, "text_config")
        built = " ".join(getattr(config, "architectures", None) or ())
        if dual and "Classification" not in built:
            if names is None:
                raise Stop(f"{name} is a dual encoder: give its classes with --class-names.", 2)
            from ..hosts import ZeroShotClassifier

            encoder = transformers.AutoModel.from_pretrained(name, **SAFE).eval()
            tokenizer = transformers.AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            return ZeroShotClassifier(encoder, names, tokenizer=tokenizer), False, ()
        refusal = refusal_of(built)
        if refusal is not None:  # before its weights are read
            raise UnsupportedModelError(refusal.sentence(f"{name} ({built})"))
        text = hasattr(config, "vocab_size") and "ImageClassification" not in built
        kind = auto_class(built, config, text=text)
        here = Path(name).expanduser()
        pickled = (here / "pytorch_model.bin").is_file() and not list(here.glob("*.safetensors"))
        if pickled:
            read_weights(here / "pytorch_model.bin")  # refuses all but tensors, in plain words
        model, info = getattr(transformers, kind).from_pretrained(
            name, output_loading_info=True, **SAFE | (TENSORS_ONLY if pickled else {})
        )
    except FormatError:
        raise
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise UnsupportedModelError(f"Cannot load {name}: {reason[:400]}") from error
    return model, text, tuple(sorted(info["missing_keys"]))
