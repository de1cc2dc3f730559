"""The record of an evaluation: figures by name, their intervals, how they were made."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .._records import read_sealed, sealed, sha256_of, write_whole
from ..errors import FormatError, UnknownNameError
from ..registry import imported
from .figures import Examples
from .tables import compare_table, html_text, plain_text

if TYPE_CHECKING:
    import pandas

FORMAT = "hydra-ensembles/results"
VERSION = 1


@dataclass(frozen=True, repr=False, eq=False)
class Results(Mapping[str, float]):
    """Figures of one model, read like a dict: `results["ood/textures/AUROC"]`.

    Names are torch-uncertainty's: `cls/Acc|NLL|Brier`, `cal/ECE|aECE`,
    `sc/AURC|E-AURC|AUGRC|Cov_5Risk`, `fail/AUROC|AUPR|FPR95`, `div/MI|Disagreement|PairwiseKL`,
    `ood/<set>/AUROC|AUPR|FPR95|FPR95_ID_positive` for the main score, `ood/<set>/<score>/...` for
    further ones, `ood/mean/...` over sets (`ood/<group>/mean/...` over a group of them),
    `shift/<set>/cls/Acc ...`, `shift/mean/...`, and `post/...` for all of them after temperature
    scaling. FPR95 takes OOD as positive, FPR95_ID_positive the in-distribution examples. Rates are
    fractions, not percent. Where novelty is fitted it is a further score, `novelty/Alarms_5` is the
    share of examples with novelty above 0.95 (5 % of data like the known ones), and
    `ood/<set>/novelty/Caught_5` that share of outliers.

    Attributes:
        name: of the model.
        figures: by name.
        intervals: 95 % bootstrap intervals by the same names, empty with `bootstrap=0`.
        settings: scores (the main one first), temperature, members, classes, sizes of sets ...
        notes: why a figure is missing, by name.
        examples: columns of every set (one value for each example), for intervals and comparisons.
        draws: every figure on each bootstrap draw, kept for comparisons; not saved.
    """

    name: str
    figures: dict[str, float]
    intervals: dict[str, tuple[float, float]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    examples: Examples = field(default_factory=dict)
    draws: dict[Any, dict[str, Tensor]] = field(default_factory=dict, init=False)

    @property
    def scores(self) -> list[str]:
        """The OOD scores by name, the main one first."""
        return list(self.settings.get("scores", ["msp"]))

    def _resolve(self, key: str) -> str:
        # the main score may be named in full: ood/x/msp/AUROC is ood/x/AUROC
        short = key.replace(f"/{self.scores[0]}/", "/") if "ood/" in key else key
        return short if key not in self.figures and short in self.figures else key

    def __getitem__(self, key: str) -> float:
        key = self._resolve(key)
        if key in self.figures:
            return self.figures[key]
        reason = self.notes.get(key, f"they have {', '.join(self.figures)}.")
        raise UnknownNameError(f"The results of {self.name!r} have no {key!r}: {reason}")

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._resolve(key) in self.figures

    def __iter__(self) -> Iterator[str]:
        return iter(self.figures)

    def __len__(self) -> int:
        return len(self.figures)

    def __repr__(self) -> str:
        return plain_text(self)

    def _repr_html_(self) -> str:
        return html_text(self)

    def interval(self, key: str) -> tuple[float, float] | None:
        """Return a figure's bootstrap interval, None when there is none."""
        return self.intervals.get(self._resolve(key))

    def to_markdown(self) -> str:
        """Return all figures as a Markdown table, one row per figure."""
        return compare_table([self], keys="all", rows="figures")

    def to_pandas(self) -> pandas.DataFrame:
        """Return all figures as a data frame: model, figure, value, low, high.

        Its own `to_csv` and `to_latex` write them in these forms.
        """
        pandas = imported("pandas", "to_pandas()", "data")
        rows = [
            (self.name, key, value, *(self.interval(key) or (math.nan, math.nan)))
            for key, value in self.figures.items()
        ]
        return pandas.DataFrame(rows, columns=["model", "figure", "value", "low", "high"])

    def to_json(self) -> str:
        """Return the record without its examples as JSON; numbers survive exactly."""
        record = {
            "format": FORMAT,
            "version": VERSION,
            "name": self.name,
            "settings": self.settings,
            "figures": {key: _to_plain(value) for key, value in self.figures.items()},
            "intervals": {k: [_to_plain(v) for v in pair] for k, pair in self.intervals.items()},
            "notes": self.notes,
        }
        return json.dumps(record, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Read what `to_json` wrote."""
        try:
            record = json.loads(text)
        except ValueError as error:
            raise FormatError(f"These results are not JSON: {error}.") from error
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise FormatError(f"Not a record of results: the format is not {FORMAT!r}.")
        if record.get("version", 0) > VERSION:
            raise FormatError(
                f"These results have format version {record['version']}, newer than {VERSION}: "
                "update hydra-ensembles to read them."
            )
        try:
            return cls(
                name=record["name"],
                figures={key: float(value) for key, value in record["figures"].items()},
                intervals={
                    key: (float(low), float(high))
                    for key, (low, high) in record.get("intervals", {}).items()
                },
                settings=record.get("settings", {}),
                notes=record.get("notes", {}),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"This record of results is damaged: {error!r}.") from error

    def save(self, path: str | os.PathLike[str], *, examples: bool = True) -> None:
        """Write the record as JSON and, unless told not to, its examples as safetensors beside."""
        path = Path(path)
        record = json.loads(self.to_json())
        if examples and self.examples:
            from safetensors.torch import save

            columns: dict[str, Tensor] = {
                f"{name}|{column}": values.contiguous().clone()
                for name, part in self.examples.items()
                for column, values in part.items()
            }
            content = save(columns)
            beside = path.with_suffix(".safetensors")
            write_whole(beside, content)
            digest = sha256_of(content)
            record["examples"] = {"file": beside.name, "sha256": digest}
        write_whole(path, json.dumps(sealed(record), indent=2, allow_nan=False))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Results:
        """Read what `save` wrote, with the examples when their file is there."""
        path = Path(path)
        advice = "Evaluate again, or copy the file again."
        record = read_sealed(path, "a record of results", advice)
        results = cls.from_json(json.dumps(record))
        entry = record.get("examples")
        # the file lies beside the record whatever its entry says: a path is never followed
        beside = path.with_suffix(".safetensors")
        if not entry or not beside.exists():
            return results
        content = beside.read_bytes()
        if not isinstance(entry, dict) or sha256_of(content) != entry.get("sha256"):
            raise FormatError(
                f"{beside.name} does not belong to {path.name}: its SHA-256 differs. Save the "
                "results again, or remove the file to read the figures only."
            )
        from safetensors.torch import load

        for key, values in load(content).items():
            name, column = key.rsplit("|", 1)
            results.examples.setdefault(name, {})[column] = values
        return results


def _to_plain(value: float) -> float | str:
    """Return a number for JSON; infinity and NaN become words that float() reads back."""
    return value if abs(value) < float("inf") else str(value)
