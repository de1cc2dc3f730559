"""How much each head and each neuron matters."""

from __future__ import annotations

import os
from dataclasses import dataclass

from .._records import read_record, to_record
from ..errors import MaskError
from .head_mask import HeadScores, Keep
from .unit_mask import UnitMask


@dataclass(frozen=True)
class UnitScores:
    """How much each head and each neuron of a model matters (higher = keep).

    Attributes:
        heads: A table of scores, layers by heads.
        neurons: The same of neurons; rows of layers whose neurons stay are empty.
        name: What the numbers are, for printing.
    """

    heads: HeadScores
    neurons: HeadScores
    name: str = ""

    def __post_init__(self) -> None:
        if len(self.heads) != len(self.neurons):
            raise MaskError(
                f"Scores of heads have {len(self.heads)} layers and those of neurons "
                f"{len(self.neurons)}: give one row of each per layer."
            )

    def top_k(self, keep: Keep) -> UnitMask:
        """Keep the same share (or number) of heads and of neurons in each layer, the highest."""
        return UnitMask(self.heads.top_k(keep), self.neurons.top_k(keep).rows)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the scores as JSON text; write it to `path` (beside, then renamed) when given."""
        rows = {"heads": self.heads.tolist(), "neurons": self.neurons.tolist()}
        return to_record("UnitScores", {**rows, "name": self.name}, path)

    @classmethod
    def from_json(cls, source: str | os.PathLike[str]) -> UnitScores:
        """Read scores from JSON text or from a file's path."""
        payload = read_record("UnitScores", source, error=MaskError)
        try:
            tables = HeadScores(payload["heads"]), HeadScores(payload["neurons"])
        except KeyError as error:
            raise MaskError(
                f"This JSON of UnitScores lacks {error}. It must come from UnitScores.to_json()."
            ) from None
        return cls(*tables, name=payload.get("name", ""))

    def __str__(self) -> str:
        title = f"UnitScores ({self.name})" if self.name else "UnitScores"
        counts = f"{sum(self.heads.shape)} heads, {sum(self.neurons.shape)} neurons"
        lines = [f"{title}: {len(self.heads)} layers, {counts}, higher = keep"]
        digits = len(str(len(self.heads) - 1))
        for layer, (heads, neurons) in enumerate(zip(self.heads, self.neurons, strict=True)):
            said = [
                f"{units} {float(row.min()):.3g} to {float(row.max()):.3g}"
                for units, row in (("heads", heads), ("neurons", neurons))
                if len(row)
            ]
            lines.append(f"  {layer:>{digits}}  " + "  ".join(said))
        return "\n".join(lines)
