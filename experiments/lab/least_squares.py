"""Rows of the tables on least squares: `fold`, `prune`, and what a user would do instead.

A draw of a fold is a trio of hosts: those of seeds 3d, 3d + 1, 3d + 2; or the teachers that `make`
makes of host d. A draw of a pruned host is its seed. `fold` sees FOLD training inputs of the task
and `prune` PRUNE, all without labels.

    trio             the hosts of a draw: `form` is `ensemble` (side by side) or `soup`
    fold             `hydra.fold` with `options`; `answers` are of `members` or of the `student`
    probe            logistic regression with labels on the features of the trio's mean weights
    prune            `hydra.prune` with `options`; `refit: false` removes the same units only;
                     `heads_by` ranks heads by a score that neurons do not have
    torch-pruning    Torch-Pruning, heads and neurons, to the same counted cost; `then` is nothing,
                     `refit` (our least squares) or `tune` (one epoch with labels)
"""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hydra_ensembles as hydra
from hydra_ensembles.costs import choose_units
from hydra_ensembles.criteria import score_heads, score_units
from hydra_ensembles.data.batches import split_batch, without_labels
from hydra_ensembles.heads import HeadScores, UnitScores, prune_units_
from hydra_ensembles.hosts import host_model, main_output
from hydra_ensembles.hosts.mlp_site import mlp_site
from hydra_ensembles.refit.readout_fit import refit_readout_
from hydra_ensembles.refit.readout_states import Parting, Reader
from hydra_ensembles.refit.refit_run import refit_
from hydra_ensembles.training import average_weights

from .answers import Answers, Store, ask
from .methods import (
    LOOKS,
    Row,
    answers_of_model,
    cost_of,
    deep_ensemble,
    methods,
    teachers_of,
)
from .tasks import Task

FOLD, PRUNE = 6000, 2500
NAMES = ("query", "key", "value", "q_proj", "k_proj", "v_proj", "qkv")
"""Linears of attention that Torch-Pruning must know."""


def trio(row: Row, draw: int) -> list[int]:
    """Return the seeds of a draw."""
    count = int(row.get("hosts", 3))
    return [count * draw + place for place in range(count)]


@methods.register("trio")
def of_trio(store: Store, row: Row, draw: int) -> Answers:
    """Ask the hosts of a draw side by side, or the mean of their weights."""
    seeds = trio(row, draw)
    if row["form"] == "ensemble":
        return deep_ensemble(store, {**row, "seeds": seeds}, draw)
    model = average_weights([store.task.host(seed) for seed in seeds]).eval()
    return answers_of_model(store.task, model, row, seeds[0])


class Student:
    """The student of a folded ensemble, as a model with one member."""

    def __init__(self, ensemble: hydra.HydraEnsemble) -> None:
        self.ensemble = ensemble

    def ask(self, data: Any) -> dict[str, Tensor]:
        """Return its answers to a set."""
        logits, labels = [], []
        for batch in data:
            args, kwargs, known = split_batch(batch)
            said = self.ensemble.predict(kwargs or args[0])
            logits.append(said.student_logits[:, None])
            labels += [] if known is None else [known]
        found = {"logits": torch.cat(logits).contiguous()}
        return found if not labels else {**found, "labels": torch.cat(labels)}


@lru_cache(maxsize=2)
def folded(store: Store, draw: int, options: str) -> hydra.HydraEnsemble:
    """Fold the hosts of a draw, or what the row makes; rows of members and student share it."""
    task, row = store.task, json.loads(options)
    if "make" in row:
        models = teachers_of(store, row, draw)
    else:
        models = [task.host(seed) for seed in trio(row, draw)]
    given = row.get("options", {})
    count = given.pop("examples", FOLD)
    data = task.training(given.pop("part", "train"), count)
    return hydra.fold(models, data, student=True, progress=False, **given)


