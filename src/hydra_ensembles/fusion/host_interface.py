"""What the host's library and its tools expect of a model: names, device, classes, inputs.

An ensemble's inputs and outputs: its host's signature and its host's kind of output.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..data.batches import put_output
from ..data.model_runs import device_of
from ..data.transforms import image_transform
from ..errors import ArgumentError, HydraError, UnsupportedModelError
from ..tasks.tokens import NEXT_TOKENS, is_language_model, predicts_next_token
from .folder_writer import save
from .inputs import Preparation

if TYPE_CHECKING:
    from .ensemble import HydraEnsemble


@dataclass
class HydraOutput:
    """An ensemble's output with labels when its host returns plain tensors."""

    logits: Tensor
    loss: Tensor | None = None


def with_signature_of(original: Callable[..., Any], host: type[nn.Module]) -> Callable[..., Any]:
    """Return `original` with the signature of a host's forward, and `labels`: trainers read it."""
    parameters = list(inspect.signature(host.forward).parameters.values())
    if "labels" not in {p.name for p in parameters}:
        label = inspect.Parameter("labels", inspect.Parameter.KEYWORD_ONLY, default=None)
        rest = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        more = [p for p in parameters if p.kind is inspect.Parameter.VAR_KEYWORD]
        parameters = [*rest, label, *more]

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return forward


def host_output(
    output: Any,
    value: Tensor,
    fields: Sequence[Sequence[str]],
    loss: Tensor | None,
    return_dict: Any,
) -> Any:
    """Put the ensemble's outputs where the host's were; drop what belongs to single streams."""
    if isinstance(output, Tensor):
        return value if loss is None else HydraOutput(logits=value, loss=loss)
    plain = isinstance(output, tuple) and not hasattr(output, "_fields")
    found = {"logits": value} if plain else put_output(output, value, fields)
    found = found if loss is None else {"loss": loss, **found}
    if plain or return_dict is False:
        return tuple(found.values())
    return type(output)(**found)


# Upload an ensemble to the hub: the folder of `save_pretrained`, in one commit.
def push(
    ensemble: HydraEnsemble,
    repo: str,
    *,
    private: bool | None,
    token: str | bool | None,
    revision: str | None,
    message: str,
) -> str:
    """Upload an ensemble and return the commit's address; see `HydraEnsemble.push_to_hub`."""
    from huggingface_hub import HfApi

    api = HfApi(token=token)
    with tempfile.TemporaryDirectory() as folder:
        save(ensemble, folder, name=repo)
        try:
            name = api.create_repo(repo, private=private, exist_ok=True).repo_id
            if revision is not None:
                api.create_branch(name, branch=revision, exist_ok=True)
            commit = api.upload_folder(
                repo_id=name, folder_path=folder, revision=revision, commit_message=message
            )
        except Exception as error:  # the hub's client raises those of its network library too
            raise HydraError(
                f"Cannot give the ensemble to the hub as {repo!r} ({type(error).__name__}: "
                f"{str(error)[:300]}). Check the name (owner/name), the network and that you are "
                "logged in (hf auth login) with a token that may write; or call save_pretrained() "
                "and upload the folder."
            ) from error
    return str(commit.commit_url)


class HostInterface(nn.Module):
    """A model that trainers and pipelines accept as one of its host's library.

    Attributes:
        host: The model whose library's conventions it follows.
    """

    host: Any

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] | None = None
        self._class_names: tuple[str, ...] | None = None  # of answers
        self._preparation = Preparation()

    @property
    def config(self) -> Any:
        """The host's config, where it has one."""
        return getattr(self.host, "config", None)

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return device_of(self) or torch.device("cpu")

    @property
    def dtype(self) -> torch.dtype:
        """The parameters' data type."""
        return next(p.dtype for p in self.parameters())

    @property
    def main_input_name(self) -> str:
        """Name of the host's main input."""
        return getattr(self.host, "main_input_name", "x")

    @property
    def input_modalities(self) -> Any:
        """What the host reads, as transformers calls it: text, image ..."""
        return getattr(self.host, "input_modalities", ())

    @property
    def name_or_path(self) -> str:
        """Where the host came from."""
        return getattr(self.host, "name_or_path", "")

    def can_generate(self) -> bool:
        """Tell pipelines that this is a classifier."""
        return False

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse with what works instead: an ensemble scores texts, it does not write them."""
        name = type(self.host).__name__
        why = NEXT_TOKENS if predicts_next_token(self.host) else f"{name} does not write text"
        raise UnsupportedModelError(f"An ensemble cannot generate(): {why}.")

    @property
    def id2label(self) -> dict[int, str] | None:
        """Class names by number: those that were set, or the host's; None without either."""
        if self._names is not None:
            return dict(self._names)
        if is_language_model(self.host):  # its config names two classes that it does not have
            return None
        labels = getattr(self.config, "id2label", None) or getattr(self.host, "id2label", None)
        return None if labels is None else {int(k): str(v) for k, v in labels.items()}

    @id2label.setter
    def id2label(self, names: Mapping[int, str] | Sequence[str] | None) -> None:
        if names is not None:
            if not isinstance(names, (Mapping, Sequence)) or isinstance(names, str):
                raise ArgumentError(f"id2label={names!r:.60}: expected a list of class names.")
            pairs = names.items() if isinstance(names, Mapping) else enumerate(names)
            named = {int(number): str(name) for number, name in pairs}
            if not named or set(named) != set(range(len(named))):
                raise ValueError(
                    f"Class names for {sorted(named)[:5]} ...: expected one for every class from 0."
                )
            names = dict(sorted(named.items()))
            if hasattr(self.config, "id2label"):  # pipelines read it there
                self.config.id2label = dict(names)
                self.config.label2id = {name: number for number, name in names.items()}
        self._names = names
        self.remember_class_names()

    def remember_class_names(self) -> None:
        """Keep the class names that answers carry, in their order."""
        names = self.id2label
        self._class_names = None if names is None else tuple(names[i] for i in sorted(names))

    @property
    def transform(self) -> Any:
        """Turns a PIL image into a tensor `[C, H, W]`; None when unknown."""
        return self._preparation.find_transform(self.host)

    @transform.setter
    def transform(self, source: Any) -> None:
        self._preparation.transform = None if source is None else image_transform(source)

    @property
    def tokenizer(self) -> Any:
        """Turns texts into inputs; None when unknown."""
        return self._preparation.find_tokenizer(self.host)

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self._preparation.tokenizer = tokenizer

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
        """Trade time for memory in the trunk, where the host can."""
        self.host.gradient_checkpointing_enable(gradient_checkpointing_kwargs)

    def gradient_checkpointing_disable(self) -> None:
        """Undo `gradient_checkpointing_enable`."""
        self.host.gradient_checkpointing_disable()
