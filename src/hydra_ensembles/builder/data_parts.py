"""The data of a build: what selects, what decides, what is held out, and the outliers of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..costs.budget import Budget
from ..data import processes
from ..data.batches import images_of, join, take
from ..data.loaders import Batches, as_data, indexable
from ..data.model_runs import checked
from ..data.progress import announce, duration, progress_bar
from ..data.proxies import ProxyData, make_proxies
from ..data.splits import fingerprint, split
from ..errors import DataError
from ..fusion.ensemble import HydraEnsemble
from ..hosts import HostModel
from ..search.search_data import outlier_sets
from ..search.search_state import SearchState, TensorStore
from ..tasks import Task

SHARES = {"select": 0.6, "stop": 0.2, "temperature": 0.2}
MEMORY = 2**30
"""Bytes of decoded images that are kept."""


def in_memory(data: Any, *, pad_id: int | None = None, progress: bool = False) -> Batches:
    """Return indexable data whose images are decoded once, if they fit: several passes follow."""
    loaded = as_data(data)
    source = indexable(loaded, pad_id=pad_id)
    if source is not loaded or isinstance(data, (Tensor, Mapping, tuple)):
        source.info["in_memory"] = True
    if source.info.get("in_memory") or processes.size() > 1:
        return source  # of several processes, each reads only its share
    first = source.batch(0)
    images = images_of(first)
    if images is None or images[0].nbytes * source.count > MEMORY:
        return source
    others = progress_bar(range(1, len(source)), description="reading images", enabled=progress)
    whole = join([first, *map(source.batch, others)])
    info = {**source.info, "in_memory": True}
    if "files" in info:
        info["files"] = [info["files"][index] for index in source.indices]
    return Batches(
        lambda rows: take(whole, rows),
        range(source.count),
        batch_size=source.batch_size,
        labels=source.labels,
        info=info,
    )


class Parts:
    """Calibration data in parts, with outliers for the parts that select and stop.

    Args:
        model: The host that the data is for.
        calibration: Labelled in-distribution data; split into `select`, `stop` and `temperature`.
        validation: Labelled data for `stop` and `temperature`; all of `calibration` selects then.
        ood: Outliers as `build` takes them.
        seed: Seed of splits and proxies.
        proxies: Add outliers made from the calibration data.
        pad_id: The token that pads texts, for data in which no text is padded.
        progress: Show a bar while images are read.

    Attributes:
        data: In-distribution data by part.
        sets: For `select` and `stop`: `"id"` and `"ood/..."`.
        given: The outliers of `stop` that the caller gave, by name; no proxies.
        validated: Whether `validation` was given.
    """

    def __init__(
        self,
        model: Any,
        calibration: Any,
        validation: Any,
        ood: Any,
        seed: int,
        *,
        proxies: bool,
        pad_id: int | None = None,
        progress: bool = False,
    ) -> None:
        self.validated, self.seed = validation is not None, seed
        source = in_memory(calibration, pad_id=pad_id, progress=progress)
        self.data: dict[str, Batches]
        if validation is None:
            self.data = split(source, SHARES, seed=seed)
        else:
            unseen = in_memory(validation, pad_id=pad_id, progress=progress)
            held_out = split(unseen, {"stop": 0.5, "temperature": 0.5}, seed=seed)
            self.data = {"select": source, **held_out}
        given = outlier_sets(model, None, None if ood == "auto" else ood)
        self.sets: dict[str, dict[str, Any]] = {
            part: {"id": self.data[part]} for part in ("select", "stop")
        }
        for name, data in given.items():
            outliers = indexable(data, pad_id=pad_id)
            halves = split(outliers, {"select": 0.7, "stop": 0.3}, seed=seed)
            for part, sets in self.sets.items():
                sets[name] = halves[part]
        self.given = self.outliers("stop")
        # each part has its own proxies, so that no example both selects and decides
        for part, sets in self.sets.items() if proxies else ():
            sets.update(outlier_sets(model, self.data[part], "auto", seed=seed))

    def outliers(self, part: str) -> dict[str, Any]:
        """Return a part's outliers by family, without the prefix `ood/`."""
        return {
            name.removeprefix("ood/"): data
            for name, data in self.sets[part].items()
            if name != "id"
        }

    def judging(self) -> dict[str, Any]:
        """Return proxies by kind that judge a choice by outliers; none if none are given."""
        if not self.given:
            return {}
        try:
            return dict(make_proxies(self.data["stop"], "auto", seed=self.seed))
        except DataError:  # neither images nor token ids
            return {}

    def fitting(self) -> list[str]:
        """Return the parts that fit temperatures: all, or `validation` if given.

        All but `select` took no part in choosing heads; figures are reported on them.
        """
        return ["stop", "temperature"] if self.validated else list(self.data)

    def fingerprints(self, classes: int, task: Task) -> dict[str, str]:
        """Check every data set, labels by the task; return its hash, proxies included."""
        found = {}
        for part, data in self.data.items():
            name = "validation" if self.validated and part != "select" else "calibration"
            size = None if task.ragged else classes
            labelled = checked(data, name=name, task=task, classes=size, labelled=True)
            found[part] = fingerprint(labelled)
        for part in self.sets:
            for name, outliers in self.outliers(part).items():
                found[f"{part}:ood/{name}"] = (
                    outliers.fingerprint()
                    if isinstance(outliers, ProxyData)
                    else fingerprint(checked(outliers, name=name))
                )
        return found

    def examples(self) -> dict[str, int]:
        """Return the number of examples by part."""
        return {part: data.count for part, data in self.data.items()}


@dataclass(frozen=True)
class Outcome:
    """What a method of `build` found.

    Attributes:
        record: Plain data, kept in the ensemble's record: `cost`, `branch_layers` and, if members
            differ by heads only, their `masks`. Otherwise `fits` says how they were fitted.
        ensemble: The ensemble; None if it is the host fused with the masks.
    """

    record: dict[str, Any]
    ensemble: HydraEnsemble | None = None


@dataclass(frozen=True)
class BuildJob:
    """What a method of `build` works on.

    Attributes:
        host: The host model.
        parts: The data.
        members: Number of members M.
        asked: Whether the caller gave this number.
        budget: Bounds their counted cost.
        seed: Random seed.
        state: Finished steps of this build.
        store: Keeps tensors of a stopped build; None keeps none.
        progress: Whether to report progress.
        batch_seconds: Measured time of the host on one batch.
    """

    host: HostModel
    parts: Parts
    members: int
    asked: bool
    budget: Budget
    seed: int
    state: SearchState
    store: TensorStore | None
    progress: bool
    batch_seconds: float

    def expect(self, batches: float, what: str) -> None:
        """Announce how long work takes that costs as much as some batches through the host."""
        length = duration(batches * self.batch_seconds)
        announce(
            f"{what}: about {length} (one batch takes {self.batch_seconds:.2g} s)",
            enabled=self.progress,
        )
