"""`build` refuses models of other tasks by their names, before it reads any data."""

from __future__ import annotations

import pytest
import transformers

import hydra_ensembles as hydra
from hydra_ensembles.errors import HydraError

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}


class Unread:
    """Data that must not be read."""

    def __iter__(self):
        raise AssertionError("the data was read before the model was refused")

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("kind", "options", "task"),
    [
        ("BertForPreTraining", {}, "pretraining"),
        ("BertModel", {}, "no labels"),
    ],
)
def test_another_task_is_named_before_any_data_is_read(kind, options, task) -> None:
    config = transformers.BertConfig(vocab_size=50, **SMALL, **options)
    model = getattr(transformers, kind)(config).eval()
    with pytest.raises(HydraError, match=task):
        hydra.build(model, Unread())
