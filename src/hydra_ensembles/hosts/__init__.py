"""Host models: what is prunable in a pretrained transformer."""

from .block import Block as Block
from .calling import device_of as device_of
from .calling import main_output as main_output
from .explaining import explain as explain
from .family import Family as Family
from .family import families as families
from .family import register_family as register_family
from .host import HostModel as HostModel
from .host import host_model as host_model
from .prompting import PromptClassifier as PromptClassifier
from .sites import AttentionSite as AttentionSite
from .zeroshot import ZeroShotClassifier as ZeroShotClassifier
