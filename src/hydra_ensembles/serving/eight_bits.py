"""A program with 8-bit weights that knows its own features.

Rounding weights to 8 bits hardly moves what the members say, but it moves the features that novelty
measures by more than known examples differ in their quiet directions: ranked among distances of the
full weights, every input is new. So the quantised program itself is run on known data, and novelty
and thresholds are fitted to what comes out of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..data.batches import split_batch
from ..errors import DataError
from ..fusion import HydraEnsemble
from ..fusion.inputs import is_raw, prepare
from ..fusion.known_data import novelty_fit, text_logits
from ..uncertainty import Policy, choose_policy, predict_from_logits
from ..uncertainty.novelty import Novelty
from ..uncertainty.policy import GIVEN, check_reachable
from .export_example import TEXT_INPUTS, Example, named
from .graph import AnsweringGraph, FeaturesGraph, trace, write_onnx
from .quantizing import quantize
from .rules import Rule, finite, rule_of

FULL, SMALL = "full.onnx", "features.onnx"


class EightBits:
    """Writes the 8-bit program of an ensemble.

    Args:
        ready: What `frozen` returned; its novelty is replaced by that of the 8-bit program.
        policy: The ensemble's policy, or None.
        inputs: What it is traced with.
        limits: The largest sizes, by name.
        folder: Where the full program is and the small one goes.
    """

    def __init__(
        self,
        ready: HydraEnsemble,
        policy: Policy | None,
        inputs: Example,
        limits: dict[str, int],
        folder: Path,
    ) -> None:
        self.ready, self.policy, self.inputs = ready, policy, inputs
        self.limits, self.folder = limits, folder

    def write(self, name: str, rule: Rule, known: Any, held_out: Any, alarm: float | None) -> Rule:
        """Write the program; return its rule.

        Args:
            name: Of the file.
            rule: Of the full weights.
            known: Data that novelty is fitted on; None for an ensemble without novelty.
            held_out: Labelled data that the policy is fitted on; None keeps what can be kept.
            alarm: Of an ensemble without a policy.
        """
        features = None
        if known is not None or held_out is not None:
            features = self._features()
        if self.ready.novelty is not None:
            assert features is not None
            self.ready.novelty = self._novelty(features, known)
        if held_out is not None and self.policy is not None and self.policy.method != GIVEN:
            assert features is not None
            policy = self._policy(features, held_out, self.policy)
            rule = Rule("policy", finite(policy), str(policy))
        elif self.policy is not None:
            rule = self._kept(self.policy)
        else:
            rule = rule_of(self.ready, alarm)
        graph = AnsweringGraph(self.ready, self.inputs.names, rule).eval()
        self._write(graph, graph.output_names, name)
        return rule

    def _write(self, graph: Any, outputs: list[str], name: str) -> None:
        whole = self.folder / FULL
        try:
            write_onnx(trace(graph, self.inputs, self.limits), self.inputs, outputs, whole)
            quantize(whole, self.folder / name)
        finally:
            whole.unlink(missing_ok=True)

    def _features(self) -> Any:
        """Return a session that computes features with 8-bit weights, as the program will."""
        import onnxruntime

        graph = FeaturesGraph(self.ready, self.inputs.names).eval()
        path = self.folder / SMALL
        try:
            self._write(graph, list(graph.output_names), SMALL)
            return onnxruntime.InferenceSession(
                path.read_bytes(), providers=["CPUExecutionProvider"]
            )
        finally:
            path.unlink(missing_ok=True)

    def _batches(
        self, session: Any, data: Iterable[Any], what: str
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield member logits, summaries and labels of every batch; every other one row by row."""
        empty = True
        for number, given in enumerate(data):
            labels = None
            if is_raw(given):
                args, kwargs, _ = split_batch(prepare(self.ready, given))
            else:
                args, kwargs, labels = split_batch(given)
            values = named(self.ready, args, kwargs)
            if set(values) != set(self.inputs.tensors):
                raise DataError(
                    f"Batch {number} of the {what} has the inputs {', '.join(values)}; the example "
                    f"has {', '.join(self.inputs.tensors)}. Prepare both alike."
                )
            tensors = {
                key: value.detach().cpu().to(self.inputs.tensors[key].dtype)
                for key, value in values.items()
            }
            # activations are rounded by a scale that a batch shares: know both kinds of batches
            parts = one_by_one(tensors) if number % 2 else [tensors]
            made = [session.run(None, {k: t.numpy() for k, t in p.items()}) for p in parts]
            said = [
                text_logits(torch.from_numpy(m[0]), p) for m, p in zip(made, parts, strict=True)
            ]
            summaries = torch.cat([torch.from_numpy(m[1]) for m in made])
            yield torch.cat(said), summaries, labels if made[0][0].ndim == 3 else None
            empty = False
        if empty:
            raise DataError(f"The {what} is empty: it gave no batch.")

    def _novelty(self, session: Any, known: Any) -> Novelty:
        """Fit novelty to the features of the 8-bit program."""
        fit = None
        for logits, summaries, labels in self._batches(session, known, "known data"):
            if fit is None:
                fit = novelty_fit(self.ready, logits.shape[-1])
            fit.add_(summaries, logits, labels)
        assert fit is not None
        return fit.finish()

    def _policy(self, session: Any, held_out: Any, policy: Policy) -> Policy:
        """Fit the thresholds to the answers of the 8-bit program, with the same promises."""
        uncertainty, scores, errors = [], [], []
        for logits, summaries, labels in self._batches(session, held_out, "held-out data"):
            answer = predict_from_logits(
                logits,
                score=self.ready.score,
                temperature=self.ready.temperature,
                member_temperatures=self.ready.member_temperatures,
                logit_scale=getattr(self.ready.host, "logit_scale", None),
            )
            if labels is None and policy.risk is not None:
                raise DataError(
                    f"The held-out data has no labels, which the policy's risk of {policy.risk} is "
                    "about."
                )
            uncertainty.append(answer.uncertainty)
            if labels is not None:
                errors.append(answer.class_index != labels.cpu())
            if self.ready.novelty is not None:
                scores.append(self.ready.novelty(summaries, logits)[1])
        wrong = torch.cat(errors) if len(errors) == len(uncertainty) else None
        novelty_score = torch.cat(scores) if scores else None
        refitted = choose_policy(
            torch.cat(uncertainty),
            wrong,
            novelty_score=novelty_score,
            risk=policy.risk,
            alarm=policy.alarm,
            method=policy.method,
            delta=0.1 if policy.delta is None else policy.delta,
            score=policy.score,
        )
        check_reachable(refitted, torch.cat(uncertainty), wrong, novelty_score)
        return refitted

    def _kept(self, policy: Policy) -> Rule:
        """Return a policy of the full weights as far as it holds: its alarm is ranked anew."""
        words = f"answer when {policy.score} <= {policy.threshold:.4g}, as with the full weights"
        if policy.alarm is not None and self.ready.novelty is not None:
            words += f", and newer than at most {1 - policy.alarm:.4g} of the known data"
            newest = self.ready.novelty.threshold(policy.alarm)
            policy = replace(policy, novelty_threshold=newest)
        if policy.risk is not None and policy.method != GIVEN:
            warnings.warn(
                "The 8-bit program keeps the uncertainty's threshold of the full weights: the "
                f"policy's promise (risk {policy.risk:.3g}) is not made for it. Give held_out=, "
                "labelled data, to fit it anew.",
                stacklevel=4,
            )
        return Rule("policy", finite(replace(policy, measured=None)), words)


def one_by_one(tensors: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return the rows of a batch, each without the padding that it has beside longer texts."""
    rows = len(next(iter(tensors.values())))
    singles = [
        {name: tensor[row : row + 1] for name, tensor in tensors.items()} for row in range(rows)
    ]
    mask = tensors.get("attention_mask")
    if mask is None:
        return singles
    for row, single in enumerate(singles):
        real = mask[row].nonzero().flatten()
        if len(real):
            span = slice(int(real[0]), int(real[-1]) + 1)
            single.update({n: t[:, span] for n, t in single.items() if n in TEXT_INPUTS})
    return singles
