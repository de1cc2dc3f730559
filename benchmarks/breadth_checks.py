"""What a model is asked: explain, score, gate == prune (heads, neurons), fuse, cost, save."""

from __future__ import annotations

import copy
import tempfile
import warnings
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask, UnitMask
from hydra_ensembles.costs.formula import CostModel
from hydra_ensembles.heads import prune_units_
from hydra_ensembles.tasks import Task, task_of

TOLERANCE = 1e-4
KEPT, BROKEN, WRONG, CRASHED, REFUSED = "kept", "broken", "wrong", "crashed", "refused"
STEPS = ("explain", "score", "gate", "prune", "neurons", "fuse", "cost", "save")


def scale_(model: nn.Module, seed: int) -> None:
    """Redraw all weights so that biases, norms, positions and every head matter, in place."""
    generator = torch.Generator().manual_seed(seed)

    def normal(parameter: Tensor, std: float) -> Tensor:
        return torch.randn(parameter.shape, generator=generator) * std

    owners = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(id(parameter), (module, name, parameter))
    with torch.no_grad():
        for module, name, parameter in owners.values():
            if not parameter.is_floating_point() or name in ("A_log", "dt_bias", "D"):
                continue
            shape = parameter.shape
            if isinstance(module, nn.Embedding):
                parameter.copy_(normal(parameter, 0.7))
            elif "parametrizations" in type(module).__module__ or "original" in name:
                parameter.add_(normal(parameter, 0.05))
            elif (
                parameter.dim() >= 2 and name.endswith(("weight", "proj"))
            ) or parameter.dim() == 3:
                inputs = shape[1:].numel() if parameter.dim() != 3 else shape[-1]
                std = 1.1 / max(1, inputs) ** 0.5
                if parameter.dim() == 3 and shape[0] == 1:  # class tokens and positions
                    std = 0.6
                parameter.copy_(normal(parameter, std))
            elif parameter.dim() >= 2:
                parameter.copy_(normal(parameter, 0.6))
            elif float(parameter.abs().max()) < 0.05 and not name.endswith("bias"):
                parameter.copy_(0.4 + normal(parameter, 0.2))  # a layer scale
            else:
                parameter.add_(normal(parameter, 0.25))
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(normal(buffer, 0.1))


def masks_of(shape: tuple[int, ...], group: int) -> tuple[HeadMask, list[HeadMask]]:
    """Return a mask whose groups are whole, and three masks that part in the last two layers."""
    generator = torch.Generator().manual_seed(1)

    def row(heads: int, size: int, keep_all: bool = False) -> Tensor:
        if keep_all or heads < 2:
            return torch.ones(heads, dtype=torch.bool)
        groups = heads // size
        kept = torch.rand(groups, generator=generator) < 0.6
        kept[int(torch.randint(groups, (1,), generator=generator))] = groups < 2
        if not bool(kept.any()):
            kept[0] = True
        return kept.repeat_interleave(size)

    whole = HeadMask([row(heads, group) for heads in shape])
    trunk = [row(heads, group, keep_all=layer > 0) for layer, heads in enumerate(shape)]
    members = []
    for _ in range(3):
        rows = [
            row(heads, 1) if layer >= len(shape) - 2 and layer else trunk[layer]
            for layer, heads in enumerate(shape)
        ]
        members.append(HeadMask(rows))
    return whole, members


