"""`fold`: fine-tunings of one pretrained model in, one ensemble out, without training."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn

from ..costs.budget import SLACK
from ..costs.formula import cost
from ..data.batches import without_labels
from ..data.model_runs import expect_batches
from ..data.progress import announce, length_of
from ..errors import DataError, HydraError, UnsupportedModelError, check_number
from ..fusion.ensemble import HydraEnsemble
from ..fusion.linear_readout import LinearReadout, Readouts
from ..hosts import host_model
from ..hosts.host_data import data_for
from ..registry import check_name
from ..tasks import Embedding, task_of
from ..training.weight_average import average_weights
from .fold_budget import Price, within_budget
from .fold_choice import Choice, HeldOut, calibrate_, choose
from .fold_hosts import check_alike, plain_host, trunks_of
from .fold_rows import FoldRows, ReadoutFit, Trunk, read_rows
from .member_fusion import fuse_by_states, one_stream
from .readout_states import Parting
from .ridge import Fit


def fold(
    models: Sequence[nn.Module],
    data: Any,
    *,
    readout: Literal["states", "logits"] = "states",
    student: bool | Literal["auto"] = "auto",
    trunk: int | Literal["mean", "auto"] = "mean",
    max_cost: float = 1.0,
    held_out: Any = None,
    seed: int = 0,
    progress: bool = True,
) -> HydraEnsemble:
    """Fold fine-tunings of one pretrained model into one ensemble, without training or labels.

    The trunk is the mean of the hosts' weights. Let a be the state that enters the residual sum of
    the last block's MLP at the readout, and u the activations of its neurons. Member m is

        by states   s_m = a + u W_m + b_m,  then host m's own norm, pooler and classifier,
        by logits   z_m = [u, a] W_m + b_m,

    with W_m, b_m fitted by ridge regression to host m's own residual sum; or by logits, the mean of
    two fits, ridge regression to host m's logits and logistic regression to its probabilities. A
    student is one more readout, fitted to the hosts' mean: `probabilities`, class and uncertainty
    then come from it, mutual information and disagreement from the members. All else is shared, so
    the ensemble costs about as much as one host. Every fifth example is held out to choose the
    ridge; a member whose fit by states is not better on them than host m's own W, b keeps the
    latter.

    Args:
        models: Two or more hosts of one architecture with the same classes, fine-tuned from the
            same pretrained weights (by seeds, data order, learning rates, LoRA or in full). LoRA
            adapters of peft are merged first. The models are not changed. Hosts that answer for
            every token, or with spans, are folded by states, without a student.
        data: Inputs as the hosts take them; the hosts' training inputs are good enough. Labels are
            ignored. A few hundred examples help, a few thousand are better.
        readout: `"states"`, members are plain hosts, `ensemble.member(m)`; or `"logits"`, members
            are linear readouts. Where hosts average all tokens, by states costs more than one host.
        student: Whether a student answers; `"auto"` if it has the lower NLL on `held_out`.
        trunk: `"mean"` of the weights; the number of a host; or `"auto"`, the one with the lowest
            NLL on `held_out` (without it the mean, or host 0 if the hosts do not seem to come from
            one pretrained model).
        max_cost: Multiply-adds of the ensemble at most, relative to one host, readouts included, on
            batches like the first one. Where folding needs more, the trunk is pruned first (see
            `prune`) and follows itself; then members and student are fitted to what is left.
        held_out: Labelled data. It decides what is `"auto"`, by the NLL at one temperature, fitted
            on one half of it and judged on the other; ties go to the mean and to no student. Then
            it fits one temperature. Without it nothing is calibrated and no student is made unless
            `student=True`.
        seed: Determines which examples are held out to choose the ridge, and the halves.
        progress: Report progress and what was done.

    Returns:
        The ensemble; `record` says how well each member follows its host, and what was chosen.

    Raises:
        UnsupportedModelError: When the hosts differ in architecture or classes, or it is not clear
            what they read.
        DataError: When the data has too few examples, NaN or infinity.
        HydraError: When folding needs more than `max_cost`, however far the trunk is pruned.

    Example:
        >>> ensemble = fold([host0, host1, host2], inputs, held_out=labelled)
        >>> ensemble.predict(batch).mutual_information
    """
    check_name("readout", readout, ("states", "logits"))
    if student not in (True, False, "auto"):
        raise HydraError(f'student={student!r}: expected True, False or "auto".')
    check_number("max_cost", max_cost, above=0)
    if isinstance(models, nn.Module) and not isinstance(models, nn.ModuleList):
        models = [models]
    hosts = [plain_host(model) for model in models]
    check_alike(hosts)
    student = _possible_student(hosts[0], readout, student)
    first_host = host_model(hosts[0])
    parting = Parting.of(first_host)
    data = data_for(hosts[0], data, labels=False)
    first = next(iter(data), None)
    if first is None:
        raise DataError("The data has no batches. Check the loader or the filter.")
    batch = without_labels(first)
    if held_out is not None:
        held_out = data_for(hosts[0], held_out, name="held-out")
    names = trunks_of(first_host, hosts, trunk, choosing=held_out is not None)
    if readout == "states" and parting.pooling is not None:  # known before anything is fitted
        own = [parting.linear(host) for host in hosts]
        _check_cost(fuse_by_states(hosts[0], hosts, parting, own, batch), hosts, batch, max_cost)
    bases = {name: average_weights(hosts) if name == "mean" else hosts[name] for name in names}  # type: ignore[index]
    has_student = student is True or (student == "auto" and held_out is not None)
    price = Price(hosts, parting, readout, has_student, batch)
    pruned = price(hosts[0]) > max_cost + SLACK
    if pruned:
        bases = {
            name: within_budget(base, data, price, max_cost, seed=seed, progress=progress)
            for name, base in bases.items()
        }
    batches = (len(hosts) + 2 * len(bases)) * (length_of(data) or 0)
    expect_batches(hosts[0], data, batches, "folding", enabled=progress)
    rows = read_rows(
        bases,
        hosts,
        parting,
        data,
        states=readout == "states",
        members=readout == "logits",
        student=has_student,
        seed=seed,
        progress=progress,
    )
    folded = {}
    for name, base in bases.items():
        folded[name] = _folded(base, name, hosts, parting, rows, batch, readout, has_student)
        _check_cost(folded[name], hosts, batch, max_cost)
    ensemble = folded[names[0]]
    if held_out is not None:
        asked = {n: HeldOut.of(e, held_out, progress=progress) for n, e in folded.items()}
        answers = {True: [True], False: [False], "auto": [False, True]}[student]
        ways: list[Choice] = [(name, answer) for name in names for answer in answers]
        chosen = ways[0]
        if len(ways) > 1:
            nll = {way: asked[way[0]].nll(student=way[1], seed=seed) for way in ways}
            chosen = choose(nll)
        ensemble = folded[chosen[0]]
        if len(ways) > 1:
            ensemble.record["choice"] = [
                {"trunk": name, "student": answer, "NLL": float(losses.mean())}
                for (name, answer), losses in nll.items()
            ]
        if not chosen[1] and ensemble.body.readouts is not None:
            readouts = ensemble.body.readouts
            readouts.student = None
            ensemble.body.readouts = None if readouts.members is None else readouts
        said = asked[chosen[0]] if chosen[1] else replace(asked[chosen[0]], student=None)
        ensemble.record["calibration"] = calibrate_(ensemble, said)
    ensemble.record |= {"student": ensemble.student is not None, "seed": seed}
    if pruned:
        left = cost(bases[ensemble.record["trunk"]], batch).relative_to(cost(hosts[0], batch))
        ensemble.record["trunk's cost"] = left.multiply_adds
        ensemble.record["notes"].append(
            f"The trunk was pruned to {left.multiply_adds:.2f} x, so that all together cost "
            f"{ensemble.record['cost']:.3f} x; max_cost is {max_cost}."
        )
    ensemble.record["notes"] += _notes(ensemble, student, trunk)
    for note in ensemble.record["notes"]:
        announce(note, enabled=progress)
    return ensemble


def _possible_student(
    host: nn.Module, readout: str, student: bool | Literal["auto"]
) -> bool | Literal["auto"]:
    """Return whether a student may answer; raise for linear readouts of many answers per input."""
    task = task_of(host)
    if task.axes == 2:
        return student
    what = "an encoder has no answer to fold"
    if not isinstance(task, Embedding):
        if readout == "states" and student is not True:
            return False
        what = (
            "linear readouts and students give one answer per input. Fold by states and without a "
            'student: readout="states", student=False'
        )
    raise UnsupportedModelError(f"{type(host).__name__} is made for {task.title}: {what}.")


def _check_cost(
    ensemble: HydraEnsemble, hosts: Sequence[nn.Module], batch: Any, max_cost: float
) -> None:
    """Raise when an ensemble costs more than the budget; its cost is kept in the record."""
    needed = cost(ensemble, batch).relative_to(cost(hosts[0], batch)).multiply_adds
    ensemble.record["cost"] = needed
    if needed <= max_cost + SLACK:
        return
    by = "logits" if ensemble.member_readout is not None else "states"
    needs = math.ceil(100 * needed) / 100
    advice = f"Pass max_cost={needs}"
    if by == "states" and not ensemble.readout.has_token and ensemble.task.axes == 2:
        advice += ', or readout="logits", which costs about as much as one host'
    raise HydraError(
        f"Folding {len(hosts)} hosts by {by} needs {needs} x the multiply-adds of one host on "
        f"these inputs; max_cost is {max_cost}. {advice}."
    )


def _folded(
    base: nn.Module,
    name: Trunk,
    hosts: Sequence[nn.Module],
    parting: Parting,
    rows: FoldRows,
    batch: Any,
    readout: str,
    student: bool,
) -> HydraEnsemble:
    """Fit the members, and a student, to one trunk."""
    fits: list[Fit] = []
    if readout == "states":
        own = [parting.linear(host) for host in hosts]
        if len(own[0].weight) != len(parting.linear(base).weight):  # pruned: the trunk's layer
            own = [parting.linear(base)] * len(hosts)
        fits = rows.states[name].fit(own)
        ensemble = fuse_by_states(base, hosts, parting, [one.linear for one in fits], batch)
    else:
        ensemble = one_stream(base, len(hosts), batch)
    outputs = len(hosts) * (readout == "logits") + student
    readouts = rows.fit_readouts(name, outputs) if outputs else []
    if readouts:
        dtype = ensemble.dtype
        members = _readout(readouts[: len(hosts)], dtype) if readout == "logits" else None
        answer = _readout(readouts[-1:], dtype) if student else None
        ensemble.attach_readouts_(
            Readouts(parting.second, members=members, student=answer, pooling=parting.pooling)
        )
    ensemble.record = {
        "made_by": "fold",
        "hosts": len(hosts),
        "trunk": name,
        "readout": readout,
        "examples": rows.examples,
        "members": [
            {
                "ridge": one.ridge,
                "error": one.error,
                "error of the host's own layer": one.given_error,
            }
            for one in fits
        ]
        or [_followed(one) for one in readouts[: len(hosts)]],
        "notes": _fit_notes(fits),
    }
    if student:
        ensemble.record["student's fit"] = _followed(readouts[-1])
    kept = rows.probabilities[name].rows
    if readouts and 0 < kept < rows.examples:
        ensemble.record["notes"].append(
            f"Only the first {kept:,} examples were fitted to probabilities, to save memory."
        )
    return ensemble


def _followed(one: ReadoutFit) -> dict[str, float | None]:
    """Say how well a readout follows: ridge and error of logits, divergence of probabilities."""
    return {"ridge": one.ridge, "error": one.error, "divergence": one.divergence}


def _readout(fits: Sequence[ReadoutFit], dtype: torch.dtype) -> LinearReadout:
    """Return fitted maps as one linear readout."""
    weight = torch.stack([one.linear.weight.T for one in fits])
    biases = [one.linear.bias for one in fits if one.linear.bias is not None]
    return LinearReadout.of(weight.to(dtype), torch.stack(biases).to(dtype))


def _fit_notes(fits: Sequence[Fit]) -> list[str]:
    """Say what a user should know about the fits by states."""
    notes = []
    if any(one.few for one in fits):
        notes.append(
            f"There are fewer examples than neurons ({len(fits[0].linear.weight):,}): members "
            "shrink to their hosts' own layers. More unlabelled data would let them follow their "
            "hosts better."
        )
    kept = [place for place, one in enumerate(fits) if one.ridge is None]
    if kept:
        names = ", ".join(map(str, kept))
        notes.append(
            f"Members {names} keep their hosts' own last linear layers: on held-out examples no "
            "fit was better."
        )
    return notes


def _notes(ensemble: HydraEnsemble, student: bool | str, trunk: int | str) -> list[str]:
    """Say what was chosen, and what was not calibrated."""
    record = ensemble.record
    if "calibration" not in record:
        auto = [f"{name} is {value}" for name, asked, value in (
            ("the trunk", trunk, "the mean" if record["trunk"] == "mean" else "host 0"),
            ("there", student, "no student"),
        ) if asked == "auto"]  # fmt: skip
        chosen = f", {' and '.join(auto)}" if auto else ""
        return [
            f"Nothing was calibrated{chosen}: pass held_out= with labelled data to choose and to "
            "fit a temperature."
        ]
    note = record["calibration"].get("note")  # numbers say why they have their variance instead
    notes = [note] if note else []
    if "choice" in record:
        ways = ", ".join(
            f"{one['NLL']:.4f} {'mean' if one['trunk'] == 'mean' else 'host ' + str(one['trunk'])}"
            f"{' with student' if one['student'] else ''}"
            for one in record["choice"]
        )
        answer = "a student answers" if record["student"] else "the members' mean answers"
        of = "the mean trunk" if record["trunk"] == "mean" else f"host {record['trunk']} as trunk"
        notes.append(f"Chosen by held-out NLL ({ways}): {of}, {answer}.")
    return notes
