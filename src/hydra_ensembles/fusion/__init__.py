"""Fusing members into one model."""

from .assembly import Assembly as Assembly
from .calibrator_data import fit_calibrator as fit_calibrator
from .ensemble import HydraEnsemble as HydraEnsemble
from .fuse_members import fuse as fuse
from .fused_block import FusedBlock as FusedBlock
from .host_folder import load as load
from .host_folder import save as save
from .policy_data import fit_policy as fit_policy
from .set_data import fit_sets as fit_sets
from .streams import PerStream as PerStream
from .verification import Verification as Verification
from .verification import verify as verify
