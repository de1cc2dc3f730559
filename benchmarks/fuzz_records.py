"""Odd lines for `hydra-ensembles predict`: every one must get its answer or its error, in order."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from hydra_ensembles.prediction import FIELDS

ANSWERED, REFUSED = "answered, as alone", "its error line"
LOST, WRONG, CRASHED = "no line", "a wrong line", "the command died"
WORDS = ["good", "bad", "film", "a", "the", "not", "very", "dull", "story", "long"]
MORE = [f"word{number}" for number in range(20)]
RUN = "from hydra_ensembles.cli.main import run; run()"


def text_tokenizer() -> Any:
    """Return a real tokenizer with a small vocabulary."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["[PAD]", "[UNK]", *WORDS, *MORE]
    table = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    table.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=table, pad_token="[PAD]", unk_token="[UNK]")


def _good_text(draw: random.Random) -> str:
    return " ".join(draw.choice(WORDS) for _ in range(draw.choice([1, 3, 12, 200])))


def text_line(draw: random.Random, number: int) -> tuple[bytes, str | None]:
    """Return a line and the text that is to be answered; None when an error is due."""
    text = _good_text(draw)
    good = draw.random() < 0.4
    if good:
        shapes: list[Any] = [
            text,
            json.dumps({"text": text, "id": number}),
            json.dumps(
                {"id": number, "text": text, "decision": "new", "label": "mine", "class": 9}
            ),
            json.dumps({"text": text, "error": "none", "score": [1], "probability": 2}),
            json.dumps(
                {"text": text + " \U0001f600 é", "id": {"deep": [[[1]]]}}, ensure_ascii=False
            ),
            "  " + json.dumps({"text": text}),
            text + "\r",
            text + "\x00\x1b[31m",
        ]
        line = draw.choice(shapes)
        given = json.loads(line)["text"] if line.lstrip().startswith("{") else line.rstrip("\r")
        return line.encode(), given
    depth = draw.choice([50, 2_000, 100_000])
    nested = "[" * depth + "]" * depth
    bad: list[bytes] = [
        json.dumps(
            {"text": draw.choice([5, None, True, 1.5, [], {}, [text], {"text": text}])}
        ).encode(),
        json.dumps({"Text": text}).encode(),
        b"{}",
        b'{"text": ' + nested.encode() + b"}",
        json.dumps({"text": text}).encode()[: -draw.randrange(1, 6)],
        b"\xff\xfe" + text.encode("utf-16-le"),
        text.encode() + b"\x80",
        b'{"text": "' + text.encode() + b'\xc3"}',
        json.dumps({"text": text + "\ud83d"}).encode(),
        b'{"text": "good", "n": NaN}',
        b'{"text": "good", "n": 1e999}',
        b'{"text": "good", "n": ' + b"1" * 5000 + b"}",
        b'{"text": "good"} {"text": "bad"}',
        b"{" + draw.randbytes(40).replace(b"\n", b"") + b"}",
    ]
    if draw.random() < 0.02:
        return b"w " * (2**19 + draw.randrange(9)) + b"good", None  # longer than is read
    return draw.choice(bad), None


def picture_line(draw: random.Random, number: int, place: Path) -> tuple[bytes, str | None]:
    """Return a line and the picture that is to be answered; None when an error is due."""
    good = str(place / f"good{draw.randrange(5)}.png")
    if draw.random() < 0.4:
        shapes = [good, json.dumps({"file": good, "id": number, "decision": "new", "label": 0})]
        return draw.choice(shapes).encode(), good
    bad: list[Any] = [
        *(5, None, [good], {"file": good}, "", "a\x00b", "n" * 5000, "/dev/zero", "/dev/null"),
        *(str(place), str(place / "none.png"), str(place / "broken.png"), str(place / "text.png")),
        *(str(place / "empty.png"), str(place / "bomb.png"), good + " ", "file://" + good),
    ]
    value = draw.choice(bad)
    if value in (str(place / "none.png"), good + " ") and draw.random() < 0.5:
        return str(value).encode(), None
    return json.dumps({"file": value, "id": number}).encode(), None


