"""Teachers of `distill`, opened one at a time; `make_teachers` makes cheap ones of one model."""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from .._records import sha256_of, sha256_of_file
from .._tensors import model_fingerprint
from ..costs.budget import fit_budget
from ..data import processes
from ..data.eval_mode import evaluating
from ..data.model_runs import call_model, member_logits, member_logits_of
from ..errors import DataError, FormatError, check_number
from ..fusion.ensemble import HydraEnsemble
from ..fusion.fuse_members import fuse
from ..heads.head_mask import HeadMask
from ..hosts import HostModel, host_model
from ..hosts.host_data import data_for
from ..hosts.probes import modules_after_blocks
from ..registry import Registry, imported
from ..tasks import task_of
from .branch_run import finetune_branch
from .checkpoint import FILE_NAME, read_checkpoint, with_prefix
from .finetune_run import finetune
from .sample_order import derive_seed
from .settings import Settings

Answer = Callable[[Any], Tensor]
"""Maps a batch to log-probabilities `[batch, member, class]`; a plain model has one member."""


@dataclass(frozen=True)
class Teacher:
    """One source of probabilities.

    Attributes:
        name: Its name in errors and records.
        identify: Returns what distinguishes it from another teacher, for resuming.
        open: Loads it and yields its `Answer`; None for a table.
        table: Precomputed log-probabilities `[example, member, class]`, or None.
    """

    name: str
    identify: Callable[[], str]
    open: Callable[[], contextlib.AbstractContextManager[Answer]] | None = None
    table: np.ndarray | None = None


def read_teachers(teachers: Any, host: nn.Module) -> list[Teacher]:
    """Return the teachers that an argument of `distill` names; nothing is run yet."""
    if isinstance(teachers, nn.ModuleList):  # a list that is a module, but no model
        teachers = list(teachers)
    if isinstance(teachers, Mapping):
        teachers = list(teachers.values())
    single = isinstance(teachers, (nn.Module, str, os.PathLike, Tensor, np.ndarray))
    if single or teachers is None or (callable(teachers) and not isinstance(teachers, Sequence)):
        teachers = [teachers]
    result = [_read(teacher, host, place) for place, teacher in enumerate(teachers)]
    if not result:
        raise DataError("There are no teachers. Pass models, or make some with make_teachers().")
    return result


def _read(teacher: Any, host: nn.Module, place: int) -> Teacher:
    if isinstance(teacher, nn.Module):
        name = f"teacher {place} ({type(teacher).__name__})"
        return Teacher(name, lambda: _identity(teacher), lambda: _opened(teacher))
    if isinstance(teacher, (Tensor, np.ndarray)):
        name = f"teacher {place} (a table)"
        table = _table(torch.as_tensor(np.asarray(teacher)), name)
        return Teacher(name, lambda: sha256_of(np.ascontiguousarray(table).tobytes()), table=table)
    if isinstance(teacher, (str, os.PathLike)):
        return _from_path(Path(teacher), host)
    if callable(teacher):
        name = f"teacher {place} ({getattr(teacher, '__name__', type(teacher).__name__)})"
        return Teacher(name, lambda: name, lambda: _called(teacher, name))
    raise DataError(
        f"Teacher {place} is a {type(teacher).__name__}; expected a model, a HydraEnsemble, a "
        "callable, a table of probabilities [example, class], or a path to a saved one."
    )


def _from_path(path: Path, host: nn.Module) -> Teacher:
    """Read a table, a checkpoint of the host, a saved ensemble or a saved host."""
    if not path.exists():
        raise DataError(f"The teacher {path} does not exist. Expected a file or a folder.")
    name = str(path)
    if path.is_dir() and (path / FILE_NAME).exists():
        path = path / FILE_NAME
    files = [path] if path.is_file() else sorted(path.glob("*.safetensors"))

    def identify() -> str:
        return " ".join(sha256_of_file(file) for file in files)

    if path.is_dir():
        return Teacher(name, identify, lambda: _opened(_from_folder(path, host)))
    if path.suffix == ".npy":
        values = torch.from_numpy(np.load(path, allow_pickle=False))
        return Teacher(name, identify, table=_table(values, name))
    if path.suffix != ".safetensors":
        raise DataError(
            f"The teacher {path} has an unknown suffix; expected a folder, .npy or .safetensors."
        )
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        names = list(file.keys())
        if len(names) == 1 or "probabilities" in names:
            key = names[0] if len(names) == 1 else "probabilities"
            return Teacher(name, identify, table=_table(file.get_tensor(key), name))
    return Teacher(name, identify, lambda: _opened(_from_weights(path, host)))


