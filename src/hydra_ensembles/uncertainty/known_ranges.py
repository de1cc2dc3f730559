"""The usual range of plain facts among known inputs (length, brightness ...), and what is outside.

That the third block finds an input new helps nobody much; that it has two words, where known
texts have eight and more, says why. Novelty is not computed from facts: they only explain it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from ..errors import FormatError

Scale = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and standard deviation per channel, by which images were normalised."""

SHARE = 0.01
"""Of the known inputs, so many lie below a fact's range, and as many above."""

FACTS: dict[str, tuple[str, str, int]] = {
    "words": ("length {} words", "texts have {}", 0),
    "tokens": ("length {} tokens", "texts have {}", 0),
    "capitals": ("{} % capital letters", "texts have {} %", 0),
    "width": ("width {} pixels", "images have {}", 0),
    "height": ("height {} pixels", "images have {}", 0),
    "brightness": ("brightness {}", "images have {}", 2),
    "contrast": ("contrast {}", "images have {}", 2),
    "colour": ("colour range {}", "images have {}", 2),
}
"""Words for a fact of an input and for its known range, and the digits that are shown."""

NO_LETTERS = "no letters"


@dataclass(frozen=True)
class KnownRanges:
    """Plain facts of known inputs.

    Attributes:
        ranges: The 1 % and the 99 % quantile of each fact.
        scripts: Scripts that 1 % of the known texts or more are written in.
        scale: Mean and standard deviation per channel, by which images were normalised: brightness
            is that of the image before. None if it is not known.
    """

    ranges: dict[str, tuple[float, float]] = field(default_factory=dict)
    scripts: tuple[str, ...] = ()
    scale: Scale | None = None

    @classmethod
    def of(cls, facts: Mapping[str, Any], scale: Scale | None = None) -> KnownRanges:
        """Take the ranges of columns of facts, each with a value per known input."""
        ranges = {}
        for name in (name for name in FACTS if name in facts):
            values = torch.as_tensor(facts[name]).double().sort().values
            skipped = int(SHARE * (len(values) - 1))
            ranges[name] = (float(values[skipped]), float(values[-1 - skipped]))
        written = list(facts.get("script", ()))
        scripts = [s for s in sorted(set(written)) if written.count(s) >= SHARE * len(written)]
        return cls(ranges, tuple(scripts), scale)

    def outside(self, facts: Mapping[str, Any], count: int) -> list[tuple[str, ...]]:
        """Say for each of `count` inputs which of its facts lie outside the known ranges."""
        return [
            tuple(
                words
                for name in (*FACTS, "script")
                if name in facts and (words := self._outside(name, facts[name][row]))
            )
            for row in range(count)
        ]

    def _outside(self, name: str, value: Any) -> str:
        if name == "script":
            if not self.scripts or value in self.scripts:
                return ""
            known = " or ".join(s for s in self.scripts if s != NO_LETTERS) or NO_LETTERS
            return f"{_script(value)}; known texts are in {known}"
        if name not in self.ranges:
            return ""
        words, known, digits = FACTS[name]
        # as shown: what looks alike is not called different
        here, least, most = (round(float(v), digits) for v in (value, *self.ranges[name]))
        if least <= here <= most:
            return ""
        shown, low, high = (f"{v:.{digits}f}" for v in (here, least, most))
        span = low if low == high else f"{low} to {high}"
        words = words.removesuffix("s") if name in ("words", "tokens") and shown == "1" else words
        return f"{words.format(shown)}; known {known.format(span)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data that JSON can hold."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any] | None) -> KnownRanges:
        """Read what `to_dict` returned; None, as in older folders, has no ranges."""
        if data is None:
            return cls()
        try:
            ranges = {name: _pair(data["ranges"][name]) for name in FACTS if name in data["ranges"]}
            scale = data["scale"]
            if scale is not None:
                mean, deviation = (tuple(float(v) for v in values) for values in scale)
                if len(mean) != len(deviation) or not all(map(math.isfinite, mean + deviation)):
                    raise ValueError(f"scale {scale!r:.60}")
                scale = (mean, deviation)
            scripts = tuple(str(script) for script in data["scripts"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(
                f"The ranges of known inputs are damaged ({error!r:.80}). Save the ensemble again, "
                "or call fit_novelty_()."
            ) from None
        return cls(ranges, scripts, scale)


def _pair(values: Sequence[float]) -> tuple[float, float]:
    least, most = (float(value) for value in values)
    if not -math.inf < least <= most < math.inf:
        raise ValueError(f"range {values!r:.60}")
    return least, most


def _script(name: str) -> str:
    return name if name == NO_LETTERS else f"script {name}"
