"""What a checkup found: the state of each file, and what can be saved."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SOUND, DAMAGED, MISSING, LEFTOVER = "sound", "damaged", "missing", "leftover"


@dataclass(frozen=True)
class Finding:
    """What was found out about one file.

    Attributes:
        file: Its path in the folder.
        state: `"sound"`, `"damaged"`, `"missing"` or `"leftover"` (of a process that was killed).
        words: What it is, or what is wrong with it and what to do.
        again: Whether it is made again by a rerun, so that it can be deleted.
    """

    file: str
    state: str
    words: str
    again: bool = False


@dataclass
class Checkup:
    """The state of a folder.

    Attributes:
        folder: What was checked.
        kinds: What it is: `"a saved ensemble"`, `"a run of build"` ...
        findings: By file.
        advice: What can be saved, and what a rerun will do.
    """

    folder: Path
    kinds: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        """Whether nothing is damaged or missing; leftovers do no harm."""
        return not any(found.state in (DAMAGED, MISSING) for found in self.findings)

    def state_of(self, file: str) -> str | None:
        """Return the state of a file, or None when it is none of ours."""
        return next((found.state for found in self.findings if found.file == file), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {**asdict(self), "folder": str(self.folder), "sound": self.is_sound}

    def __str__(self) -> str:
        width = max((len(found.file) for found in self.findings), default=0)
        lines = [f"{self.folder}: {', '.join(self.kinds) or 'nothing of hydra-ensembles'}"]
        for found in self.findings:
            lines.append(f"  {found.state:8}  {found.file:{width}}  {found.words}")
        lines += [f"- {words}" for words in self.advice]
        bad = sum(found.state in (DAMAGED, MISSING) for found in self.findings)
        lines.append("Sound." if self.is_sound else f"Not sound: {bad} of its files.")
        return "\n".join(lines)