def _from_folder(folder: Path, host: nn.Module) -> nn.Module:
    config = folder / "config.json"
    if config.exists() and json.loads(config.read_bytes()).get("format") == "hydra-ensembles":
        return HydraEnsemble.from_pretrained(folder)
    load = getattr(type(host), "from_pretrained", None)
    if callable(load):
        of_transformers = type(host).__module__.startswith("transformers.")
        model: nn.Module = load(folder, **({"use_safetensors": True} if of_transformers else {}))
        return model
    weights = sorted(folder.glob("*.safetensors"))
    if len(weights) != 1:
        raise FormatError(
            f"The teacher's folder {folder} holds {len(weights)} .safetensors files; expected one "
            f"with weights of {type(host).__name__}, or a folder of save_pretrained()."
        )
    return _from_weights(weights[0], host)


def _from_weights(path: Path, host: nn.Module) -> nn.Module:
    """Return a copy of the host with the weights of a training checkpoint or a plain file."""
    from safetensors.torch import load_file

    state: dict[str, Tensor]
    if path.name == FILE_NAME:
        saved = read_checkpoint(path.parent)
        assert saved is not None
        state = with_prefix(saved[0], "best/") or with_prefix(saved[0], "model/")
    else:
        state = load_file(path)
    result = copy.deepcopy(host)
    missing, unknown = result.load_state_dict(state, strict=False)
    if unknown or (missing and path.name != FILE_NAME):
        raise FormatError(
            f"The weights in {path} do not fit {type(host).__name__}: "
            f"{', '.join([*unknown, *missing][:3])} differ. Give a checkpoint of this model."
        )
    return result


@contextlib.contextmanager
def _opened(model: nn.Module) -> Iterator[Answer]:
    with evaluating(model):
        task = task_of(model)

        def answer(batch: Any) -> Tensor:
            outputs = member_logits(model, batch).detach().float()
            return (outputs.log_softmax(-1) if task.classifies else outputs).cpu()

        yield answer


@contextlib.contextmanager
def _called(function: Callable[..., Any], name: str) -> Iterator[Answer]:
    def answer(batch: Any) -> Tensor:
        values = member_logits_of(call_model(function, batch)).detach().float().cpu()
        return log_probabilities(values, name)

    with torch.no_grad():
        yield answer


def log_probabilities(values: Tensor, name: str) -> Tensor:
    """Return log-probabilities of values that are probabilities or, failing that, logits."""
    values = values.float()
    if not bool(values.isfinite().all()):
        raise DataError(f"The answers of {name} hold NaN or infinity.")
    if bool((values >= 0).all()) and bool(((values.sum(-1) - 1).abs() < 1e-3).all()):
        return values.clamp_min(1e-12).log().log_softmax(-1)
    return values.log_softmax(-1)


def _table(values: Tensor, name: str) -> np.ndarray:
    if values.ndim not in (2, 3) or not len(values):
        raise DataError(
            f"The table of {name} has shape {list(values.shape)}; expected [example, class] or "
            "[example, member, class]."
        )
    values = values[:, None] if values.ndim == 2 else values
    return log_probabilities(values, name).numpy()


def _identity(model: nn.Module) -> str:
    known = [getattr(model, name, None) for name in ("temperature", "member_temperatures")]
    calibrator = getattr(model, "calibrator", None)
    known += [] if calibrator is None else [calibrator]
    return f"{model_fingerprint(model)} {known}"


How = Literal["lora", "branch", "snapshots", "full"]


@dataclass(frozen=True)
class Job:
    """What each way of making teachers receives."""

    host: HostModel
    data: Iterable[Any]
    seeds: list[int]
    settings: Settings
    rank: int
    branch_layer: int | None
    folder: Path | None
    progress: bool

    def place(self, name: str) -> Path | None:
        """Return the folder for the checkpoints of one run, or None."""
        return None if self.folder is None else self.folder / name

    def tune(self, model: nn.Module, seed: int, choose: Any = None) -> nn.Module:
        """Fine-tune one copy: all parameters, or those that `choose` selects."""
        return finetune(
            model,
            self.data,
            settings=self.settings,
            seed=seed,
            parameters=choose,
            folder=self.place(f"teacher-{seed}"),
            progress=self.progress,
        )[0].model


ways: Registry[tuple[Callable[[Job], list[nn.Module]], Settings]] = Registry("way to make teachers")


