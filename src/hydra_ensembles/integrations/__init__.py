"""Where people work: pipelines of transformers, callbacks of trainers, MLflow."""
