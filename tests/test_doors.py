"""Every door gives the same answer: the same inputs, compared field by field."""

from __future__ import annotations

import base64
import io
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from starlette.testclient import TestClient

import hydra_ensembles as hydra
from hydra_ensembles import runtime
from hydra_ensembles.cli.main import main
from hydra_ensembles.data.transforms import ImageTransform
from hydra_ensembles.integrations.mlflow_flavor import predict_frame
from hydra_ensembles.prediction import FIELDS
from hydra_ensembles.serving.app import make_app
from hydra_ensembles.serving.bulk import predict_files
from hydra_ensembles.serving.service import Service
from hydra_ensembles.serving.torch_backend import TorchBackend
from hydra_ensembles.task_predictions import TASK_PREDICTIONS
from tests import zoo
from tests.fusion.test_fusion import EARLY
from tests.fusion.test_inputs import words

TEXTS = ["a good film", "bad", "films", "a bad bad film", "good good good"]
KNOWN = [" ".join(some) for some in itertools.product(("a", "good", "bad", "film"), repeat=3)]
KNOWN = [text for text in KNOWN if text not in TEXTS]  # ranks of an equal text would be ties
SIZE = 24
Row = dict[str, Any]


def image(seed: int) -> Image.Image:
    pixels = torch.rand(SIZE, SIZE, 3, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray((pixels * (0.3 + 0.15 * seed) * 255).to(torch.uint8).numpy())


IMAGES = [image(seed) for seed in range(5)]
FILES = []
for _picture in IMAGES:
    _stream = io.BytesIO()
    _picture.save(_stream, "PNG")
    FILES.append(_stream.getvalue())


class House:
    """An ensemble behind all its doors."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.inputs: list[Any] = TEXTS if kind == "text" else IMAGES
        host = zoo.host("bert" if kind == "text" else "vit")
        with torch.no_grad():
            host.classifier.weight.mul_(20.0)
        self.ensemble = ensemble = hydra.fuse(host, EARLY)
        classes = host.config.num_labels
        ensemble.id2label = [f"class {number}" for number in range(classes)]
        if kind == "text":
            ensemble.tokenizer = words(folder)
            known: Any = [ensemble_inputs(ensemble, [text]) for text in KNOWN]
        else:
            ensemble.transform = ImageTransform(size=16, mean=(0.5,) * 3, std=(0.5,) * 3)
            known = [zoo.batch("vit", size=48)]
        ensemble.temperature = 1.3
        ensemble.fit_novelty_(known, progress=False)
        answer = ensemble.predict(self.inputs)
        # between two inputs, so that some are answered and rounding decides nothing
        low, high = answer.uncertainty.sort().values[2:4].tolist()
        scores = answer.novelty_score.sort().values[2:4].tolist()
        ensemble.policy = hydra.Policy(
            threshold=(low + high) / 2, novelty_threshold=sum(scores) / 2, alarm=0.05
        )
        scores = (1 - answer.probabilities).flatten().sort().values
        between = int(scores.diff().argmax())  # rounding decides nothing here either
        limit = float(scores[between : between + 2].mean())
        ensemble.sets = hydra.Sets("lac", 0.9, ((limit,),), ((50,),), 50)
        ensemble.save_pretrained(folder / "saved")

    def predict(self) -> list[Row]:
        return self.ensemble.predict(self.inputs).rows()

    def files(self) -> list[str]:
        if self.kind == "text":
            (self.folder / "texts.txt").write_text("\n".join(TEXTS))
            return [str(self.folder / "texts.txt")]
        for number, content in enumerate(FILES):
            (self.folder / f"{number}.png").write_bytes(content)
        return [str(self.folder / f"{number}.png") for number in range(len(FILES))]

    def command(self) -> list[Row]:
        output = self.folder / "rows.jsonl"
        arguments = ["predict", str(self.folder / "saved"), *self.files(), "-o", str(output)]
        assert main(arguments) == 0
        return [json.loads(line) for line in output.read_text().splitlines()]

    def client(self) -> Any:
        service = Service(TorchBackend(self.ensemble), "tiny")
        return TestClient(make_app(service, version="0"))

    def post(self) -> list[Row]:
        files = [base64.b64encode(content).decode() for content in FILES]
        body = {"texts": TEXTS} if self.kind == "text" else {"images": files}
        with self.client() as client:
            return client.post("/predict", json=body).json()["answers"]

    def protocol_v2(self) -> list[Row]:
        data = TEXTS if self.kind == "text" else [base64.b64encode(f).decode() for f in FILES]
        tensor = {"name": self.kind, "datatype": "BYTES", "shape": [len(data)], "data": data}
        with self.client() as client:
            response = client.post("/v2/models/tiny/infer", json={"inputs": [tensor]}).json()
        columns = {output["name"]: output["data"] for output in response["outputs"]}
        rows = [{name: columns[name][i] for name in FIELDS} for i in range(len(data))]
        for row in rows:
            row["why"] = row["why"] or None  # BYTES have no null
            row["set"] = json.loads(row["set"])
        return rows

    def map_function(self) -> list[Row]:
        function = self.ensemble.as_map_function(prefix="")
        columns = function({self.kind: self.inputs})
        assert columns.pop("error") == [None] * len(self.inputs)
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]

    def bulk(self) -> list[Row]:
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        values = TEXTS if self.kind == "text" else [{"bytes": f, "path": None} for f in FILES]
        parquet.write_table(pyarrow.table({self.kind: values}), self.folder / "in.parquet")
        output = self.folder / "bulk"
        predict_files(self.folder / "saved", [self.folder / "in.parquet"], output, progress=False)
        tables = [parquet.read_table(file) for file in sorted(output.rglob("*.parquet"))]
        rows = [row for table in tables for row in table.to_pylist()]
        return [{n: row[f"predicted_{n}"] for n in FIELDS} for row in rows]

    def mlflow(self) -> list[Row]:
        pytest.importorskip("pandas")
        frame = predict_frame(self.ensemble, self.files() if self.kind == "image" else TEXTS)
        assert list(frame.columns) == list(FIELDS)
        return frame.astype(object).where(frame.notna(), None).to_dict("records")

    def pipeline(self) -> list[Row]:
        classify = hydra.pipeline(f"{self.kind}-classification", self.ensemble, batch_size=2)
        entries = [e[0] if isinstance(e, list) else e for e in classify(self.inputs, top_k=1)]
        numbers = {name: number for number, name in (self.ensemble.id2label or {}).items()}
        return [{**entry, "class": numbers[entry["label"]]} for entry in entries]

    def exported(self) -> list[Row]:
        for package in ("onnxscript", "onnxruntime"):
            pytest.importorskip(package)
        self.ensemble.export(self.folder / "exported")
        return runtime.load(self.folder / "exported").predict(self.inputs).rows()


DOORS: dict[str, Callable[[House], list[Row]]] = {
    "command line": House.command,
    "POST /predict": House.post,
    "protocol v2": House.protocol_v2,
    "map function": House.map_function,
    "bulk": House.bulk,
    "MLflow": House.mlflow,
    "pipeline": House.pipeline,
    "exported": House.exported,
}


def ensemble_inputs(ensemble: hydra.HydraEnsemble, texts: list[str]) -> dict[str, Any]:
    return dict(ensemble.tokenizer(texts, padding=True, return_tensors="pt"))


@pytest.fixture(scope="module", params=["image", "text"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> House:
    return House(request.param, tmp_path_factory.mktemp(request.param))


def test_the_inputs_are_decided_differently(house: House) -> None:
    rows = house.predict()
    assert list(rows[0]) == list(FIELDS)
    assert {len(row["set"]) for row in rows} != {0}
    assert len({row["decision"] for row in rows}) > 1 and len({row["why"] for row in rows}) > 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("door", DOORS)
def test_every_door_gives_the_same_rows(door: str, house: House) -> None:
    expected, rows = house.predict(), DOORS[door](house)
    assert len(rows) == len(expected)
    for row, right in zip(rows, expected, strict=True):
        for name in FIELDS:
            if isinstance(right[name], float):
                close = math.isclose(row[name], right[name], rel_tol=2e-4, abs_tol=2e-6)
                assert close, f"{name}: {row[name]} instead of {right[name]}"
            else:
                assert row[name] == right[name], name


def test_what_is_not_fitted_is_null(tmp_path: Path) -> None:
    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    ensemble.tokenizer = words(tmp_path)
    with TestClient(make_app(Service(TorchBackend(ensemble), "tiny"), version="0")) as client:
        [posted] = client.post("/predict", json={"text": "good"}).json()["answers"]
    columns = ensemble.as_map_function(prefix="")({"text": ["good"]})
    for row in (posted, {name: column[0] for name, column in columns.items()}):
        assert set(FIELDS) <= set(row)
        absent = {name for name in FIELDS if row[name] is None}
        assert absent == {"novelty", "novelty_score", "decision", "why", "set"}


def test_the_page_has_the_table_of_fields() -> None:
    page = Path(__file__).parents[1] / "docs" / "reference" / "fields.md"
    rows = [f"| `{name}` | {meaning} |" for name, meaning in FIELDS.items()]
    assert "\n".join(rows) in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", TASK_PREDICTIONS, ids=lambda kind: kind.__name__)
def test_the_page_has_the_fields_of_every_task(kind: type[hydra.Prediction]) -> None:
    page = (Path(__file__).parents[1] / "docs" / "reference" / "fields.md").read_text("utf-8")
    rows = [f"| `{name}` | {meaning} |" for name, meaning in kind.FIELDS.items()]
    assert "\n".join(rows) in page.partition(f": `{kind.__name__}`")[2].partition("###")[0]
