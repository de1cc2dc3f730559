"""Exported Hydra ensembles without torch: the room `hydra_ensembles.runtime` as its own package.

import hydra_ensembles_runtime as runtime

answer = runtime.load("exported").predict(["a joy to watch"])
"""

from .runtime import Contract as Contract
from .runtime import ExportedEnsemble as ExportedEnsemble
from .runtime import ImageReader as ImageReader
from .runtime import Texts as Texts
from .runtime import load as load
from .runtime import read_contract as read_contract
