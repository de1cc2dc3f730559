"""How members are found: one config object per method of `build`; a string is its shorthand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..criteria import Criterion, HeadImportanceEntropy, score_heads
from ..data.progress import Progress, announce, duration
from ..data.splits import sample, split
from ..errors import ArgumentError, UnsupportedModelError
from ..heads.head_mask import HeadMask, HeadScores, Keep
from ..registry import Registry
from ..search.candidate_table import joined
from ..search.detection import Detection, left_out_detection
from ..search.halving import halve
from ..search.headmap import Condition, find_circuit
from ..search.mask_pool import make_pool
from ..search.selection import (
    EnsembleObjective,
    Rows,
    Selection,
    count_masks,
    next_best,
    select_members,
)
from ..search.task_table import table_of
from ..search.trunk_cache import CACHE_BYTES, Outputs, Prefix
from .data_parts import BuildJob, Outcome

METHODS: Registry[type[Method]] = Registry("method")
"""Methods of `build` by name: classes whose objects can be given instead of the name."""

RUNGS = {"first": 0.1, "second": 0.3, "rest": 0.6}
"""Shares of the selecting data: all masks run on the first, survivors on the others."""

Found = tuple[HeadMask, HeadScores, dict[str, Any]]
"""A member's mask, the scores whose top heads it keeps, and what to record."""

FEWEST = 40
"""Selecting examples below which all masks run on all data."""


class Method(Protocol):
    """A way to find members.

    Attributes:
        name: In the registry.
        members: Default number of members; None if that depends on the outcome.
        proxies: Whether it needs outliers made from the calibration data.
    """

    name: ClassVar[str]
    members: ClassVar[int | None]
    proxies: ClassVar[bool]

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on, as plain data."""
        ...

    def find(self, job: BuildJob) -> Outcome:
        """Find members: masks or an ensemble, `cost`, `branch_layers` and what was tried.

        Where fewer members than asked for are distinct, `equal_members` says why.
        """
        ...


def as_method(method: str | Method) -> Method:
    """Return a method's config object; a name means its defaults."""
    if isinstance(method, str):
        return METHODS[method]()
    if not hasattr(method, "find") or isinstance(method, type):
        raise ArgumentError(
            f"method={method!r}: expected one of {', '.join(METHODS)} or a config object such as "
            "hydra_ensembles.methods.Select(masks=96)."
        )
    return method


def method_with(name: str, **options: Any) -> Method:
    """Return a method by name with the options that are not None; refuse unknown options."""
    kind = METHODS[name]
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in known:
            raise ValueError(
                f"Method {name!r} has no option {key!r}. Its options: {', '.join(known)}."
            )
    return kind(**given)


