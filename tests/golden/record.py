"""Record golden values: `python -m tests.golden.record`.

Run it on code whose answers are known to be right, never to make a failing comparison pass.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from tests.golden import cases

FILE = Path(__file__).with_name("values.safetensors")


def stored() -> dict[str, np.ndarray]:
    """Return the stored values by name: group, then field."""
    return dict(sorted(load_file(FILE).items()))


def main() -> None:
    """Compute all groups and store them in one file."""
    values = {
        f"{group}/{field}": value
        for group, compute in cases.GROUPS.items()
        for field, value in compute().items()
    }
    save_file(dict(sorted(values.items())), FILE)
    print(f"{len(values)} values of {len(cases.GROUPS)} groups, {FILE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
