"""Trace a graph once, for any size of batch and any number of tokens; write it as ONNX."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import HydraError, UnsupportedModelError
from .example import Example


def trace(graph: nn.Module, inputs: Example, limits: dict[str, int]) -> Any:
    """Trace a graph for any size of batch and any number of tokens."""
    sizes = {"batch": torch.export.Dim("batch", min=1, max=2**20)}
    if limits:
        sizes["tokens"] = torch.export.Dim("tokens", min=1, max=limits["tokens"])
    shapes = tuple(
        {axis: sizes[dim] for axis, dim in enumerate(inputs.dims(name)) if isinstance(dim, str)}
        for name in inputs.tensors
    )
    rows = inputs.rows(3)
    if inputs.has_tokens and rows["input_ids"].shape[1] in (1, 3):  # sizes that mean one thing
        rows = {n: torch.cat([t, t[:, -1:]], 1) if t.ndim == 2 else t for n, t in rows.items()}
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=DeprecationWarning)
            warnings.filterwarnings("ignore", category=FutureWarning)
            return torch.export.export(
                graph, tuple(rows.values()), dynamic_shapes=(shapes,), strict=False
            )
    except HydraError:
        raise
    except Exception as error:  # torch.export has many kinds of errors, of its own and of the host
        reason = " ".join(str(error).split())[:300]
        fixed = "specialized it to be a constant" in reason
        hint = " Its forward may call len(tensor): write tensor.shape[0]." if fixed else ""
        raise UnsupportedModelError(
            f"{inputs.host} cannot be exported for any size of batch: "
            f"{type(error).__name__}: {reason}.{hint}"
        ) from error


def write_onnx(program: Any, inputs: Example, outputs: list[str], path: Path) -> None:
    """Write a traced graph as an ONNX program, by torch's exporter."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\.onnx.*")
        made = torch.onnx.export(
            program,
            dynamo=True,
            input_names=list(inputs.tensors),
            output_names=outputs,
            verbose=False,
        )
    assert made is not None
    _name_sizes(made, inputs)
    made.save(str(path))


def _name_sizes(made: Any, inputs: Example) -> None:
    """Call the free sizes of inputs and outputs by their names in place of torch's symbols."""
    import onnx_ir as ir

    names: dict[str, str] = {}
    for value in made.model.graph.inputs:
        for found, wanted in zip(value.shape, inputs.dims(value.name), strict=True):
            if isinstance(wanted, str):
                names[str(found)] = wanted
    for value in (*made.model.graph.inputs, *made.model.graph.outputs):
        value.shape = ir.Shape([names.get(str(size), size) for size in value.shape])