@METHODS.register("select")
@dataclass(frozen=True)
class Select:
    """Choose members by the ensemble's own figures, by successive halving.

    Without outliers, members are chosen for their likelihood; novelty finds outliers. Outliers that
    are given count as well. The choice is then judged on families that it did not see: each family
    is left out in turn, and proxies are added. Where detection by MSP may fall below the host's,
    the host's own heads are kept.

    Attributes:
        objective: What an ensemble is rewarded for.
        masks: Largest number of candidate masks.
        stems: Choices of heads below the last layer that candidates share.
        cache_bytes: Memory for hidden states.
    """

    name: ClassVar[str] = "select"
    members: ClassVar[int | None] = 3
    proxies: ClassVar[bool] = False
    objective: EnsembleObjective = field(default_factory=EnsembleObjective)
    masks: int = 96
    stems: int = 8
    cache_bytes: int = CACHE_BYTES

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on."""
        return {"objective": asdict(self.objective), "masks": self.masks, "stems": self.stems}

    def find(self, job: BuildJob) -> Outcome:
        """Select members: few stems over a cached trunk, most masks dropped on little data."""
        host, parts, members = job.host, job.parts, job.members
        layers = job.budget.branch_layers(members)
        known = parts.data["select"]
        rungs = split(known, RUNGS, seed=job.seed) if known.count >= FEWEST else {"rest": known}
        sets: dict[str, Any] = {f"{rung}:id": data for rung, data in rungs.items()}
        sets |= {f"rest:ood/{name}": data for name, data in parts.outliers("select").items()}
        sets |= {f"stop:{name}": data for name, data in parts.sets["stop"].items()}
        sets |= {f"stop:proxy/{name}": data for name, data in parts.judging().items()}
        labelled = [name for name in sets if name.endswith(":id")]
        prefix = Prefix(host, sets, cache_bytes=self.cache_bytes, labelled=labelled)
        tables = _score_tables(job, next(iter(rungs.values())), layers)
        pool = make_pool(
            host, layers, size=self.masks, stems=self.stems, tables=tables, seed=job.seed
        )
        work = prefix.batches * (layers[0] + (self.stems + len(pool) // 4) * len(layers))
        what, start = f"Selecting {members} members among {len(pool)} masks", time.perf_counter()
        if not layers[0]:
            job.expect(work / len(host), what)
        with Progress("members", work, enabled=job.progress, unit="block runs") as bar:
            for layer in range(layers[0]):
                row = torch.ones(host.head_counts[layer], dtype=torch.bool)
                prefix.advance(row, tick=bar.update)
                if layer == 0:  # the others are like these, or cheaper: masks are dropped early
                    seconds = time.perf_counter() - start
                    length = duration(seconds * work / prefix.batches)
                    announce(f"{what}: up to {length}", enabled=job.progress)
            survivors = halve(
                prefix,
                pool,
                [rung for rung in rungs if rung != "rest"],
                objective=self.objective,
                members=members,
                state=job.state,
                tick=bar.update,
            )
            masks = list(survivors)
            outputs = prefix.logits(masks, tick=bar.update, store=job.store)
            logits = joined(outputs.logits)
            table = table_of(Outputs(logits, joined(outputs.labels), host.task))

            def choose(select: Rows, hold: Rows) -> Selection:
                return select_members(
                    table,
                    masks,
                    job.budget,
                    members=members,
                    select=select,
                    hold=hold,
                    objective=self.objective,
                    seed=job.seed,
                )

            rows = _rows(prefix, list(rungs))
            proxies = [name for name in logits if name.startswith("proxy/")]
            hold = {n: r for n, r in _rows(prefix, ["stop"]).items() if n not in proxies}
            chosen = choose(rows, hold)
            detection = None
            if parts.given and host.task.classifies:  # others have no MSP to lose
                detection = left_out_detection(
                    logits,
                    chosen.members,
                    lambda select, hold: choose(select, hold).members,
                    select=rows,
                    hold=hold,
                    seed=job.seed,
                )
        found = [masks[i] for i in chosen.members]
        result = {
            "masks": [mask.tolist() for mask in found],
            "cost": job.budget.ratio(found),
            "origins": [survivors[mask] for mask in found],
            "branch_layers": list(layers),
            "pool": len(pool),
            "gain": chosen.gain,
            "held_out_gain": chosen.held_out,
            "intervals": {name: list(pair) for name, pair in chosen.intervals.items()},
            "tried": sorted(chosen.trail, key=lambda tried: -tried["held_out"])[:10],
        }
        if len(set(found)) < members:
            limit = job.budget.max_cost
            within = "" if limit is None else f" within max_cost={limit}"
            result["equal_members"] = (
                f"no ensemble of {members} different masks out of {len(pool)} was found{within}"
            )
        return Outcome(result if detection is None else _guarded(job, result, detection))


def _guarded(job: BuildJob, result: dict[str, Any], detection: Detection) -> dict[str, Any]:
    """Keep the host's heads where the chosen ones may lose detection of unseen outliers."""
    judged = f"{detection.sentence} on outliers left out of the choice"
    whole = HeadMask.full(job.host)
    if detection.kept:
        sentence, kept = f"The chosen heads keep detection: {judged}.", "chosen"
    elif not job.budget.allows([whole]):
        sentence = f"The chosen heads may lose detection: {judged}; max_cost rules out the host's."
        kept = "chosen"
    else:
        sentence = f"Kept the host's own heads: the chosen ones may lose detection, {judged}."
        kept = "host"
        count = job.members if job.asked else 1
        equal = "the host's own heads are kept, which detect unseen outliers better"
        result = {
            **result,
            "masks": [whole.tolist()] * count,
            "origins": ["host"] * count,
            "cost": job.budget.ratio([whole]),
            "branch_layers": [],
        }
        result.pop("equal_members", None)
        if count > 1:
            result["equal_members"] = equal
    return {
        **result,
        "detection": {**detection.to_dict(), "heads": kept, "sentence": sentence},
    }


