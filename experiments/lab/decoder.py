"""SST-2 read by a decoder: SmolLM2-135M, which classifies by the state of its last token."""

from __future__ import annotations

import os
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from . import sets
from .language_models import load_smollm
from .tasks import Data, Sst2


def pretrained() -> tuple[Any, Any]:
    """Return the language model and its tokenizer, which pads on the right."""
    model, tokenizer = load_smollm(Path(os.environ.get("HYDRA_WORK", "work")))
    tokenizer.padding_side = "right"
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model, tokenizer


def new_classifier(classes: int) -> nn.Module:
    """Return SmolLM2 with a fresh classifier in the place of its vocabulary."""
    from transformers import LlamaForSequenceClassification

    model, tokenizer = pretrained()
    config = model.config
    config.num_labels, config.pad_token_id = classes, tokenizer.pad_token_id
    classifier = LlamaForSequenceClassification(config)
    classifier.model.load_state_dict(model.model.state_dict())
    return classifier


class DecoderSst2(Sst2):
    """SST-2 with fewer texts than MiniLM reads, since a decoder of 135 M weights is slow here."""

    name = "sst2-smollm"
    added = ()
    shifts: dict[str, Data] = {}  # noqa: RUF012  (read only)

    def host(self, seed: int) -> nn.Module:
        """Load a fine-tuned host."""
        from transformers import LlamaForSequenceClassification

        return LlamaForSequenceClassification.from_pretrained(self.host_folder(seed)).eval()

    @cached_property
    def tokenizer(self) -> Any:
        """SmolLM2's tokenizer."""
        return pretrained()[1]

    @cached_property
    def test(self) -> Data:
        """Every other sentence of dev."""
        return self.batches(self.part("dev").subset(range(0, 872, 2)))

    @cached_property
    def held_out(self) -> Data:
        """200 sentences that no host saw."""
        return self.batches(self.part("calibration").sample(200))

    @cached_property
    def ood(self) -> dict[str, dict[str, Data]]:
        """100 questions of TREC."""
        return {"far": {"trec": self.batches(sets.trec(self.data).sample(100))}}
