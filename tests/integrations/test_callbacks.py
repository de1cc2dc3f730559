"""Trainers log NLL, ECE, AURC and novelty alarms: the figures of `evaluate`, at each validation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles.integrations import lightning_callback, trainer_callback
from tests import zoo
from tests.fusion.test_fusion import LATE

pytestmark = pytest.mark.filterwarnings("ignore")
NAMES = {
    "cls/NLL": "nll",
    "cal/ECE": "ece",
    "sc/AURC": "aurc",
    "novelty/Alarms_5": "novelty_alarms",
}


def labelled(size: int = 40) -> dict[str, Any]:
    images = zoo.batch("vit", size=size, seed=4)
    return {"pixel_values": images, "labels": torch.arange(size) % 5}


def ensemble() -> hydra.HydraEnsemble:
    made = hydra.fuse(zoo.make("vit"), LATE)
    return made.fit_novelty_([labelled()], progress=False)


def test_the_trainer_logs_them(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model, batch = ensemble(), labelled()
    rows = [
        {"pixel_values": x, "labels": y}
        for x, y in zip(batch["pixel_values"], batch["labels"].tolist(), strict=True)
    ]
    arguments = TrainingArguments(
        output_dir=str(tmp_path), report_to=[], max_steps=2, eval_strategy="steps", eval_steps=1,
        save_strategy="no", learning_rate=1e-2, use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows)
    trainer_callback(trainer, [batch])
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "eval_aurc" in entry]
    assert [entry["step"] for entry in logged] == [1, 2]
    assert logged[0]["eval_nll"] != logged[1]["eval_nll"]  # it trains in between
    expected = hydra.evaluate(model, [batch], progress=False)
    for key, name in NAMES.items():
        assert logged[1][f"eval_{name}"] == pytest.approx(expected[key], abs=1e-6), name
    assert trainer.evaluate()["eval_ece"] == pytest.approx(expected["cal/ECE"], abs=1e-6)


def test_lightning_logs_them(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    model, batch = ensemble(), labelled()

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.ensemble = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.ensemble(**batch).loss

        def validation_step(self, batch: Any, index: int) -> None:
            return None

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        callbacks=[lightning_callback([batch])],
    )  # fmt: skip
    loader = torch.utils.data.DataLoader([batch], batch_size=None)
    trainer.fit(Module(), loader, loader)
    expected = hydra.evaluate(model, [batch], progress=False)
    for key, name in NAMES.items():
        found = float(trainer.callback_metrics[f"val_{name}"])
        assert found == pytest.approx(expected[key], abs=1e-5), name
