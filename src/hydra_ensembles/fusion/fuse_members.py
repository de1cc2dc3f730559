"""`fuse`: members in, one model out."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import nn

from ..data.batches import batch_length, move, split_batch, take
from ..data.model_runs import device_of
from ..errors import DataError, HydraError, MaskError, UnsupportedModelError, VerificationError
from ..heads.head_mask import HeadMask
from ..hosts import Family, HostModel, host_model
from ..hosts.block_calls import Inputs
from ..hosts.example_inputs import examples
from ..hosts.explanation import engine_of
from ..hosts.host import check_model
from ..registry import unknown_name
from ..tasks import Task, refuse
from .assembly import assemble
from .ensemble import HydraEnsemble
from .fused_model import Mode
from .verification import check_against

Engine = Literal["auto", "fused", "host"]
CHECKED = 8
"""Samples that the check runs on: an error shows on any sample."""


def fuse(
    model_or_members: nn.Module | Sequence[nn.Module],
    masks: Sequence[HeadMask] | None = None,
    *,
    share_trunk: bool = True,
    share_branch: bool = True,
    readout_only: bool = True,
    mode: Mode = "fused",
    average: Literal["mlp", "first", "all"] = "mlp",
    family: Family | None = None,
    branch_layer: int | None = None,
    batch: Any = None,
    engine: Engine = "auto",
    task: str | Task | None = None,
) -> HydraEnsemble:
    """Fuse M pruned members into one model, and check it against them.

    Example:
        >>> masks = [hydra.HeadMask.random(model, keep=0.5, seed=seed) for seed in range(3)]
        >>> ensemble = hydra.fuse(model, masks)
        >>> ensemble.predict(batch).probabilities

    Args:
        model_or_members: One host model, pruned in M ways by `masks`; or M models fine-tuned from
            one, pruned already (their recorded masks are taken) or pruned here by `masks`.
        masks: One `HeadMask` per member.
        share_trunk: Run members as one stream as long as they agree.
        share_branch: At a branch, project and attend the union of the members' heads once.
        readout_only: Run the last block only for the tokens that the classifier reads.
        mode: `"fused"`, or `"loop"` to run the members one by one (the reference).
        average: What to average over fine-tuned members: `"mlp"` (as in the paper; embeddings too);
            `"first"`, the same but for each MLP's last linear layer, which members keep; or `"all"`
            parts except the heads.
        family: Describes the blocks of a model that is not supported yet.
        branch_layer: End the trunk before this block even where members agree in it, so that this
            and all later blocks can be trained separately.
        batch: One of your batches. On its first samples the fused model must give the same output
            as its members one by one, run by the host library's own code with gates. By default a
            small example is made, if we know what the model takes.
        engine: `"fused"`, our own arithmetic of attention and MLP, the quickest; `"host"`, which
            runs the host's own blocks once per stream and is exact for any block whose heads meet
            in a linear output projection; `"auto"` uses `"fused"` where probes show it is equal on
            the arguments that the host passes to its blocks, otherwise `"host"`. `explain` says
            which. If the fused model then still differs from its members, `"auto"` warns and uses
            `"host"`.
        task: What the outputs mean, where the model's class and config do not say it:
            `"multi-label"`, `"regression"`, or a task with its options, such as
            `Embedding(pooling="mean")` of `hydra_ensembles.tasks`.

    Returns:
        The ensemble. None of the options changes its output.

    Raises:
        UnsupportedModelError: When the model cannot be fused; the message says why.
        VerificationError: When the fused model and its members differ under the chosen engine.
    """
    if engine not in ("auto", "fused", "host"):
        raise unknown_name("engine", engine, ("auto", "fused", "host"))
    several = isinstance(model_or_members, Iterable) and not isinstance(
        model_or_members, (nn.Module, str)
    )
    models: list[Any] = list(model_or_members) if several else [model_or_members]  # type: ignore[arg-type]
    if not models:
        raise UnsupportedModelError("No members: give a model, or a list of fine-tuned models.")
    for model in models:
        check_model(model)
        refuse(model)
    if masks is not None and not (
        isinstance(masks, Sequence) and all(isinstance(mask, (HeadMask, list)) for mask in masks)
    ):
        raise MaskError(
            f"masks={masks!r:.60}: expected a list with one HeadMask per member, such as "
            "[HeadMask.full(model), ...]."
        )
    hosts = [host_model(model, family=family) for model in models]
    switches = {
        "share_trunk": share_trunk,
        "share_branch": share_branch,
        "readout_only": readout_only,
        "average": average,
    }
    inputs = _inputs_for(hosts[0], batch)
    failures: dict[str, HydraError] = {}
    for name, folds in _ways(hosts[0], engine):
        assembly, references = assemble(
            hosts,
            masks,
            share_trunk=share_trunk,
            share_branch=share_branch,
            readout_only=readout_only,
            average=average,
            branch_layer=branch_layer,
            engine=name,
            folds=folds,
        )
        settings = {**switches, **assembly.settings}
        ensemble = HydraEnsemble.around(assembly, hosts[0], mode=mode, switches=settings, task=task)
        try:
            if inputs is not None:
                check_against(ensemble, references, inputs)
        except HydraError as error:
            failures[name] = error
        except Exception as error:  # the host's code cannot run like this: try the next way
            failures[name] = VerificationError(
                f"{hosts[0].name} cannot run its members by the {name} engine "
                f"({type(error).__name__}: {error})."
            )
        else:
            if name == "host" and "fused" in failures:
                _warn_of_fallback(hosts[0], failures["fused"])
            return ensemble
    raise list(failures.values())[-1]


def _warn_of_fallback(host: HostModel, failure: HydraError) -> None:
    """Warn that the fast engine failed its check, why, and what runs instead."""
    engine, why = engine_of(host)
    warnings.warn(
        f"{host.name} runs its own blocks, which is exact but slower: the fused engine failed its "
        f"check. {failure} explain() says {engine!r} ({why}), which does not hold on these inputs. "
        'Pass engine="host" to silence this warning, and please report the model.',
        UserWarning,
        stacklevel=3,
    )


def _ways(host: HostModel, engine: Engine) -> list[tuple[str, bool]]:
    """List the ways to run a host's members: the engine, and whether streams are folded."""
    arithmetic, hosted = host.why_not_fused(), host.why_not_hosted()
    ways = []
    if engine != "host" and arithmetic is None:
        ways.append(("fused", True))
    if engine != "fused" and hosted is None:
        ways += [("host", True)] * host.readout.folds + [("host", False)]
    if not ways:
        reason = (
            arithmetic
            if engine == "fused"
            else hosted
            if engine == "host" or arithmetic is None
            else f"{arithmetic}; and its own blocks cannot run: {hosted}"
        )
        raise UnsupportedModelError(
            f"{host.name} cannot be fused: {reason}. gate(), prune_heads_() and score_heads() may "
            "still work: explain(model) says which."
        )
    return ways


def _inputs_for(host: HostModel, batch: Any) -> Inputs | None:
    """Return the inputs of the check: the batch, with which the blocks are also probed."""
    if batch is None:
        return examples(host.model)[-1] if host.passes() else None
    few = take(batch, slice(0, CHECKED)) if batch_length(batch) > CHECKED else batch
    args, kwargs, _ = split_batch(few)
    device = device_of(host.model)
    inputs = move(args, device), move(kwargs, device)
    try:
        host.observe(inputs)
    except HydraError:
        raise
    except Exception as error:
        raise DataError(
            f"{host.name} cannot be run on this batch ({type(error).__name__}: {error}). Pass a "
            "batch in the form that the model takes."
        ) from error
    return inputs
