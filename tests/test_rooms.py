"""Imports go one way, from room to room and from module to module; importing stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hydra_ensembles
from tests.loose_files import load

rooms = load("docs/draw_rooms.py")
GRAPH: dict[str, set[str]] = rooms.graph()


def room_of(module: str) -> str:
    return module.split(".")[0]


def test_rooms_import_only_rooms_before_them() -> None:
    order = list(rooms.ROOMS)
    new = {room_of(module) for module in GRAPH} - set(order)
    assert not new, f"New rooms: add them to ROOMS in docs/draw_rooms.py: {sorted(new)}"
    later = [
        f"{module} imports {other}"
        for module in sorted(GRAPH)
        for other in sorted(GRAPH[module])
        if order.index(room_of(other)) > order.index(room_of(module))
    ]
    assert len(GRAPH) > 100 and not later, "\n".join(later)


def test_no_modules_import_each_other() -> None:
    assert rooms.cycles(rooms.graph(types=False)) == []


def test_a_cycle_would_be_found() -> None:
    assert rooms.cycles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"d"}}) == [["b", "c"], ["d"]]
    assert "data.model_runs" in GRAPH["heads.gates"] | GRAPH["criteria.head_scoring"]


def test_no_module_bears_the_name_of_a_public_function() -> None:
    stems = {m.rpartition(".")[2] for m in GRAPH if not m.startswith("cli.commands.")}
    assert not stems & set(hydra_ensembles.__all__)


def test_the_picture_is_up_to_date() -> None:
    drawn = rooms.PICTURE.read_text(encoding="utf-8")
    assert drawn == rooms.draw(), "run: python docs/draw_rooms.py"


HEAVY = ("transformers", "timm", "matplotlib", "open_clip", "sklearn", "torchmetrics", "typer")
HOST_LIBRARIES = ("transformers", "timm", "open_clip")


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import hydra_ensembles", (*HEAVY, "torch", "jinja2")),
        (
            "from hydra_ensembles import "
            "HeadMask, cost, evaluate, explain, find_circuit, fuse, gate, score_heads, verify",
            (*HOST_LIBRARIES, "matplotlib", "typer", "jinja2"),
        ),
        ("from hydra_ensembles import *", HOST_LIBRARIES),
        ("import hydra_ensembles.cli.main", (*HEAVY[:-1], "torch")),
    ],
    ids=["import", "the core", "all public names", "the command line"],
)
def test_importing_is_lean(statement: str, absent: tuple[str, ...]) -> None:
    code = f"import sys\n{statement}\nprint([m for m in {absent!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_the_names_for_type_checkers_are_those_for_python() -> None:
    source = Path(hydra_ensembles.__file__).read_text(encoding="utf-8")
    block = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
    typed = [
        (alias.asname, node.module)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    ]
    assert typed == list(hydra_ensembles._NAMES.items())


def test_every_public_name_exists() -> None:
    for name in hydra_ensembles.__all__:
        assert getattr(hydra_ensembles, name) is not None
    assert set(hydra_ensembles.__all__) <= set(dir(hydra_ensembles))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hydra_ensembles.nothing  # noqa: B018
