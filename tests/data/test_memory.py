"""Memory runs out: batches are halved, the answers stay the same, and it is said."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import warnings
from multiprocessing.resource_sharer import DupFd
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hydra_ensembles as hydra
from hydra_ensembles.answer_each import is_out_of_memory
from hydra_ensembles.data.memory import telling_lost_workers
from hydra_ensembles.data.model_runs import collect_logits
from hydra_ensembles.errors import DataError, HydraError
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig
from hydra_ensembles.training import finetune

IMAGES = torch.rand(20, 1, 16, 16, generator=torch.Generator().manual_seed(0))
DATA = [(IMAGES[:10], torch.arange(10)), (IMAGES[10:], torch.arange(10))]
SHAPE = TinyViTConfig(width=24, heads=4, layers=2, mlp_width=24)


class Small(TinyViT):
    """A real model on a device that holds so many examples."""

    room = 10**9
    kind: Any = torch.OutOfMemoryError

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = args[0] if args else next(iter(kwargs.values()))
        if len(inputs) > self.room:
            raise self.kind("can't allocate memory: you tried to allocate 10**12 bytes")
        return super().forward(*args, **kwargs)


def small(room: int = 10**9) -> Small:
    model = Small(SHAPE, seed=0).eval()
    for parameter in model.parameters():
        parameter.data.mul_(4)
    model.room = room
    return model


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, MemoryError, RuntimeError])
@pytest.mark.parametrize(("room", "said"), [(9, [5]), (3, [5, 3]), (1, [5, 3, 2, 1])])
def test_batches_are_halved(kind: Any, room: int, said: list[int]) -> None:
    whole, labels = collect_logits(small(), DATA)
    model = small(room)
    model.kind = kind
    with pytest.warns(UserWarning, match="Memory ran out") as notes:
        found, same = collect_logits(model, DATA)
    for size, note in zip(said, notes, strict=True):  # the second batch is small from its start
        assert f"batches of {size}." in str(note.message)
    torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)
    assert torch.equal(labels, same)


def test_a_single_example_that_does_not_fit_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(DataError, match=r"single example.*'data'"):
            collect_logits(small(0), DATA)


def test_other_errors_are_not_memory() -> None:
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(ValueError("out of memory"))


def test_novelty_and_heads_go_on_too() -> None:
    with pytest.warns(UserWarning, match="calibration data"):
        found = hydra.score_heads(small(4), DATA, criterion="taylor", progress=False)
    whole = hydra.score_heads(small(), DATA, criterion="taylor", progress=False)
    for one, other in zip(found, whole, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_training_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(HydraError, match=r"smaller batches.*kept"):
        finetune(small(4), DATA, epochs=1, folder=tmp_path, progress=False)


def test_the_command_line_halves_too(tmp_path: Path) -> None:
    from PIL import Image

    from hydra_ensembles.cli.commands.predict import answer_records
    from hydra_ensembles.cli.models import Loaded
    from hydra_ensembles.data.records import Record

    files = [tmp_path / f"{number}.png" for number in range(7)]
    for file, image in zip(files, IMAGES, strict=False):
        Image.fromarray((image[0] * 255).byte().numpy()).save(file)
    records = [Record(str(file), {}) for file in files]
    transform = hydra.data.ImageTransform(size=16, mean=(0.5,), std=(0.5,))
    whole = answer_records(Loaded(small(), "x", transform=transform, key=None), records)
    with pytest.warns(UserWarning, match="Memory ran out"):
        found = answer_records(Loaded(small(2), "x", transform=transform, key=None), records)
    assert [row["class"] for row in found] == [row["class"] for row in whole]


class Dying(Dataset[Any]):
    """A data set whose loading process is killed at the fifth example."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        return IMAGES[index], index


# torch's loader may hear of the death a second time, while it is deleted
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_loading_process_that_dies_is_told() -> None:
    loader = DataLoader(Dying(), batch_size=2, num_workers=1)
    with pytest.raises(DataError, match=r"process.*known data"):
        collect_logits(nn.Flatten(), loader, name="known data")


def _announce_memory(connection: Any) -> None:
    with open(os.devnull) as file:
        connection.send(DupFd(file.fileno()))
    time.sleep(60)


def test_memory_of_a_process_that_died_is_told() -> None:
    """A batch may be announced just before its process dies; it cannot be fetched any more."""
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_announce_memory, args=(there,))
    process.start()
    announced = here.recv()
    process.kill()
    process.join()

    def batches() -> Any:
        yield announced.detach()

    with pytest.raises(DataError, match=r"process.*known data"):
        list(telling_lost_workers(batches(), "known data"))


def test_an_error_of_the_data_itself_stays() -> None:
    def batches() -> Any:
        raise ConnectionResetError("the database is gone")
        yield

    with pytest.raises(ConnectionResetError, match="database"):
        list(telling_lost_workers(batches(), "known data"))