@methods.register("fold")
def fold(store: Store, row: Row, draw: int) -> Answers:
    """Ask the members or the student of a folded ensemble."""
    task, seed = store.task, draw if "make" in row else trio(row, draw)[0]
    shared = {key: value for key, value in row.items() if key not in (*LOOKS, "answers")}
    ensemble = folded(store, draw, json.dumps(shared, sort_keys=True))
    if row["answers"] == "members":
        found = answers_of_model(task, ensemble, row, seed)
        for one in found.sets.values():  # the student has rows of its own
            one.pop("student_logits", None)
    else:
        student, host = Student(ensemble), task.host(seed)
        sets = {name: student.ask(data) for name, data in task.evaluated().items()}
        found = Answers(sets, cost_of(ensemble, host, task.one))
    found.about["record"] = ensemble.record
    return found


def features(model: nn.Module, data: Any) -> tuple[Tensor, Tensor | None]:
    """Return [u, a] of a host's last block at the readout token, and labels."""
    reader, rows, labels = Reader(model, Parting.of(host_model(model))), [], []
    for batch in data:
        seen = reader(batch)
        rows.append(torch.cat([seen.features, seen.total - seen.update], 1).float())
        known = split_batch(batch)[2]
        labels += [] if known is None else [known]
    return torch.cat(rows), torch.cat(labels) if labels else None


