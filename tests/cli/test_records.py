"""One bad record never kills `predict`: each gets its answer or its error, in order, soon."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hydra_ensembles as hydra
from hydra_ensembles import Policy
from hydra_ensembles.cli.commands.predict import answer_records, line_of
from hydra_ensembles.cli.models import load_model
from hydra_ensembles.data.records import (
    MOST_BYTES,
    Form,
    Record,
    batches,
    read_records,
    records_of_lines,
)
from hydra_ensembles.prediction import FIELDS
from tests import zoo
from tests.fusion.test_fusion import EARLY
from tests.fusion.test_inputs import words

pytestmark = pytest.mark.filterwarnings("ignore:Model config")


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved ensemble that reads texts."""
    folder = tmp_path_factory.mktemp("texts")
    ensemble = hydra.fuse(zoo.host("bert"), EARLY)
    ensemble.tokenizer = words(folder)
    ensemble.id2label = ["a", "b", "c", "d", "e"]
    ensemble.save_pretrained(folder / "saved")
    return folder / "saved"


def answered(loaded: Any, lines: bytes, **options: Any) -> list[dict[str, Any]]:
    text = loaded.tokenizer is not None
    records = records_of_lines(io.BytesIO(lines), Form.of(None, text=text))
    rows = [row for part in batches(records, 4) for row in answer_records(loaded, part, **options)]
    return [json.loads(line_of(row)) for row in rows]


NESTED = b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD = {
    b'{"text": 5}': "'text' is a number",
    b'{"text": null}': "'text' is null",
    b'{"text": ["a"]}': "'text' is a list",
    b'{"text": true}': "'text' is true or false",
    b'{"text": {"a": 1}}': "'text' is an object",
    b'{"text": "\\ud800"}': "not valid Unicode",
    b'{"txt": "good"}': "expected a JSON object with 'text'",
    b'{"text": "good"': "expected a JSON object",
    b"\xff\xfe good film": "not UTF-8",
    NESTED: "expected a JSON object",
    b'{"text": "good", "n": NaN}': "NaN is not a number",
    b'{"text": "good", "n": 1e999}': "cannot be given back",
    b"g" * (MOST_BYTES + 5): f"longer than {MOST_BYTES} bytes",
    b'{"text": "good", "n": ' + b"9" * 5000 + b"}": "expected a JSON object",
}


def test_every_bad_line_gets_its_error_and_the_others_their_answers(texts: Path) -> None:
    loaded = load_model(str(texts))
    lines: list[bytes] = []
    for bad in BAD:
        lines += [bad, b"a good film"]
    found = answered(loaded, b"\n".join(lines))
    assert len(found) == len(lines)
    good = answered(loaded, b"a good film")[0]
    for answer, problem in zip(found[::2], BAD.values(), strict=True):
        assert problem in answer["error"] and {answer[name] for name in FIELDS} == {None}
    for answer in found[1::2]:
        assert answer["label"] == good["label"] and answer["text"] == "a good film"
        assert answer["uncertainty"] == pytest.approx(good["uncertainty"], rel=1e-4)


def test_an_inputs_own_keys_do_not_pass_as_the_answers(texts: Path) -> None:
    given = {"text": "bad film", "id": 7, "decision": "new", "label": "z", "error": "no"}
    loaded = load_model(str(texts))
    loaded.model.policy = Policy(threshold=-1e9)
    (answer,) = answered(loaded, json.dumps(given).encode())
    assert answer["id"] == 7 and answer["decision"] == "unsure" and answer["label"] in "abcde"
    assert "error" not in answer
    (refused,) = answered(load_model(str(texts)), b'{"text": 1, "label": "z", "id": 8}')
    assert refused["label"] is None and refused["id"] == 8 and refused["line"] == 1


def test_pictures_that_are_none(shelf: Path, tmp_path: Path) -> None:
    loaded = load_model(str(shelf / "host"))
    picture = next((shelf / "noise").iterdir())
    broken = tmp_path / "broken.png"
    broken.write_bytes(picture.read_bytes()[:60])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # opening it would wait for ever
    names: list[Any] = [5, None, str(tmp_path / "none.png"), str(broken), str(pipe), str(tmp_path)]
    names += ["a\0b", "n" * 5000, "/dev/zero", str(Path(__file__))]
    lines = [json.dumps({"file": name}) for name in [*names, str(picture)]]
    found = answered(loaded, "\n".join(lines).encode())
    assert ["error" in answer for answer in found] == [True] * len(names) + [False]


def test_one_input_that_the_model_cannot_take_leaves_its_batch_alone(texts: Path) -> None:
    loaded = load_model(str(texts))
    right = loaded.tokenizer

    class Picky:  # a tokenizer that refuses one text, as some do
        model_max_length = 512

        def __call__(self, given: list[str], **options: Any) -> Any:
            if "refuse" in given:
                raise ValueError("cannot be tokenized")
            return right(given, **options)

    loaded.tokenizer = Picky()
    found = answered(loaded, b"good\nrefuse\nbad")
    assert ["error" in answer for answer in found] == [False, True, False]
    assert "cannot be tokenized" in found[1]["error"]


def test_an_answer_that_is_no_number_is_an_error(texts: Path) -> None:
    loaded = load_model(str(texts))
    with torch.no_grad():
        loaded.model.host.classifier.bias[0] = float("nan")
    (answer,) = answered(loaded, b"good")
    assert "NaN" in answer["error"] and answer["label"] is None


def answers_to_files(loaded: Any, *files: Path) -> list[dict[str, Any]]:
    records = read_records(map(str, files), Form.of(None, text=loaded.tokenizer is not None))
    rows = [row for part in batches(records, 4) for row in answer_records(loaded, part)]
    return [json.loads(line_of(row)) for row in rows]


