"""What a model's outputs mean: how members are averaged, what is uncertain, the loss, the labels.

A task that is imported later is asked earlier whether a model is its own.
"""

from .embeddings import Embedding as Embedding
from .multi_class import MultiClass as MultiClass
from .multi_label import MultiLabel as MultiLabel
from .refused import refusal_of as refusal_of
from .refused import refuse as refuse
from .regression import Regression as Regression
from .spans import Spans as Spans
from .task import IGNORED as IGNORED
from .task import Facts as Facts
from .task import Task as Task
from .task import as_task as as_task
from .task import task_of as task_of
from .task import tasks as tasks
from .tokens import NextToken as NextToken
from .tokens import Tokens as Tokens
