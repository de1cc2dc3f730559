"""Methods of `build` and their options; a method's name is shorthand for its defaults.

Example:
    >>> from hydra_ensembles.methods import Select
    >>> ensemble = hydra.build(model, calibration, method=Select(masks=48))
"""

from .builder.auto_choice import Auto as Auto
from .builder.methods import Circuits as Circuits
from .builder.methods import Hies as Hies
from .builder.methods import Random as Random
from .builder.methods import Select as Select
from .builder.methods import Taylor as Taylor
from .builder.refit_methods import Fold as Fold
from .builder.refit_methods import Parts as Parts
from .search.selection import EnsembleObjective as EnsembleObjective