def write_pictures(place: Path) -> None:
    """Write good pictures and some that are none."""
    import zlib

    from PIL import Image

    for number in range(5):
        draw = random.Random(number)
        Image.frombytes("RGB", (20, 18), draw.randbytes(20 * 18 * 3)).save(
            place / f"good{number}.png"
        )
    content = (place / "good0.png").read_bytes()
    (place / "broken.png").write_bytes(content[: len(content) // 2])
    (place / "text.png").write_text("not a picture")
    (place / "empty.png").write_bytes(b"")
    header = bytearray(content)
    header[16:24] = (60_000).to_bytes(4, "big") * 2  # claims 3.6 gigapixels
    header[29:33] = zlib.crc32(bytes(header[12:29])).to_bytes(4, "big")
    (place / "bomb.png").write_bytes(header)


def fuzz_records(made: dict[str, Path], count: int, seed: int) -> dict[str, Any]:
    """Send odd lines to the command; return figures by kind of model and of outcome."""
    table: dict[str, Counter[str]] = {}
    failures: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        write_pictures(place)
        third = count // 3
        shares = {"texts": count - 2 * third, "images": third, "json lines": third}
        for name, share in shares.items():
            draw = random.Random(seed)
            lines = [
                picture_line(draw, n, place) if name == "images" else text_line(draw, n)
                for n in range(share)
            ]
            file = None
            if name == "json lines":  # in a file, what is not an object is an error
                file = place / "odd.jsonl"
                lines = [(line, text if b"{" in line[:3] else None) for line, text in lines]
            kinds = _send(made["images" if name == "images" else "texts"], lines, file)
            table[name] = Counter(kind for kind, _ in kinds)
            for number, (kind, detail) in enumerate(kinds):
                if kind not in (ANSWERED, REFUSED):
                    line = lines[number][0][:80].decode("latin-1")
                    failures.append({"model": name, "line": line, "kind": kind, "detail": detail})
    total = sum(table.values(), Counter())
    order = (ANSWERED, REFUSED, LOST, WRONG, CRASHED)
    return {
        "count": count,
        "total": {kind: total[kind] for kind in order},
        "by_model": {name: dict(sorted(kinds.items())) for name, kinds in table.items()},
        "failures": failures,
    }


def _send(
    model: Path, lines: list[tuple[bytes, str | None]], file: Path | None = None
) -> list[tuple[str, str]]:
    """Run the command on all lines at once, or on a file of them; judge its answers one by one."""
    import hydra_ensembles as hydra

    ensemble = hydra.HydraEnsemble.from_pretrained(model)
    content = b"\n".join(line for line, _ in lines) + b"\n"
    if file is not None:
        file.write_bytes(content)
    done = subprocess.run(
        [sys.executable, "-c", RUN, "predict", str(model), *([] if file is None else [str(file)])],
        input=content if file is None else b"",
        capture_output=True,
        check=False,
    )
    if done.returncode != 3 or b"Traceback" in done.stderr:
        return [(CRASHED, done.stderr.decode("utf-8", "replace")[-300:])] * len(lines)
    answers = done.stdout.decode("utf-8").splitlines()
    if len(answers) != len(lines):
        return [(LOST, f"{len(answers)} answers for {len(lines)} lines")] * len(lines)
    return [_judge(ensemble, *pair) for pair in zip(lines, answers, strict=True)]


def _judge(ensemble: Any, given: tuple[bytes, str | None], answer: str) -> tuple[str, str]:
    """Compare an answer with what the ensemble says about that input alone."""
    line, expected = given
    try:
        found = json.loads(answer, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return WRONG, answer[:200]
    sent = json.loads(line) if line.lstrip().startswith(b"{") and expected is not None else {}
    if "id" in sent and found.get("id") != sent["id"]:
        return WRONG, f"the id of another record: {answer[:200]}"
    if expected is None:
        good = isinstance(found.get("error"), str) and {found[name] for name in FIELDS} == {None}
        return (REFUSED, "") if good else (WRONG, answer[:200])
    alone = ensemble.predict(expected)
    same = (
        found.get("label") == alone.labels[0]
        and abs(found["uncertainty"] - float(alone.uncertainty)) < 1e-3
        and found["decision"] == (alone.decision or [None])[0]
    )
    return (ANSWERED, "") if same else (WRONG, answer[:200])
