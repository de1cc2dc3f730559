"""Host models: what is prunable in a pretrained transformer."""

from ..data.batches import main_output as main_output
from .attention_site import AttentionSite as AttentionSite
from .block import Block as Block
from .explanation import explain as explain
from .families import Family as Family
from .families import families as families
from .families import register_family as register_family
from .host import HostFacts as HostFacts
from .host import HostModel as HostModel
from .host import host_model as host_model
from .prompt_classifier import PromptClassifier as PromptClassifier
from .zero_shot import ZeroShotClassifier as ZeroShotClassifier
