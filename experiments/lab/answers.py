"""Stored answers: what a model said about every set, so that tables need no model again.

One folder per (task, row, draw); in it one safetensors file per set with `logits`
`[example, member, class]`, `labels` where there are any, `novelty` and its score where fitted, and
`about.json` with the row's options and its cost. Answers of other options are made anew.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hydra_ensembles import Results, evaluate
from hydra_ensembles._records import write_whole
from hydra_ensembles.data.batches import split_batch
from hydra_ensembles.data.eval_mode import evaluating
from hydra_ensembles.data.model_runs import member_logits
from hydra_ensembles.errors import DataError
from hydra_ensembles.prediction import Prediction
from hydra_ensembles.uncertainty import predict_from_logits

Tensors = dict[str, Tensor]


@dataclass
class Answers:
    """What one row said on one draw: tensors by set, and what it costs."""

    sets: dict[str, Tensors]
    about: dict[str, Any] = field(default_factory=dict)

    @property
    def cost(self) -> float:
        """Counted multiply-adds against the plain host."""
        return float(self.about["cost"])

    def member(self, index: Sequence[int]) -> dict[str, Tensors]:
        """Return the sets with some of the members only."""
        return {
            name: {**one, "logits": one["logits"][:, list(index)].contiguous()}
            for name, one in self.sets.items()
        }


def ask(model: Any, data: Any) -> Tensors:
    """Run a model over data and keep what it says."""
    parts: dict[str, list[Tensor]] = {}

    def add(**tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if tensor is not None:
                parts.setdefault(name, []).append(tensor)

    with evaluating(model):
        for batch in data:
            args, kwargs, labels = split_batch(batch)
            if getattr(model, "novelty", None) is None and getattr(model, "student", None) is None:
                add(logits=member_logits(model, batch), labels=labels)
                continue
            said = model.predict(kwargs or args[0])
            add(logits=said.member_logits, labels=labels)
            add(novelty=said.novelty, novelty_score=said.novelty_score)
            add(student_logits=said.student_logits)
    return {name: torch.cat(part).contiguous() for name, part in parts.items()}


class Store:
    """The answers of one task in a folder."""

    def __init__(self, folder: Path, task: Any) -> None:
        self.folder, self.task = folder / task.name, task

    def place(self, row: str, draw: int) -> Path:
        """Return the folder of a row's draw."""
        return self.folder / re.sub(r"[^\w.=-]+", "_", row) / str(draw)

    def read(self, row: str, draw: int, options: Mapping[str, Any]) -> Answers | None:
        """Return stored answers made with these options, None when there are none."""
        about = self.place(row, draw) / "about.json"
        if not about.exists():
            return None
        said = json.loads(about.read_text())
        if said["options"] != json.loads(json.dumps(options)):
            return None
        if not set(self.task.added) <= set(said["sets"]):
            return None
        folder = about.parent
        return Answers(
            {name: load_file(folder / f"{name}.safetensors") for name in said["sets"]}, said
        )

    def write(self, row: str, draw: int, options: Mapping[str, Any], answers: Answers) -> Answers:
        """Keep answers; `about.json` comes last, so that what is read is whole."""
        folder = self.place(row, draw)
        for name, tensors in answers.sets.items():
            path = folder / f"{name}.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            beside = path.with_name(f".{path.name}.{os.getpid()}")
            save_file({k: v.contiguous() for k, v in tensors.items()}, beside)
            os.replace(beside, path)
        answers.about |= {"options": dict(options), "sets": list(answers.sets)}
        write_whole(folder / "about.json", json.dumps(answers.about, indent=1))
        return answers

    def keep(
        self, row: str, draw: int, options: Mapping[str, Any], make: Callable[[], Answers]
    ) -> Answers:
        """Read answers, or make and keep them."""
        found = self.read(row, draw, options)
        if found is None:
            begun = time.process_time()
            found = make()
            found.about["seconds"] = round(time.process_time() - begun, 1)
            self.write(row, draw, options, found)
            print(f"{self.task.name}: {row}, draw {draw}: {found.about['seconds']} s", flush=True)
        return found


class Stored:
    """A model that answers with what was stored: batches are the stored tensors themselves."""

    def predict(self, batch: Mapping[str, Tensor]) -> Prediction:
        """Return the stored answer as a prediction."""
        answer = predict_from_logits(batch["logits"], student_logits=batch.get("student_logits"))
        if "novelty" not in batch:
            return answer
        return replace(answer, novelty=batch["novelty"], novelty_score=batch["novelty_score"])


def evaluate_answers(answers: Answers, *, scores: Sequence[str], name: str) -> Results:
    """Evaluate stored answers as `evaluate` does a model, raw and at one temperature.

    `evaluate` adds the score `novelty` by itself where it was fitted.
    """
    test = answers.sets["test"]
    # log-probabilities have no energy: their logsumexp is 0 by definition
    normed = bool((test["logits"].logsumexp(-1).abs() < 1e-3).all())
    wanted = [score for score in scores if not (normed and score == "energy")]
    ood: dict[str, dict[str, Any]] = {}
    shifts = {}
    for key, tensors in answers.sets.items():
        kind, _, rest = key.partition("/")
        if kind == "ood":
            group, _, family = rest.partition("/")
            ood.setdefault(group, {})[family] = [tensors]
        elif kind == "shift":
            shifts[rest] = [tensors]
    if "labels" not in test:
        raise DataError(f"The stored test answers of {name!r} have no labels.")
    return evaluate(
        Stored(),
        [test],
        ood=ood,
        shifts=shifts or None,
        score=wanted,
        temperature=[answers.sets["held_out"]],
        progress=False,
        name=name,
    )
