"""Pages name things that exist: links, menu entries, public names; tables come from files."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest
import yaml

from tests.loose_files import load

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_menu_and_the_snippets_exist() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for entry in re.findall(r": ([\w/-]+\.md)$", text, flags=re.M):
        assert (ROOT / "docs" / entry).is_file(), entry
    assert yaml.safe_load(text)["theme"]["name"] == "material"
    for page in PAGES:
        for snippet in re.findall(r'--8<-- "([^"]+)"', page.read_text(encoding="utf-8")):
            assert (ROOT / snippet).is_file(), snippet


def test_the_reference_names_what_exists() -> None:
    text = (ROOT / "docs" / "reference" / "api.md").read_text(encoding="utf-8")
    for path in re.findall(r"^::: (\S+)$", text, flags=re.M):
        home, _, name = path.rpartition(".")
        if importlib.util.find_spec(home) is None or not hasattr(
            importlib.import_module(home), name
        ):
            importlib.import_module(path)  # a module by itself


def test_every_command_of_the_readme_exists() -> None:
    from hydra_ensembles.cli.main import COMMANDS

    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"hydra-ensembles ([a-z]+)", text)) - {"developers"}
    assert named <= set(COMMANDS), named - set(COMMANDS)


def test_tables_are_filled_from_files(tmp_path: Path) -> None:
    make = load("docs/make_tables.py")
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    entry = {
        "table": "results",
        "title": "A task",
        "command": "python x.py",
        "columns": ["", "NLL"],
        "rows": [["single", 0.3], ["hydra", 0.2]],
    }
    (folder / "a.json").write_text(json.dumps({"readme": entry, "other": 1}))
    (folder / "b.json").write_text(json.dumps([1, 2]))
    before = "x\n<!-- table:results -->\nold\n<!-- /table:results -->\ny"
    after = make.fill(before, make.entries(tmp_path))
    assert "| hydra | 0.2 |" in after and "old" not in after and after.endswith("\ny")
    assert "`python x.py`" in after and make.fill(after, make.entries(tmp_path)) == after
    (folder / "a.json").write_text(json.dumps({"readme": {**entry, "rows": [["single"]]}}))
    with pytest.raises(ValueError, match="2 columns"):
        make.fill(before, make.entries(tmp_path))


def test_the_readme_is_up_to_date() -> None:
    make = load("docs/make_tables.py")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert make.fill(text, make.entries()) == text, "run python docs/make_tables.py"
