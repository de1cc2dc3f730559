"""Every task at every door: saved, exported, served, in pipelines, data sets and files."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
import transformers
from starlette.testclient import TestClient

import hydra_ensembles as hydra
from hydra_ensembles import HydraEnsemble, runtime
from hydra_ensembles.cli.main import main
from hydra_ensembles.data import as_data, load_data
from hydra_ensembles.data.batches import labels_of
from hydra_ensembles.errors import DataError, UnsupportedModelError
from hydra_ensembles.serving import openapi
from hydra_ensembles.serving.app import make_app
from hydra_ensembles.serving.service import Service
from hydra_ensembles.serving.torch_backend import TorchBackend
from hydra_ensembles.tasks import IGNORED
from tests import zoo
from tests.fusion.test_fusion import EARLY
from tests.tasks.test_tasks import bert, fast_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore")

NAMES = ["classes", "labels", "number", "numbers", "pairs", "tags", "questions", "encoder"]
FEELINGS = ["joy", "anger", "fear", "calm"]
TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]
TEXTS = ["ann lees saw rome", "who", "ann saw ann lee in rome", "rome in rome"]
SEQUENCE = "BertForSequenceClassification"
HOSTS: dict[str, Callable[[], torch.nn.Module]] = {
    "classes": bert(SEQUENCE, num_labels=4),
    "labels": bert(SEQUENCE, num_labels=4, problem_type="multi_label_classification"),
    "number": bert(SEQUENCE, num_labels=1),
    "numbers": bert(SEQUENCE, num_labels=3, problem_type="regression"),
    "pairs": bert(SEQUENCE, num_labels=1),
    "tags": bert("BertForTokenClassification", num_labels=5),
    "questions": bert("BertForQuestionAnswering"),
    "encoder": bert("BertModel"),
}
Row = dict[str, Any]


def named(name: str) -> list[str] | None:
    """The names of a model's classes, labels or tags."""
    return {"classes": FEELINGS, "labels": FEELINGS, "tags": TAGS}.get(name)


def items(name: str, texts: list[str] = TEXTS) -> list[Any]:
    """Inputs as `predict` and `POST /predict` take them."""
    if name == "questions":
        return [{"question": "who saw rome", "context": text} for text in texts]
    if name == "pairs":
        return [{"text": text, "text_pair": "ann saw rome"} for text in texts]
    return list(texts)


@cache
def host(name: str) -> Any:
    model = zoo.seeded(HOSTS[name])
    with torch.no_grad():  # decisive answers
        for head in ("classifier", "qa_outputs"):
            if hasattr(model, head):
                getattr(model, head).weight.mul_(40.0)
    if named(name):
        model.config.id2label = dict(enumerate(named(name) or []))
        model.config.label2id = {n: i for i, n in model.config.id2label.items()}
    return model


@cache
def ensemble(name: str) -> HydraEnsemble:
    """An ensemble with a tokenizer, novelty and a policy between two of its inputs."""
    made = hydra.fuse(host(name), EARLY)
    made.tokenizer = fast_tokenizer()
    words = ["who", "saw", "ann", "lee", "in", "rome"]
    known = [f"{a} {b} {c}" for a in words for b in words for c in words[::2]]
    made.fit_novelty_(
        [made.tokenizer(known[:60], padding=True, return_tensors="pt")], progress=False
    )
    answer = made.predict(items(name))
    sure, new = answer.uncertainty.flatten().sort().values, answer.novelty_score.sort().values
    middle = len(sure) // 2
    made.policy = hydra.Policy(
        threshold=float(sure[middle - 1 : middle + 1].mean()),
        novelty_threshold=float(new[1:3].mean()),
        alarm=0.05,
        score=made.score,
    )
    return made


@cache
def saved(name: str, folder: Path) -> Path:
    ensemble(name).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("saved")
    return lambda name: saved(name, base / name)


def same(ours: Any, right: Any, name: str) -> None:
    """Compare values of rows: numbers to 2e-4."""
    if isinstance(right, float) and not isinstance(right, bool):
        assert math.isclose(ours, right, rel_tol=2e-4, abs_tol=2e-4), (name, ours, right)
    elif isinstance(right, dict):
        assert ours.keys() == right.keys()
        for key, value in right.items():
            same(ours[key], value, f"{name}.{key}")
    elif isinstance(right, list):
        assert len(ours) == len(right), (name, ours, right)
        for one, other in zip(ours, right, strict=True):
            same(one, other, name)
    else:
        assert ours == right, (name, ours, right)