def test_files_of_texts_row_by_row(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"sentence": "good"}\n{"text": 5}\n\xff\n')
    (tmp_path / "b.csv").write_text("text,label\ngood,1\nbad,0\n")
    (tmp_path / "c.txt").write_text('{"just a brace\n')
    (tmp_path / "d.csv").write_text("other\n1\n")
    files = [str(tmp_path / n) for n in ("a.jsonl", "none.csv", "b.csv", "c.txt", "d.csv")]
    found = list(read_records(files, Form.of(None, text=True)))
    shown = [record.value or record.error or "" for record in found]
    assert shown[0] == "good" and "a number" in shown[1]
    assert "not UTF-8" in shown[2] and "none.csv" in shown[3]
    assert shown[4:7] == ["good", "bad", '{"just a brace'] and "no text column" in shown[7]


def test_what_is_no_object_in_json_lines_is_an_error_line(texts: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('not json\n[1]\n5\nnull\n"good"\n\n{"text": "good", "id": 7}\n')
    found = answers_to_files(load_model(str(texts)), file)
    assert [answer["line"] for answer in found] == [1, 2, 3, 4, 5, 6, 7]
    for answer in found[:5]:
        assert "expected a JSON object" in answer["error"] and answer["label"] is None
    assert "a list" in found[1]["error"] and "null" in found[3]["error"]
    assert "blank" in found[5]["skipped"] and found[5]["label"] is None
    assert found[6]["id"] == 7 and found[6]["label"] in "abcde"


def test_a_short_row_of_a_table_is_an_error_line_and_other_columns_stay(
    texts: Path, tmp_path: Path
) -> None:
    table = tmp_path / "rows.csv"
    table.write_bytes(
        b'id,text,label\n7,good,x\n8\n\n9,"two\nlines",y\n10,a "quoted" film,z\n'
        b'11,"bad" film,z\n12,\xff,z\n13,bad,\n'
    )
    found = answers_to_files(load_model(str(texts)), table)
    assert [answer["line"] for answer in found] == [2, 3, 4, 5, 7, 8, 9, 10]
    assert {answer["file"] for answer in found} == {str(table)}
    assert "1 field" in found[1]["error"] and "skipped" in found[2]
    assert "expected after" in found[5]["error"] and "not UTF-8" in found[6]["error"]
    good = [answer for answer in found if answer["label"] is not None]
    assert [answer["id"] for answer in good] == ["7", "9", "10", "13"]
    assert [answer["text"] for answer in good][1] == "two\nlines"
    assert all(answer["label"] in "abcde" for answer in good)  # not the table's own
    entries = tmp_path / "rows.json"
    entries.write_text('[{"text": "good", "id": 1}, 5, {"id": 2}, {"text": "bad", "id": 3}]')
    found = answers_to_files(load_model(str(texts)), entries)
    assert ["error" in answer for answer in found] == [False, True, True, False]
    assert [answer.get("id") for answer in found] == [1, None, 2, 3]


def test_lines_of_texts_carry_their_number_and_blank_ones_are_told(
    texts: Path, tmp_path: Path
) -> None:
    loaded = load_model(str(texts))
    file = tmp_path / "rows.txt"
    file.write_text("good\n  \nbad\n")
    for found in (answers_to_files(loaded, file), answered(loaded, b"good\n  \nbad\n")):
        assert [answer["line"] for answer in found] == [1, 2, 3]
        assert ["skipped" in answer for answer in found] == [False, True, False]
        assert found[2]["text"] == "bad" and found[2]["label"] and found[1]["label"] is None


def test_other_files_of_a_folder_of_images_get_their_line(shelf: Path, tmp_path: Path) -> None:
    picture = next((shelf / "noise").iterdir())
    (tmp_path / "b").mkdir()
    for name in ("a.png", "b/c.PNG"):
        (tmp_path / name).write_bytes(picture.read_bytes())
    for name in ("a.txt", "b/d"):
        (tmp_path / name).write_text("not an image")
    found = answers_to_files(load_model(str(shelf / "host")), tmp_path)
    names = [str(tmp_path / name) for name in ("a.png", "a.txt", "b/c.PNG", "b/d")]
    assert [answer["file"] for answer in found] == names
    assert ["skipped" in answer for answer in found] == [False, True, False, True]


def test_a_batch_goes_on_when_nothing_comes() -> None:
    def slow() -> Iterator[Record]:
        for number in range(5):
            if number == 3:
                time.sleep(0.5)
            yield Record(str(number))

    sizes = [[record.value for record in batch] for batch in batches(slow(), 32, idle=0.1)]
    assert sizes == [["0", "1", "2"], ["3", "4"]]
    assert [len(b) for b in batches((Record(str(i)) for i in range(5)), 2, idle=5)] == [2, 2, 1]

    def fails() -> Iterator[Record]:
        yield Record("0")
        raise OSError("the pipe broke")

    with pytest.raises(OSError, match="the pipe broke"):
        list(batches(fails(), 2))


def test_an_answer_comes_before_the_next_line(texts: Path) -> None:
    """The reader of a pipe sees an answer while the writer still thinks."""
    run = "from hydra_ensembles.cli.main import run; run()"
    command = [sys.executable, "-c", run, "predict", str(texts)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        for line in (b"a good film\n", b'{"text": 5}\n', b"bad\n"):
            process.stdin.write(line)
            process.stdin.flush()
            answer = json.loads(process.stdout.readline())  # waits for ever where 32 are awaited
            assert "label" in answer or "error" in answer
        process.stdin.close()
        assert process.wait(60) == 3
