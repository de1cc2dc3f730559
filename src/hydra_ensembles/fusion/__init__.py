"""Fusing members into one model."""

from .assemble import Assembly as Assembly
from .assemble import assemble as assemble
from .body import Body as Body
from .cast import cast_full as cast_full
from .cast import cast_member as cast_member
from .layers import FusedBlock as FusedBlock
from .layers import PerStream as PerStream
from .verify import Verification as Verification
from .verify import verify as verify
