"""What every test may rely on."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # a busy machine is not a failure
settings.load_profile("no deadline")

if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has one core; torch is not imported yet
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    """Accept the options of `addopts` in pyproject.toml also with `-p no:xdist`."""
    if not pluginmanager.hasplugin("xdist"):
        parser.addoption("--numprocesses")
        parser.addoption("--dist")


@pytest.fixture(autouse=True)
def _no_accelerator_is_left_behind() -> Iterator[None]:
    """Forget accelerate's state of the process after a test, so that order does not matter."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
