"""A task: what a model's outputs mean. Everything that depends on the meaning asks this object.

A task says which tensors of the host's output a member gives, how members are averaged, what is
uncertain, the loss and the labels, and what an answer looks like. Outputs of members are
`[batch, member, ...]`, those of one model `[batch, ...]`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from ..errors import DataError, FormatError, UnsupportedModelError
from ..prediction import Prediction
from ..registry import Registry
from ..uncertainty import Score

IGNORED = -100
"""The label of a token that does not count, as torch's losses and transformers have it."""

LOGITS: tuple[tuple[str, ...], ...] = (("logits",),)
"""The usual field of a host's output."""

USUAL = "multi-class"
"""The task of every model that has no other."""


class Facts(NamedTuple):
    """What a task is recognised by.

    Attributes:
        name: Name of the model's class, or of the classes that its config lists.
        config: Its config of transformers, or None.
        model: The model, or None before its weights are read.
    """

    name: str
    config: Any = None
    model: Any = None

    @property
    def problem(self) -> str | None:
        """What the config of transformers calls the problem."""
        return getattr(self.config, "problem_type", None)

    @property
    def classifies(self) -> bool:
        """Whether the class is made for sequences, images or sounds with labels."""
        return "Classification" in self.name and "TokenClassification" not in self.name