def same_rows(rows: list[Row], name: str, leave_out: tuple[str, ...] = ()) -> None:
    expected = ensemble(name).predict(items(name)).rows()
    assert len(rows) == len(expected)
    for row, right in zip(rows, expected, strict=True):
        for field, value in right.items():
            if field not in leave_out:
                same(row[field], value, field)


@pytest.mark.parametrize("name", NAMES)
def test_saved_and_loaded(name: str, folders: Callable[[str], Path]) -> None:
    loaded = HydraEnsemble.from_pretrained(folders(name))
    same_rows(loaded.predict(items(name)).rows(), name)
    assert loaded.task == ensemble(name).task


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("number", "classes")])
def test_exported(name: str, tmp_path: Path) -> None:
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package)
    found = ensemble(name).export(tmp_path)
    assert all(v <= 1e-4 for n, v in found.differences["onnx"].items() if "novelty" not in n)
    exported = runtime.load(tmp_path)
    ours, theirs = exported.predict(items(name)), ensemble(name).predict(items(name))
    assert type(ours) is type(theirs) and set(ours._columns()) == set(theirs._columns())
    same_rows(ours.rows(), name)
    same_rows(exported.predict(items(name), batch_size=2).rows(), name)  # joined
    if name == "questions":
        with pytest.raises(DataError, match="'context'"):
            exported.predict(["who saw rome"])


def client(name: str) -> Any:
    return TestClient(make_app(Service(TorchBackend(ensemble(name)), "tiny"), version="0"))


@pytest.mark.parametrize("name", NAMES)
def test_served(name: str) -> None:
    document = openapi.document("0")
    answers = document["paths"]["/predict"]["post"]["responses"]["200"]["content"]
    schema = {**answers["application/json"]["schema"], "components": document["components"]}
    body: Row = {"inputs": items(name)} if name in ("pairs", "questions") else {"texts": TEXTS}
    asked = document["components"]["schemas"]["Inputs"]
    jsonschema.Draft202012Validator({**asked, "components": document["components"]}).validate(body)
    kind = type(ensemble(name).predict(items(name))).__name__
    with client(name) as served:
        told = served.post("/predict", json=body).json()
        jsonschema.Draft202012Validator(schema).validate(told)
        own = {"$ref": f"#/components/schemas/{kind}", "components": document["components"]}
        for row in told["answers"]:
            jsonschema.Draft202012Validator(own).validate(row)
        same_rows(told["answers"], name)
        one = {"text": TEXTS[0]} if name not in ("pairs", "questions") else items(name)[0]
        same(served.post("/predict", json=one).json()["answers"][0], told["answers"][0], "one")
        wrong = {"text": "who"} if name == "questions" else {"question": "who", "context": "ann"}
        refused = served.post("/predict", json=wrong)
        assert refused.status_code == 422 and "tiny" in refused.json()["error"]
        assert served.get("/metrics").status_code == 200
        assert served.get("/facts").json()["asks"] == (
            "question" if name == "questions" else ("tokens" if name == "tags" else "text")
        )


