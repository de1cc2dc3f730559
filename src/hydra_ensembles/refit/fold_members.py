"""`fold`: fine-tunings of one pretrained model in, one ensemble out, by least squares."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..data.batches import check_inputs, without_labels
from ..data.class_names import class_count, first_spellings, model_names, shown_order
from ..data.loaders import as_data, check_reiterable
from ..data.model_runs import collect_logits
from ..data.processes import in_order
from ..data.progress import announce, length_of, progress_bar
from ..errors import DataError, HydraError, UnsupportedModelError
from ..fusion.ensemble import HydraEnsemble
from ..fusion.fuse_members import fuse, refuse_other_tasks
from ..fusion.member import share_parameters
from ..hosts import HostModel, host_model
from ..hosts.families import first_path
from ..hosts.head_weights import linear_weight
from ..hosts.probes import modules_after_blocks
from ..training.weight_average import average_weights
from ..uncertainty import find_temperature
from .readout_states import Parting, Reader, layer_scale
from .ridge import Fit, Linear, Moments, fit

HELD_OUT = 5
"""Every fifth example is held out to choose the ridge."""
LEAST = 20
"""Fewest examples to fit to."""
APART = 0.5
"""Distance of the hosts' weights from their mean, relative to it, from which we warn. Three
fine-tunings of one MiniLM are at 0.01, unrelated weights at 1 or more."""
ROWS = 1024
"""Rows that are kept before their moments are added."""


def fold(
    models: Sequence[nn.Module],
    data: Any,
    *,
    trunk: int | Literal["mean", "auto"] = "mean",
    held_out: Any = None,
    seed: int = 0,
    progress: bool = True,
) -> HydraEnsemble:
    """Fold fine-tunings of one pretrained model into one ensemble, without training or labels.

    The trunk is the mean of the hosts' weights. Let a be the state that enters the residual sum of
    the last block's MLP at the readout token, and u the activations of its neurons. Member m is

        s_m = a + u W_m + b_m,  then host m's own norm, pooler and classifier,

    with W_m, b_m fitted by ridge regression to host m's own residual sum. Members share everything
    else, so the ensemble costs about as much as one host. Every fifth example is held out to choose
    the ridge; a member whose fit is not better on them than host m's own W, b keeps the latter.

    Args:
        models: Two or more hosts of one architecture with the same classes, fine-tuned from the
            same pretrained weights (by seeds, data order, learning rates, LoRA or in full). LoRA
            adapters of peft are merged first. The models are not changed.
        data: Inputs as the hosts take them; the hosts' training inputs are good enough. Labels are
            ignored. A few hundred examples help, a few thousand are better.
        trunk: `"mean"` of the weights; the number of a host; or `"auto"`, the mean if the hosts
            seem to come from one pretrained model, else host 0.
        held_out: Labelled data that fits one temperature; without it nothing is calibrated.
        seed: Determines which examples are held out to choose the ridge.
        progress: Report progress and what was done.

    Returns:
        The ensemble; `record` says how well each member follows its host.

    Raises:
        UnsupportedModelError: When the hosts differ in architecture or classes, or do not read a
            fixed token.
        DataError: When the data has too few examples, NaN or infinity.

    Example:
        >>> ensemble = fold([host0, host1, host2], inputs, held_out=labelled)
        >>> ensemble.predict(batch).mutual_information
    """
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        models = [models]
    hosts = [_merged(model) for model in models]
    _check_alike(hosts)
    first_host = host_model(hosts[0])
    parting = Parting.of(first_host)
    data = as_data(data)
    first = next(iter(check_reiterable(data)), None)
    if first is None:
        raise DataError("The data has no batches. Check the loader or the filter.")
    chosen = _trunk_of(first_host, hosts, trunk)
    base = average_weights(hosts) if chosen == "mean" else hosts[chosen]
    rows = read_rows(base, hosts, parting, data, seed=seed, progress=progress)
    assert rows.fitted is not None and rows.judging is not None
    fits = fit(rows.fitted, rows.judging, [parting.linear(host) for host in hosts])
    members = [
        member_of(base, host, parting, result.linear)
        for host, result in zip(hosts, fits, strict=True)
    ]
    ensemble = fuse(members, average="first", batch=without_labels(first))
    ensemble.record = {
        "made_by": "fold",
        "hosts": len(hosts),
        "trunk": chosen,
        "examples": rows.examples,
        "seed": seed,
        "members": [
            {
                "ridge": result.ridge,
                "error": result.error,
                "error of the host's own layer": result.given_error,
            }
            for result in fits
        ],
        "notes": _notes(fits),
    }
    if held_out is None:
        ensemble.record["notes"].append(
            "Nothing was calibrated: pass held_out= with labelled data to fit a temperature."
        )
    else:
        logits, labels = collect_logits(
            ensemble, as_data(held_out), name="held-out", need_labels=True
        )
        assert labels is not None
        fitted = find_temperature(logits, labels)
        ensemble.temperature = fitted.temperature
        ensemble.record["calibration"] = {"examples": len(labels), **asdict(fitted)}
        ensemble.record["notes"] += [fitted.note] if fitted.note else []
    for note in ensemble.record["notes"]:
        announce(note, enabled=progress)
    return ensemble


def _merged(model: nn.Module) -> nn.Module:
    """Return a plain host; adapters of peft are merged into a copy."""
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(
            f"Found a {type(model).__name__} among the hosts; expected models. Load them first."
        )
    if isinstance(model, HydraEnsemble):
        raise UnsupportedModelError(
            "One of the hosts is a HydraEnsemble already. Give the plain models."
        )
    merge = getattr(model, "merge_and_unload", None)
    if callable(merge):
        plain: nn.Module = copy.deepcopy(model).merge_and_unload()  # type: ignore[operator]
        return plain
    if any(hasattr(module, "base_layer") for module in model.modules()):
        raise UnsupportedModelError(
            f"{type(model).__name__} holds adapters that are not merged. Load it as a PeftModel "
            "and call merge_and_unload()."
        )
    return model


def _check_alike(hosts: Sequence[nn.Module]) -> None:
    """Raise unless the hosts have one architecture and the same classes in the same order."""
    if len(hosts) < 2:
        raise UnsupportedModelError(
            f"{len(hosts)} hosts cannot be folded: give two or more fine-tunings of one model."
        )
    for host in hosts:
        refuse_other_tasks(host)
    first, names = hosts[0], model_names(hosts[0])
    shapes = {name: tensor.shape for name, tensor in first.state_dict().items()}
    for place, host in enumerate(hosts[1:], 1):
        classes = class_count(first), class_count(host)
        if None not in classes and classes[0] != classes[1]:
            raise UnsupportedModelError(
                f"Host {place} has {classes[1]} classes, host 0 has {classes[0]}. Fold hosts of "
                "one task."
            )
        others = model_names(host)
        if names is not None and others is not None and names != others:
            raise UnsupportedModelError(
                f"Host {place} has the classes {shown_order(first_spellings(others))}; host 0 has "
                f"{shown_order(first_spellings(names))}. Fold hosts with one class order."
            )
        same = {name: tensor.shape for name, tensor in host.state_dict().items()} == shapes
        if type(host) is not type(first) or not same:
            raise UnsupportedModelError(
                f"Host {place} ({type(host).__name__}) has another architecture than host 0 "
                f"({type(first).__name__}): names or shapes of their weights differ. Fold "
                "fine-tunings of one model."
            )
    masks = [getattr(host, "hydra_head_mask", None) for host in hosts]
    if any(a != b for a, b in pairwise(masks)):
        raise UnsupportedModelError(
            "The hosts are pruned in different ways. Fold hosts with one head mask."
        )


def _trunk_of(
    view: HostModel, hosts: Sequence[nn.Module], trunk: int | str
) -> int | Literal["mean"]:
    """Return "mean" or the number of a host; warn when a mean makes little sense."""
    if isinstance(trunk, int) and not isinstance(trunk, bool):
        if not 0 <= trunk < len(hosts):
            raise HydraError(f"trunk={trunk} is not a host: there are {len(hosts)}, from 0.")
        return trunk
    if trunk not in ("mean", "auto"):
        raise HydraError(f'Unknown trunk {trunk!r}: expected "mean", "auto" or a host\'s number.')
    distance = _distance(hosts, view.blocks_path)
    if distance < APART:
        return "mean"
    if trunk == "auto":
        return 0
    warnings.warn(
        f"The hosts do not seem to be fine-tuned from one pretrained model: their weights differ "
        f"from the mean by {distance:.0%} of its size. The mean of such weights is a poor trunk: "
        "pass trunk=0.",
        stacklevel=3,
    )
    return "mean"


@torch.no_grad()
def _distance(hosts: Sequence[nn.Module], blocks_path: str) -> float:
    """Return the largest distance of a host's block weights from their mean, relative to it."""
    states = [dict(host.named_parameters()) for host in hosts]
    apart, size = torch.zeros(len(hosts), dtype=torch.float64), 0.0
    for name, parameter in states[0].items():
        if parameter.dim() < 2 or not name.startswith(blocks_path + "."):
            continue
        values = torch.stack([state[name].double().cpu() for state in states])
        mean = values.mean(0)
        apart += (values - mean).square().flatten(1).sum(1)
        size += float(mean.square().sum())
    return float((apart / max(size, 1e-300)).max().sqrt())


