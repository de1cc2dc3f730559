"""What rivals share: members in one answer, features, small heads, surgery, what they cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from ...data.batches import map_tensors, split_batch
from ...data.eval_mode import evaluating
from ...data.model_runs import call_model, member_logits, member_logits_of, member_outputs_of
from ...data.progress import progress_bar
from ...errors import DataError, UnsupportedModelError
from ...hosts import host_model
from ...hosts.operation_count import multiply_adds
from ...tasks import task_of


class MemberStack(nn.Module):
    """Run models one after another: what their task reads, `[batch, member, ...]`."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.task = task_of(models[0])

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Answer with every model's outputs."""
        said = [member_outputs_of(m(*args, **kwargs), self.task) for m in self.models]
        return torch.cat(said, dim=1)


class Folded(nn.Module):
    """Run a host whose answer holds the members one after another: `[member * batch, ...]`.

    For hosts whose layers know that row m * batch + i belongs to member m (BatchEnsemble), that
    treat rows independently (dropout), or that fold on their own (Packed-Ensembles).

    Args:
        host: Answers with logits.
        members: How many.
        repeat: Whether the host is given its batch once per member.
    """

    def __init__(self, host: nn.Module, members: int, *, repeat: bool = True) -> None:
        super().__init__()
        self.host = host
        self.members = members
        self.repeat = repeat
        self.task = task_of(host)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Answer with what the host's task reads, `[batch, member, ...]`."""
        if self.repeat:
            args, kwargs = map_tensors(self._repeated, args), map_tensors(self._repeated, kwargs)
        folded = member_outputs_of(self.host(*args, **kwargs), self.task)[:, 0]
        return folded.unflatten(0, (self.members, -1)).transpose(0, 1)

    def _repeated(self, tensor: Tensor) -> Tensor:
        return tensor.repeat(self.members, *[1] * (tensor.ndim - 1)) if tensor.ndim else tensor


def first_batch(data: Iterable[Any]) -> Any:
    """Return the first batch of a data set."""
    for batch in data:
        return batch
    raise DataError("The data set is empty: it gave no batches. Check the loader or the filter.")


def find_classifier(host: nn.Module, batch: Any) -> str | None:
    """Return the path of the linear layer whose output is the host's logits, or None."""
    outputs: dict[str, Tensor] = {}

    def note(name: str) -> Any:
        return lambda module, inputs, output: outputs.update({name: output})

    linears = [(n, m) for n, m in host.named_modules() if isinstance(m, nn.Linear)]
    handles = [module.register_forward_hook(note(name)) for name, module in linears]
    try:
        with evaluating(host):
            logits = member_logits_of(call_model(host, batch))[:, 0]
    finally:
        for handle in handles:
            handle.remove()
    found = [n for n, o in outputs.items() if o.shape == logits.shape and torch.equal(o, logits)]
    return found[-1] if found else None


def need_classifier(host: nn.Module, data: Iterable[Any], rival: str) -> str:
    """Return the path of the last linear layer, or raise for hosts that end otherwise."""
    path = find_classifier(host, first_batch(data))
    if path is None:
        raise UnsupportedModelError(
            f"{type(host).__name__} does not end in a linear layer whose output is the logits, but "
            f"{rival!r} works on that layer. Choose another rival, or fold what follows into it."
        )
    return path


class Featured(nn.Module):
    """A host that answers with its logits `[batch, class]` and what they were made of.

    The features `[batch, width]` are the input of the last linear layer, else the image embeddings
    (zero-shot), else the logits themselves.
    """

    def __init__(self, host: nn.Module, classifier: str | None) -> None:
        super().__init__()
        self.host = host
        self.classifier = classifier

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Answer with `(logits, features)`."""
        seen: list[Tensor] = []
        handle = None
        if self.classifier is not None:
            layer = self.host.get_submodule(self.classifier)
            handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            output = self.host(*args, **kwargs)
        finally:
            if handle is not None:
                handle.remove()
        logits = member_logits_of(output)[:, 0]
        embeds = getattr(output, "image_embeds", None)
        features = seen[0] if seen else embeds if isinstance(embeds, Tensor) else logits
        return logits, features.float()


def collect(
    host: Featured, data: Iterable[Any], *, name: str, labels: bool, progress: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return all logits, features and labels (None unless wanted) of a data set."""
    logits, features, targets = [], [], []
    with evaluating(host):
        for batch in progress_bar(data, description=name, enabled=progress):
            answer = call_model(host, batch)
            logits.append(answer[0])
            features.append(answer[1])
            target = split_batch(batch)[2] if labels else None
            if labels and target is None:
                raise DataError(f"A batch of the data set {name!r} has no labels.")
            if target is not None:
                targets.append(target.to(answer[0].device))
    if not logits:
        raise DataError(f"The data set {name!r} is empty: it gave no examples.")
    found = torch.cat(features)
    if not bool(found.isfinite().all()):
        raise DataError(f"The host's features on the data set {name!r} hold NaN or infinity.")
    return torch.cat(logits), found, torch.cat(targets).long() if labels else None


def carry_uncertainty(logits: Tensor, uncertainty: Tensor) -> Tensor:
    """Shift logits so that their energy is a given uncertainty; no probability changes.

    z' = z - logsumexp(z) - u has softmax(z') = softmax(z) and energy -logsumexp(z') = u: a score
    that no function of the logits could find travels with them, and the score `energy` reads it.

    Args:
        logits: `[batch, class]`.
        uncertainty: `[batch]`.
    """
    return logits.log_softmax(-1) - uncertainty[:, None]


