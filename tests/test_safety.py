"""What the source must not contain: pickles, code from files, wall clocks, half-written files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.loose_files import load

SOURCE: Path = load("docs/draw_rooms.py").SOURCE
FILES = sorted(SOURCE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}

PICKLES = {"pickle", "cPickle", "joblib", "dill", "shelve", "marshal", "cloudpickle"}
UNSAFE = {
    *("torch.load", "torch.save", "pickle.load", "pickle.loads", "pandas.read_pickle"),
    *("pd.read_pickle", "torch.jit.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load"),
    *("eval", "exec", "os.system", "os.popen", "__import__"),
}
CLOCKS = {"time.time", "time.time_ns", "os.path.getmtime"}
WRITES = {
    "_records.py": "writes beside and renames",
    "fusion/folder_writer.py": "writes a folder beside and renames",
    "cli/commands/predict.py": "writes beside and renames",
    "training/teacher_answers.py": "writes into memory",
}
"""Who may open a file for writing; everybody else calls `write_whole`."""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keywords(call: ast.Call) -> dict[str, str]:
    return {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg}


def place(path: Path) -> str:
    return path.relative_to(SOURCE).as_posix()


@pytest.mark.parametrize("path", FILES, ids=place)
def test_no_pickle_and_no_code_from_files(path: Path) -> None:
    for node in ast.walk(TREES[path]):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            assert not PICKLES & {name.split(".")[0] for name in names}
    for name, call in calls(TREES[path]):
        given = keywords(call)
        assert name not in UNSAFE, f"line {call.lineno}: {name}"
        assert given.get("shell", "False") == "False", f"line {call.lineno}"
        assert given.get("trust_remote_code", "False") == "False", f"line {call.lineno}"
        if name in ("np.load", "np.save", "numpy.load", "numpy.save"):
            assert given.get("allow_pickle") == "False", f"line {call.lineno}"


@pytest.mark.parametrize("path", FILES, ids=place)
def test_code_of_the_hub_is_never_run(path: Path) -> None:
    """Every loading by transformers says so itself: its default asks, and may wait for a key."""
    for name, call in calls(TREES[path]):
        owner = name.removesuffix(".from_pretrained")
        ours = owner in ("cls", "HydraEnsemble", "hydra.HydraEnsemble", "hydra_ensembles")
        if name.endswith(".from_pretrained") and not ours:
            text = ast.unparse(call)
            assert "trust_remote_code=False" in text or "**SAFE" in text, f"line {call.lineno}"


@pytest.mark.parametrize("path", FILES, ids=place)
def test_no_clock_that_may_jump(path: Path) -> None:
    for name, call in calls(TREES[path]):
        assert name not in CLOCKS, f"line {call.lineno}: use time.monotonic()"
    text = path.read_text(encoding="utf-8")
    assert "st_mtime" not in text, "the age of a file tells nothing: compare its content"


@pytest.mark.parametrize("path", FILES, ids=place)
def test_files_are_written_whole(path: Path) -> None:
    if place(path) in WRITES:
        return
    for name, call in calls(TREES[path]):
        last = name.rpartition(".")[2]
        text = ast.unparse(call)
        assert last not in ("write_bytes", "save_file"), f"line {call.lineno}: {text}"
        assert name == "write_text" or last != "write_text", f"line {call.lineno}: {text}"
        if last == "open" and "os.devnull" not in text:
            modes = [ast.unparse(a).strip("'") for a in call.args] + [
                keywords(call).get("mode", "")
            ]
            assert not any(m in ("w", "wb", "a", "ab", "x", "xb", "w+") for m in modes), text


def test_the_list_of_writers_is_needed() -> None:
    assert set(WRITES) <= {place(path) for path in FILES}
