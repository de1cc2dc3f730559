"""What a model costs: plain data that prints as a table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerCost:
    """Cost of one block, or of what comes before and after the blocks."""

    name: str
    multiply_adds: int
    parameters: int
    activation_bytes: int


@dataclass(frozen=True)
class Cost:
    """What a model costs on one batch.

    Attributes:
        multiply_adds: Products-and-sums of matrix products, convolutions and attention.
        parameters: Distinct numbers stored.
        bytes_on_disk: Their bytes; each distinct tensor and head counts once.
        activation_bytes: Largest set of activations alive at once in inference, counted.
        layers: The same by layer.
        batch: Number of samples in the counted batch.
    """

    multiply_adds: int
    parameters: int
    bytes_on_disk: int
    activation_bytes: int
    layers: tuple[LayerCost, ...]
    batch: int
    name: str = ""

    def relative_to(self, other: Cost) -> CostRatio:
        """Divide by another cost, such as the host's."""
        return CostRatio(
            self.multiply_adds / other.multiply_adds,
            self.parameters / other.parameters,
            self.bytes_on_disk / other.bytes_on_disk,
            self.activation_bytes / other.activation_bytes,
        )

    def __str__(self) -> str:
        lines = [
            f"{self.name or 'model'}: {self.multiply_adds / 1e9:.3f} G multiply-adds for "
            f"{self.batch} sample{'s' if self.batch != 1 else ''}, "
            f"{self.parameters / 1e6:.2f} M parameters, {self.bytes_on_disk / 2**20:.1f} MiB on "
            f"disk, {self.activation_bytes / 2**20:.1f} MiB of activations at the peak"
        ]
        total = max(1, self.multiply_adds)
        for layer in self.layers:
            lines.append(
                f"  {layer.name:<10} {layer.multiply_adds / 1e6:10.2f} M  "
                f"{layer.multiply_adds / total:6.1%}  {layer.parameters / 1e3:9.1f} k parameters"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class CostRatio:
    """One cost divided by another."""

    multiply_adds: float
    parameters: float
    bytes_on_disk: float
    activation_bytes: float

    def __str__(self) -> str:
        return (
            f"{self.multiply_adds:.3f} x multiply-adds, {self.parameters:.3f} x parameters, "
            f"{self.bytes_on_disk:.3f} x bytes on disk, {self.activation_bytes:.3f} x activations"
        )
