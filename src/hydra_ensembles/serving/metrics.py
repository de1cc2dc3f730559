"""What Prometheus reads at `/metrics`: traffic, batches, and how sure and how new answers are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ..prediction import WHY, Prediction
from .backends import Backend

FACTS = ("platform", "reads", "members", "classes", "score")
OBSERVED = ("confidence", "uncertainty", "mutual_information", "novelty", "novelty_score")

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
SHARES = tuple(round(0.05 * i, 2) for i in range(1, 21))
CONFIDENCE = (*SHARES[:-1], 0.99, 1.0)
NOVELTY = (*(round(0.1 * i, 1) for i in range(1, 10)), 0.95, 0.99, 0.995, 0.999, 1.0)
SCORES = (0.5, 1.0, 2.0, 3.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0)
WIDE = tuple(float(v) for v in (-100, -50, -20, -10, -5, -2, -1, 0, 1, 2, 5, 10, 20, 50, 100))


# Metrics by attribute: kind, name, help, and labels or buckets.
TABLE: dict[str, tuple[str, str, str, Sequence[Any]]] = {
    "requests": ("Counter", "requests", "Requests by path and status.", ("path", "code")),
    "in_flight": ("Gauge", "requests_in_flight", "Requests now.", ()),
    "waiting": ("Gauge", "queue_rows", "Inputs that wait for the model.", ()),
    "queue_seconds": ("Histogram", "queue_seconds", "How long an input waits.", SECONDS),
    "model_seconds": ("Histogram", "batch_seconds", "How long a batch takes.", SECONDS),
    "confidence": ("Histogram", "confidence", "Probability of the predicted class.", CONFIDENCE),
    "mutual_information": (
        "Histogram",
        "mutual_information",
        "What the members disagree about, in nats.",
        (0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0),
    ),
    "novelty": ("Histogram", "novelty", "Share of known data that is less novel.", NOVELTY),
    "novelty_score": ("Histogram", "novelty_score", "What novelty ranks, unbounded.", SCORES),
    "alarms": ("Counter", "alarms", "Answers with novelty above 1 - the alarm level.", ()),
    "abstentions": ("Counter", "abstentions", "Answers that should be withheld.", ("why",)),
    "drift_p": (
        "Gauge",
        "drift_p_value",
        "Of the last tested window of novelty scores against the known data.",
        (),
    ),
    "drift_gap": (
        "Gauge",
        "drift_gap",
        "Largest gap between the window's distribution and the known one, 0 to 1.",
        (),
    ),
    "drifted": ("Gauge", "drift", "1 when the last tested window has drifted.", ()),
    "drift_windows": ("Counter", "drift_windows", "Windows tested.", ("verdict",)),
}


class Metrics:
    """The service's own registry and what it counts: an attribute per row of `TABLE`, and three
    histograms whose buckets or labels depend on the model.

    Args:
        backend: Its score decides the buckets of uncertainty.
        model: The name that it is served under.
        limits_batch: The largest batch.
    """

    requests: Any
    in_flight: Any
    waiting: Any
    queue_seconds: Any
    model_seconds: Any
    alarms: Any
    abstentions: Any
    drift_p: Any
    drift_gap: Any
    drifted: Any
    drift_windows: Any

    def __init__(self, backend: Backend, model: str, limits_batch: int) -> None:
        import prometheus_client as prometheus

        self.registry = registry = prometheus.CollectorRegistry()
        prometheus.ProcessCollector(registry=registry)
        self.alarm = backend.alarm
        facts = {name: str(getattr(backend, name)) for name in FACTS}
        information = prometheus.Info("hydra_model", "What is served.", registry=registry)
        information.info({"name": model, **facts, "alarm": f"{backend.alarm:g}"})
        for attribute, (kind, name, text, more) in TABLE.items():
            options = {"buckets" if kind == "Histogram" else "labelnames": more}
            metric = getattr(prometheus, kind)(f"hydra_{name}", text, registry=registry, **options)
            setattr(self, attribute, metric)
        self.seconds = prometheus.Histogram(
            "hydra_request_seconds",
            "From the first byte of a request to its answer.",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self.batch_rows = prometheus.Histogram(
            "hydra_batch_rows",
            "Inputs per batch.",
            buckets=[*(2**i for i in range(20) if 2**i < limits_batch), limits_batch],
            registry=registry,
        )
        self.uncertainty = prometheus.Histogram(
            "hydra_uncertainty",
            f"Uncertainty by the score {backend.score}, higher when less sure.",
            buckets=uncertainty_buckets(backend.score, backend.classes),
            registry=registry,
        )
        for why in filter(None, WHY):
            self.abstentions.labels(why)  # a rate needs a zero to start from
        for verdict in ("same", "drifted"):
            self.drift_windows.labels(verdict)
        self.drift_p.set(math.nan)
        self.drift_gap.set(math.nan)

    def note_batch(self, answers: Prediction, took: float, waits: Sequence[float]) -> None:
        """Count one batch of answers."""
        self.batch_rows.observe(len(waits))
        self.model_seconds.observe(took)
        for wait in waits:
            self.queue_seconds.observe(wait)
        for name in OBSERVED:
            column = getattr(answers, name)
            for value in [] if column is None else column.tolist():
                getattr(self, name).observe(value)
        if answers.novelty is not None:
            self.alarms.inc(int((~(answers.novelty <= 1 - self.alarm)).sum()))
        for why in filter(None, answers.why or ()):
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


def uncertainty_buckets(score: str, classes: int) -> tuple[float, ...]:
    """Return buckets that fit the range of a score."""
    if score == "msp":
        return SHARES
    if score in ("entropy", "mutual_information"):
        top = math.log(max(classes, 2))
        return tuple(round(top * share, 6) for share in SHARES)
    return WIDE
