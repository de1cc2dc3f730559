"""What Prometheus reads at `/metrics`: traffic, batches, and how sure and how new answers are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from .answers import Answers
from .backend import Backend

if TYPE_CHECKING:
    from prometheus_client import Histogram

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SHARES = tuple(round(0.05 * i, 2) for i in range(1, 21))
CONFIDENCE = (*SHARES[:-1], 0.99, 1.0)
NOVELTY = (*(round(0.1 * i, 1) for i in range(1, 10)), 0.95, 0.99, 0.995, 0.999, 1.0)
SCORES = (0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0)
WIDE = tuple(float(v) for v in (-100, -50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100))


class Metrics:
    """The service's own registry and what it counts.

    Args:
        backend: Its score decides the buckets of uncertainty.
        model: The name that it is served under.
        limits_batch: The largest batch.
    """

    def __init__(self, backend: Backend, model: str, limits_batch: int) -> None:
        from prometheus_client import (
            CollectorRegistry,
            Counter,
            Gauge,
            Histogram,
            Info,
            ProcessCollector,
        )

        self.registry = registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        self.alarm = backend.alarm
        information = Info("hydra_model", "What is served.", registry=registry)
        information.info(
            {
                "name": model,
                "platform": backend.platform,
                "reads": backend.reads,
                "members": str(backend.members),
                "classes": str(backend.classes),
                "score": backend.score,
                "alarm": f"{backend.alarm:g}",
            }
        )
        self.requests = Counter(
            "hydra_requests", "Requests by path and status.", ["path", "code"], registry=registry
        )
        self.seconds = Histogram(
            "hydra_request_seconds",
            "From the first byte of a request to its answer.",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self.in_flight = Gauge("hydra_requests_in_flight", "Requests now.", registry=registry)
        self.waiting = Gauge(
            "hydra_queue_rows", "Inputs that wait for the model.", registry=registry
        )
        self.queue_seconds = Histogram(
            "hydra_queue_seconds", "How long an input waits.", buckets=SECONDS, registry=registry
        )
        self.model_seconds = Histogram(
            "hydra_batch_seconds", "How long a batch takes.", buckets=SECONDS, registry=registry
        )
        sizes = [2**i for i in range(20) if 2**i < limits_batch]
        self.batch_rows = Histogram(
            "hydra_batch_rows",
            "Inputs per batch.",
            buckets=[*sizes, limits_batch],
            registry=registry,
        )
        self.confidence = Histogram(
            "hydra_confidence",
            "Probability of the predicted class.",
            buckets=CONFIDENCE,
            registry=registry,
        )
        self.uncertainty = Histogram(
            "hydra_uncertainty",
            f"Uncertainty by the score {backend.score}, higher when less sure.",
            buckets=uncertainty_buckets(backend.score, backend.classes),
            registry=registry,
        )
        self.mutual_information = Histogram(
            "hydra_mutual_information",
            "What the members disagree about, in nats.",
            buckets=(0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0),
            registry=registry,
        )
        self.novelty = Histogram(
            "hydra_novelty",
            "Share of known data that is less novel.",
            buckets=NOVELTY,
            registry=registry,
        )
        self.novelty_score = Histogram(
            "hydra_novelty_score",
            "What novelty ranks, unbounded.",
            buckets=SCORES,
            registry=registry,
        )
        self.alarms = Counter(
            "hydra_alarms", "Answers with novelty above 1 - the alarm level.", registry=registry
        )
        self.abstentions = Counter(
            "hydra_abstentions", "Answers that should be withheld.", ["why"], registry=registry
        )
        for why in ("too unsure", "too new"):
            self.abstentions.labels(why)  # a rate needs a zero to start from
        self.drift_p = Gauge(
            "hydra_drift_p_value",
            "Of the last tested window of novelty scores against the known data.",
            registry=registry,
        )
        self.drift_p.set(math.nan)
        self.drift_gap = Gauge(
            "hydra_drift_gap",
            "Largest gap between the window's distribution and the known one, 0 to 1.",
            registry=registry,
        )
        self.drift_gap.set(math.nan)
        self.drifted = Gauge(
            "hydra_drift", "1 when the last tested window has drifted.", registry=registry
        )
        self.drift_windows = Counter(
            "hydra_drift_windows", "Windows tested.", ["verdict"], registry=registry
        )
        for verdict in ("same", "drifted"):
            self.drift_windows.labels(verdict)

    def note_batch(self, answers: Answers, took: float, waits: Sequence[float]) -> None:
        """Count one batch of answers."""
        self.batch_rows.observe(len(waits))
        self.model_seconds.observe(took)
        observe_all(self.queue_seconds, waits)
        observe_all(self.confidence, answers.probability)
        observe_all(self.uncertainty, answers.uncertainty)
        observe_all(self.mutual_information, answers.mutual_information)
        if answers.novelty is not None and answers.novelty_score is not None:
            observe_all(self.novelty, answers.novelty)
            observe_all(self.novelty_score, answers.novelty_score)
            self.alarms.inc(int((~(answers.novelty <= 1 - self.alarm)).sum()))
        for why in answers.why:
            if why:
                self.abstentions.labels(why).inc()

    def note_window(self, window: Any) -> None:
        """Show the outcome of one test for drift."""
        self.drift_p.set(window.p)
        self.drift_gap.set(window.gap)
        self.drifted.set(int(window.drifted))
        self.drift_windows.labels("drifted" if window.drifted else "same").inc()

    def page(self) -> tuple[bytes, str]:
        """Return the page that Prometheus reads, and its content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self.registry), CONTENT_TYPE_LATEST


def observe_all(histogram: Histogram, values: Sequence[float] | np.ndarray) -> None:
    """Observe several values."""
    for value in np.asarray(values, dtype=float).tolist():
        histogram.observe(value)


def uncertainty_buckets(score: str, classes: int) -> tuple[float, ...]:
    """Return buckets that fit the range of a score."""
    if score == "msp":
        return SHARES
    if score in ("entropy", "mutual_information"):
        top = math.log(max(classes, 2))
        return tuple(round(top * share, 6) for share in SHARES)
    return WIDE