class Case:
    """One model under test and what became of each promise."""

    def __init__(
        self, model: nn.Module, batches: list[Any], real: list[Tensor | None], variant: bool
    ) -> None:
        self.model, self.batches, self.real, self.variant = model, batches, real, variant
        self.task = task_of(model)
        self.steps: dict[str, str] = {}
        self.notes: dict[str, str] = {}

    def step(self, name: str, check: Callable[[], None], *, promised: bool) -> bool:
        """Run a check; note whether the promise was kept, and if not, how."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                check()
            self.steps[name] = KEPT
            return True
        except Difference as error:
            self.steps[name], self.notes[name] = WRONG, str(error)
        except hydra.HydraError as error:
            self.steps[name] = BROKEN if promised else REFUSED
            self.notes[name] = f"{type(error).__name__}: {error}"
        except Exception as error:
            self.steps[name], self.notes[name] = CRASHED, f"{type(error).__name__}: {error}"
        return False

    def run(self, model: nn.Module, index: int) -> Tensor:
        """Return what a plain model gives on one of the batches, as its task reads it."""
        from hydra_ensembles.hosts import main_output

        batch = self.batches[index]
        with torch.no_grad():
            output = model(**batch) if isinstance(batch, dict) else model(batch)
            return main_output(output, self.task.fields)

    def at_real(self, outputs: Tensor, index: int) -> Tensor:
        """Return outputs at real tokens, and all that belong to no token."""
        real = self.real[index]
        if real is None or outputs.dim() != 3:
            return outputs
        if self.task.name == "question-answering":
            outputs = outputs.transpose(1, 2)
        more = outputs.shape[1] - real.shape[1]
        if more:  # a pooled output after the tokens, or tokens before or after them
            real = torch.cat([real, real.new_ones(len(real), max(0, more))], 1)
        return outputs[real] if real.shape == outputs.shape[:2] else outputs

    def compare(self, ours: Tensor, theirs: Tensor, index: int, what: str) -> None:
        """Raise `Difference` when two outputs differ at a real token."""
        ours, theirs = self.at_real(ours, index), self.at_real(theirs, index)
        if ours.shape != theirs.shape:
            raise Difference(f"{what}: shape {list(ours.shape)}, expected {list(theirs.shape)}")
        scale = max(1.0, float(theirs.abs().max()))
        difference = float((ours - theirs).abs().max())
        if not difference <= TOLERANCE * scale:
            raise Difference(f"{what}: {difference:.2g} of {scale:.2g}")


class Difference(AssertionError):
    """Two numbers that must agree do not."""


def examine(name: str, model: nn.Module, batches: list[Any], real: list[Any]) -> dict[str, Any]:
    """Ask everything of one model; return plain data."""
    model = model.eval()
    scale_(model, zlib.crc32(name.encode()))
    case = Case(model, batches, real, variant=", " in name)
    plain = case.run(model, 0)
    if not bool(case.at_real(plain, 0).isfinite().all()):
        raise ValueError("the scaled model gives no finite outputs")
    if not _attends(case, plain):
        raise ValueError("the host's own attention has no effect here (a kernel is missing?)")
    found: list[Any] = []
    result: dict[str, Any] = {"steps": case.steps, "notes": case.notes}
    case.step("explain", lambda: found.append(hydra.explain(model)), promised=True)
    if not found:
        return result
    explanation = found[0]
    result |= {
        "task": case.task.name,
        "supported": explanation.supported,
        "removable": explanation.removable,
        "fusable": explanation.fusable,
        "family": explanation.family,
        "engine": getattr(explanation, "engine", ""),
        "engine_why": getattr(explanation, "engine_why", "")[:300],
        "reason": explanation.reason,
    }
    if not explanation.supported:
        return result
    ran = _ask(case, explanation, plain)
    if ran is not None:  # fuse takes the next engine where the first fails its check
        result["engine"] = ran
    return result


def _attends(case: Case, plain: Tensor) -> bool:
    """Tell whether any linear of the host's attention modules has an effect on its logits."""
    twin = copy.deepcopy(case.model)
    attentions = [m for m in twin.modules() if "attention" in type(m).__name__.lower()]
    linears = [m for a in attentions for m in a.modules() if isinstance(m, nn.Linear)]
    if not linears:
        return True  # another kind of module: the checks will tell
    with torch.no_grad():
        for linear in linears:
            linear.weight.zero_()
    return float((case.run(twin, 0) - plain).abs().max()) > 1e-6