def _score_tables(job: BuildJob, data: Any, layers: Sequence[int]) -> dict[str, HeadScores]:
    """Score heads by criteria, to seed the pool."""
    if not job.state.find("tables"):
        tables: dict[str, HeadScores] = {}
        if any(job.host.head_counts[layer] > 3 for layer in layers):  # else the pool has all masks
            try:
                tables = score_heads(
                    job.host, data, criterion=["taylor", "hies"], progress=job.progress
                )
            except UnsupportedModelError:  # attention that cannot be watched has no entropy
                tables = score_heads(
                    job.host, data, criterion=["taylor", "his"], progress=job.progress
                )
        job.state.add({"tables": {name: table.tolist() for name, table in tables.items()}})
    return {name: HeadScores(rows) for name, rows in job.state.find("tables")[0].items()}


def _rows(prefix: Prefix, parts: Sequence[str]) -> dict[str, Tensor]:
    """Return the examples of some parts among those joined by data set."""
    rows: dict[str, list[Tensor]] = {}
    starts: dict[str, int] = {}
    for key, count in prefix.examples.items():
        part, _, name = key.partition(":")
        start = starts.get(name, 0)
        if part in parts:
            rows.setdefault(name, []).append(torch.arange(start, start + count))
        starts[name] = start + count
    return {name: torch.cat(pieces) for name, pieces in rows.items()}


@dataclass(frozen=True)
class _OneByOne:
    """Finds members one by one; each only has to differ from those before it."""

    members: ClassVar[int | None] = 3
    proxies: ClassVar[bool] = False
    keep: Keep | None = None

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on."""
        return {k: v for k, v in asdict(self).items() if k != "cache_bytes"}

    def member(self, job: BuildJob, index: int, layers: Sequence[int], keep: Keep) -> Found:
        """Find one member."""
        raise NotImplementedError

    def batches(self, job: BuildJob, layers: Sequence[int]) -> float:
        """Estimate the cost of a member, in batches through the whole host."""
        return 0.0

    def find(self, job: BuildJob) -> Outcome:
        """Find every member; where a mask is taken, use the next best."""
        option = job.budget.option(job.members, keep=self.keep)
        layers = range(option.branch_layer, len(job.host))
        known = job.state.find("member")
        remaining = job.members - len(known)
        if remaining and (batches := self.batches(job, layers)):
            job.expect(remaining * batches, f"Scoring heads for {remaining} members")
        for index in range(len(known), job.members):
            best, scores, tried = self.member(job, index, layers, option.keep_per_layer)
            mask = HeadMask.full(job.host)
            for layer in layers:
                mask = mask.with_layer(layer, best[layer])
            taken = {HeadMask(step["mask"]) for step in known}
            if mask in taken:
                other = next_best(scores, mask, layers, taken)
                tried["replaced"] = other is not None
                mask = other or mask
            known.append({"mask": mask.tolist(), "tried": tried})
            job.state.add({"member": known[index]})
        masks = [HeadMask(step["mask"]) for step in known]
        result = {
            "masks": [mask.tolist() for mask in masks],
            "tried": [step["tried"] for step in known],
            "cost": job.budget.ratio(masks),
            "branch_layers": list(layers),
        }
        if len(set(masks)) < len(masks):
            several = count_masks(job.host.head_counts, option.keep_per_layer, layers)
            result["equal_members"] = (
                f"only {several} mask{'s' * (several > 1)} keep{'s' * (several == 1)} "
                f"{', '.join(str(option.keep_per_layer[layer]) for layer in layers)} heads from "
                f"block {layers[0]} on"
            )
        return Outcome(result)


@METHODS.register("circuit")
@dataclass(frozen=True)
class Circuits(_OneByOne):
    """Give each member the circuit of one objective, by HeadMap, as in the paper.

    Attributes:
        keep: Heads kept in branched layers: a fraction, a number, or a list by layer; by default
            as many as the budget allows, at most half.
        objectives: Objectives of the members in turn.
        condition: What is fixed below a layer; see `find_circuit`.
        cache_bytes: Memory for hidden states.
    """

    name: ClassVar[str] = "circuit"
    proxies: ClassVar[bool] = True
    objectives: tuple[str, ...] = ("id-loss", "ood-auroc", "average", "ece", "nll-shift")
    condition: Condition = "knockout"
    cache_bytes: int = CACHE_BYTES

    def batches(self, job: BuildJob, layers: Sequence[int]) -> float:
        """Count block runs: above a layer, once for each of its heads."""
        depth = len(job.host)
        runs = sum((job.host.head_counts[i] + 1) * (depth - i) for i in layers)
        return runs / depth * sum(len(data) for data in job.parts.sets["select"].values())

    def member(self, job: BuildJob, index: int, layers: Sequence[int], keep: Keep) -> Found:
        """Search the circuit of this member's objective."""
        goals = [g for g in self.objectives if g != "ece" or job.host.task.classifies]
        goal = goals[index % len(goals)]
        path = job.state.path
        circuit = find_circuit(
            job.host,
            id=job.parts.data["select"],
            ood=job.parts.outliers("select"),
            objective=goal,
            keep=keep,
            condition=self.condition,
            layers=layers,
            effects=True,
            folder=None if path is None else path.parent / f"member{index}",
            cache_bytes=self.cache_bytes,
            progress=job.progress,
        )
        tried = {"objective": goal, "effects": circuit.effects.tolist()}
        return circuit.mask, circuit.effects, tried