@methods.register("probe")
def probe(store: Store, row: Row, draw: int) -> Answers:
    """Fit a classifier with labels to what `fold` reads; its penalty by held-out NLL."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.preprocessing import StandardScaler

    task, seeds = store.task, trio(row, draw)
    base = average_weights([task.host(seed) for seed in seeds]).eval()
    x, y = features(base, task.training("train", FOLD))
    held, labels = features(base, task.held_out)
    assert y is not None and labels is not None
    scaler = StandardScaler().fit(x)
    fits = []
    for strength in (1e-4, 1e-3, 1e-2):
        model = LogisticRegression(C=strength, max_iter=300).fit(scaler.transform(x), y)
        logs = torch.tensor(model.predict_log_proba(scaler.transform(held)))
        fits.append((float(-logs[torch.arange(len(labels)), labels].mean()), model))
    best = min(fits, key=lambda pair: pair[0])[1]

    def said(data: Any) -> dict[str, Tensor]:
        found, known = features(base, data)
        logits = torch.tensor(best.decision_function(scaler.transform(found))).float()
        if logits.dim() == 1:  # two classes have one logit
            logits = torch.stack([torch.zeros_like(logits), logits], 1)
        answers = {"logits": logits[:, None].contiguous()}
        return answers if known is None else {**answers, "labels": known}

    sets = {name: said(data) for name, data in task.evaluated().items()}
    return Answers(sets, {"cost": 1.0, "parameters": 1.0})


@methods.register("prune")
def prune(store: Store, row: Row, draw: int) -> Answers:
    """Prune a host to a budget."""
    task = store.task
    host, options = task.host(draw), row["options"]
    data = task.training("train", row.get("count", PRUNE))
    refitted = row.get("refit", True)
    if refitted and "heads_by" not in row:
        model = hydra.prune(host, data, progress=False, **options)
        return answers_of_model(task, model.eval(), row, draw)
    scores = score_units(host, data, criterion=options.get("criterion", "energy"), progress=False)
    if "heads_by" in row:
        ranking = score_heads(host, data, criterion=row["heads_by"], progress=False)
        scores = with_order(scores, ranking)
    first = without_labels(data[0])
    mask = choose_units(host, scores, max_cost=options["max_cost"], batch=first)
    model = prune_units_(copy.deepcopy(host), mask)
    if refitted:
        refit_(model, host, data, progress=False)
        refit_readout_(model, host, data, progress=False)
    return answers_of_model(task, model.eval(), row, draw)


def with_order(scores: UnitScores, ranking: HeadScores) -> UnitScores:
    """Deal the same values to the heads in another order, so that heads and neurons still compare.

    The head that `ranking` has first gets the largest of `scores`, and so on over all layers.
    """
    rows = torch.stack([torch.as_tensor(row) for row in scores.heads.rows])
    order = torch.stack([torch.as_tensor(row) for row in ranking.rows]).flatten().argsort()
    dealt = torch.empty_like(rows.flatten())
    dealt[order] = rows.flatten().sort().values
    return UnitScores(HeadScores(dealt.view_as(rows)), scores.neurons, ranking.name)


@methods.register("torch-pruning")
def torch_pruning(store: Store, row: Row, draw: int) -> Answers:
    """Prune a host by Torch-Pruning to the same counted cost."""
    task = store.task
    host = task.host(draw)
    model = copy.deepcopy(pruned_by_torch_pruning(task, draw, row["max_cost"]))
    if row.get("then") == "refit":
        data = task.training("train", PRUNE)
        refit_(model, host, data, progress=False)
        refit_readout_(model, host, data, progress=False)
    elif row.get("then") == "tune":
        model = tuned(task, model)
    return answers_of_model(task, model.eval(), row, draw)


@lru_cache(maxsize=1)
def pruned_by_torch_pruning(task: Task, seed: int, max_cost: float) -> nn.Module:
    """Remove units by group Taylor importance, equally in all layers, to a counted cost.

    Both heads and neurons, or neurons only, whichever is more accurate on calibration data: those
    are all the tuning runs. The residual width stays: nothing would be left of a model whose width
    is cut without training.
    """
    host = task.host(seed)
    dense, found = hydra.cost(host, task.one), []
    for heads in (True, False):
        low, high, best = 0.0, 0.98, None
        for _ in range(6):
            ratio = (low + high) / 2
            model = _cut(task, copy.deepcopy(host), ratio, heads=heads)
            if hydra.cost(model, task.one).relative_to(dense).multiply_adds <= max_cost:
                high, best = ratio, model
            else:
                low = ratio
        if best is not None:
            said = ask(best, task.calibration)
            right = (said["logits"][:, 0].argmax(-1) == said["labels"]).float().mean()
            found.append((float(right), best))
    return max(found, key=lambda pair: pair[0])[1]


def _cut(task: Task, model: nn.Module, ratio: float, *, heads: bool) -> nn.Module:
    """Cut a share of the neurons, and of the heads, of every layer."""
    import torch_pruning as tp

    blocks = host_model(model).blocks
    attention = {
        block.module.get_submodule(path): block.attention.num_heads
        for block in blocks
        for path, module in block.module.named_modules()
        if isinstance(module, nn.Linear) and path.endswith(NAMES)
    }
    cut = {block.module.get_submodule(mlp_site(block).first[0]) for block in blocks}
    cut |= set(attention) if heads else set()
    kinds = (nn.Linear, nn.Conv2d, nn.LayerNorm)
    data = task.training("train", 200)
    args, kwargs, _ = split_batch(data[0])
    pruner = tp.pruner.BasePruner(
        model,
        {name: value[:1] for name, value in kwargs.items()} if kwargs else args[0][:1],
        importance=tp.importance.GroupTaylorImportance(),
        pruning_ratio=ratio,
        head_pruning_ratio=ratio if heads else 0.0,
        num_heads=attention,
        prune_num_heads=heads,
        prune_head_dims=False,
        ignored_layers=[m for m in model.modules() if isinstance(m, kinds) and m not in cut],
        output_transform=lambda output: main_output(output).sum(),
    )
    for batch in data:
        args, kwargs, labels = split_batch(batch)
        cross_entropy(main_output(model(*args, **kwargs)), labels).backward()
    pruner.step()
    model.zero_grad()
    for module in model.modules():  # the host's own settings follow, as in its examples
        for child in module.children():
            if child in pruner.num_heads:
                count = pruner.num_heads[child]
                for name in ("num_attention_heads", "num_heads"):
                    if hasattr(module, name):
                        setattr(module, name, count)
                if hasattr(module, "all_head_size"):
                    module.all_head_size = count * module.attention_head_size
                if hasattr(module, "attn_dim"):
                    module.attn_dim = child.out_features // 3
    return model


def tuned(task: Task, model: nn.Module) -> nn.Module:
    """Train one epoch with labels, at the host's own rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.01)
    model.train()
    data = task.training("train", None)
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    for place in order:
        args, kwargs, labels = split_batch(data[place])
        with torch.autocast("cpu", torch.bfloat16):
            out = model(*args, **kwargs)
        cross_entropy(main_output(out).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