@processes.holds("folder")
def make_teachers(
    model: nn.Module | HostModel,
    data: Iterable[Any],
    *,
    count: int = 3,
    how: How = "lora",
    settings: Settings | None = None,
    epochs: int | None = None,
    learning_rate: float | None = None,
    rank: int = 4,
    branch_layer: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    progress: bool = True,
) -> list[nn.Module]:
    """Make teachers for `distill` out of one model and labelled data.

    Ways, from the cheapest to the most expensive:

    * `"branch"`: the last blocks and the classifier, each teacher on its own bootstrap, above one
      trunk that runs once;
    * `"lora"`: low-rank updates of the attention projections and the classifier, each teacher from
      its own random start on its own bootstrap (Muehlematter et al., 2024, arXiv 2405.14438);
    * `"snapshots"`: one run with as many cycles of the learning rate as teachers; each cycle starts
      where the last one ended, and its end is a teacher (Huang et al., 2017);
    * `"full"`: all weights, each teacher on its own bootstrap (a Deep Ensemble of one start).

    Args:
        model: A trained classifier; it is not changed.
        data: Labelled batches, as `finetune` takes them. For `"branch"`, as `finetune_branch`.
        count: Number of teachers.
        how: One of the ways above.
        settings: How to train; each way has its own default. `epochs` (of each teacher) and
            `learning_rate` override its fields.
        rank: Rank of the low-rank updates.
        branch_layer: First block that `"branch"` trains; by default the one at which three members
            would branch within 1.07 x the cost.
        seed: Teacher t has the seed `seed + t`.
        folder: Where checkpoints go; start again with the same arguments to resume.
        progress: Show bars on a terminal.

    Returns:
        Plain host models in evaluation mode.

    Example:
        >>> teachers = make_teachers(model, train, how="branch", epochs=3)
        >>> student = distill(model, teachers, train)
    """
    make, default = ways[how]
    check_number("count", count, least=1, whole=True)
    check_number("rank", rank, least=1, whole=True)
    job = Job(
        host=host_model(model),
        data=data_for(model, data, name="training"),
        seeds=[seed + place for place in range(count)],
        settings=(settings or default).updated(epochs, learning_rate),
        rank=rank,
        branch_layer=branch_layer,
        folder=None if folder is None else Path(folder),
        progress=progress,
    )
    return [teacher.eval() for teacher in make(job)]


def _snapshots(job: Job) -> list[nn.Module]:
    teachers, model = [], job.host.model
    for seed in job.seeds:
        model = job.tune(model, seed)
        teachers.append(model)
    return teachers


def _branch(job: Job) -> list[nn.Module]:
    layer = job.branch_layer
    if layer is None:
        first = next(iter(job.data), None)
        if first is None:
            raise DataError("The data has no batches. Check the loader or the filter.")
        option = fit_budget(job.host, members=3, max_cost=1.07, batch=first, untied=True)
        layer = option.branch_layer
    start = fuse(job.host.model, [HeadMask.full(job.host)], branch_layer=layer)
    states: dict[Any, Tensor] = {}  # all teachers share one trunk
    teachers = []
    for seed in job.seeds:
        trained = finetune_branch(
            start,
            job.data,
            settings=job.settings,
            seed=seed,
            trunk_states=states,
            folder=job.place(f"teacher-{seed}"),
            progress=job.progress,
        ).model
        teachers.append(trained.member(0))  # type: ignore[operator]
    return teachers


def _lora(job: Job) -> list[nn.Module]:
    peft = imported("peft", 'how="lora"', "train")
    projections = {
        part
        for site in job.host.sites
        for part in (site.packed, site.query, site.key, site.value, site.output)
    }
    modules = dict(job.host.model.named_modules())
    parents = {name: modules[name.rpartition(".")[0]] for name in modules}
    names = [  # peft updates a whole nn.MultiheadAttention, which reads its weights directly
        name
        for name, module in modules.items()
        if (isinstance(module, nn.MultiheadAttention) and module.out_proj in projections)
        or (
            module in projections
            and getattr(module, "weight", torch.empty(0)).ndim == 2
            and not isinstance(parents[name], nn.MultiheadAttention)
        )
    ]
    # GPT-2's Conv1D keeps its weight as [in, out]
    transposed = any(type(part).__name__ == "Conv1D" for part in projections)
    config = peft.LoraConfig(
        r=job.rank, lora_alpha=2 * job.rank, target_modules=names, fan_in_fan_out=transposed
    )
    after = tuple(f"{path}." for path in modules_after_blocks(job.host))
    teachers = []
    for seed in job.seeds:
        with torch.random.fork_rng(devices=[]):  # peft draws from the global generator
            torch.manual_seed(derive_seed("lora", seed))
            adapters = peft.LoraModel(copy.deepcopy(job.host.model), config, "teacher")
        adapters.model = job.tune(
            adapters.model, seed, lambda name, _: ".lora_" in name or name.startswith(after)
        )
        teacher = adapters.merge_and_unload()
        for name, parameter in job.host.model.named_parameters():  # peft froze them
            teacher.get_parameter(name).requires_grad_(parameter.requires_grad)
        teachers.append(teacher)
    return teachers


ways.register("full")(
    (
        lambda job: [job.tune(job.host.model, seed) for seed in job.seeds],
        Settings(epochs=3, learning_rate=1e-4, bootstrap=True),
    )
)
ways.register("snapshots")((_snapshots, Settings(epochs=3, learning_rate=2e-4)))
ways.register("branch")((_branch, Settings(epochs=3, learning_rate=5e-4, bootstrap=True)))
ways.register("lora")(
    (_lora, Settings(epochs=3, learning_rate=1e-3, weight_decay=0.0, bootstrap=True))
)