@METHODS.register("taylor")
@dataclass(frozen=True)
class Taylor(_OneByOne):
    """Score heads by Taylor on half of the selecting examples; each member has its own half.

    Attributes:
        keep: Heads kept in branched layers; by default what the budget allows, at most half.
    """

    name: ClassVar[str] = "taylor"

    def criterion(self, index: int) -> str | Criterion:
        """Return this member's criterion."""
        return "taylor"

    def batches(self, job: BuildJob, layers: Sequence[int]) -> float:
        """Count half of the examples, forward and backward."""
        return 3 * len(job.parts.data["select"]) / 2

    def member(self, job: BuildJob, index: int, layers: Sequence[int], keep: Keep) -> Found:
        """Score the heads and keep the highest."""
        data = job.parts.data["select"]
        half = sample(data, max(1, data.count // 2), seed=1000 * job.seed + index)
        table = score_heads(job.host, half, criterion=self.criterion(index), progress=job.progress)
        return table.top_k(keep), table, {"criterion": self.name, "scores": table.tolist()}


@METHODS.register("hies")
@dataclass(frozen=True)
class Hies(Taylor):
    """Score heads by HIES (arXiv 2510.13832); each member has its own alpha and its own half.

    Attributes:
        keep: Heads kept in branched layers; by default what the budget allows, at most half.
        alphas: Weights of importance against entropy of the members in turn.
    """

    name: ClassVar[str] = "hies"
    alphas: tuple[float, ...] = (0.5, 0.25, 0.75)

    def criterion(self, index: int) -> Criterion:
        """Return this member's criterion."""
        return HeadImportanceEntropy(alpha=self.alphas[index % len(self.alphas)])


@METHODS.register("random")
@dataclass(frozen=True)
class Random(_OneByOne):
    """Draw members' heads at random, seeded.

    Attributes:
        keep: Heads kept in branched layers; by default what the budget allows, at most half.
    """

    name: ClassVar[str] = "random"

    def member(self, job: BuildJob, index: int, layers: Sequence[int], keep: Keep) -> Found:
        """Draw a mask."""
        seed = 1000 * job.seed + index
        mask = HeadMask.random(job.host, keep=keep, seed=seed)
        equal = HeadScores([torch.zeros(len(row)) for row in mask])  # no head beats another
        return mask, equal, {"seed": seed}
