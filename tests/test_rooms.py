"""The rooms of the library import only what the architecture allows, and importing stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "hydra_ensembles"
ORDER = (
    "errors",
    "registry",
    "_records",
    "uncertainty",
    "data",
    "hosts",
    "heads",
    "costs",
    "criteria",
    "search",
    "fusion",
    "training",
    "evaluation",
    "builder",
    "baselines",
    "report",
    "serving",
    "cli",
)
"""The rooms; each imports only rooms that stand before it."""


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
def test_rooms_import_only_rooms_before_them(path: Path) -> None:
    room = room_of(path)
    if room == "__init__":
        return
    assert room in ORDER, f"{room} is a new room: add it here and to docs/architecture.md"
    before = set(ORDER[: ORDER.index(room) + 1]) | ({"__version__"} if room == "cli" else set())
    extra = imported_rooms(path) - before
    assert not extra, f"{path.relative_to(SOURCE)} imports {sorted(extra)}"


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
