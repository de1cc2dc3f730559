"""How members are found: one config object per method of `build`; a string is its shorthand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, Protocol

from ..criteria import HeadImportanceEntropy, score_heads
from ..data.splits import sample
from ..heads.head_mask import HeadMask, HeadScores, Keep
from ..registry import Registry
from ..search.headmap import Condition, find_effects
from ..search.selection import EnsembleObjective, count_masks, next_best
from ..search.trunk_cache import CACHE_BYTES
from .data_parts import Task
from .searching import search_pool
from .selecting import select_members

METHODS: Registry[type[Method]] = Registry("method")
"""Methods of `build` by name: classes whose objects can be given in place of the name."""


class Method(Protocol):
    """A way to find members.

    Attributes:
        name: In the registry.
        proxies: Whether outliers are made of the calibration data for it.

    A method whose `searches` is True runs candidate masks, which Ray can share.
    """

    name: ClassVar[str]
    proxies: ClassVar[bool]

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on, as plain data."""
        ...

    def find(self, task: Task) -> dict[str, Any]:
        """Find members: plain data with `masks`, `cost`, `branch_layers` and what was tried.

        Where fewer masks than members are distinct, `equal_members` says why.
        """
        ...


def as_method(method: str | Method) -> Method:
    """Return a method's config object; a name means its defaults."""
    if isinstance(method, str):
        return METHODS[method]()
    if not hasattr(method, "find") or isinstance(method, type):
        raise TypeError(
            f"method={method!r}: expected one of {', '.join(METHODS)} or a config object such as "
            "hydra.Select(masks=96)."
        )
    return method


def method_with(name: str, **options: Any) -> Method:
    """Return a method by name with the options that are not None; refuse what it does not have."""
    kind = METHODS[name]
    known = [f.name for f in fields(kind)]  # type: ignore[arg-type]
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if key not in known:
            raise ValueError(
                f"{key}={given[key]} says nothing to the method {name!r}: leave it out."
            )
    return kind(**given)


@METHODS.register("select")
@dataclass(frozen=True)
class Select:
    """Choose members by the ensemble's own figures, by successive halving (the default).

    Without outliers members are chosen for their likelihood, which is what they are for: novelty
    finds outliers. Outliers that are given count as well.

    Attributes:
        objective: What an ensemble is rewarded for.
        masks: Candidate masks at most.
        stems: Choices of heads below the last layer that candidates share.
        cache_bytes: Memory for hidden states.
    """

    name: ClassVar[str] = "select"
    searches: ClassVar[bool] = True
    proxies: ClassVar[bool] = False
    objective: EnsembleObjective = field(default_factory=EnsembleObjective)
    masks: int = 96
    stems: int = 8
    cache_bytes: int = CACHE_BYTES

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on."""
        return {"objective": asdict(self.objective), "masks": self.masks, "stems": self.stems}

    def find(self, task: Task) -> dict[str, Any]:
        """Select members."""
        return select_members(
            task,
            objective=self.objective,
            masks=self.masks,
            stems=self.stems,
            cache_bytes=self.cache_bytes,
        )


@METHODS.register("search")
@dataclass(frozen=True)
class Search:
    """Search members for many minutes: a large pool on all data, evolved, for every family.

    Proxies of outliers are joined to those that are given.

    Attributes:
        objective: What an ensemble is rewarded for.
        masks: Candidate masks at most; fewer where their logits would not fit in memory.
        rounds: Rounds of mutations at most.
        cache_bytes: Memory for hidden states.
    """

    name: ClassVar[str] = "search"
    searches: ClassVar[bool] = True
    proxies: ClassVar[bool] = True
    objective: EnsembleObjective = field(default_factory=EnsembleObjective)
    masks: int = 600
    rounds: int = 2
    cache_bytes: int = CACHE_BYTES

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on."""
        return {"objective": asdict(self.objective), "masks": self.masks, "rounds": self.rounds}

    def find(self, task: Task) -> dict[str, Any]:
        """Search members."""
        return search_pool(
            task,
            objective=self.objective,
            masks=self.masks,
            rounds=self.rounds,
            cache_bytes=self.cache_bytes,
        )