def labels_for(task: Task, plain: Tensor) -> dict[str, Tensor]:
    """Return labels of a task for outputs, by the names that hosts give them; none for vectors."""
    generator = torch.Generator().manual_seed(2)
    if task.name == "embedding":
        return {}
    if task.name == "regression":
        return {"labels": torch.randn(plain.shape, generator=generator)}
    if task.name == "multi-label":
        return {"labels": torch.randint(2, plain.shape, generator=generator).float()}
    if task.name == "question-answering":
        ends = torch.randint(plain.shape[-1] // 2, (2, len(plain)), generator=generator)
        return {"start_positions": ends[0], "end_positions": ends[0] + ends[1]}
    classes = min(5, plain.shape[-1])
    return {"labels": torch.randint(classes, plain.shape[:-1], generator=generator)}


def _ask(case: Case, explanation: Any, plain: Tensor) -> str | None:
    """Check what is promised; return the engine that members ran by."""
    from hydra_ensembles.hosts import host_model

    model = case.model
    host = host_model(model)
    group = max(1, max(site.num_heads // max(1, site.kv_heads) for site in host.sites))
    whole, members = masks_of(explanation.head_counts, group)
    single = masks_of(explanation.head_counts, 1)[0]

    def score() -> None:
        batch, loss = case.batches[-1], None
        given = labels_for(case.task, plain)
        if not given:  # embeddings are not right or wrong
            loss = lambda outputs, labels: outputs.float().flatten(1).square().mean(1)  # noqa: E731
        data = [{**batch, **given} if isinstance(batch, dict) else (batch, given.get("labels"))]
        scores = hydra.score_heads(model, data, criterion="his", loss=loss, progress=False)
        dead = [layer for layer, row in enumerate(scores) if not bool((row > 0).any())]
        if dead and len(dead) < len(scores.rows) and dead[0] == len(scores.rows) - 1:
            dead = []  # the last block of a decoder may only feed tokens that are not read
        if dead:
            raise Difference(f"no head of layer {dead[0]} has any effect on the loss")

    def gates() -> None:
        for index in range(len(case.batches)):
            with hydra.gate(model, single):
                gated = case.run(model, index)
            if float((gated - case.run(model, index)).abs().max()) < 1e-6:
                raise Difference("gating heads changes nothing")

    def prune() -> None:
        pruned = hydra.prune_heads_(copy.deepcopy(model), whole)
        for index in range(len(case.batches)):
            with hydra.gate(model, whole):
                gated = case.run(model, index)
            case.compare(case.run(pruned, index), gated, index, f"pruned, batch {index}")

    def neurons() -> None:
        mask = UnitMask(HeadMask.full(host), UnitMask.random(host, keep=0.6).neurons)
        pruned = None if host.shares_layers else prune_units_(copy.deepcopy(model), mask)
        for index in range(len(case.batches)):
            with hydra.gate(model, mask):
                gated = case.run(model, index)
            if float((gated - case.run(model, index)).abs().max()) < 1e-6:
                raise Difference("gating neurons changes nothing")
            if pruned is not None:
                case.compare(case.run(pruned, index), gated, index, f"no neurons, batch {index}")

    ensembles: list[Any] = []

    def compare_members(ensemble: Any, what: str) -> None:
        for index, batch in enumerate(case.batches):
            with torch.no_grad():
                fused = ensemble.member_logits(batch)
            for member, mask in enumerate(members):
                with hydra.gate(model, mask):
                    alone = case.run(model, index)
                case.compare(fused[:, member], alone, index, f"{what} {member}, batch {index}")

    def fuse() -> None:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            ensembles.append(hydra.fuse(copy.deepcopy(model), members))
        if ensembles[0].engine != explanation.engine:
            told = [str(w.message) for w in said if "failed its check" in str(w.message)]
            raise hydra.HydraError(
                f"explain promised the engine {explanation.engine}, fuse took "
                f"{ensembles[0].engine}: {' '.join(told) or 'and did not say so'}"
            )
        compare_members(ensembles[0], "member")

    def count() -> None:
        batch = case.batches[0]
        planned = CostModel(model, batch).ratio(members)
        ran = hydra.cost(ensembles[0], batch).relative_to(hydra.cost(model, batch)).multiply_adds
        if abs(planned - ran) > 1e-3 * ran:
            raise Difference(f"the plan costs {planned:.4f} x, the ensemble {ran:.4f} x")

    def save() -> None:
        with tempfile.TemporaryDirectory() as folder:
            ensembles[0].save_pretrained(folder)
            try:
                loaded = hydra.HydraEnsemble.from_pretrained(folder)
            except hydra.HydraError as error:
                if "host=" not in str(error):
                    raise
                case.notes["save"] = "loads with host="
                loaded = hydra.HydraEnsemble.from_pretrained(folder, host=copy.deepcopy(model))
        compare_members(loaded.eval(), "loaded member")

    case.step("score", score, promised=True)
    case.step("gate", gates, promised=True)
    if not all(bool(row.all()) for row in whole):  # else all heads are one group
        case.step("prune", prune, promised=explanation.removable)
    twice = case.variant  # neurons and costs do not depend on what the outputs mean
    if any(explanation.neuron_counts) and not twice:
        case.step("neurons", neurons, promised=True)
    if case.step("fuse", fuse, promised=explanation.fusable):
        if not twice:
            case.step("cost", count, promised=True)
        case.step("save", save, promised=explanation.fusable)
    return ensembles[0].engine if ensembles else None


def verdict(result: dict[str, Any]) -> str:
    """Sum up one model in a word: the worst that happened."""
    steps = set(result["steps"].values())
    for worst in (WRONG, CRASHED, BROKEN):
        if worst in steps:
            return worst
    if not result.get("supported"):
        return REFUSED
    return "fused" if result["steps"].get("fuse") == KEPT else "scored"
