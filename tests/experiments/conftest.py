"""The runner of the experiments is no package of the library: its folder is put on the path."""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "experiments"
if str(FOLDER) not in sys.path:
    sys.path.insert(0, str(FOLDER))
