"""`build`: from a pretrained model and data to a fused ensemble, in one line."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ._records import model_fingerprint
from .costs.budget import Budget
from .criteria import HeadImportanceEntropy, score_heads
from .data.batches import Batches, as_data, indexable
from .data.splits import fingerprint, sample, split
from .errors import DataError
from .evaluation.metrics_ood import ood_figures
from .fusion.ensemble import HydraEnsemble
from .fusion.fusing import fuse
from .heads.masks import HeadMask, HeadScores, Keep
from .hosts import HostModel, host_model
from .search.candidates import PartCandidates
from .search.ensemble_search import Members, search_members
from .search.headmap import find_effects
from .search.pool import make_pool
from .search.prefix import CACHE_BYTES, Prefix
from .search.select import EnsembleObjective, settings_of, split_rows
from .search.sets import outlier_sets
from .search.state import SearchState, TensorStore
from .search.ticking import ticker
from .uncertainty import fit_member_temperatures, fit_temperature, score_logits, scores

Method = Literal["select", "circuit", "taylor", "hies", "random"]
METHODS = ("select", "circuit", "taylor", "hies", "random")
SHARES = {"select": 0.6, "stop": 0.2, "temperature": 0.2}
AUTO_SCORES = ("msp", "entropy", "max-logit", "energy", "mutual-information")
CIRCUITS = ("id-loss", "ood-auroc", "average", "ece", "nll-shift")
POOL_BYTES = 2 * 2**30


def build(
    model: nn.Module | HostModel,
    calibration: Any,
    *,
    ood: Any = "auto",
    validation: Any = None,
    method: Method = "select",
    members: int = 3,
    max_cost: float | None = 1.07,
    keep: Keep | None = None,
    score: str = "auto",
    calibrate: bool = True,
    objective: EnsembleObjective | None = None,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    cache_bytes: int = CACHE_BYTES,
    progress: bool = True,
) -> HydraEnsemble:
    """Build an ensemble of a pretrained model: members, score and temperatures, nothing trained.

    Args:
        model: A host model with a classifier; left as it was.
        calibration: Labelled in-distribution data that the model was not trained on; some hundred
            examples. Split by itself (stratified, seeded): 60 % select, 20 % decide when to stop,
            20 % fit temperatures.
        ood: Outliers: data, a dict of data by family, or `"auto"`. Proxies made of the calibration
            data are always joined; `"auto"` (or None) means proxies alone.
        validation: Labelled data that stops and fits temperatures in place of the split.
        method: `"select"` (members by the ensemble's own figures), `"circuit"` (HeadMap with one
            objective a member, as in the paper), `"taylor"`, `"hies"` or `"random"`.
        members: Number of members M.
        max_cost: Bound on counted multiply-adds relative to the plain model; None for none.
        keep: Heads that `circuit`, `taylor`, `hies` and `random` keep in branched layers: a
            fraction, a number, or a list by layer; by default as many as the budget allows, half at
            most.
        score: The uncertainty that `predict` reports, or `"auto"`: the best on validation data.
        calibrate: Fit a temperature for each member and one for the mean.
        objective: What `select` rewards.
        seed: Of splits, proxies, pools and bags.
        folder: Keep finished steps here (candidates' logits, up to 1 GB, until the search is done),
            so that a stopped build goes on and ends with the same members. Another model, other
            data or settings are refused.
        cache_bytes: Memory for hidden states.
        progress: Show bars on a terminal.

    Returns:
        The ensemble; `.record` says what was done and can be given to `replay`.

    Example:
        >>> ensemble = build(model, calibration, ood={"textures": textures})
        >>> ensemble.predict(batch).uncertainty
    """
    if method not in METHODS:
        raise ValueError(f"Unknown method {method!r}: expected one of {', '.join(METHODS)}.")
    if members < 1:
        raise ValueError(f"members={members}: expected 1 or more.")
    if score != "auto":
        scores[score]  # an unknown name fails now
    host = host_model(model)
    work = _Build(host, calibration, validation, ood, seed, cache_bytes, progress)
    objective = objective or EnsembleObjective()
    settings = {
        "method": method,
        "members": members,
        "max_cost": max_cost,
        "keep": keep if keep is None or isinstance(keep, (int, float)) else list(keep),
        "score": score,
        "calibrate": calibrate,
        "seed": seed,
        "objective": settings_of(objective),
        "model": model_fingerprint(host.model),
        "data": work.fingerprints(),
    }
    settings = json.loads(json.dumps(settings))
    state = SearchState(folder, settings, name="build.json")
    store = None if folder is None else TensorStore(Path(folder) / "candidates")
    result = next((step for step in state.steps if "masks" in step), None)
    if result is None:
        budget = Budget.of(host, work.first_batch(), max_cost)
        if method == "select":
            result = work.select(members, budget, objective, state, store)
        else:
            result = work.by_method(method, members, budget, keep, state)
        state.add(result)
    if store is not None:
        store.clear()
    masks = [HeadMask(rows) for rows in result["masks"]]
    ensemble = fuse(host.model, masks).eval()
    decisions = work.decide(ensemble, score, calibrate)
    ensemble.record = {
        "made_by": "build",
        "settings": settings,
        "examples": work.examples(),
        **result,
        "decisions": decisions,
    }
    apply_decisions(ensemble, decisions)
    return ensemble


def replay(model: nn.Module | HostModel, record: Mapping[str, Any]) -> HydraEnsemble:
    """Make an ensemble again from what `build` recorded, without data."""
    try:
        masks = [HeadMask(rows) for rows in record["masks"]]
        decisions, expected = record["decisions"], record["settings"]["model"]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"Not a record of build() ({error!r} is missing): pass ensemble.record."
        ) from None
    host = host_model(model)
    if model_fingerprint(host.model) != expected:
        raise DataError(
            "The record was made for a model with other weights. Load the model that it was built "
            "from, or build() anew."
        )
    ensemble = fuse(host.model, masks).eval()
    ensemble.record = json.loads(json.dumps(dict(record)))
    apply_decisions(ensemble, decisions)
    return ensemble


def apply_decisions(ensemble: HydraEnsemble, decisions: Mapping[str, Any]) -> None:
    """Set score and temperatures."""
    ensemble.score = decisions["score"]
    ensemble.temperature = decisions["temperature"]
    ensemble.member_temperatures = decisions["member_temperatures"]


class _Build:
    """The data of a build and the steps over it."""

    def __init__(
        self,
        host: HostModel,
        calibration: Any,
        validation: Any,
        ood: Any,
        seed: int,
        cache_bytes: int,
        progress: bool,
    ) -> None:
        self.host, self.seed = host, seed
        self.cache_bytes, self.progress = cache_bytes, progress
        own = indexable(as_data(calibration))
        self.parts: dict[str, Batches]
        if validation is None:
            self.parts = split(own, SHARES, seed=seed)
        else:
            other = split(as_data(validation), {"stop": 0.5, "temperature": 0.5}, seed=seed)
            self.parts = {"select": own, **other}
        # proxies are made of each part by itself, so that no image selects and decides
        self.sets: dict[str, dict[str, Any]] = {"select": {}, "stop": {}}
        given = outlier_sets(None, None if ood == "auto" else ood)
        for part in self.sets:
            self.sets[part] = {"id": self.parts[part]}
        for name, data in given.items():
            halves = split(data, {"select": 0.7, "stop": 0.3}, seed=seed)
            for part in self.sets:
                self.sets[part][name] = halves[part]
        for part in self.sets:
            self.sets[part].update(outlier_sets(self.parts[part], "auto", seed=seed))

    def first_batch(self) -> Any:
        return next(iter(self.parts["select"]))

    def fingerprints(self) -> dict[str, str]:
        found = {part: fingerprint(data) for part, data in self.parts.items()}
        for name, data in self.sets["select"].items():
            if name != "id" and "proxy-" not in name:
                found[name] = fingerprint(data)
        return found

    def examples(self) -> dict[str, int]:
        return {part: data.count for part, data in self.parts.items()}

    def select(
        self,
        members: int,
        budget: Budget,
        objective: EnsembleObjective,
        state: SearchState,
        store: TensorStore | None,
    ) -> dict[str, Any]:
        """Search members by the ensemble's own figures."""
        layers = budget.branch_layers(members)
        both = {
            f"{part}:{name}": data
            for part, sets in self.sets.items()
            for name, data in sets.items()
        }
        labelled = [name for name in both if name.endswith(":id")]
        prefix = Prefix(self.host, both, cache_bytes=self.cache_bytes, labelled=labelled)
        tables = self._tables(layers, state)
        size = self._pool_size(prefix)
        pool = make_pool(self.host, layers, size=size, tables=tables, seed=self.seed)
        trunk = torch.ones(1)
        work = prefix.batches * (layers[0] + len(pool) * len(layers))
        with ticker("members", work, enabled=self.progress) as tick:
            for layer in range(layers[0]):
                trunk = torch.ones(self.host.head_counts[layer], dtype=torch.bool)
                prefix.advance(trunk, tick=tick)
            candidates = PartCandidates(prefix, pool, tick=tick, store=store)
            found = search_members(
                candidates,
                budget,
                members=members,
                layers=layers,
                select=candidates.rows("select"),
                hold=candidates.rows("stop"),
                objective=objective,
                seed=self.seed,
                state=state,
            )
        return _plain(found, len(candidates.masks), layers)

    def _pool_size(self, prefix: Prefix) -> int:
        classes = getattr(getattr(self.host.model, "config", None), "num_labels", None) or 1000
        examples = sum(prefix.examples.values())
        return int(min(600, max(64, POOL_BYTES / (8 * examples * classes))))

    def _tables(self, layers: Sequence[int], state: SearchState) -> dict[str, HeadScores]:
        """Score heads by criteria, as seeds of the pool."""
        if not state.find("tables"):
            names = ["taylor", "hies"]
            few = all(self.host.head_counts[layer] <= 3 for layer in layers)
            found = (
                {}
                if few
                else score_heads(
                    self.host, self.parts["select"], criterion=names, progress=self.progress
                )
            )
            state.add({"tables": {name: table.tolist() for name, table in found.items()}})
        return {name: HeadScores(rows) for name, rows in state.find("tables")[0].items()}

    def by_method(
        self, method: str, members: int, budget: Budget, keep: Keep | None, state: SearchState
    ) -> dict[str, Any]:
        """Make members one by one, each without a look at the others."""
        option = budget.option(members, keep=keep)
        layers = range(option.branch_layer, len(self.host))
        full = HeadMask.full(self.host)
        known = state.find("member")
        for member in range(len(known), members):
            folder = None if state.path is None else state.path.parent / f"member{member}"
            kept, tried = self._member(method, member, layers, option.keep_per_layer, folder)
            mask = full
            for layer in layers:
                mask = mask.with_layer(layer, kept[layer])
            known.append({"mask": mask.tolist(), "tried": tried})
            state.add({"member": known[member]})
        masks = [HeadMask(step["mask"]) for step in known]
        return {
            "masks": [mask.tolist() for mask in masks],
            "tried": [step["tried"] for step in known],
            "cost": budget.ratio(masks),
            "branch_layers": list(layers),
        }

    def _member(
        self, method: str, member: int, layers: Sequence[int], keep: Keep, folder: Any
    ) -> tuple[HeadMask, dict[str, Any]]:
        if method == "random":
            seed = 1000 * self.seed + member
            return HeadMask.random(self.host, keep=keep, seed=seed), {"seed": seed}
        if method == "circuit":
            goal = CIRCUITS[member % len(CIRCUITS)]
            outliers = {
                name.removeprefix("ood/"): data
                for name, data in self.sets["select"].items()
                if name != "id"
            }
            circuit = find_effects(
                self.host,
                id=self.parts["select"],
                ood=outliers,
                objective=goal,
                keep=keep,
                layers=layers,
                folder=folder,
                cache_bytes=self.cache_bytes,
                progress=self.progress,
            )
            return circuit.mask, {"objective": goal, "effects": circuit.effects.tolist()}
        # members differ by the examples that score their heads
        data = self.parts["select"]
        part = sample(data, max(1, data.count // 2), seed=1000 * self.seed + member)
        alphas = (0.5, 0.25, 0.75)
        criterion: Any = (
            "taylor" if method == "taylor" else HeadImportanceEntropy(alpha=alphas[member % 3])
        )
        table = score_heads(self.host, part, criterion=criterion, progress=self.progress)
        return table.top_k(keep), {"criterion": method, "scores": table.tolist()}

    @torch.no_grad()
    def decide(self, ensemble: HydraEnsemble, score: str, calibrate: bool) -> dict[str, Any]:
        """Fit temperatures, choose the score; both on data that selected nothing."""
        decisions: dict[str, Any] = {
            "score": "msp" if score == "auto" else score,
            "temperature": None,
            "member_temperatures": None,
        }
        was_training = ensemble.training
        ensemble.eval()
        if calibrate:
            logits, labels = _run(ensemble, self.parts["temperature"])
            assert labels is not None
            each = fit_member_temperatures(logits, labels)
            scaled = logits / torch.tensor(each)[:, None]
            decisions["member_temperatures"] = each
            decisions["temperature"] = fit_temperature(scaled, labels)
        if score == "auto":
            decisions.update(self._auto_score(ensemble, decisions))
        ensemble.train(was_training)
        return decisions

    def _auto_score(self, ensemble: HydraEnsemble, decisions: dict[str, Any]) -> dict[str, Any]:
        """Pick the score with the best mean AUROC over families, on the stopping part."""
        divide = torch.ones(ensemble.members)
        if decisions["member_temperatures"] is not None:
            divide = torch.tensor(decisions["member_temperatures"]) * decisions["temperature"]
        logits = {
            name: _run(ensemble, data)[0] / divide[:, None]
            for name, data in self.sets["stop"].items()
        }
        names = [n for n in AUTO_SCORES if ensemble.members > 1 or n != "mutual-information"]
        found = {}
        for name in names:
            own = score_logits(logits["id"], name)
            values = [
                ood_figures(own, score_logits(v, name))["AUROC"]
                for k, v in logits.items()
                if k != "id"
            ]
            found[name] = sum(values) / len(values)
        best = max(names, key=lambda name: (round(found[name], 4), -names.index(name)))
        return {"score": best, "auroc_by_score": found}


def _run(ensemble: HydraEnsemble, data: Any) -> tuple[Tensor, Tensor | None]:
    """Return the members' raw logits and labels."""
    from .data.running import split_batch

    logits, labels = [], []
    for batch in data:
        logits.append(ensemble.member_logits(batch).float().cpu())
        found = split_batch(batch)[2]
        if found is not None:
            labels.append(found.long().cpu())
    return torch.cat(logits), torch.cat(labels) if labels else None


def _plain(found: Members, pool: int, layers: Sequence[int]) -> dict[str, Any]:
    chosen = found.selection
    best = sorted(chosen.trail, key=lambda t: -t["held_out"])[:10]
    return {
        "masks": [mask.tolist() for mask in found.masks],
        "cost": found.cost,
        "origins": list(found.origins),
        "branch_layers": list(layers),
        "pool": pool,
        "rounds": found.rounds,
        "gain": chosen.gain,
        "held_out_gain": chosen.held_out,
        "intervals": {name: list(pair) for name, pair in chosen.intervals.items()},
        "tried": best,
    }


__all__ = ["build", "replay", "split_rows"]
