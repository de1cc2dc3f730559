"""Drift: the permutation test against scipy, its false alarms, and what it sees."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scipy.stats import ks_2samp

from hydra_ensembles import Drift
from hydra_ensembles.errors import DataError
from hydra_ensembles.uncertainty.drift import ks_test
from hydra_ensembles.uncertainty.novelty import Ranks


def fitted(known: torch.Tensor) -> SimpleNamespace:
    """Stand for an ensemble: a watcher reads its held-out scores only."""
    return SimpleNamespace(novelty=SimpleNamespace(sums=Ranks.of(known[:, None])))


def normal(count: int, seed: int, shift: float = 0.0) -> torch.Tensor:
    return shift + torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shift", [0.0, 0.2, 0.4])
def test_the_statistic_and_its_p_value_are_those_of_scipy(shift: float) -> None:
    known, window = normal(150, 0), normal(60, 1, shift)
    gap, p = ks_test(known, window)
    expected = ks_2samp(window.numpy(), known.numpy(), method="exact")
    assert gap == pytest.approx(expected.statistic)
    assert p == pytest.approx(expected.pvalue, abs=0.04)


def test_streams_like_the_known_data_alarm_at_the_rate() -> None:
    drift = Drift(fitted(normal(400, 0)), window=40, rate=0.1)
    for seed in range(60):
        fresh = Drift(fitted(normal(400, 1000 + seed)), window=40, rate=0.1, seed=seed)
        fresh.add_scores(normal(40, seed + 1))
        drift.windows += fresh.windows
    assert sum(window.drifted for window in drift.windows) <= 12  # 6 expected


def test_a_stream_that_leaves_is_found() -> None:
    drift = Drift(fitted(normal(400, 0)), window=50)
    assert not drift.add_scores(normal(75, 1)) and not drift.drifted
    assert drift.add_scores(normal(60, 2, shift=2.0))
    assert [window.drifted for window in drift.windows] == [False, True]
    assert drift.seen == 100 and "DRIFT" in str(drift)
    assert drift.windows[1].alarms > 0.2


def test_chunks_do_not_matter() -> None:
    stream = normal(130, 3, shift=0.5)
    whole, parts = (Drift(fitted(normal(200, 0)), window=40) for _ in range(2))
    whole.add_scores(stream)
    for part in stream.split(7):
        parts.add_scores(part)
    assert whole.windows == parts.windows and len(whole.windows) == 3


def test_what_is_missing_is_said() -> None:
    with pytest.raises(DataError, match="fit_novelty_"):
        Drift(SimpleNamespace(novelty=None))
    with pytest.raises(ValueError, match="window=5"):
        Drift(fitted(normal(50, 0)), window=5)
    with pytest.raises(ValueError, match="rate=0"):
        Drift(fitted(normal(50, 0)), rate=0)
