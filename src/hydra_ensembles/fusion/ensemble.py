"""One model that is an ensemble: the host's inputs and outputs, M members in one forward pass."""

from __future__ import annotations

import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import check_number
from ..evaluation.results import Results
from ..heads.stream_plan import Plan
from ..hosts import HostModel, host_model
from ..hosts.probes import modules_after_blocks
from ..registry import public_function
from ..tasks import Task
from ..uncertainty import Evidence
from .assembly import Assembly
from .folder_reader import load
from .folder_writer import save
from .fused_block import FusedBlock
from .fused_model import FusedModel, Mode
from .host_interface import push, with_signature_of
from .known_data import fit_novelty, why_novel
from .linear_readout import Readouts, refuse_readouts
from .row_function import RowAnswers, predict_proba
from .structure import attach_readouts_
from .summary import remember_results, summarize, summarize_html


class HydraEnsemble(FusedModel):
    """M pruned members of one host, fused. Made by `fuse`, `build` or `from_pretrained`.

    It is called like its host: the same inputs, the same kind of output, which is the members'
    mean. `logits` of classes are the log of the mean probability: their softmax is the ensemble's.

    `predict` always runs in eval mode without changing the modules' flags, so any number of threads
    may call it.

    Attributes:
        host: The host model with the fused body in place of its blocks.
        plan: Which streams run where.
        masks: The members' masks, in terms of the host's original heads.
        members: Number of members M.
        task: What the outputs mean (`hydra_ensembles.tasks`): classes, labels, numbers, tokens ...
        mode: `"fused"`, or `"loop"` to run members one by one.
        temperature: Divides the logits behind `probabilities`: the student's if there is one,
            otherwise all members' (None: not calibrated).
        member_temperatures: Divide each member's logits (None: not calibrated).
        calibrator: Follows the temperatures: see `fit_calibrator`; None for nothing.
        student: One linear output that answers for the ensemble; None without.
        member_readout: Linear outputs, one per member; None where members are hosts.
        score: The uncertainty that `predict` reports.
        policy: When to answer, and what is guaranteed (see `fit_policy`); None before it is fitted.
        sets: What may be right, with a guarantee (see `fit_sets`); None before they are fitted.
        transform, tokenizer: How `predict` turns images, paths and texts into inputs.
        novelty: Statistics of known data; None before `fit_novelty_`.
        record: How it was made (plain data, saved along).
    """

    keeps_modes = True
    """Callers of `predict` need not switch to eval mode (see `data.running`)."""

    def __init__(
        self,
        assembly: Assembly,
        host: HostModel,
        *,
        mode: Mode = "fused",
        task: str | Task | None = None,
    ) -> None:
        super().__init__(assembly, host, mode=mode, task=task)
        self.record: dict[str, Any] = {}
        shown = with_signature_of(HydraEnsemble.forward, type(self.host))
        self.forward = types.MethodType(shown, self)  # type: ignore[method-assign]

    # --- many inputs ---------------------------------------------------------------------------

    def predict_proba(self, data: Any, *, batch_size: int = 32) -> np.ndarray[Any, Any]:
        """Return the probabilities of all examples, `[example, class]`, as scikit-learn does.

        Args:
            data: A list of texts, images or paths; a large batch (an array or tensor of inputs, a
                mapping, `(inputs, labels)`); a data set; or data, batch by batch.
            batch_size: Examples per batch, if the data is not in batches yet.
        """
        return predict_proba(self, data, batch_size=batch_size)

    def as_map_function(
        self,
        column: str | None = None,
        *,
        prefix: str = "predicted_",
        probabilities: bool = False,
        batch_size: int = 32,
    ) -> RowAnswers:
        """Return a function from columns to columns of answers, for `datasets.map` and the like.

        Args:
            column: The column of texts or images; by default the usual names.
            prefix: Prefix of the columns of answers: `predicted_label`, ...
            probabilities: Whether to add the probabilities of all classes.
            batch_size: Rows that run through the model together.

        Example:
            >>> answered = dataset.map(ensemble.as_map_function("text"), batched=True)
        """
        return RowAnswers(
            self,
            column=column,
            prefix=prefix,
            probabilities=probabilities,
            batch_size=batch_size,
        )

    # --- novelty ---------------------------------------------------------------------------------

    def fit_novelty_(
        self,
        known: Any,
        *,
        train: Any = None,
        choose: bool = True,
        ood: Mapping[str, Any] | None = None,
        names: Sequence[str] | bool = True,
        progress: bool = True,
    ) -> HydraEnsemble:
        """Learn what is known, in place: `predict` then says how new an input is.

        One pass over `known`; nothing is trained and no outlier is needed. The page on novelty has
        the formulas and what is guaranteed. Fit again after training. A policy with an alarm
        belongs to the old statistics and is dropped with a warning.

        Args:
            known: In-distribution data that the model was not trained on; a few hundred examples.
                Labels are optional: with five per class or more, distances to classes are used.
            train: Training data (or other data of the same kind that `known` has no part of), with
                labels for distances to classes. Means and covariances are then those of `train`,
                of which there is more; ranks, and with them the rate of false alarms, still come
                from `known`.
            choose: Whether terms may join the usual ones, by classes (without labels: by clusters)
                that are left out of the known data. It finds near outliers better on hosts that
                nobody fine-tuned. Where it gains, proxies of 200 known examples are run, and
                nothing is chosen that finds them worse.
            ood: With `choose`, more families of outliers by name that the choice may not lose;
                nothing is fitted to them.
            names: Names of the known examples for `why_novel`, at most 100 characters each; by
                default file names, or the beginning of texts. They are saved with the statistics,
                for up to 512 examples. False keeps none.
            progress: Show a bar on a terminal.

        Example:
            >>> ensemble.fit_novelty_(held_out)
            >>> ensemble.novelty  # says which terms are summed, and why
            >>> ensemble.predict(batch).novelty > 0.95
        """
        self.novelty = fit_novelty(
            self, known, train=train, ood=ood, choose=choose, names=names, progress=progress
        )
        if self.policy is not None and self.policy.reads_novelty:
            super()._drop_policy("what is known")
        if self.sets is not None and self.sets.reads_novelty:
            self._drop_sets("what is known")
        return self

    @torch.no_grad()
    def why_novel(
        self, batch: Any, *, neighbours: int = 3, raw: Sequence[Any] | None = None
    ) -> Evidence:
        """Explain each example's novelty by blocks, the nearest known examples and plain facts.

        Args:
            batch: Texts, images, paths, or inputs as `predict` takes them.
            neighbours: Number of known examples to name.
            raw: The texts, images or paths that prepared inputs were made of, for their facts.
        """
        return why_novel(self, batch, neighbours, raw)

    def _drop_policy(self, what: str) -> None:
        super()._drop_policy(what)
        self._drop_sets(what)

    def _drop_sets(self, what: str) -> None:
        """Drop the sets: their thresholds belong to the old answers or novelty."""
        if getattr(self, "sets", None) is not None:
            self.sets = None
            warnings.warn(
                f"Sets were fitted before {what} changed: they are dropped. Fit them again with "
                "fit_sets().",
                stacklevel=4,
            )

    def forget_names_(self) -> HydraEnsemble:
        """Drop the names of known examples (excerpts of texts, file names), in place."""
        if self.novelty is not None:
            self.novelty = self.novelty.without_names()
        return self

    # --- members ---------------------------------------------------------------------------------

    def member(self, index: int) -> nn.Module:
        """Return one member as a plain, physically pruned host model.

        It shares the parameters of the trunk, the MLPs and the norms; its heads are copies. Members
        that are linear readouts of one trunk (`fold(readout="logits")`) are refused.
        """
        check_number("index", index, whole=True)
        if not 0 <= index < self.members:
            raise IndexError(f"Member {index} of {self.members}: count from 0.")
        refuse_readouts(self.member_readout)
        return self._cast_member(index)

    def attach_readouts_(self, readouts: Readouts) -> HydraEnsemble:
        """Let linear readouts answer for the members, for all of them, or both, in place.

        The last block must be branched, as `fuse(..., branch_layer=last)` makes it.
        """
        attach_readouts_(self.body, readouts.to(self.device), self._assembly.block_templates[-1])
        self._drop_policy("the readouts")
        return self

    def untie_(self, *, mlps: bool = False) -> HydraEnsemble:
        """Give each member its own heads, norms and output biases, for training, in place.

        The merged MLPs stay shared unless `mlps` is true: members run them one by one anyway, so
        copies cost memory, not arithmetic. The embeddings stay shared. Returns the ensemble.
        """
        body = self.body
        for block in body.branch:
            block.untie_(mlps=mlps)  # type: ignore[operator]
        layers = tuple(block.plan for block in body.branch)
        body.plan = Plan(**{**body.plan.__dict__, "layers": layers})
        for block in body.branch:
            if isinstance(block, FusedBlock):
                self.copies.update(block.copies())
        return self

    def freeze_trunk_(self) -> HydraEnsemble:
        """Stop gradients in everything before the branch, in place; returns the ensemble."""
        for parameter in self.host.parameters():
            parameter.requires_grad_(False)
        trainable = [p for block in self.body.branch for p in block.parameters()]
        # probe a member: its host's code runs on a batch that is not folded
        for path in modules_after_blocks(host_model(self._cast_member(0), family=self.body.family)):
            trainable += list(self.host.get_submodule(path).parameters())
        for parameter in trainable:
            parameter.requires_grad_(True)
        return self

    # --- saving ------------------------------------------------------------------------------

    def save_pretrained(
        self,
        folder: Any,
        *,
        tokenizer: Any = None,
        image_processor: Any = None,
        results: Results | list[Results] | None = None,
        state_dict: Any = None,
        safe_serialization: bool = True,
    ) -> None:
        """Write `config.json`, `model.safetensors` and a model card into a folder.

        The folder is replaced as a whole: if saving fails, what was there before is still there.

        Args:
            folder: Where to write; it is created if it does not exist.
            tokenizer: Replaces the ensemble's own tokenizer, which is saved too.
            image_processor: Replaces the ensemble's own transform, which is saved too.
            results: What `evaluate` measured, of the ensemble and of baselines, for the card.
            state_dict: Ignored, as is `safe_serialization`; the tools of transformers pass them.
            safe_serialization: Weights are always written as safetensors.

        Example:
            >>> ensemble.save_pretrained("vit-hydra", results=hydra.evaluate(ensemble, test))
        """
        if results is not None:
            remember_results(self, results)
        if tokenizer is not None:
            self.tokenizer = tokenizer
        if image_processor is not None:
            self.transform = image_processor
        save(self, folder)

    def export(
        self,
        folder: Any,
        *,
        example: Any = None,
        int8: bool = False,
        known: Any = None,
        held_out: Any = None,
        alarm: float | None = 0.05,
        tolerance: float = 1e-4,
    ) -> Any:
        """Write an ONNX program that runs without torch.

        Preprocessing, thresholds and statistics are inside; see `hydra_ensembles.export` for the
        arguments and `hydra_ensembles.runtime` for running it without torch.
        """
        return public_function("export")(
            self,
            folder,
            example=example,
            int8=int8,
            known=known,
            held_out=held_out,
            alarm=alarm,
            tolerance=tolerance,
        )

    def push_to_hub(
        self,
        repo: str,
        *,
        results: Results | list[Results] | None = None,
        private: bool | None = None,
        token: str | bool | None = None,
        revision: str | None = None,
        commit_message: str = "Upload a Hydra ensemble",
    ) -> str:
        """Upload the ensemble to the hub as `owner/name`; return the address of the commit.

        The folder of `save_pretrained` is uploaded in one commit, with its model card.

        Args:
            repo: Name on the hub; created if it does not exist.
            results: What `evaluate` measured, for the card: of the ensemble, and of baselines.
            private: Whether a new repository is private.
            token: Token of the hub, if you are not logged in.
            revision: A branch; created if it does not exist.
            commit_message: Message of the commit.
        """
        if results is not None:
            remember_results(self, results)
        return push(
            self, repo, private=private, token=token, revision=revision, message=commit_message
        )

    @classmethod
    def from_pretrained(
        cls,
        name_or_folder: Any,
        *,
        host: nn.Module | None = None,
        mode: Mode | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> HydraEnsemble:
        """Load what `save_pretrained` or `push_to_hub` wrote.

        Every file is checked before anything is built: its SHA-256, every field of the config, and
        the shapes of the tensors. No pickle and no code is loaded.

        Args:
            name_or_folder: A folder, or a name on the hub: `owner/name`.
            host: The plain host, for models that cannot be rebuilt by name.
            mode: `"fused"` or `"loop"`; by default as it was saved.
            revision: Branch, tag or commit on the hub.
            token: Token of the hub, for a private repository if you are not logged in.

        Raises:
            FormatError: When the folder is damaged, of another format, or not an ensemble.

        Example:
            >>> ensemble = HydraEnsemble.from_pretrained("vit-hydra")
        """
        return load(cls, name_or_folder, host=host, mode=mode, revision=revision, token=token)

    # --- printing ----------------------------------------------------------------------------

    def __str__(self) -> str:
        return summarize(self)

    def _repr_html_(self) -> str:
        return summarize_html(self)

    def __repr__(self) -> str:
        host = type(self.host).__name__
        return f"HydraEnsemble({host}, members={self.members}, mode={self.mode!r})"
