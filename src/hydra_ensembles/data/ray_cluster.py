"""Ray, started only when it is needed: a cluster that is there, or a small one on this machine."""

from __future__ import annotations

import os
from typing import Any

from ..errors import MissingDependencyError

STORE_BYTES = 200 * 2**20
"""Memory of a local Ray's object store, at least."""


def import_ray() -> Any:
    """Return the module `ray`, or say which extra brings it."""
    try:
        import ray
    except ImportError as error:
        raise MissingDependencyError(
            "A pool of workers needs Ray: pip install 'hydra-ensembles[ray]'."
        ) from error
    return ray


def start_ray(cpus: int, *, store_bytes: int = STORE_BYTES) -> bool:
    """Join the cluster of `RAY_ADDRESS`, or start a small one; tell whether that was done here.

    A Ray that this process has joined already stays as it is.
    """
    ray = import_ray()
    if ray.is_initialized():
        return False
    if os.environ.get("RAY_ADDRESS"):
        ray.init(log_to_driver=False)
    else:
        ray.init(
            num_cpus=cpus,
            object_store_memory=max(store_bytes, STORE_BYTES),
            include_dashboard=False,
            log_to_driver=False,
        )
    return True