@pytest.mark.parametrize("name", NAMES)
def test_protocol_v2(name: str) -> None:
    def tensor(key: str, data: list[str]) -> Row:
        return {"name": key, "datatype": "BYTES", "shape": [len(data)], "data": data}

    rows = items(name)
    keys = list(rows[0]) if isinstance(rows[0], dict) else ["text"]
    columns = [[row[key] if isinstance(row, dict) else row for row in rows] for key in keys]
    given = [tensor(key, column) for key, column in zip(keys, columns, strict=True)]
    with client(name) as served:
        about = served.get("/v2/models/tiny").json()
        assert [spec["name"] for spec in about["inputs"]][: len(keys)] == keys
        told = served.post("/v2/models/tiny/infer", json={"inputs": given}).json()
        prepared = dict(ensemble(name).tokenizer(*columns, padding=True, return_tensors="pt"))
        if name == "questions":
            encoded = ensemble(name).tokenizer(*columns, padding=True)
            sides = [encoded.sequence_ids(row) for row in range(len(rows))]
            prepared["sequence_ids"] = torch.tensor(
                [[-1 if side is None else side for side in row] for row in sides]
            )
        arrays = [
            {"name": n, "datatype": "INT64", "shape": list(v.shape), "data": v.flatten().tolist()}
            for n, v in prepared.items()
            if n in {spec["name"] for spec in about["inputs"]}
        ]
        plain = served.post("/v2/models/tiny/infer", json={"inputs": arrays}).json()
    assert {o["name"] for o in told["outputs"]} == {o["name"] for o in about["outputs"]}
    by_name = {output["name"]: output for output in told["outputs"]}
    found: list[Row] = []
    for row in range(len(rows)):
        values: Row = {}
        for field in ensemble(name).task.prediction.FIELDS:
            if field == "set":  # no output without sets
                assert field not in by_name and ensemble(name).sets is None
                continue
            output, width = by_name[field], by_name[field]["shape"][1:]
            size = math.prod(width)
            part = output["data"][row * size : (row + 1) * size]
            values[field] = part if width and width != [1] else part[0]
            expected = ensemble(name).predict(items(name)).rows()[row][field]
            if output["datatype"] == "BYTES" and not isinstance(expected, (str, type(None))):
                values[field] = json.loads(values[field])
            values[field] = None if expected is None and values[field] == "" else values[field]
        found.append(values)
    same_rows(found, name, leave_out=("set",))
    sure = {output["name"]: output for output in plain["outputs"]}
    score = "confidence" if name == "questions" else "novelty_score"
    same(sure[score]["data"], by_name[score]["data"], score)


PIPELINES = {
    "classes": "text-classification",
    "labels": "text-classification",
    "number": "text-classification",
    "pairs": "text-classification",
    "tags": "token-classification",
    "questions": "question-answering",
    "encoder": "feature-extraction",
}


@pytest.mark.parametrize("name", PIPELINES)
@pytest.mark.parametrize("size", [1, 2])
def test_pipelines(name: str, size: int) -> None:
    pipe = hydra.pipeline(PIPELINES[name], ensemble(name), batch_size=size)
    answer = ensemble(name).predict(items(name))
    found, rows = pipe(items(name)), answer.rows()
    for place, (entry, row) in enumerate(zip(found, rows, strict=True)):
        if name == "tags":
            entities = pipe(TEXTS[place], aggregation_strategy="first")
            for own, ours in zip(entities, row["entities"], strict=True):
                assert (own["entity_group"], own["start"], own["end"]) == (
                    ours["label"],
                    ours["start"],
                    ours["end"],
                )
                same(own["novelty"], row["novelty"], "novelty")
            continue
        same(entry["uncertainty"], row["uncertainty"], "uncertainty")
        same(entry["novelty"], row["novelty"], "novelty")
        assert entry["decision"] == row["decision"]
        if name == "labels":
            assert entry["labels"] == row["label"]
            every = pipe(items(name)[place], top_k=None)
            assert {e["label"] for e in every} == set(FEELINGS)
            shown = {e["label"]: e["score"] for e in every}
            same([shown[n] for n in FEELINGS], answer.probabilities[place].tolist(), "score")
            raw = pipe(items(name)[place], top_k=None, function_to_apply="none")
            assert any(not 0 <= e["score"] <= 1 for e in raw)
        if name in ("number", "pairs"):
            same(entry["score"], row["value"], "value")
        if name == "questions":
            same(entry["score"], row["confidence"], "score")
            assert TEXTS[place][entry["start"] : entry["end"]] == entry["answer"] == row["answer"]
        if name == "encoder":
            same(entry["embedding"], row["embedding"], "embedding")
    if name == "questions":
        asked = items(name)[0]
        assert pipe(question=asked["question"], context=asked["context"])["answer"] is not None
    other = "token-classification" if name != "tags" else "text-classification"
    with pytest.raises(UnsupportedModelError, match="Take"):
        hydra.pipeline(other, ensemble(name))


