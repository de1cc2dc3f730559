"""Rows of the table of every task: models from three fine-tunings of MiniLM, and what they answer.

A draw of `single` is a host, a draw of `folded` is what it is fitted to. With each draw goes
another half of the calibration rows: `build` chooses by it, novelty knows it.
Answers are kept as in `answers.py`, with `text` (the number of a word's text) where tokens answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

import hydra_ensembles as hydra
from hydra_ensembles import HeadMask, HydraEnsemble, fuse
from hydra_ensembles.data.batches import split_batch
from hydra_ensembles.data.eval_mode import evaluating
from hydra_ensembles.data.model_runs import member_logits
from hydra_ensembles.errors import UnsupportedModelError
from hydra_ensembles.research.rivals import make_baseline
from hydra_ensembles.tasks import IGNORED, task_of
from hydra_ensembles.training import average_weights

from .answers import Answers, Store, Tensors
from .methods import cost_of
from .other_tasks import HeldTask

SEEDS = (0, 1, 2)
FOLD = 800
"""Training inputs that a fold is fitted to."""
PASSES = 8
"""Of dropout."""
TOKENS = 1.3
"""Most that a row may cost where every token is read: heads cost 1.22 at the least, folds 1.25."""


def single(task: HeldTask, draw: int) -> nn.Module:
    """Return a host as a fused model of one member, which has novelty."""
    host = task.host(draw)
    return fuse(host, [HeadMask.full(host)])


def soup(task: HeldTask, draw: int) -> nn.Module:
    """Return the mean of the hosts' weights."""
    return average_weights([task.host(seed) for seed in SEEDS]).eval()


def dropout(task: HeldTask, draw: int) -> nn.Module:
    """Return host 0 with dropout on."""
    return make_baseline("mc-dropout", task.host(0), members=PASSES, seed=draw)


def folded(task: HeldTask, draw: int) -> nn.Module:
    """Fold the hosts; a student answers too."""
    texts = task.part("train").sample(FOLD, seed=draw)
    hosts = [task.host(seed) for seed in SEEDS]
    tokens = task_of(hosts[0]).by_token  # folded by states, without a student
    most = TOKENS if tokens else 1.0
    data = task.batches(texts)
    return hydra.fold(hosts, data, student=not tokens, max_cost=most, progress=False)


def built(method: str) -> Callable[[HeldTask, int], nn.Module]:
    """Return what builds members of one host."""

    def make(task: HeldTask, draw: int) -> nn.Module:
        host = task.host(draw)
        return hydra.build(
            host,
            task.known(draw),
            method=method,
            max_cost=TOKENS if task_of(host).by_token else 1.07,
            calibrate=False,
            novelty=False,
            seed=draw,
            progress=False,
        )

    return make


MAKERS: dict[str, tuple[Callable[[HeldTask, int], nn.Module], int, bool]] = {
    "single": (single, 3, True),
    "MC dropout": (dropout, 1, False),
    "soup": (soup, 1, False),
    "folded": (folded, 1, True),
    "heads": (built("select"), 1, False),
    "parts": (built("parts"), 1, False),
}
"""What makes a row's model, its draws, and whether novelty is fitted."""


def ask(model: Any, data: Iterable[Any]) -> Tensors:
    """Run a model over data; keep members' outputs, what a student says, labels and novelty.

    Of tokens, the first one of each word is kept.
    """
    task, texts = task_of(model), 0
    parts: dict[str, list[Tensor]] = {}

    def add(**tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if tensor is not None:
                parts.setdefault(name, []).append(tensor)

    with evaluating(model):
        for batch in data:
            _, inputs, labels = split_batch(batch)
            said = model.predict(inputs) if isinstance(model, HydraEnsemble) else None
            outputs = member_logits(model, batch).float() if said is None else said.member_outputs
            student = None if said is None else said.student_outputs
            if said is not None:
                add(novelty=said.novelty, novelty_score=said.novelty_score)
            if task.by_token:
                assert labels is not None
                words = labels != IGNORED
                outputs, labels = outputs.transpose(1, 2)[words], labels[words]
                student = None if student is None else student[words]
                add(text=words.nonzero()[:, 0] + texts)
            texts += len(inputs["input_ids"])
            add(logits=outputs, student_logits=student, labels=labels)
    return {name: torch.cat(part).contiguous() for name, part in parts.items()}


class Rows:
    """The answers of all rows of a task, made when they are first read.

    Args:
        task: The task.
        store: Where answers are kept.
    """

    def __init__(self, task: HeldTask, store: Store) -> None:
        self.task, self.store = task, store

    def read(self, row: str, draw: int) -> Answers:
        """Return a row's answers; those of the three hosts together are a Deep Ensemble."""
        if row == "Deep Ensemble":
            return self._together
        make, _, known = MAKERS[row]

        def run() -> Answers:
            model = make(self.task, draw)
            with torch.autocast("cpu", torch.bfloat16):  # as the hosts were trained
                if known:
                    assert isinstance(model, HydraEnsemble)
                    model.fit_novelty_(self.task.known(draw), names=False, progress=False)
                found = {name: ask(model, data) for name, data in self.task.evaluated().items()}
            about: dict[str, Any] = cost_of(model, self.task.host(0), self.task.one)
            return Answers(found, about)

        return self.store.keep(row, draw, self.options(row), run)

    def options(self, row: str) -> dict[str, Any]:
        """Return what decides a row's answers."""
        return {"row": row, "fold": FOLD, "passes": PASSES, "hosts": list(SEEDS)}

    def make(self, row: str) -> None:
        """Make all draws of a row; a model that is refused has none, and its reason is told."""
        for draw in range(self.draws(row)):
            try:
                self.read(row, draw)
            except UnsupportedModelError as error:
                print(f"{self.task.name}: {row}: {error}", flush=True)
                return

    def kept(self, row: str) -> bool:
        """Tell whether all draws of a row are there."""
        of = "single" if row == "Deep Ensemble" else row
        draws = range(MAKERS[of][1])
        return all(self.store.read(of, draw, self.options(of)) is not None for draw in draws)

    def draws(self, row: str) -> int:
        """Return how many draws a row has."""
        return 1 if row == "Deep Ensemble" else MAKERS[row][1]

    @cached_property
    def _together(self) -> Answers:
        hosts = [self.read("single", seed) for seed in SEEDS]
        joined = {
            name: {
                **{k: v for k, v in one.items() if not k.startswith("novelty")},
                "logits": torch.cat([host.sets[name]["logits"] for host in hosts], 1),
            }
            for name, one in hosts[0].sets.items()
        }
        count = float(len(hosts))
        return Answers(joined, {"cost": count, "parameters": count})
