"""Novelty: is this input like anything known? (See `detector.py`.)"""

from .detector import Evidence as Evidence
from .detector import Novelty as Novelty
from .detector import from_tensors as from_tensors
from .fitting import NoveltyFit as NoveltyFit
from .moments import full_precision as full_precision
from .stream import Drift as Drift
