"""One member's training run: seeded steps, checkpoints, the record of what happened."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._records import check_same_run
from .._tensors import model_fingerprint
from ..answer_each import is_out_of_memory
from ..data import processes
from ..data.batches import batch_length, take
from ..data.memory import telling_lost_workers
from ..data.processes import in_order, own_numbers
from ..data.progress import Progress
from ..errors import DataError, HydraError
from ..tasks import task_of
from .accelerator import Gradients, MemberLogits, logits_and_labels
from .checkpoint import (
    pack_optimizer,
    read_checkpoint,
    unpack_optimizer,
    with_prefix,
    write_checkpoint,
)
from .sample_order import Stream, derive_seed
from .settings import Settings

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class StepInfo:
    """What `on_step` receives after each step."""

    member: int
    epoch: int
    step: int
    steps: int
    loss: float
    learning_rate: float


@dataclass
class FinetunedMember:
    """A trained model and the record of its training (plain data, apart from the model)."""

    model: nn.Module
    seed: int
    steps: int
    trained_parameters: int
    history: list[dict[str, float]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return the record without the model, for JSON."""
        return {key: value for key, value in vars(self).items() if key != "model"}

    def __repr__(self) -> str:
        last = ", ".join(f"{k} {v:.4g}" for k, v in (self.history or [{}])[-1].items())
        name = type(self.model).__name__
        return f"FinetunedMember({name}, seed {self.seed}, {self.steps} steps; {last})"


def schedule(step: int, steps: int, warmup: float) -> float:
    """Return the learning rate's factor: linear from 0 to 1 in the warm-up, then down to 0."""
    rising = round(warmup * steps)
    if step < rising:
        return (step + 1) / rising
    return (steps - step) / max(1, steps - rising)