@dataclass(frozen=True)
class Task(ABC):
    """Base of all tasks: a frozen dataclass whose fields are its options, saved with an ensemble.

    Attributes:
        name: As it is registered, saved and given: `fuse(model, masks, task="regression")`.
        title: In words, for sentences.
        fields: Fields of the host's output that a member gives: the first alternative that is
            there. Several fields are joined along axis 1; one without that axis becomes one row.
        axes: Number of axes of one model's output.
        prediction: Class of the answers.
        scores: What can be called uncertain: functions of the members' outputs to `[batch]`.
        default_score: The score that is reported unless another one is chosen.
        classifies: Whether labels are numbers of classes, and outputs their logits.
        has_temperatures: Whether outputs are logits that temperatures divide.
        calibrators: What else can calibrate outputs, by name, in words; `answer` takes `calibrator`
            where there is any.
        by_token: Whether every token is an example of its own.
        ragged: Whether the last axis of outputs depends on the length of texts.
        reads_inputs: Whether `answer` takes the inputs of the batch.
        sets: Names of the methods that make sets with a guarantee, the default first.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    fields: ClassVar[tuple[tuple[str, ...], ...]] = LOGITS
    axes: ClassVar[int] = 2
    prediction: ClassVar[type[Prediction]]
    scores: ClassVar[Registry[Score]]
    default_score: ClassVar[str]
    classifies: ClassVar[bool] = False
    has_temperatures: ClassVar[bool] = False
    calibrators: ClassVar[Mapping[str, str]] = {}
    by_token: ClassVar[bool] = False
    ragged: ClassVar[bool] = False
    reads_inputs: ClassVar[bool] = False
    sets: ClassVar[tuple[str, ...]] = ()

    @classmethod
    @abstractmethod
    def found_in(cls, facts: Facts) -> Task | None:
        """Return the task of a model, if it is this one."""

    # `answer` is a class variable in tasks whose answer is a function already
    @abstractmethod
    def answer(
        self,
        outputs: Tensor,
        /,
        *,
        score: str | Score,
        temperature: float | Tensor | None = None,
        member_temperatures: Sequence[float] | Tensor | None = None,
        logit_scale: float | Tensor | None = None,
        class_names: Sequence[str] | None = None,
        student_logits: Tensor | None = None,
    ) -> Prediction:
        """Turn the members' outputs `[batch, member, ...]` into the ensemble's answer.

        Args:
            outputs: What the members gave.
            score: The uncertainty to report, a name in `scores` or a function of the outputs.
            temperature, member_temperatures, logit_scale: As in `predict_from_logits`.
            class_names: Names of classes, labels or numbers, in their order.
            student_logits: Outputs of one model that answers for the members, `[batch, ...]`.
        """

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """Average members `[batch, member, ...]`; return it as one model would give it."""

    @abstractmethod
    def losses(self, outputs: Tensor, labels: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the loss of one model's outputs, one for each example, `[batch]`.

        Args:
            outputs: `[batch, ...]`; of an ensemble, those of `mean`.
            labels: As `check_labels` returns them.
            mask: The batch's `attention_mask`, for tasks that answer for tokens.
        """

    def target(self, outputs: Tensor) -> Tensor:
        """Turn outputs of another model into labels that `losses` takes, to learn from it."""
        return outputs

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss as the host's own library has it, a scalar."""
        return self.losses(outputs, labels).mean()

    @abstractmethod
    def check_labels(self, labels: Tensor, where: str, *, size: int | None = None) -> Tensor:
        """Return labels on the CPU as the loss takes them, or raise a DataError.

        Args:
            labels: As a batch holds them.
            where: Where they are from, for errors.
            size: Length of the last axis of the outputs, if it is known.
        """

    def errors(self, answer: Prediction, labels: Tensor) -> Tensor | None:
        """Tell which answers are wrong, bool `[batch]`; None where no answer is right or wrong."""
        return None

    def member_outputs(self, outputs: Tensor, /) -> Tensor:
        """Return outputs with a member axis: one model is one member."""
        return outputs[:, None] if outputs.ndim == self.axes else outputs

    def novelty_rows(self, outputs: Tensor, mask: Tensor | None, /) -> Tensor | None:
        """Return logits `[batch, member, class]` whose probability speaks for novelty, or None."""
        return None

    def examples(
        self, outputs: Tensor, labels: Tensor | None, inputs: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Return the members' outputs and labels by example: one per input, or one per token.

        Args:
            outputs: `[batch, member, ...]`.
            labels: As a batch holds them.
            inputs: The batch's inputs by name.
        """
        return outputs, labels

    def score(self, outputs: Tensor, score: str | Score) -> Tensor:
        """Return an uncertainty of the members' outputs, `[batch]`, higher when less sure."""
        return (self.scores[score] if isinstance(score, str) else score)(outputs)

    def to_dict(self) -> dict[str, Any]:
        """Return the name and the options as plain data."""
        return {"name": self.name, **asdict(self)}

    def __str__(self) -> str:
        return self.name


tasks: Registry[type[Task]] = Registry("task")
"""Tasks by name; one that is registered later is asked earlier whether a model is its own."""


def as_task(task: str | Task | Mapping[str, Any]) -> Task:
    """Return a task by its name, from what `to_dict` returned, or the one that was given."""
    if isinstance(task, Task):
        return task
    if isinstance(task, str):
        return tasks[task]()
    if "name" not in task:
        raise FormatError(f"expected a task with its name: {', '.join(tasks)}")
    options = {key: value for key, value in task.items() if key != "name"}
    kind = tasks[task["name"]]
    if unknown := options.keys() - {field.name for field in fields(kind)}:
        raise FormatError(f"The task {kind.name!r} has no option {', '.join(sorted(unknown))}.")
    return kind(**{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()})


def task_of(model: Any, task: str | Task | None = None) -> Task:
    """Return the task of a model, or the given one if it reads what the model gives.

    Args:
        model: An ensemble, a host or any callable; or `Facts` of a model that is not there yet.
        task: A task or its name.
    """
    own = getattr(model, "task", None)
    if not isinstance(own, Task):
        facts = model
        if not isinstance(model, Facts):
            facts = Facts(type(model).__name__, getattr(model, "config", None), model)
        found = (tasks[name].found_in(facts) for name in reversed(list(tasks)))
        own = next((task for task in found if task is not None), None) or tasks[USUAL]()
    if task is None:
        return own
    given = as_task(task)
    if given.fields != own.fields:
        raise UnsupportedModelError(
            f"{type(model).__name__} is made for {own.title}, so it cannot be used for "
            f"{given.title}: they read different outputs. Load the model with the class for "
            f"{given.title}, or leave task= out."
        )
    return given


def wrong_shape(task: Task, labels: Tensor, where: str, expected: str) -> DataError:
    """Return the error for labels of another task."""
    return DataError(
        f"Labels of shape {list(labels.shape)} and type {labels.dtype} in {where}; {task.title} "
        f"expects {expected}. If the model is made for another task, pass task= "
        f"({', '.join(tasks)})."
    )
