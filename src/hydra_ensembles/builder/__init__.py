"""`build`: from a pretrained model and data to a fused ensemble, in one line."""

from .auto_choice import Auto as Auto
from .build_run import build as build
from .build_run import replay as replay
from .methods import METHODS as METHODS