@dataclass(frozen=True)
class _OneByOne:
    """Members made one by one, each without a look at the others but to differ from them.

    Attributes:
        keep: Heads kept in branched layers: a fraction, a number, or a list by layer; by default
            as many as the budget allows, half at most.
    """

    proxies: ClassVar[bool] = False
    keep: Keep | None = None

    def settings(self) -> dict[str, Any]:
        """Return what the result depends on."""
        return {k: v for k, v in asdict(self).items() if k != "cache_bytes"}

    def member(self, task: Task, index: int, layers: Sequence[int], keep: Keep) -> Found:
        """Find one member: its mask, the scores behind it, and what to remember."""
        raise NotImplementedError

    def batches(self, task: Task, layers: Sequence[int]) -> float:
        """Return what a member costs, in batches through the whole host; about."""
        return 0.0

    def find(self, task: Task) -> dict[str, Any]:
        """Find every member; replace a mask that is taken by the next best."""
        option = task.budget.option(task.members, keep=self.keep)
        layers = range(option.branch_layer, len(task.host))
        known = task.state.find("member")
        remaining = task.members - len(known)
        if remaining and (batches := self.batches(task, layers)):
            task.expect(remaining * batches, f"Scoring heads for {remaining} members")
        for index in range(len(known), task.members):
            found = self.member(task, index, layers, option.keep_per_layer)
            mask = HeadMask.full(task.host)
            for layer in layers:
                mask = mask.with_layer(layer, found.mask[layer])
            taken = {HeadMask(step["mask"]) for step in known}
            tried = dict(found.tried)
            if mask in taken:
                other = next_best(found.scores, mask, layers, taken)
                tried["replaced"] = other is not None
                mask = other or mask
            known.append({"mask": mask.tolist(), "tried": tried})
            task.state.add({"member": known[index]})
        masks = [HeadMask(step["mask"]) for step in known]
        result = {
            "masks": [mask.tolist() for mask in masks],
            "tried": [step["tried"] for step in known],
            "cost": task.budget.ratio(masks),
            "branch_layers": list(layers),
        }
        if len(set(masks)) < len(masks):
            several = count_masks(task.host.head_counts, option.keep_per_layer, layers)
            result["equal_members"] = (
                f"only {several} mask{'s' * (several > 1)} keep{'s' * (several == 1)} "
                f"{', '.join(str(option.keep_per_layer[layer]) for layer in layers)} heads from "
                f"block {layers[0]} on"
            )
        return result


@dataclass(frozen=True)
class Found:
    """One member: its mask, the scores that it keeps the top of, and what to remember."""

    mask: HeadMask
    scores: HeadScores
    tried: dict[str, Any]


@METHODS.register("circuit")
@dataclass(frozen=True)
class Circuits(_OneByOne):
    """Give each member the circuit of one objective, by HeadMap, as in the paper.

    Attributes:
        keep: Heads kept in branched layers; by default what the budget allows, half at most.
        objectives: Of the members in turn.
        condition: What is fixed below a layer; see `find_circuit`.
        cache_bytes: Memory for hidden states.
    """

    name: ClassVar[str] = "circuit"
    searches: ClassVar[bool] = True
    proxies: ClassVar[bool] = True
    objectives: tuple[str, ...] = ("id-loss", "ood-auroc", "average", "ece", "nll-shift")
    condition: Condition = "knockout"
    cache_bytes: int = CACHE_BYTES

    def batches(self, task: Task, layers: Sequence[int]) -> float:
        """Count block runs: above a layer, once for each of its heads."""
        depth = len(task.host)
        runs = sum((task.host.head_counts[i] + 1) * (depth - i) for i in layers)
        return runs / depth * sum(len(data) for data in task.parts.sets["select"].values())

    def member(self, task: Task, index: int, layers: Sequence[int], keep: Keep) -> Found:
        """Search the circuit of this member's objective."""
        goal = self.objectives[index % len(self.objectives)]
        path = task.state.path
        circuit = find_effects(
            task.host,
            id=task.parts.data["select"],
            ood=task.parts.outliers("select"),
            objective=goal,
            keep=keep,
            condition=self.condition,
            layers=layers,
            folder=None if path is None else path.parent / f"member{index}",
            cache_bytes=self.cache_bytes,
            progress=task.progress,
        )
        tried = {"objective": goal, "effects": circuit.effects.tolist()}
        return Found(circuit.mask, circuit.effects, tried)


@METHODS.register("taylor")
@dataclass(frozen=True)
class Taylor(_OneByOne):
    """Score heads by Taylor on half of the selecting examples, another half per member."""

    name: ClassVar[str] = "taylor"

    def criterion(self, index: int) -> Any:
        """Return this member's criterion."""
        return "taylor"

    def batches(self, task: Task, layers: Sequence[int]) -> float:
        """Count half of the examples, forward and backward."""
        return 3 * len(task.parts.data["select"]) / 2

    def member(self, task: Task, index: int, layers: Sequence[int], keep: Keep) -> Found:
        """Score the heads and keep the highest."""
        data = task.parts.data["select"]
        half = sample(data, max(1, data.count // 2), seed=1000 * task.seed + index)
        table = score_heads(
            task.host, half, criterion=self.criterion(index), progress=task.progress
        )
        tried = {"criterion": self.name, "scores": table.tolist()}
        return Found(table.top_k(keep), table, tried)


@METHODS.register("hies")
@dataclass(frozen=True)
class Hies(Taylor):
    """Score heads by HIES, with another alpha and another half of the examples per member.

    Attributes:
        keep: Heads kept in branched layers; by default what the budget allows, half at most.
        alphas: Weights of importance against entropy, of the members in turn.
    """

    name: ClassVar[str] = "hies"
    alphas: tuple[float, ...] = (0.5, 0.25, 0.75)

    def criterion(self, index: int) -> Any:
        """Return this member's criterion."""
        return HeadImportanceEntropy(alpha=self.alphas[index % len(self.alphas)])


@METHODS.register("random")
@dataclass(frozen=True)
class Random(_OneByOne):
    """Draw members' heads at random, seeded."""

    name: ClassVar[str] = "random"

    def member(self, task: Task, index: int, layers: Sequence[int], keep: Keep) -> Found:
        """Draw a mask."""
        seed = 1000 * task.seed + index
        mask = HeadMask.random(task.host, keep=keep, seed=seed)
        # no head is better than another: the next best is the nearest in order
        none = HeadScores([row.float() * 0 for row in mask])
        return Found(mask, none, {"seed": seed})
