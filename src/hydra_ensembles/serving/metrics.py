"""What Prometheus reads at `/metrics`: traffic, batches, and how sure and how new answers are."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..prediction import WHY, Prediction
from ..task_predictions import TokenPrediction
from .backends import Backend

if TYPE_CHECKING:
    from ..uncertainty.drift import Window

FACTS = ("platform", "reads", "members", "classes", "score")
OBSERVED = ("confidence", "uncertainty", "mutual_information", "novelty", "novelty_score")

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SHARES = tuple(round(0.05 * i, 2) for i in range(1, 21))
CONFIDENCE = (*SHARES[:-1], 0.99, 1.0)
NATS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
NOVELTY = (*(round(0.1 * i, 1) for i in range(1, 10)), 0.95, 0.99, 0.995, 0.999, 1.0)
SCORES = (0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0)
WIDE = tuple(float(v) for v in (-100, -50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100))

Row = tuple[str, str, str, Sequence[str], Sequence[float]]


def table(backend: Backend, largest_batch: int) -> Iterator[Row]:
    """Yield kind, name, help, labels and buckets of every metric of a model."""
    batches = [*(2**i for i in range(20) if 2**i < largest_batch), largest_batch]
    score = uncertainty_buckets(backend.score, backend.classes)
    yield "Counter", "requests", "Requests by path and status.", ("path", "code"), ()
    yield "Gauge", "requests_in_flight", "Requests now.", (), ()
    yield "Histogram", "request_seconds", "From first byte to answer.", ("path",), SECONDS
    yield "Gauge", "queue_rows", "Inputs that wait for the model.", (), ()
    yield "Histogram", "queue_seconds", "How long an input waits.", (), SECONDS
    yield "Histogram", "batch_seconds", "How long a batch takes.", (), SECONDS
    yield "Histogram", "batch_rows", "Inputs per batch.", (), batches
    yield "Histogram", "confidence", "Probability of the predicted class.", (), CONFIDENCE
    yield "Histogram", "uncertainty", f"By the score {backend.score}, higher if unsure.", (), score
    yield "Histogram", "mutual_information", "How far members disagree, in nats.", (), NATS
    yield "Histogram", "novelty", "Share of known data that is less novel.", (), NOVELTY
    yield "Histogram", "novelty_score", "What novelty ranks, unbounded.", (), SCORES
    yield "Counter", "alarms", "Answers with novelty above 1 - the alarm level.", (), ()
    yield "Counter", "abstentions", "Answers that should be withheld.", ("why",), ()
    yield "Gauge", "drift_p_value", "Of the last tested window of novelty scores.", (), ()
    yield "Gauge", "drift_gap", "Largest gap to the known distribution, 0 to 1.", (), ()
    yield "Gauge", "drift", "1 when the last tested window has drifted.", (), ()
    yield "Counter", "drift_windows", "Windows tested.", ("verdict",), ()


class Metrics:
    """The service's own registry and what it counts, by the names of `table`.

    Args:
        backend: Its score decides the buckets of uncertainty.
        model: The name that it is served under.
        largest_batch: The most inputs of a batch.
    """

    def __init__(self, backend: Backend, model: str, largest_batch: int) -> None:
        import prometheus_client as prometheus

        self.registry = registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        self.alarm = backend.alarm
        facts = {name: str(getattr(backend, name)) for name in FACTS}
        information = prometheus.Info("hydra_model", "What is served.", registry=registry)
        information.info({"name": model, **facts, "alarm": f"{backend.alarm:g}"})
        self._metrics: dict[str, Any] = {}
        for kind, name, words, labels, buckets in table(backend, largest_batch):
            options = {"buckets": buckets} if buckets else {}
            self._metrics[name] = getattr(prometheus, kind)(
                f"hydra_{name}", words, labels, registry=registry, **options
            )
        for why in filter(None, WHY):
            self["abstentions"].labels(why)  # a rate needs a zero to start from
        for verdict in ("same", "drifted"):
            self["drift_windows"].labels(verdict)
        self["drift_p_value"].set(math.nan)
        self["drift_gap"].set(math.nan)

    def __getitem__(self, name: str) -> Any:
        return self._metrics[name]

    def note_batch(self, answers: Prediction, took: float, waits: Sequence[float]) -> None:
        """Count one batch of answers."""
        self["batch_rows"].observe(len(waits))
        self["batch_seconds"].observe(took)
        for wait in waits:
            self["queue_seconds"].observe(wait)
        for name in OBSERVED:
            for value in _values(answers, name):
                self[name].observe(value)
        if answers.novelty is not None:
            self["alarms"].inc(int((~(answers.novelty <= 1 - self.alarm)).sum()))
        for why in answers.why or ():
            reasons = set(why) if isinstance(why, list) else {why}  # of tokens, each reason once
            for reason in sorted(filter(None, reasons)):
                self["abstentions"].labels(reason).inc()

    def note_window(self, window: Window) -> None:
        """Show the outcome of one test for drift."""
        self["drift_p_value"].set(window.p)
        self["drift_gap"].set(window.gap)
        self["drift"].set(int(window.drifted))
        self["drift_windows"].labels("drifted" if window.drifted else "same").inc()

    def page(self) -> tuple[bytes, str]:
        """Return the page that Prometheus reads, and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST


def _values(answers: Prediction, name: str) -> list[float]:
    """Return a column's numbers: one per input, or per real token; none where the task has none."""
    column = getattr(answers, name, None)
    if isinstance(answers, TokenPrediction) and column is not None and column.ndim == 2:
        column = column[answers.real]
    return column.tolist() if hasattr(column, "ndim") else []


def uncertainty_buckets(score: str, classes: int) -> tuple[float, ...]:
    """Return buckets that fit the range of a score."""
    if score == "msp":
        return SHARES
    if score in ("entropy", "mutual_information"):
        top = math.log(max(classes, 2))
        return tuple(round(top * share, 6) for share in SHARES)
    return WIDE