def table(name: str, count: int = 24) -> list[Row]:
    """Labelled rows as users have them: names, numbers, tags and answers."""
    generator = torch.Generator().manual_seed(5)
    rows: list[Row] = []
    for number in range(count):
        text = TEXTS[number % 4]
        draw = int(torch.randint(4, (1,), generator=generator))
        words = text.split()
        row: Row = {"text": text}
        if name == "classes":
            row["label"] = FEELINGS[draw]
        if name == "labels":
            row["label"] = "|".join(FEELINGS[:draw])
        if name == "number":
            row["label"] = draw / 2
        if name == "numbers":
            row["label"] = f"{draw}|{draw / 4}|-1.5"
        if name == "pairs":
            row = {"score": draw + 0.25, "sentence1": text, "sentence2": "ann saw rome"}
        if name == "tags":
            row = {"tokens": words, "tags": [TAGS[(draw + i) % 5] for i in range(len(words))]}
        if name == "questions":
            start = text.find("rome")
            answer = {"text": ["rome"], "answer_start": [start]} if start >= 0 and draw else None
            given = answer or {"text": [], "answer_start": []}
            row = {"question": "who saw rome", "context": text, "answers": given}
        rows.append(row)
    return rows


def write(name: str, suffix: str, folder: Path) -> Path:
    path, rows = folder / f"{name}{suffix}", table(name)
    if suffix == ".jsonl":
        path.write_text("\n".join(map(json.dumps, rows)))
    elif suffix == ".conll":
        lines = [
            "\n".join(f"{w}\t{t}" for w, t in zip(r["tokens"], r["tags"], strict=True))
            for r in rows
        ]
        path.write_text("\n\n".join(lines) + "\n")
    else:
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    return path


FORMS = [
    *((name, ".csv") for name in NAMES if name not in ("tags", "questions")),
    *((name, ".jsonl") for name in NAMES),
    ("tags", ".conll"),
]


def options(name: str) -> dict[str, Any]:
    task = ensemble(name).task
    return {
        "tokenizer": fast_tokenizer(),
        "class_names": named(name),
        "task": task,
        "classes": {"numbers": 3, "labels": 4, "number": 1, "pairs": 1}.get(name),
        "labels": name != "encoder",
    }


@pytest.mark.parametrize(("name", "suffix"), FORMS)
def test_files_hold_the_labels_of_every_task(name: str, suffix: str, tmp_path: Path) -> None:
    data = load_data(write(name, suffix, tmp_path), batch_size=10, **options(name))
    batches, rows = list(data), table(name)
    check_labels(name, batches, rows)
    if name in ("classes", "labels", "number", "numbers", "pairs"):
        assert len(data.labels) == len(rows)


def check_labels(name: str, batches: list[Any], rows: list[Row]) -> None:
    """Compare the labels of batches with those of the rows, one by one."""
    assert sum(len(batch["input_ids"]) for batch in batches) == len(rows)
    tokenizer, row = fast_tokenizer(), iter(rows)
    for batch in batches:
        labels = labels_of(batch)
        for place, ids in enumerate(batch["input_ids"].tolist()):
            given = next(row)
            words = tokenizer.convert_ids_to_tokens([i for i in ids if i])
            if name == "encoder":
                assert labels is None
                continue
            assert labels is not None
            label = labels[place]
            if name == "classes":
                assert FEELINGS[int(label)] == given["label"]
            if name == "labels":
                assert [FEELINGS[int(i)] for i in label.nonzero()] == [
                    part for part in given["label"].split("|") if part
                ]
            if name == "number":
                assert float(label) == given["label"]
            if name == "numbers":
                assert label.tolist() == [float(part) for part in given["label"].split("|")]
            if name == "pairs":
                assert float(label) == given["score"] and words.count("[SEP]") == 2
            if name == "tags":
                counted = [TAGS[int(tag)] for tag in label if tag != IGNORED]
                assert counted == given["tags"]
                first = [w for w, tag in zip(words, label, strict=False) if tag != IGNORED]
                assert "##s" not in first
            if name == "questions":
                start, end = label.tolist()
                wanted = given["answers"]["text"]
                assert words[start : end + 1] == (wanted or ["[CLS]"])


