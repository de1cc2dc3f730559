"""What the source must not contain: pickles, code from files, wall clocks, half-written files.

Each lint reads every file of the source and lists every offender.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.loose_files import load

SOURCE: Path = load("docs/draw_rooms.py").SOURCE
TREES = {
    path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(SOURCE.rglob("*.py"))
}

PICKLES = {"pickle", "cPickle", "joblib", "dill", "shelve", "marshal", "cloudpickle"}
UNSAFE = {
    *("torch.load", "torch.save", "pickle.load", "pickle.loads", "pandas.read_pickle"),
    *("pd.read_pickle", "torch.jit.load", "torch.hub.load", "yaml.load", "yaml.unsafe_load"),
    *("eval", "exec", "os.system", "os.popen", "__import__"),
}
CLOCKS = {"time.time", "time.time_ns", "os.path.getmtime"}
WRITERS = {
    "_records.py": {"write_whole": "writes beside and renames"},
    "cli/commands/predict.py": {"_written": "writes beside and renames"},
    "fusion/folder_writer.py": {"_write_files": "writes into a folder that is renamed at the end"},
    "training/teacher_answers.py": {"_keep": "writes into memory"},
}
"""The functions that may write a file; every other function calls `write_whole`."""


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def keywords(call: ast.Call) -> dict[str, str]:
    return {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg}


def pickles_and_code(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what imports a pickle library, or calls what runs code that a file holds."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
            if PICKLES & {name.split(".")[0] for name in names}:
                yield node
    for name, call in calls(tree):
        given = keywords(call)
        tensors_only = name == "torch.load" and given.get("weights_only") == "True"
        array_file = name in ("np.load", "np.save", "numpy.load", "numpy.save")
        if (
            (name in UNSAFE and not tensors_only)
            or given.get("shell", "False") != "False"
            or given.get("trust_remote_code", "False") != "False"
            or (array_file and given.get("allow_pickle") != "False")
        ):
            yield call


def trusting_loads(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield loads by transformers that do not refuse code: its default asks, and may wait."""
    for name, call in calls(tree):
        owner = name.removesuffix(".from_pretrained")
        ours = owner in ("cls", "HydraEnsemble", "hydra.HydraEnsemble", "hydra_ensembles")
        if name.endswith(".from_pretrained") and not ours:
            text = ast.unparse(call)
            if "trust_remote_code=False" not in text and "**SAFE" not in text:
                yield call


def jumping_clocks(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield readings of the wall clock (use `time.monotonic`) and of the age of a file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in CLOCKS:
            yield node
        named = getattr(node, "attr", "") or getattr(node, "id", "") or getattr(node, "value", "")
        if isinstance(named, str) and "st_mtime" in named:
            yield node


def direct_writes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield calls that write a file without `write_whole`: a crash would leave half of it."""
    for name, call in calls(tree):
        last = name.rpartition(".")[2]
        method = last == "write_text" and name != "write_text"
        if method or last in ("write_bytes", "save_file") or name in ("np.save", "numpy.save"):
            yield call
        elif last == "open" and "os.devnull" not in ast.unparse(call):
            modes = [ast.unparse(argument).strip("'") for argument in call.args]
            modes.append(keywords(call).get("mode", "").strip("'"))
            if any(mode in ("w", "wb", "a", "ab", "x", "xb", "w+") for mode in modes):
                yield call


Lint = Callable[[ast.AST], Iterator[ast.AST]]


def offenders(lint: Lint) -> str:
    return "\n".join(
        f"{path}:{getattr(node, 'lineno', '?')}: {ast.unparse(node)}"
        for path, tree in TREES.items()
        for node in lint(tree)
    )


@pytest.mark.parametrize("lint", [pickles_and_code, trusting_loads, jumping_clocks])
def test_the_source_is_free_of(lint: Lint) -> None:
    assert len(TREES) > 100
    found = offenders(lint)
    assert not found, f"{lint.__doc__}\n{found}"


def test_files_are_written_whole_and_the_list_of_writers_is_exact() -> None:
    """Catch a new direct write, and an entry of WRITERS whose function no longer writes.

    An entry that is not needed would let a later direct write pass unseen.
    """
    found: dict[str, list[str]] = {}
    for path, tree in TREES.items():
        within = {  # of nested functions the innermost, which comes last
            call: function.name
            for function in ast.walk(tree)
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef))
            for call in direct_writes(function)
        }
        for call in direct_writes(tree):
            place = f"{path}: {within.get(call, 'the module')}"
            found.setdefault(place, []).append(f"{place}, {ast.unparse(call)}")
    listed = {f"{path}: {name}" for path, names in WRITERS.items() for name in names}
    unlisted = [line for place, lines in found.items() if place not in listed for line in lines]
    assert not unlisted, "Use _records.write_whole:\n" + "\n".join(unlisted)
    unneeded = sorted(listed - set(found))
    assert not unneeded, "Write nothing, remove from WRITERS:\n" + "\n".join(unneeded)


@pytest.mark.parametrize(
    ("lint", "code"),
    [
        (pickles_and_code, "import pickle"),
        (pickles_and_code, "from joblib.numpy_pickle import load"),
        (pickles_and_code, "torch.load(file)"),
        (pickles_and_code, "subprocess.run(command, shell=True)"),
        (pickles_and_code, "AutoModel.from_config(config, trust_remote_code=trust)"),
        (pickles_and_code, "np.load(file)"),
        (trusting_loads, "AutoModel.from_pretrained(name)"),
        (jumping_clocks, "time.time()"),
        (jumping_clocks, "path.stat().st_mtime"),
        (direct_writes, "path.write_text(text)"),
        (direct_writes, "path.open('wb')"),
        (direct_writes, "open(path, mode='a')"),
        (direct_writes, "np.save(path, table, allow_pickle=False)"),
    ],
)
def test_a_lint_finds(lint: Lint, code: str) -> None:
    assert len(list(lint(ast.parse(code)))) == 1
