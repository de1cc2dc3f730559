"""Every class that transformers lists for a task is one of ours or is refused by its right name."""

from __future__ import annotations

from transformers.models.auto import modeling_auto

from hydra_ensembles.tasks import Facts, refusal_of, task_of

OURS = (
    "Classification",
    "ForImageClassificationWithTeacher",
    "ForImageClassificationConvProcessing",
    "ForImageClassificationFourier",
    "ForImageClassificationLearned",
    "ForQuestionAnswering",
    "ForQuestionAnsweringSimple",
    "ForMultipleChoice",
    "ForNextSentencePrediction",
    "ForMaskedLM",
    "ForCausalLM",
)
"""Ends of names whose outputs are those of our tasks."""


def listed() -> set[str]:
    """The names of all classes in the tables of transformers that are made for something."""
    tables = [name for name in dir(modeling_auto) if name.endswith("_MAPPING_NAMES")]
    found = [names for table in tables for names in getattr(modeling_auto, table).values()]
    flat = {one for names in found for one in ((names,) if isinstance(names, str) else names)}
    return {name for name in flat if "For" in name[1:] and name.partition("For")[2][:1].isupper()}


def test_every_class_is_ours_or_refused() -> None:
    names = listed()
    assert len(names) > 500
    models = {name for name in names if not name.endswith(("Model", "Former"))}
    left = {n for n in models if not n.endswith(OURS) and refusal_of(n) is None}
    assert not left, sorted(left)


def test_what_is_ours_is_not_refused() -> None:
    ours = {name for name in listed() if name.endswith(OURS)}
    refused = {name for name in ours if refusal_of(name) is not None}
    beam = {f"{kind}ForQuestionAnswering" for kind in ("Flaubert", "XLM", "XLNet")}
    other = {f"{kind}ForQuestionAnswering" for kind in ("Lxmert", "Tapas", "Vilt", "VisualBert")}
    time = {name for name in refused if name.startswith("PatchTS")}
    assert refused - time <= beam | other
    for name in ours - refused:
        if name.endswith("TokenClassification"):
            assert task_of(Facts(name)).name == "token-classification"
        elif "QuestionAnswering" in name:
            assert task_of(Facts(name)).name == "question-answering"


def test_a_refusal_says_what_to_do() -> None:
    refusal = refusal_of("Wav2Vec2ForXVector")
    assert refusal is not None
    said = refusal.sentence("Wav2Vec2ForXVector")
    assert "telling speakers apart" in said and "AutoModel" in said