@pytest.mark.parametrize("name", NAMES)
def test_data_sets_of_hugging_face(name: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = table(name)
    if name == "labels":  # class numbers with names, as GoEmotions has them
        rows = [
            {"text": r["text"], "labels": [FEELINGS.index(p) for p in r["label"].split("|") if p]}
            for r in rows
        ]
        kind = datasets.Sequence(datasets.ClassLabel(names=FEELINGS))
        features = datasets.Features({"text": datasets.Value("string"), "labels": kind})
        stored = datasets.Dataset.from_list(rows, features=features)
    else:
        stored = datasets.Dataset.from_list(rows)
    stored.save_to_disk(tmp_path / "set")
    batches = list(load_data(tmp_path / "set", **options(name)))
    check_labels(name, batches, table(name))
    # tokenised and padded by the user, as transformers' own examples have it
    [batch] = batches
    columns = {key: value.tolist() for key, value in batch.items()}
    ready = as_data(datasets.Dataset.from_dict(columns).with_format("torch"))
    if name != "encoder":
        made = hydra.build(
            host(name),
            ready,
            method="random",
            members=2,
            max_cost=2.0,
            novelty=False,
            progress=False,
        )
        results = hydra.evaluate(made, ready, bootstrap=5, progress=False)
        assert results.figures
    hydra.fuse(host(name), EARLY).fit_novelty_(ready, progress=False)


@pytest.mark.parametrize(
    ("name", "row", "error"),
    [
        ("labels", {"text": "who", "label": "joy,anger"}, "several separated by '|'"),
        ("labels", {"text": "who", "label": "7"}, "none of the model's 4 labels"),
        ("number", {"text": "who", "label": "good"}, "expects a number"),
        ("numbers", {"text": "who", "label": "1|2"}, "expects 3 numbers"),
        ("tags", {"tokens": ["who", "saw"], "tags": ["O"]}, "2 words and 1 tags"),
        ("tags", {"text": "who saw"}, "has no 'tokens'"),
        (
            "questions",
            {"question": "who", "context": "ann", "answer": "rome"},
            "not in the context",
        ),
        ("questions", {"question": "who", "answers": []}, "no 'question' and 'context'"),
    ],
)
def test_other_forms_are_refused(name: str, row: Row, error: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(DataError) as raised:
        list(load_data(path, **options(name)))
    assert error in str(raised.value)


@pytest.mark.parametrize(("name", "suffix"), [(n, s) for n, s in FORMS if n not in ("number",)])
def test_the_command_predicts(
    name: str, suffix: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    output = tmp_path / "rows.jsonl"
    given = str(write(name, suffix, tmp_path))
    assert main(["predict", str(folders(name)), given, "-o", str(output), "--why"]) == 0
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    assert all(row["evidence"] for row in rows) and len(rows) == 24
    same_rows(rows[:4], name)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("number", "numbers")])
def test_the_commands_build_evaluate_and_fit(name: str, tmp_path: Path) -> None:
    model, folder = tmp_path / "model", tmp_path / "built"
    host(name).save_pretrained(model)
    fast_tokenizer().save_pretrained(model)
    data = str(write(name, ".jsonl", tmp_path))
    build = ["build", str(model), "--data", data, "-o", str(folder), "--method", "random"]
    build += ["--members", "2", "--max-cost", "2"]
    if name == "encoder":
        assert main(build) != 0  # nothing is right or wrong
        return
    assert main(build) == 0
    built = HydraEnsemble.from_pretrained(folder)
    assert built.task.name == ensemble(name).task.name and built.members == 2
    assert main(["policy", str(folder), "--data", data, "--risk", "0", "--alarm", "0.2"]) == 0
    assert HydraEnsemble.from_pretrained(folder).policy is not None
    results = tmp_path / "results"
    evaluate = ["eval", str(folder), "--data", data, "-o", str(results), "--bootstrap", "10"]
    assert main([*evaluate, "--no-report"]) == 0
    figures = json.loads((results / "results-built.json").read_text())["figures"]
    wanted = {"pairs": "reg/RMSE"}.get(name, "cls/Acc")
    assert wanted in figures, sorted(figures)


@pytest.mark.parametrize("name", NAMES)
def test_columns_of_rows(name: str) -> None:
    function = ensemble(name).as_map_function(prefix="")
    rows = items(name)
    if isinstance(rows[0], dict):
        columns = {key: [row[key] for row in rows] for key in rows[0]}
    else:
        columns = {"text": rows}
    found = function(columns)
    assert found.pop("error") == [None] * 4
    made = [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
    same_rows(made, name)


def test_transformers_classes_keep_their_pipeline_options() -> None:
    pipe = hydra.pipeline("text-classification", ensemble("classes"))
    plain = transformers.pipeline(
        "text-classification", model=ensemble("classes"), tokenizer=fast_tokenizer()
    )
    for ours, theirs in zip(pipe(TEXTS, top_k=2), plain(TEXTS, top_k=2), strict=True):
        assert [e["label"] for e in ours] == [e["label"] for e in theirs]
