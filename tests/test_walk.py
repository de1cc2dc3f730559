"""The way of a batch is short: each way visits few modules, and decides once."""

from __future__ import annotations

import asyncio
import base64
import io
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hydra_ensembles as hydra
from hydra_ensembles.cli.commands.predict import answer_records, line_of
from hydra_ensembles.cli.models import Loaded
from hydra_ensembles.data.records import Form, batches, read_records
from hydra_ensembles.data.transforms import ImageTransform
from hydra_ensembles.serving.app import make_app
from hydra_ensembles.serving.service import Service
from hydra_ensembles.serving.torch_backend import TorchBackend
from tests import zoo
from tests.fusion.test_fusion import EARLY
from tests.fusion.test_inputs import picture

PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
PACKAGE = "hydra_ensembles."
MOST = {"predict": 16, "command": 21, "POST": 25}
"""A new step raises its number by one, with its reason here: what novelty measures distances with
has a module of its own, and `data.eval_mode` alone asks whether a model is in eval mode."""


class Walk:
    """Records the modules of the package that are visited, in order, in every thread."""

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.decided = 0

    def _visit(self, frame: Any, event: str, argument: object) -> None:
        module = frame.f_globals.get("__name__", "")
        if event != "call" or not module.startswith(PACKAGE):
            return
        if frame.f_code.co_filename.endswith("__init__.py"):
            return
        self.decided += frame.f_code.co_name == "decide"
        if module not in self.modules:
            self.modules.append(module)

    def __enter__(self) -> Walk:
        threading.setprofile(self._visit)
        sys.setprofile(self._visit)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def ensemble() -> hydra.HydraEnsemble:
    ensemble = hydra.fuse(zoo.host("vit"), EARLY)
    ensemble.transform = ImageTransform(size=16, mean=(0.5,) * 3, std=(0.5,) * 3)
    ensemble.temperature = 1.7
    ensemble.fit_novelty_([zoo.batch("vit", size=64)], progress=False)
    assert ensemble.novelty is not None
    newest = ensemble.novelty.threshold(0.05)
    ensemble.policy = hydra.Policy(threshold=0.5, novelty_threshold=newest, alarm=0.05)
    return ensemble


def walk_predict(ensemble: hydra.HydraEnsemble, folder: Path) -> Walk:
    batch = zoo.batch("vit", size=4)
    ensemble.predict(batch)
    with Walk() as walk:
        ensemble.predict(batch)
    return walk


def walk_command(ensemble: hydra.HydraEnsemble, folder: Path) -> Walk:
    for seed in range(4):
        picture(seed).save(folder / f"{seed}.png")
    loaded = Loaded(ensemble, "vit", transform=ensemble.transform)

    def lines() -> list[str]:
        records = read_records([str(folder)], Form.of(None, text=False))
        rows = [row for batch in batches(records, 8) for row in answer_records(loaded, batch)]
        return [line_of(row) for row in rows]

    lines()
    with Walk() as walk:
        assert len(lines()) == 4
    return walk


def walk_post(ensemble: hydra.HydraEnsemble, folder: Path) -> Walk:
    stream = io.BytesIO()
    picture(0).save(stream, "PNG")
    body = b'{"images": ["%s"]}' % base64.b64encode(stream.getvalue())
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": "/predict",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(message: Any) -> None:
        sent.append(message)

    async def go() -> Walk:
        with Walk() as walk:  # threads that start from here on are followed
            service = Service(TorchBackend(ensemble), "vit")
            await service.start()
            app = make_app(service, version="0")
            await app(dict(scope), receive, send)
            walk.modules.clear()
            walk.decided = 0
            await app(dict(scope), receive, send)
            visited, decided = list(walk.modules), walk.decided
        await service.stop()
        walk.modules, walk.decided = visited, decided
        return walk

    walk = asyncio.run(go())
    assert [m["status"] for m in sent if "status" in m] == [200, 200]
    return walk


WALKS: dict[str, Callable[[hydra.HydraEnsemble, Path], Walk]] = {
    "predict": walk_predict,
    "command": walk_command,
    "POST": walk_post,
}


@pytest.mark.parametrize("name", WALKS)
def test_few_modules_and_one_decision(
    name: str, ensemble: hydra.HydraEnsemble, tmp_path: Path
) -> None:
    walk = WALKS[name](ensemble, tmp_path)
    shown = "\n".join(walk.modules)
    assert len(walk.modules) <= MOST[name], f"{len(walk.modules)} modules:\n{shown}"
    assert walk.decided == 1
    assert sorted(drawn(name)) == sorted(walk.modules), f"docs/architecture.md; found:\n{shown}"


def drawn(name: str) -> list[str]:
    """Return the modules of a walk as docs/architecture.md draws it, checked against its count."""
    page = PAGE.read_text(encoding="utf-8").partition("## The three walks")[2]
    row = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
    _, _, count, way, _ = row.split("|")
    modules = [PACKAGE + step.strip(" `") for step in way.split(">")]
    assert len(modules) == int(count)
    return modules
