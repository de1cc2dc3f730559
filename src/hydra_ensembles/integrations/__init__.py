"""Where people work: pipelines of transformers, callbacks of trainers, MLflow."""

from .callbacks import lightning_callback as lightning_callback
from .callbacks import trainer_callback as trainer_callback
from .pipelines import pipeline as pipeline