class WithUncertainty(nn.Module):
    """A host with a head on its features and predicted classes, whose logit is the uncertainty.

    Predictions stay the host's. Read the uncertainty with the score `energy`, see
    `carry_uncertainty`.
    """

    score = "energy"

    def __init__(self, host: Featured, head: nn.Module) -> None:
        super().__init__()
        self.host = host
        self.head = head

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Answer with the host's log-probabilities shifted by the uncertainty."""
        logits, features = self.host(*args, **kwargs)
        return carry_uncertainty(logits, self.head(features, logits.argmax(-1)))


class Standardize(nn.Module):
    """Shift and scale features to zero mean and unit spread, as seen on given ones."""

    def __init__(self, features: Tensor) -> None:
        super().__init__()
        self.mean: Tensor
        self.spread: Tensor
        self.register_buffer("mean", features.mean(0))
        self.register_buffer("spread", features.std(0, correction=0).clamp_min(1e-6))

    def forward(self, features: Tensor) -> Tensor:
        """Standardise `[batch, width]`."""
        return (features - self.mean) / self.spread


def fit_binary(
    head: nn.Module,
    inputs: Sequence[Tensor],
    targets: Tensor,
    *,
    positive_weight: float = 1.0,
    steps: int = 400,
    batch_size: int = 128,
    learning_rate: float = 1e-3,
    weight_decay: float = 1e-2,
    seed: int = 0,
    progress: bool = True,
) -> None:
    """Train a head by weighted binary cross-entropy, in place.

    Args:
        head: Called on the rows of `inputs`, answers with logits `[batch]`.
        inputs: Tensors with one row per example.
        targets: 1 for positive, 0 for negative examples, `[example]`.
        positive_weight: What multiplies the loss of positive examples.
        steps: Of AdamW, its rate falling along a cosine.
        batch_size: Examples per step, drawn with replacement.
        learning_rate: At the start.
        weight_decay: Decoupled.
        seed: Of the draws and of dropout; the caller's generators are untouched.
        progress: Show a bar on a terminal.
    """
    optimizer = torch.optim.AdamW(head.parameters(), lr=learning_rate, weight_decay=weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    draws = torch.Generator().manual_seed(seed)
    weight = torch.tensor(positive_weight, device=targets.device)
    head.train()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(seed)
        for _ in progress_bar(range(steps), description="head", enabled=progress, total=steps):
            rows = torch.randint(len(targets), (batch_size,), generator=draws).to(targets.device)
            answer = head(*[part[rows] for part in inputs])
            loss = F.binary_cross_entropy_with_logits(
                answer, targets[rows].float(), pos_weight=weight
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
    head.eval().requires_grad_(False)


def replace_(model: nn.Module, path: str, module: nn.Module) -> None:
    """Put a module at a path of the model, in place."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def block_linears(model: nn.Module) -> list[str]:
    """Return the paths of the linear layers inside the blocks, in order.

    Raises:
        UnsupportedModelError: for `nn.MultiheadAttention`, which reads the weights of its linears
            without calling them: a replacement would do nothing.
    """
    host = host_model(model)
    _refuse_multihead(model)
    return [
        f"{host.blocks_path}.{name}"
        for name, module in host.blocks_list.named_modules()
        if isinstance(module, nn.Linear)
    ]


def attention_linears(model: nn.Module) -> list[str]:
    """Return the paths of the query, key, value and output projections."""
    host = host_model(model)
    _refuse_multihead(model)
    parts = {
        id(part)
        for site in host.sites
        for part in (site.packed, site.query, site.key, site.value, site.output)
    }
    return [
        name
        for name, module in model.named_modules()
        if id(module) in parts and isinstance(module, nn.Linear)
    ]


def _refuse_multihead(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            raise UnsupportedModelError(
                f"{type(model).__name__}: {name} is an nn.MultiheadAttention, which never calls "
                "its projections, so they cannot be replaced. Use a host with linear projections."
            )


@dataclass(frozen=True)
class RelativeCost:
    """A rival's cost divided by the host's.

    Attributes:
        multiply_adds: Of one batch, in matrix products, convolutions and attention.
        parameters: Distinct numbers stored.
    """

    multiply_adds: float
    parameters: float

    def __str__(self) -> str:
        return f"{self.multiply_adds:.2f} x multiply-adds, {self.parameters:.2f} x parameters"


def relative_cost(model: nn.Module, host: nn.Module, batch: Any) -> RelativeCost:
    """Count a rival and its host on one batch by running both.

    `hydra_ensembles.cost` counts from shapes and knows hosts and ensembles only. This one counts
    anything that runs; where both apply, they agree.
    """
    return RelativeCost(
        _multiply_adds(model, batch) / _multiply_adds(host, batch),
        _parameters(model) / _parameters(host),
    )


def _multiply_adds(model: nn.Module, batch: Any) -> int:
    # plain matrix products inside attention: fused kernels are not all known to the counter
    with evaluating(model), sdpa_kernel(SDPBackend.MATH):
        return multiply_adds(lambda: member_logits(model, batch))


def _parameters(model: nn.Module) -> int:
    """Count numbers, tensors that share memory once."""
    stored: dict[tuple[Any, ...], int] = {}
    for parameter in model.parameters():
        stored[(parameter.device, parameter.data_ptr(), parameter.shape)] = parameter.numel()
    return sum(stored.values())
