"""Exported ensembles without torch: numpy, onnxruntime, pillow and tokenizers are enough.

    from hydra_ensembles import runtime

    model = runtime.load("exported")
    answer = model.predict(["a joy to watch"])     # a Prediction with numpy columns

What is read here is a folder that `ensemble.export` wrote: `contract.json` says what goes in, what
comes out and which files belong to it. Importing this room never imports torch, and imports
onnxruntime only when a folder is loaded.
"""

from .contract import Contract as Contract
from .contract import read_contract as read_contract
from .exported_ensemble import ExportedEnsemble as ExportedEnsemble
from .exported_ensemble import load as load
from .images import ImageReader as ImageReader
from .texts import Texts as Texts
