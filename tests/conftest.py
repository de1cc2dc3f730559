"""What every test may rely on."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("no deadline", deadline=None)  # a busy machine is no failure
settings.load_profile("no deadline")


@pytest.fixture(autouse=True)
def _no_accelerator_is_left_behind() -> Iterator[None]:
    """Forget accelerate's state of the process after a test, so that order does not matter."""
    yield
    state = sys.modules.get("accelerate.state")
    if state is not None:
        state.AcceleratorState._reset_state(reset_partial_state=True)
