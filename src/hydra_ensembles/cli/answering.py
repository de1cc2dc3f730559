"""Answer records in batches: each gets its answer or its error, in order."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ..data.records import Record, batches
from ..errors import DataError

if TYPE_CHECKING:
    from ..prediction import Prediction
    from ..uncertainty import Policy
    from .models import Loaded


@dataclass
class Answering:
    """How records are answered.

    Attributes:
        loaded: The model and what prepares its inputs.
        policy: When to answer, or None.
        probabilities: Add all classes' probabilities.
        most: Inputs that are run at once; halved when memory runs out.
    """

    loaded: Loaded
    policy: Policy | None = None
    probabilities: bool = False
    most: int = sys.maxsize

    def __call__(self, batch: Sequence[Record]) -> Iterator[dict[str, Any]]:
        """Yield one answer for every record."""
        inputs = [self._input(record) for record in batch]
        good = [i for i, value in enumerate(inputs) if value is not None]
        answers = dict(zip(good, self._predict([inputs[i] for i in good]), strict=True))
        for i, record in enumerate(batch):
            answer = answers.get(i) or record.error or "there is no input"
            if record.skipped is not None:
                yield {**record.echo, "skipped": record.skipped, "abstain": True}
            elif isinstance(answer, str):
                yield {**record.echo, "error": answer, "abstain": True}
            else:
                yield {**record.echo, **self._told(answer)}

    def _input(self, record: Record) -> Any:
        """Return a text or a decoded picture; None when there is none, and say why."""
        if record.error is not None or record.value is None:
            return None
        if self.loaded.tokenizer is not None:
            return record.value
        from ..runtime.images import open_image

        try:
            if self.loaded.transform is None:
                raise DataError(f"{self.loaded.name} does not say how it wants its images.")
            return self.loaded.transform(open_image(record.value))
        except Exception as error:  # whatever one file does to its transform, the others go on
            record.error = str(error) or type(error).__name__
            return None

    def _predict(self, inputs: list[Any]) -> list[Prediction | str]:
        """Predict inputs together; when that fails, one by one, with an error where it does.

        When memory runs out, batches are halved from there on, which a note says.
        """
        from ..data.memory import is_out_of_memory

        if not inputs:
            return []
        if len(inputs) > self.most:
            parts = [inputs[i : i + self.most] for i in range(0, len(inputs), self.most)]
            return [answer for part in parts for answer in self._predict(part)]
        try:
            return list(self._run(inputs))
        except Exception as error:
            if len(inputs) == 1:
                return [f"the model failed ({type(error).__name__}: {str(error)[:200]})"]
            if not is_out_of_memory(error):
                return [answer for one in inputs for answer in self._predict([one])]
        self.most = (len(inputs) + 1) // 2
        warnings.warn(
            f"Memory ran out on {len(inputs)} inputs: going on with batches of {self.most}.",
            stacklevel=2,
        )
        return self._predict(inputs)

    def _run(self, inputs: list[Any]) -> Prediction:
        import torch

        from ..data.image_data import image_batch
        from ..fusion.inputs import token_limit
        from ..fusion.policy_data import answer_of

        model = self.loaded.model
        if self.loaded.tokenizer is None:
            return answer_of(model, image_batch(torch.stack(inputs), None, self.loaded.key))
        tokenize = self.loaded.texts
        limit = token_limit(getattr(model, "config", None), tokenize)
        encoded = tokenize(
            inputs, padding=True, truncation=True, max_length=limit, return_tensors="pt"
        )
        return answer_of(model, dict(encoded))

    def _told(self, answer: Prediction) -> dict[str, Any]:
        """Return the fields of an answer; one that is no number is an error."""
        number, unsure = int(answer.label), float(answer.uncertainty)
        probability = float(answer.confidence)
        if not (math.isfinite(unsure) and math.isfinite(probability)):
            return {"error": f"the model's answer is no number ({unsure})", "abstain": True}
        told: dict[str, Any] = {
            "label": self.loaded.class_name(number),
            "class": number,
            "probability": round(probability, 6),
            "uncertainty": unsure,
            "score": answer.score,
        }
        if answer.novelty is not None and answer.novelty_score is not None:
            told["novelty"] = round(float(answer.novelty), 6)
            told["novelty_score"] = float(answer.novelty_score)
        if self.policy is not None:
            told |= self._decided(answer, self.policy)
        if self.probabilities:
            told["probabilities"] = [round(p, 6) for p in answer.probabilities[0].tolist()]
        return told

    def _decided(self, answer: Prediction, policy: Policy) -> dict[str, Any]:
        """Return the decision in words, whether it abstains, and why."""
        from ..fusion.policy_data import decided

        words = decided(answer, policy).decisions
        why = policy.reasons(answer.uncertainty, answer.novelty_score)[0]
        assert words is not None  # there is a policy
        return {"decision": words[0], "abstain": bool(why), **({"why": why} if why else {})}


def answered(
    answers: Answering, records: Iterable[Record], size: int
) -> Iterator[list[dict[str, Any]]]:
    """Yield the answers to records, in order, as they come; several processes share them.

    The first process reads; it alone gets the answers, the others get none.
    """
    from ..data import processes

    several = processes.size()
    if several == 1:
        for batch in batches(records, size):
            yield list(answers(batch))
        return
    groups = batches(records, size * several) if processes.is_first() else iter(())
    while True:
        group = next(groups, None)
        told = None if group is None else [asdict(record) for record in group]
        shared = processes.exchange(told)[0]
        if shared is None:
            return
        start = size * processes.rank()
        mine = [Record(**plain) for plain in shared[start : start + size]]
        said = processes.exchange(list(answers(mine)) if mine else [])
        if processes.is_first():
            yield [answer for part in said for answer in part]


def line_of(answer: dict[str, Any], *, encoding: str | None = "utf-8") -> str:
    """Return an answer as one line of JSON in an encoding, whatever came back with it."""
    try:
        text = json.dumps(answer, ensure_ascii=False, allow_nan=False)
        text.encode(encoding or "utf-8")
    except UnicodeEncodeError:
        text = json.dumps(answer)
    except (ValueError, RecursionError) as error:
        kept = {
            key: answer[key] for key in ("file", "line") if isinstance(answer.get(key), (str, int))
        }
        text = json.dumps({**kept, "error": f"cannot be given back: {error}", "abstain": True})
    return text + "\n"
