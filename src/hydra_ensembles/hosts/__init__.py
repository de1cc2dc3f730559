"""Host models: what is prunable in a pretrained transformer."""

from .explaining import explain as explain
from .family import Family as Family
from .family import families as families
from .family import register_family as register_family
from .host import Block as Block
from .host import HostModel as HostModel
from .host import device_of as device_of
from .host import host_model as host_model
from .host import main_output as main_output
from .sites import AttentionSite as AttentionSite
from .zeroshot import ZeroShotClassifier as ZeroShotClassifier
