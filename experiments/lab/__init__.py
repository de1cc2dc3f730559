"""What every table shares: data sets, tasks, methods, stored answers, records and pages."""

from __future__ import annotations

from collections.abc import Callable

from hydra_ensembles.errors import HydraError


def plainly(main: Callable[[], None]) -> None:
    """Run a command; what is missing ends it with a message instead of a traceback."""
    try:
        main()
    except HydraError as error:
        raise SystemExit(str(error)) from None
