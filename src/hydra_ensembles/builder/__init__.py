"""`build`: from a pretrained model and data to a fused ensemble, in one line.

`building.py` is the verb, `parts.py` its data, `methods.py`, `selecting.py` and `searching.py` the
ways to find members, `deciding.py` what is fitted on the finished ensemble: temperatures and
the score.
"""

from .build_run import build as build
from .build_run import replay as replay
from .methods import METHODS as METHODS
from .methods import Circuits as Circuits
from .methods import Hies as Hies
from .methods import Random as Random
from .methods import Search as Search
from .methods import Select as Select
from .methods import Taylor as Taylor
