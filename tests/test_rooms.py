"""The rooms of the library import only what the architecture allows, and importing stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "hydra_ensembles"
LEAVES = {"errors", "files", "registry", "head_tables", "masks", "uncertainty", "inference"}
CORE = LEAVES | {"models", "heads", "plan", "counting"}
EXPERIMENTS = CORE | {"criteria", "data", "fusion", "fusing", "ensemble", "training"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "registry": {"errors"},
    "head_tables": {
        "errors",
        "files",
        "models",
    },  # models only to count a module's heads, in a function
    "masks": {"errors", "head_tables"},
    "uncertainty": {"errors", "registry"},
    "inference": {"errors", "uncertainty"},
    "models": LEAVES,
    "heads": LEAVES | {"models"},
    "plan": {"errors", "masks", "models"},
    "counting": CORE,
    "cost_frontier": EXPERIMENTS | {"circuits", "evaluation", "budget"},
    "criteria": CORE,
    "data": {"errors", "registry", "masks"},
    "circuits": CORE | {"criteria", "data", "fusion", "budget"},
    "fusion": LEAVES | {"plan", "models", "heads"},
    "summary": {"errors", "plan", "counting", "models"},
    "saving": LEAVES | {"fusion", "models", "plan", "fusing"},
    "fusing": LEAVES | {"fusion", "models", "ensemble"},
    "ensemble": LEAVES | {"fusion", "models", "plan", "saving", "summary"},
    "training": EXPERIMENTS,
    "baselines": EXPERIMENTS | {"circuits", "builder", "evaluation"},
    "budget": EXPERIMENTS | {"circuits", "evaluation"},
    "evaluation": EXPERIMENTS | {"circuits", "baselines", "budget", "selective"},
    "selective": LEAVES | {"evaluation"},
    "builder": EXPERIMENTS | {"circuits", "evaluation", "budget", "baselines"},
    "report": {
        "errors",
        "files",
        "masks",
        "plan",
        "counting",
        "cost_frontier",
        "evaluation",
        "uncertainty",
        "selective",
    },
    "tiny_vit": {"models", "errors"},
}
FREE = {"cli", "demo", "__init__"}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    """Return the rooms that a file imports, at the top or inside functions."""
    parts = path.relative_to(SOURCE).with_suffix("").parts
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            base = list(parts[: len(parts) - node.level])
            target = base + (node.module.split(".") if node.module else [])
            names = [target[0]] if target else [alias.name for alias in node.names]
            found |= {name.split(".")[0] for name in names}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hydra_ensembles"):
            rest = (node.module or "").split(".")[1:]
            found |= {rest[0]} if rest else {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.name))
def test_rooms_import_only_what_they_may(path: Path) -> None:
    room = room_of(path)
    if room in FREE:
        return
    assert room in MAY_IMPORT, f"{room} is a new room: add it here and to docs/architecture.md"
    extra = imported_rooms(path) - MAY_IMPORT[room] - {room}
    assert not extra, f"{path.relative_to(SOURCE)} imports {sorted(extra)}"


def test_nobody_imports_the_command_line() -> None:
    for path in SOURCE.rglob("*.py"):
        if room_of(path) != "cli":
            assert "cli" not in imported_rooms(path), path


def test_importing_is_light() -> None:
    heavy = ("transformers", "timm", "matplotlib", "open_clip", "sklearn", "torchmetrics", "typer")
    code = f"import sys, hydra_ensembles; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_importing_every_core_room_is_light() -> None:
    heavy = ("transformers", "timm", "matplotlib", "open_clip")
    code = (
        "import sys, hydra_ensembles as h; "
        "[getattr(h, n) for n in ('fuse', 'gate', 'HeadMask', 'explain', 'cost', 'verify')]; "
        f"print([m for m in {heavy!r} if m in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"


def test_every_public_name_exists() -> None:
    import hydra_ensembles

    for name in hydra_ensembles.__all__:
        assert getattr(hydra_ensembles, name) is not None
    assert set(hydra_ensembles.__all__) <= set(dir(hydra_ensembles))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hydra_ensembles.nothing  # noqa: B018


def test_no_submodule_hides_a_public_function() -> None:
    import hydra_ensembles

    modules = {path.stem for path in SOURCE.iterdir() if path.name != "__init__.py"}
    assert not modules & set(hydra_ensembles.__all__)


def test_no_pickle_is_loaded() -> None:
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", "") or ""]
                assert not {"pickle", "joblib", "dill", "shelve"} & set(names), path
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "torch.load",
                "pickle.load",
            ):
                raise AssertionError(f"{path} loads a pickle")
