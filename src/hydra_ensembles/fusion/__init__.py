"""Fusing members into one model."""

from .assemble import Assembly as Assembly
from .ensemble import HydraEnsemble as HydraEnsemble
from .fusing import fuse as fuse
from .layers import FusedBlock as FusedBlock
from .per_stream import PerStream as PerStream
from .policies import fit_policy as fit_policy
from .verifying import Verification as Verification
from .verifying import verify as verify
