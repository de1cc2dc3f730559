"""Tasks that members cannot answer together, by the names of the classes of transformers."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import UnsupportedModelError


class Refusal(NamedTuple):
    """Why a model is refused: its task in words, and what to do instead."""

    task: str
    advice: str

    def sentence(self, name: str) -> str:
        """Say it in a sentence about a model."""
        return (
            f"{name} is made for {self.task}, which members do not answer together. {self.advice}"
        )


_ENCODER = (
    "Fuse its encoder for embeddings and novelty (AutoModel), or remove heads of the whole model "
    "with prune_heads_()."
)
_CAUSAL = "Fuse a causal language model (AutoModelForCausalLM): members score the next token."
_SPANS = "Load a model that gives start_logits and end_logits, such as BertForQuestionAnswering."

REFUSALS = {
    "Segmentation": Refusal("segmentation", _ENCODER),
    "ObjectDetection": Refusal("object detection", _ENCODER),
    "ForKeypoint": Refusal("finding key points", _ENCODER),
    "PoseEstimation": Refusal("pose estimation", _ENCODER),
    "DepthEstimation": Refusal("depth estimation", _ENCODER),
    "ForCTC": Refusal("speech recognition", _ENCODER),
    "SpeechSeq2Seq": Refusal("speech recognition", _ENCODER),
    "WhisperForConditionalGeneration": Refusal("speech recognition", _ENCODER),
    "Speech2TextForConditionalGeneration": Refusal("speech recognition", _ENCODER),
    "ForTextToSpeech": Refusal("speech synthesis", _ENCODER),
    "ForSpeechToText": Refusal("speech translation", _ENCODER),
    "ForSpeechToSpeech": Refusal("speech translation", _ENCODER),
    "ForTextToSpectrogram": Refusal("speech synthesis", _ENCODER),
    "ForTextToWaveform": Refusal("speech synthesis", _ENCODER),
    "ForConditionalGeneration": Refusal("generation", _CAUSAL),
    "ForMaskedImageModeling": Refusal("masked image modelling", _ENCODER),
    "ForImageToImage": Refusal("image restoration", _ENCODER),
    "ForImageSuperResolution": Refusal("image restoration", _ENCODER),
    "ForPrediction": Refusal("forecasting", _ENCODER),
    "ForTableQuestionAnswering": Refusal("question answering over tables", _ENCODER),
    "TapasForQuestionAnswering": Refusal("question answering over tables", _ENCODER),
    "ViltForQuestionAnswering": Refusal("visual question answering", _ENCODER),
    "LxmertForQuestionAnswering": Refusal("visual question answering", _ENCODER),
    "VisualBertForQuestionAnswering": Refusal("visual question answering", _ENCODER),
    "ForVisualQuestionAnswering": Refusal("visual question answering", _ENCODER),
    "XLNetForQuestionAnswering": Refusal("question answering by beam search", _SPANS),
    "XLMForQuestionAnswering": Refusal("question answering by beam search", _SPANS),
    "FlaubertForQuestionAnswering": Refusal("question answering by beam search", _SPANS),
    "ForPreTraining": Refusal("pretraining", _ENCODER),
    "ForPretraining": Refusal("pretraining", _ENCODER),
    "ForRNNT": Refusal("speech recognition", _ENCODER),
    "ForTDT": Refusal("speech recognition", _ENCODER),
    "ForXVector": Refusal("telling speakers apart", _ENCODER),
    "Retrieval": Refusal("retrieval by vectors of its own kind", _ENCODER),
    "ForContrastiveLearning": Refusal("contrastive learning", _ENCODER),
    "TextRecognition": Refusal("reading text in images", _ENCODER),
    "TableRecognition": Refusal("reading tables in images", _ENCODER),
    "ForImageMatting": Refusal("image matting", _ENCODER),
    "ForNormalEstimation": Refusal("estimating surface normals", _ENCODER),
    "ForPointmapEstimation": Refusal("estimating points in space", _ENCODER),
    "ForDensePrediction": Refusal("dense prediction", _ENCODER),
    "ForOpticalFlow": Refusal("optical flow", _ENCODER),
    "ForVideoGrounding": Refusal("finding moments in videos", _ENCODER),
    "ForRegionToPhraseAlignment": Refusal("aligning regions and phrases", _ENCODER),
    "ForMultimodalAutoencoding": Refusal("autoencoding", _ENCODER),
    "ForProteinFolding": Refusal("protein folding", _ENCODER),
    "ForProteinText2Text": Refusal("generation", _CAUSAL),
    "ForVisionText2Text": Refusal("generation", _CAUSAL),
    "ForTextToText": Refusal("generation", _CAUSAL),
    "ForGeneration": Refusal("generation", _CAUSAL),
    "ForBlockDiffusion": Refusal("generation", _CAUSAL),
    "ForCausalImageModeling": Refusal("generation of images", _ENCODER),
    "JevForDecision": Refusal("choosing among marked options", _ENCODER),
    "PatchTSTFor": Refusal("time series", _ENCODER),
    "PatchTSMixerFor": Refusal("time series", _ENCODER),
}
"""Parts of the names of classes, and why such a model is refused."""

_SPAN_READERS = ("ForQuestionAnsweringSimple",)


def refuse(model: object) -> None:
    """Raise an UnsupportedModelError for a model whose task members cannot answer together."""
    name = type(model).__name__
    refusal = refusal_of(name)
    if refusal is not None:
        raise UnsupportedModelError(refusal.sentence(name))


def refusal_of(name: str) -> Refusal | None:
    """Return why a class of transformers is refused, or None.

    Args:
        name: Name of the class, or of the classes that a config lists.
    """
    if any(part in name for part in _SPAN_READERS):
        return None
    return next((refusal for part, refusal in REFUSALS.items() if part in name), None)