@dataclass
class Run:
    """Train one member.

    All random draws are functions of (seed, epoch, step). A checkpoint therefore needs no generator
    states, and a resumed run repeats the original exactly.
    """

    model: nn.Module
    stream: Stream
    settings: Settings
    seed: int
    accelerator: Accelerator
    member: int = 0
    is_trained: Callable[[str, nn.Parameter], bool] = lambda _, parameter: parameter.requires_grad
    loss: Callable[[Tensor, Tensor], Tensor] | None = None
    validation: Iterable[Any] | None = None
    folder: Path | None = None
    save_every: int = 200
    progress: bool = True
    on_step: Callable[[StepInfo], None] | None = None
    action: str = "fine-tune"  # what the progress bar calls it

    def train(self) -> FinetunedMember:
        """Train from the start, or from the checkpoint if there is one."""
        flags = {name: p.requires_grad for name, p in self.model.named_parameters()}
        home = next(self.model.parameters()).device
        self._prepare()
        self._restore()
        if self.step < self.steps:
            self._run_epochs()
        if self.best:
            self._load(self.best)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(flags[name])
            parameter.grad = None
        return FinetunedMember(
            model=self.model.to(home).eval(),
            seed=self.seed,
            steps=self.steps,
            trained_parameters=sum(p.numel() for p in self.trained.values()),
            history=self.history,
        )

    def _prepare(self) -> None:
        self.parts = self.settings.parts or processes.size()
        self.steps_per_epoch = len(self.stream)
        self.steps = self.steps_per_epoch * self.settings.epochs
        self.step, self.epoch, self.loss_sum = 0, 0, 0.0
        self.history: list[dict[str, float]] = []
        self.best: dict[str, Tensor] = {}
        self.trained: dict[str, nn.Parameter] = {}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(self.is_trained(name, parameter))
            if parameter.requires_grad:
                self.trained[name] = parameter
        if not self.trained:
            raise HydraError(
                f"No parameter of {type(self.model).__name__} is chosen for training. "
                "Check the regular expression against model.named_parameters()."
            )
        self.fingerprint = {
            **asdict(self.settings),
            "seed": self.seed,
            "steps_per_epoch": self.steps_per_epoch,
            "trained": sorted(self.trained),
            "start": model_fingerprint(self.model) if self.folder else None,
        }
        self.model.to(self.accelerator.device)
        pull = self.settings.towards_host
        self.start = {n: p.detach().clone() for n, p in self.trained.items()} if pull else {}
        self.optimizer = torch.optim.AdamW(self._groups(), lr=self.settings.learning_rate)
        # "evaluation": gradients of several processes are added up here (`Gradients`)
        self.wrapped = self.accelerator.prepare_model(
            MemberLogits(self.model), evaluation_mode=True
        )
        self.stepper = self.accelerator.prepare_optimizer(self.optimizer)

    def _groups(self) -> list[dict[str, Any]]:
        """Group the trained parameters by their share of the learning rate and by decay."""
        groups: dict[tuple[float, bool], list[nn.Parameter]] = {}
        for name, parameter in self.trained.items():
            groups.setdefault((self._rate_of(name), parameter.ndim > 1), []).append(parameter)
        decay = self.settings.weight_decay
        ordered = sorted(groups.items(), key=lambda group: (-group[0][0], not group[0][1]))
        return [
            {"params": parameters, "weight_decay": decay if decayed else 0.0, "share": share}
            for (share, decayed), parameters in ordered
        ]

    def _rate_of(self, name: str) -> float:
        """Return a parameter's share of the learning rate."""
        return 1.0

    def _run_epochs(self) -> None:
        shown = self.progress and processes.is_first()
        with Progress(self.action, self.steps, enabled=shown, unit="steps", done=self.step) as bar:
            for epoch in range(self.step // self.steps_per_epoch, self.settings.epochs):
                self._run_epoch(epoch, bar)

    def _run_epoch(self, epoch: int, bar: Progress) -> None:
        self.model.train()
        self.epoch = epoch
        done = self.step - epoch * self.steps_per_epoch
        self._seed_step(epoch, -1)
        batches = telling_lost_workers(self.stream.epoch(epoch), "training data")
        missing = object()
        for index in range(self.steps_per_epoch):
            self._seed_step(epoch, index)
            batch = next(batches, missing)
            if batch is missing:
                raise DataError(
                    f"The data ended before the {self.steps_per_epoch} batches that it announced. "
                    "It must give the same number of batches each time it is iterated."
                )
            if index < done:  # trained on before the run was stopped
                continue
            loss, rate = self._update(batch)
            self.step += 1
            self.loss_sum += loss
            bar.update()
            bar.show(f"loss {loss:.3f}")
            is_last = index + 1 == self.steps_per_epoch
            if is_last:
                self._end_epoch(epoch)
            if is_last or self.step % self.save_every == 0:
                self._save()
            if self.on_step is not None:
                self.on_step(StepInfo(self.member, epoch, self.step, self.steps, loss, rate))

    def _seed_step(self, epoch: int, index: int, part: int = 0) -> None:
        # inside fork_rng: the caller's generators do not change
        torch.manual_seed(derive_seed("step", self.seed, epoch, index, part))

    def _update(self, batch: Any) -> tuple[float, float]:
        """Make one step of the optimizer; return the loss and the learning rate."""
        settings = self.settings
        factor = schedule(self.step, self.steps, settings.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.learning_rate * factor * group["share"]
        try:
            if self.parts > 1:
                value = self._backward_by_parts(batch)
            else:
                loss = self._loss(batch, 0)
                value = self._check_loss(loss.item())
                self.accelerator.backward(loss)
            self.accelerator.unscale_gradients(self.stepper)
            for name, start in self.start.items():  # the gradient of the pull, added directly
                parameter = self.trained[name]
                if parameter.grad is not None:
                    parameter.grad.add_(parameter.detach() - start, alpha=settings.towards_host)
            if math.isfinite(settings.max_grad_norm):
                nn.utils.clip_grad_norm_(self.trained.values(), settings.max_grad_norm)
            self.stepper.step()
            self.stepper.zero_grad()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # halving the batch would change the final weights: that is the user's choice
            kept = "" if self.folder is None else f" Finished steps are kept in {self.folder}."
            raise HydraError(
                f"Memory ran out at step {self.step} of member {self.member} ({error}). Train with "
                f"smaller batches, or on a device with more memory.{kept}"
            ) from error
        return value, settings.learning_rate * factor

    def _backward_by_parts(self, batch: Any) -> float:
        """Compute the gradients of a batch part by part, shared with other processes."""
        gradients = Gradients(
            list(self.trained.values()), self.parts, ordered=self.settings.parts > 0
        )
        losses: dict[int, float] = {}
        failure: Exception | None = None
        try:
            for part in own_numbers(self.parts):
                self._seed_step(self.epoch, self.step % self.steps_per_epoch, part + 1)
                loss = self._loss(batch, part)
                losses[part] = self._check_loss(loss.item())
                if loss.requires_grad:
                    self.accelerator.backward(loss)
                gradients.take_(part)
        except Exception as error:  # sent to the other processes, so that all raise
            failure = error
        reports = processes.exchange(
            {"losses": list(losses.items()), "error": processes.describe_error(failure)}
        )
        if failure is not None:
            raise failure
        for report in reports:
            if report["error"] is not None:
                raise processes.error_of(report["error"])
        gradients.put_()
        by_part = {part: float(value) for report in reports for part, value in report["losses"]}
        return sum(by_part[part] for part in range(self.parts))

    def _check_loss(self, value: float) -> float:
        if not math.isfinite(value):
            raise HydraError(
                f"The loss became {value} at step {self.step} of member {self.member}. "
                "Lower the learning rate, or check the data for NaN."
            )
        return value

    def _part(self, batch: Any, part: int) -> tuple[Any, float]:
        """Return a part of a batch and its share of the samples."""
        if self.parts == 1:
            return batch, 1.0
        size = batch_length(batch)
        start, end = size * part // self.parts, size * (part + 1) // self.parts
        return take(batch, slice(start, end)), (end - start) / size

    def _loss(self, batch: Any, part: int) -> Tensor:
        """Return a part's contribution to the batch's mean loss."""
        batch, share = self._part(batch, part)
        return share * self._data_loss(batch) if share else torch.zeros(())

    def _data_loss(self, batch: Any) -> Tensor:
        task = task_of(self.model)
        logits, labels = logits_and_labels(self.wrapped, batch, task)
        if self.loss is not None:
            return self.loss(logits, labels)
        if task.by_token or not task.classifies:
            return torch.stack([task.loss(m, labels) for m in logits.unbind(1)]).mean()
        smoothing = self.settings.label_smoothing
        members = [F.cross_entropy(m, labels, label_smoothing=smoothing) for m in logits.unbind(1)]
        return torch.stack(members).mean()

    def _end_epoch(self, epoch: int) -> None:
        entry = {"epoch": float(epoch), "loss": self.loss_sum / self.steps_per_epoch}
        self.loss_sum = 0.0
        if self.validation is not None:
            entry |= self._validate(self.validation)
            is_best = entry["nll"] <= min(e["nll"] for e in [*self.history, entry])
            if self.settings.keep == "best" and is_best:
                self.best = {n: p.detach().clone() for n, p in self._state().items()}
        self.history.append(entry)

    @torch.no_grad()
    def _validate(self, data: Iterable[Any]) -> dict[str, float]:
        self.model.eval()

        task = task_of(self.model)

        def work(index: int, batch: Any) -> dict[str, Tensor]:
            logits, labels = logits_and_labels(self.wrapped, batch, task)
            if task.by_token or not task.classifies:  # no accuracy
                losses = task.losses(task.mean(logits), labels)
                return {"sums": torch.tensor([float(losses.sum()), torch.nan, len(losses)])}
            if labels.ndim > 1:
                raise DataError("Validation needs class numbers as labels, not probabilities.")
            log_mean = logits.log_softmax(-1).logsumexp(1) - math.log(logits.shape[1])
            nll = F.nll_loss(log_mean, labels, reduction="sum").item()
            right = (log_mean.argmax(1) == labels).sum().item()
            return {"sums": torch.tensor([nll, right, len(labels)], dtype=torch.float64)}

        sums = torch.zeros(3, dtype=torch.float64)
        for result in in_order(data, work, name="validation"):
            sums += result["sums"]
        nll, right, count = sums.tolist()
        if not count:
            raise DataError("The validation data has no batches. Check the loader or the filter.")
        return {"nll": nll / count, **({} if math.isnan(right) else {"accuracy": right / count})}

    def _state(self) -> dict[str, Tensor]:
        """Return what training changes: the trained parameters and the buffers."""
        return {**self.trained, **dict(self.model.named_buffers())}

    @torch.no_grad()
    def _load(self, state: dict[str, Tensor]) -> None:
        for name, value in self._state().items():
            value.copy_(state[name])

    def _save(self) -> None:
        if self.folder is None:
            return
        if processes.is_first():
            tensors = {f"model/{name}": value for name, value in self._state().items()}
            tensors |= {f"best/{name}": value for name, value in self.best.items()}
            if self.step < self.steps:  # a finished run needs no optimizer state
                packed = pack_optimizer(self.optimizer)
                tensors |= {f"optimizer/{name}": value for name, value in packed.items()}
            scaler = self.accelerator.scaler
            record = {
                "settings": self.fingerprint,
                "step": self.step,
                "loss_sum": self.loss_sum,
                "history": self.history,
                "scaler": scaler.state_dict() if scaler is not None else {},
            }
            write_checkpoint(self.folder, tensors, record)
        processes.wait()

    def _restore(self) -> None:
        saved = None if self.folder is None else read_checkpoint(self.folder)
        if self.folder is not None:
            step = None if saved is None else saved[1]["step"]
            processes.check_same(f"the checkpoint in {self.folder} (do all see it?)", step)
        if self.folder is None or saved is None:
            return
        tensors, record = saved
        check_same_run(self.folder, record["settings"], self.fingerprint)
        self._load(with_prefix(tensors, "model/"))
        self.best = {
            name: value.to(self.accelerator.device)
            for name, value in with_prefix(tensors, "best/").items()
        }
        if record["step"] < self.steps:
            unpack_optimizer(self.optimizer, with_prefix(tensors, "optimizer/"))
        if record["scaler"]:
            self.accelerator.scaler.load_state_dict(record["scaler"])
        self.step, self.loss_sum = record["step"], record["loss_sum"]
        self.history = record["history"]
