"""Which heads matter: scores of attention heads, and how to add your own."""

from .alpha import AlphaChoice as AlphaChoice
from .alpha import choose_alpha as choose_alpha
from .alpha import mix as mix
from .attention import AttentionView as AttentionView
from .attention_entropy import row_entropies as row_entropies
from .base import AttentionScore as AttentionScore
from .base import CombinedScore as CombinedScore
from .base import Criterion as Criterion
from .base import GateGradient as GateGradient
from .base import Setting as Setting
from .base import WeightScore as WeightScore
from .base import as_criterion as as_criterion
from .base import criteria as criteria
from .base import ranked as ranked
from .entropy import AttentionEntropy as AttentionEntropy
from .entropy_kinds import EntropyKind as EntropyKind
from .fisher import Fisher as Fisher
from .hies import HeadImportanceEntropy as HeadImportanceEntropy
from .importance import HeadImportance as HeadImportance
from .magnitude import Magnitude as Magnitude
from .random_order import RandomOrder as RandomOrder
from .scoring import gate_gradients as gate_gradients
from .scoring import score_heads as score_heads
from .taylor import Taylor as Taylor
from .watching import watch_attention as watch_attention
