"""8-bit weights for an exported ONNX program: smaller and, on most CPUs, quicker; not the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any


def quantize(source: Path, target: Path) -> None:
    """Write a program with the weights of its linear layers in 8 bits (dynamic quantisation).

    Weights become signed 8-bit integers with one scale per column; activations are quantised while
    the program runs. Embedding tables become 8-bit too. The distances of novelty stay as they are:
    they compare features in thousandths.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(str(source))
    del model.graph.value_info[:]  # shapes are inferred anew: transposed weights have others
    root = logging.getLogger()
    level = root.level
    root.setLevel(logging.ERROR)  # it advises to preprocess, which the exporter has done
    try:
        quantize_dynamic(
            model,
            str(target),
            op_types_to_quantize=["MatMul", "Gemm", "Gather"],
            nodes_to_exclude=_kept(model),
            per_channel=True,
            weight_type=QuantType.QInt8,
        )
    finally:
        root.setLevel(level)


def _kept(model: Any) -> list[str]:
    """Return the names of the nodes that keep their digits: all but linear layers and embeddings.

    A linear layer's weight and a table of embeddings have two axes. The statistics of novelty have
    three, one for the taps.
    """
    tables = {weight.name for weight in model.graph.initializer if len(weight.dims) == 2}
    return [node.name for node in model.graph.node if not tables & set(node.input)]
