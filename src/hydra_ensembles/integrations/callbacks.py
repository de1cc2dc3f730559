"""Log how calibrated, how rankable and how new, after every validation of a training."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..evaluation.evaluator import evaluate
from ..fusion.ensemble import HydraEnsemble
from ..registry import imported

LOGGED = {
    "cls/NLL": "nll",
    "cal/ECE": "ece",
    "sc/AURC": "aurc",
    "novelty/Alarms_5": "novelty_alarms",
}
"""What is logged, by the names that `Results` has."""


def figures_of(model: nn.Module, data: Any, *, prefix: str) -> dict[str, float]:
    """Return the figures to log: NLL, ECE, AURC and, where novelty is fitted, the share of alarms.

    The alarm is at novelty above 0.95: 5 % of data like the known. It rises as training moves the
    features; fit novelty again when training is over.
    """
    results = evaluate(model, data, progress=False)
    return {prefix + name: results[key] for key, name in LOGGED.items() if key in results}


def trainer_callback(trainer: Any, data: Any, *, prefix: str = "eval_") -> Any:
    """Let a `transformers.Trainer` log NLL, ECE, AURC and novelty alarms at each evaluation.

    Args:
        trainer: The trainer, of an ensemble or of a plain classifier; the callback is added to it.
        data: Labelled batches; read once per evaluation.
        prefix: Of the figures' names: `eval_nll`, `eval_ece`, `eval_aurc`, `eval_novelty_alarms`.

    Returns:
        The callback; `trainer.remove_callback` takes it away.
    """
    base: Any = imported("transformers", "This callback", "transformers").TrainerCallback

    class UncertaintyCallback(base):
        """Logs through the trainer, so that history and reporters have the figures too."""

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            found = figures_of(kwargs["model"], data, prefix=prefix)
            if kwargs.get("metrics") is not None:  # what evaluate() returns
                kwargs["metrics"].update(found)
            trainer.log(dict(found))

    callback = UncertaintyCallback()
    trainer.add_callback(callback)
    return callback


def lightning_callback(data: Any, *, prefix: str = "val_") -> Any:
    """Return a Lightning callback that logs NLL, ECE, AURC and novelty alarms at each validation.

    The model is the first `HydraEnsemble` in the module, else the module itself, which must answer
    a batch with logits.

    Args:
        data: Labelled batches; read once per validation.
        prefix: Of the figures' names: `val_nll`, `val_ece`, `val_aurc`, `val_novelty_alarms`.
    """
    base: Any = imported("lightning.pytorch", "This callback", "rivals").Callback

    class UncertaintyCallback(base):
        """Logs through the module, at the end of a validation epoch."""

        def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            if trainer.sanity_checking:
                return
            ensembles = (m for m in pl_module.modules() if isinstance(m, HydraEnsemble))
            found = figures_of(next(ensembles, pl_module), data, prefix=prefix)
            pl_module.log_dict(found)

    return UncertaintyCallback()
