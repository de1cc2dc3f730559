"""Which heads matter: scores of attention heads, and how to add your own."""

from .attention_entropy import AttentionEntropy as AttentionEntropy
from .attention_entropy import EntropyKind as EntropyKind
from .attention_entropy import row_entropies as row_entropies
from .attention_watch import AttentionView as AttentionView
from .attention_watch import watch_attention as watch_attention
from .criterion import AttentionScore as AttentionScore
from .criterion import CombinedScore as CombinedScore
from .criterion import Criterion as Criterion
from .criterion import GateGradient as GateGradient
from .criterion import Setting as Setting
from .criterion import WeightScore as WeightScore
from .criterion import as_criterion as as_criterion
from .criterion import criteria as criteria
from .criterion import ranked as ranked
from .gradients import Fisher as Fisher
from .gradients import HeadImportance as HeadImportance
from .gradients import Taylor as Taylor
from .head_scoring import gate_gradients as gate_gradients
from .head_scoring import score_heads as score_heads
from .hies import AlphaChoice as AlphaChoice
from .hies import HeadImportanceEntropy as HeadImportanceEntropy
from .hies import choose_alpha as choose_alpha
from .hies import mix as mix
from .weights import Magnitude as Magnitude
from .weights import RandomOrder as RandomOrder
