"""A causal language model as an ordinary text classifier: the label that best ends a prompt."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import DataError, UnsupportedModelError

DEFAULT_TEMPLATE = "{}\nLabel:"


@dataclass
class PromptOutput:
    """What a `PromptClassifier` returns.

    Attributes:
        logits: log P(label | prompt) [batch, class].
        loss: Cross-entropy, when labels were given.
    """

    logits: Tensor
    loss: Tensor | None = None


class PromptClassifier(nn.Module):
    """Classify texts by the label that a language model finds likeliest after a prompt.

    The logit of a label y with tokens y_1 ... y_k is log P(y | prompt) = sum_i log P(y_i | prompt,
    y_1 ... y_i-1); a softmax over the classes makes them probabilities. Every function of this
    library takes the result as a host whose attention heads can be pruned.

    Args:
        model: A causal language model of transformers (`LlamaForCausalLM`, `GPT2LMHeadModel`, ...).
        tokenizer: Texts to token ids; used by `encode` and to split the labels into tokens.
        template: The prompt, with a `{}` for the text.
        labels: What follows the prompt, one text per class, as it would be written there (most
            tokenizers want the leading space: `" positive"`); or a mapping of class names to them.
        calibrate: Subtract log P(label | prompt with an empty text), so that labels that are likely
            anywhere are not preferred (Zhao et al., 2021, https://arxiv.org/abs/2102.09690).
        max_length: Longest prompt in tokens; longer texts are cut at their end.

    Example:
        >>> host = PromptClassifier(model, tokenizer, "Review: {}\\nSentiment:", [" bad", " good"])
        >>> host(**host.encode(["a joy to watch"])).logits
    """

    main_input_name = "input_ids"
    label_tokens: Tensor
    label_bias: Tensor

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Callable[..., Any],
        template: str = DEFAULT_TEMPLATE,
        labels: Sequence[str] | Mapping[str, str] = (),
        *,
        calibrate: bool = False,
        max_length: int = 512,
    ) -> None:
        super().__init__()
        names, texts = _names_and_texts(labels)
        if template.count("{}") != 1:
            raise DataError(f"The template {template!r} needs exactly one {{}}, for the text.")
        tokens = [_ids(tokenizer, text) for text in texts]
        if len({tuple(row) for row in tokens}) < len(tokens) or not all(tokens):
            raise DataError(
                f"The labels {texts} become the tokens {tokens}: each must have tokens, and no two "
                "the same ones."
            )
        longest = max(map(len, tokens))
        table = [row + [-1] * (longest - len(row)) for row in tokens]
        self._set_up(model, names, template, table, max_length)
        self.tokenizer: Callable[..., Any] | None = tokenizer
        if calibrate:
            with torch.no_grad():
                self.label_bias.copy_(-self(**self.encode([""])).logits[0])

    def _set_up(
        self, model: Any, names: list[str], template: str, tokens: list[list[int]], max_length: int
    ) -> None:
        if model.get_output_embeddings() is None or not hasattr(model, "base_model"):
            raise UnsupportedModelError(
                f"{type(model).__name__} is not a causal language model that we know: expected a "
                "transformers model with an output embedding (AutoModelForCausalLM)."
            )
        self.lm = model
        self.class_names, self.template, self.max_length = names, template, max_length
        device = model.get_output_embeddings().weight.device
        self.label_ids = tokens  # plain, for a model without storage
        self.register_buffer("label_tokens", torch.tensor(tokens, device=device))
        self.register_buffer("label_bias", torch.zeros(len(names), device=device))
        self.tokenizer = None
        self.config = copy.deepcopy(model.config)
        self.config.id2label = dict(enumerate(names))
        self.config.label2id = {name: i for i, name in enumerate(names)}

    @classmethod
    def from_parts(
        cls,
        model: nn.Module,
        class_names: list[str],
        template: str,
        label_tokens: list[list[int]],
        *,
        max_length: int = 512,
    ) -> PromptClassifier:
        """Make a classifier from tokenized labels; `tokenizer` can be set later."""
        self = cls.__new__(cls)
        nn.Module.__init__(self)
        self._set_up(model, class_names, template, label_tokens, max_length)
        return self

    @property
    def id2label(self) -> dict[int, str]:
        """Class index to name."""
        return dict(enumerate(self.class_names))

    @property
    def prompts(self) -> PromptTokenizer:
        """Turns texts into prompts, wherever a tokenizer is taken (`text_data`, `load_data`)."""
        return PromptTokenizer(self)

    def check_data(self, data: Any) -> None:
        """Raise for texts tokenized without the prompt: predictions would be meaningless."""
        tokenizer = getattr(data, "tokenizer", None)
        if tokenizer is not None and not isinstance(tokenizer, PromptTokenizer):
            raise DataError(
                f"The texts are tokenized by {type(tokenizer).__name__}, without the prompt "
                f"{self.template!r:.80}. Make the data with classifier.prompts as its tokenizer."
            )

    def encode(self, texts: Sequence[str]) -> dict[str, Tensor]:
        """Put texts into the prompt and tokenize them: `input_ids`, `attention_mask`, right-padded.

        A text that makes the prompt longer than `max_length` is cut at its end; the words of the
        template always stay.
        """
        if self.tokenizer is None:
            raise DataError(
                "This PromptClassifier was loaded without its tokenizer: set "
                "classifier.tokenizer = AutoTokenizer.from_pretrained(...) first."
            )
        before, after = self.template.split("{}")
        rows = [self._prompt(text, before, after) for text in texts]
        shape = (len(rows), max(map(len, rows)))
        device = self.label_tokens.device
        ids = torch.zeros(shape, dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row, device=device)
            mask[i, : len(row)] = 1
        return {"input_ids": ids, "attention_mask": mask}

    def _prompt(self, text: str, before: str, after: str) -> list[int]:
        assert self.tokenizer is not None
        ids = _ids(self.tokenizer, before + text + after, special=True)
        if len(ids) <= self.max_length:
            return ids
        start = _ids(self.tokenizer, before, special=True)
        body, end = _ids(self.tokenizer, text), _ids(self.tokenizer, after)
        room = max(0, self.max_length - len(start) - len(end))
        return start + body[:room] + end

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> PromptOutput:
        """Return log P(label | prompt) [batch, class] of prompts padded on either side."""
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        batch, classes = input_ids.shape[0], len(self.class_names)
        longest = self.label_tokens.shape[1]
        if longest > 1:  # one row per prompt and label; the last token of a label predicts nothing
            ids, mask = _with_endings(input_ids, mask, self.label_tokens[:, :-1].clamp_min(0))
        else:
            ids = input_ids
        model: Any = self.lm
        takes = inspect.signature(model.base_model.forward).parameters
        more = (
            {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if "position_ids" in takes else {}
        )
        output = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False, **more)
        hidden = output.last_hidden_state
        last = _last_real(mask) - (longest - 1)
        steps = last[:, None] + torch.arange(longest, device=ids.device)
        read = hidden.gather(1, steps[..., None].expand(-1, -1, hidden.shape[-1]))
        scores = F.log_softmax(self._head(read).float(), -1)  # [rows, label tokens, vocabulary]
        wanted = self.label_tokens
        if longest == 1:
            logits = scores[:, 0, wanted[:, 0]]
        else:
            index = wanted.clamp_min(0).repeat(batch, 1)[..., None]
            token_scores = scores.gather(-1, index)[..., 0].unflatten(0, (batch, classes))
            logits = (token_scores * (wanted >= 0)).sum(-1)
        logits = logits + self.label_bias
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return PromptOutput(logits=logits, loss=loss)

    def _head(self, states: Tensor) -> Tensor:
        """Apply the output embedding, and the logit scaling or softcap that some models have."""
        model: Any = self.lm
        logits = model.get_output_embeddings()(states)
        config = model.config
        scale = getattr(config, "logits_scaling", None)  # Granite divides, Cohere multiplies
        logits = logits if scale is None else logits / scale
        scale = getattr(config, "logit_scale", None)
        logits = logits if not isinstance(scale, (int, float)) else logits * scale
        cap = getattr(config, "final_logit_softcapping", None)
        return logits if cap is None else cap * torch.tanh(logits / cap)


class PromptTokenizer:
    """Puts texts into the prompt of a classifier and tokenizes them; called like a tokenizer.

    Args:
        classifier: Its template, tokenizer and longest prompt are used.
    """

    def __init__(self, classifier: PromptClassifier) -> None:
        self._classifier = classifier

    @property
    def plain(self) -> Any:
        """The tokenizer without the prompt."""
        return self._classifier.tokenizer

    @property
    def model_max_length(self) -> int:
        """The longest prompt in tokens."""
        return self._classifier.max_length

    @property
    def all_special_ids(self) -> list[int]:
        """Tokens that are not the text's: special ones and the words of the prompt."""
        words = self._classifier.template.split("{}")
        prompt = [token for part in words for token in _ids(self.plain, part)]
        return sorted({*getattr(self.plain, "all_special_ids", ()), *prompt})

    def get_vocab(self) -> dict[str, int]:
        """Return all tokens with their ids; empty if the tokenizer has no vocabulary to show."""
        vocabulary = getattr(self.plain, "get_vocab", None)
        return {} if vocabulary is None else dict(vocabulary())

    def __call__(
        self,
        texts: str | Sequence[str],
        pairs: Sequence[str] | None = None,
        *,
        padding: bool | str = True,
        truncation: bool = True,
        max_length: int | None = None,
        return_tensors: str = "pt",
    ) -> dict[str, Tensor]:
        """Return `input_ids` and `attention_mask` as torch tensors, always padded and truncated."""
        if pairs is not None:
            raise DataError("A prompt takes one text, but texts come in pairs: join them first.")
        if max_length is not None and max_length != self.model_max_length:
            raise DataError(
                f"max_length is {max_length}, but the classifier's own is {self.model_max_length}: "
                "set classifier.max_length, so that every prompt is cut alike."
            )
        return self._classifier.encode([texts] if isinstance(texts, str) else texts)


def _names_and_texts(labels: Sequence[str] | Mapping[str, str]) -> tuple[list[str], list[str]]:
    if isinstance(labels, str) or len(labels) < 2:
        raise DataError(
            f"labels is {labels!r}: give two or more texts, one per class, or a mapping of class "
            "names to texts."
        )
    if isinstance(labels, Mapping):
        return list(labels), list(labels.values())
    return [text.strip() for text in labels], list(labels)


def _ids(tokenizer: Callable[..., Any], text: str, *, special: bool = False) -> list[int]:
    return [int(i) for i in tokenizer(text, add_special_tokens=special)["input_ids"]]


def _last_real(mask: Tensor) -> Tensor:
    """Return the position of each row's last real token [rows]."""
    places = torch.arange(mask.shape[1], device=mask.device)
    return (mask * places).argmax(1)


def _with_endings(ids: Tensor, mask: Tensor, endings: Tensor) -> tuple[Tensor, Tensor]:
    """Append every ending [labels, length] to every prompt, right after its last real token."""
    labels, length = endings.shape
    ids, mask = (t.repeat_interleave(labels, 0) for t in (ids, mask))
    endings = endings.repeat(ids.shape[0] // labels, 1)
    ids, mask = F.pad(ids, (0, length)), F.pad(mask, (0, length))
    places = _last_real(mask)[:, None] + 1 + torch.arange(length, device=ids.device)
    return ids.scatter(1, places, endings), mask.scatter(1, places, torch.ones_like(endings))