@dataclass
class Rows:
    """Moments of the rows that are fitted and of those that judge."""

    examples: int = 0
    fitted: Moments | None = None
    judging: Moments | None = None
    _kept: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def add_(self, features: Tensor, targets: Tensor, examples: int, seed: int) -> None:
        """Add the rows of a batch; every fifth example judges."""
        numbers = torch.arange(self.examples, self.examples + examples)
        judges = (numbers + seed) % HELD_OUT == 0
        self._kept.append((features, targets, judges.repeat_interleave(len(features) // examples)))
        self.examples += examples
        if sum(len(part[0]) for part in self._kept) >= ROWS:
            self.flush_()

    def flush_(self) -> None:
        """Turn the kept rows into moments."""
        if not self._kept:
            return
        features, targets, judges = (torch.cat(parts) for parts in zip(*self._kept, strict=True))
        self._kept = []
        for name, rows in (("fitted", ~judges), ("judging", judges)):
            new, old = Moments.of(features[rows], targets[rows]), getattr(self, name)
            setattr(self, name, new if old is None else old + new)


def read_rows(
    base: nn.Module,
    hosts: Sequence[nn.Module],
    parting: Parting,
    data: Any,
    *,
    seed: int,
    progress: bool,
) -> Rows:
    """Run the trunk and the hosts; targets are what each host's sum adds to the trunk's state."""
    readers = [Reader(host, parting) for host in hosts]
    at = next((place for place, host in enumerate(hosts) if host is base), None)
    trunk = Reader(base, parting) if at is None else readers[at]

    def work(number: int, batch: Any) -> dict[str, Tensor]:
        where = f"batch {number} of the data"
        check_inputs(batch, where)
        try:
            states = [reader(batch) for reader in readers]
            shared = trunk(batch) if at is None else states[at]
        except HydraError:
            raise
        except Exception as error:
            raise DataError(
                f"The hosts failed on {where} ({type(error).__name__}: {error}). Give inputs as "
                "the hosts take them."
            ) from error
        if not all(bool(state.total.isfinite().all()) for state in (shared, *states)):
            raise DataError(
                f"The hosts' states hold NaN or infinity on {where}. Fix or remove these examples, "
                "and check the hosts' weights."
            )
        entering = shared.total - shared.update
        targets = torch.cat([state.total - entering for state in states], 1)
        return {"features": shared.features, "targets": targets}

    rows = Rows()
    results = in_order(data, work, name="data to fold on")
    total = length_of(data)
    for result in progress_bar(results, description="fold", enabled=progress, total=total):
        features = result["features"]
        rows.add_(features, result["targets"], len(features) // parting.tokens, seed)
    if rows.examples < LEAST:
        raise DataError(
            f"The data has {rows.examples} examples, too few to fit to. Give at least {LEAST}; "
            "a few thousand are best, and they need no labels."
        )
    rows.flush_()
    return rows


def _notes(fits: Sequence[Fit]) -> list[str]:
    """Say what a user should know about the fits."""
    notes = []
    if any(result.few for result in fits):
        unknowns = len(fits[0].linear.weight)
        notes.append(
            f"There are fewer examples than neurons ({unknowns:,}): members shrink to their hosts' "
            "own layers. More unlabelled data would let them follow their hosts better."
        )
    kept = [place for place, result in enumerate(fits) if result.ridge is None]
    if kept:
        names = ", ".join(map(str, kept))
        notes.append(
            f"Members {names} keep their hosts' own last linear layers: on held-out examples no "
            "fit was better."
        )
    return notes


@torch.no_grad()
def member_of(base: nn.Module, host: nn.Module, parting: Parting, linear: Linear) -> nn.Module:
    """Return the trunk with a member's last linear layer, and the host's own norm and classifier.

    All other parameters are the trunk's own tensors.
    """
    member = share_parameters(base)
    block = parting.block(member)
    layer, scale = copy.deepcopy(block.module.get_submodule(parting.second)), layer_scale(block)
    assert scale is not None
    linear_weight(layer).copy_((linear.weight / scale).T)
    if linear.bias is not None:
        layer.bias.copy_(linear.bias / scale)  # type: ignore[operator]
    block.module.set_submodule(parting.second, layer)
    if parting.family.norm == "post":
        norm = first_path(block.module, parting.family.norm2)
        assert norm is not None
        block.module.set_submodule(norm, parting.block(host).module.get_submodule(norm))
    for path in modules_after_blocks(host_model(base, family=parting.family)):
        member.set_submodule(path, host.get_submodule(path))
    return member
