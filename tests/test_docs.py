"""Pages name things that exist: links, menu entries, public names; tables come from files."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import re
import sys
import types
from pathlib import Path

import pytest
import yaml

from tests.loose_files import load

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_links_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)} links to {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
        if not target.startswith(("http://", "https://", "mailto:"))
        and not (page.parent / target).exists()
    ]
    assert len(PAGES) > 20 and not broken, "\n".join(broken)


def test_the_menu_and_the_snippets_exist() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for entry in re.findall(r": ([\w/-]+\.md)$", text, flags=re.M):
        assert (ROOT / "docs" / entry).is_file(), entry
    assert yaml.safe_load(text)["theme"]["name"] == "material"
    for page in PAGES:
        for snippet in re.findall(r'--8<-- "([^"]+)"', page.read_text(encoding="utf-8")):
            assert (ROOT / snippet).is_file(), snippet


def test_tutorials_hold_the_scripts_that_are_run() -> None:
    make = load("docs/make_tutorials.py")
    for name in make.TITLES:
        text = (ROOT / "docs" / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
        assert text == make.page(name), "run: python docs/make_tutorials.py"
        assert "--8<--" not in text and text.count("```python") > 1
        code = "\n".join(re.findall(r"```python\n(.*?)```", text, flags=re.S))
        script = (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8")
        assert set(script.partition('"""\n\n')[2].splitlines()) <= {*code.splitlines(), ""}


REFERENCE = ROOT / "docs" / "reference"
ROOMS = ("data", "evaluation", "integrations", "methods", "research", "runtime", "training")


def entries() -> list[str]:
    pages = (page.read_text(encoding="utf-8") for page in sorted(REFERENCE.glob("*.md")))
    return [path for page in pages for path in re.findall(r"^::: (\S+)$", page, flags=re.M)]


def test_the_reference_names_what_exists_and_once() -> None:
    missing = []
    for path in entries():
        home, _, name = path.rpartition(".")
        named = importlib.util.find_spec(home) and hasattr(importlib.import_module(home), name)
        if not named and importlib.util.find_spec(path) is None:
            missing.append(path)
    assert not missing and len(entries()) == len(set(entries()))


@pytest.mark.parametrize("room", ["", *ROOMS, "uncertainty", "errors"])
def test_every_public_name_has_an_entry(room: str) -> None:
    import hydra_ensembles

    module = importlib.import_module(f"hydra_ensembles.{room}".rstrip("."))
    tree = ast.parse(Path(str(module.__file__)).read_text(encoding="utf-8"))
    names = {  # what a room exports on purpose: from .x import name as name
        alias.asname
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name
    }
    names |= {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    names = set(hydra_ensembles.__all__) if not room else names
    assert names
    told = set(entries())
    here = {name for name in names if f"{module.__name__}.{name}" in told}
    above = {name for name in names if f"hydra_ensembles.{name}" in told}
    assert not names - here - above, "docs/reference has no entry for these"


def test_every_command_of_the_readme_exists() -> None:
    from hydra_ensembles.cli.main import COMMANDS

    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    named = set(re.findall(r"hydra-ensembles ([a-z]+)", text)) - {"developers", "prunes"}
    assert named <= set(COMMANDS), named - set(COMMANDS)


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md", "SECURITY.md"])
def test_files_named_in_pages_exist(page: str) -> None:
    roots = (ROOT, ROOT / "docs", ROOT / "src" / "hydra_ensembles")
    text = (ROOT / page).read_text(encoding="utf-8")
    files = set(re.findall(r"`([\w./]+\.(?:py|md)|[\w./]+/)`", text))
    missing = [file for file in sorted(files) if not any((r / file).exists() for r in roots)]
    assert len(files) > 2 and not missing, f"{page} names {missing}"


def test_the_page_has_every_field_of_an_answer() -> None:
    from hydra_ensembles.prediction import FIELDS

    text = (ROOT / "docs" / "reference" / "fields.md").read_text(encoding="utf-8")
    table = text.partition("| way |")[0]
    assert dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table, flags=re.M)) == FIELDS


HABITS = r"(?<!here )\bis no |\banew\b|\bby itself\b|\bin the place of\b|\bof these\b|\bpromise"
WRITTEN = [page for page in PAGES if page.parent.name in ("concepts", "docs", ROOT.name)]


@pytest.mark.parametrize("page", WRITTEN, ids=lambda p: p.name)
def test_pages_are_plain_english(page: Path) -> None:
    prose = re.sub(r"```.*?```|<!--.*?-->", "", page.read_text(encoding="utf-8"), flags=re.S)
    assert re.findall(HABITS, prose) == []


def test_tables_are_filled_from_files(tmp_path: Path) -> None:
    make = load("docs/make_tables.py")
    folder = tmp_path / "docs" / "results"
    folder.mkdir(parents=True)
    figures = {"novelty": (98.0, 95.0), "msp": (80.0, 95.2), "single + novelty": (97.9, 90.0)}
    draw = {
        row: {family: {"AUROC": value} for family, value in zip("ab", pair, strict=True)}
        for row, pair in figures.items()
    }
    record = {
        "usual": 200,
        "families": {"near": ["b"], "far": ["a"]},
        "detectors": {"50": [], "200": [draw, draw]},
        "rows": list(figures),
        # by rows: which of them each is told above
        "above": {"near": [[2], [2], []], "far": [[1], [], [1]]},
    }
    (folder / "novelty-sst2.json").write_text(json.dumps(record))
    table = make.results_table(tmp_path)
    missing = "– | " * 5
    assert f"| SST-2, MiniLM: near | **95.2** | {missing}90.0 | – | **95.0** |" in table
    assert f"| SST-2, MiniLM: far | 80.0 | {missing}**97.9** | – | **98.0** |" in table
    assert "2 draws" in table
    text = "a\n<!-- table:x -->\nold\n<!-- /table:x -->\nb"
    assert make.fill(text, {"x": "new"}) == text.replace("old", "new")
    with pytest.raises(ValueError, match="0 places"):
        make.fill("nothing here", {"x": "new"})


def test_tables_are_up_to_date() -> None:
    make = load("docs/make_tables.py")
    for name, bodies in make.tables().items():
        text = (ROOT / name).read_text(encoding="utf-8")
        assert make.fill(text, bodies) == text, "run python docs/make_tables.py"


def test_every_record_is_hashed_and_every_page_is_linked() -> None:
    folder = ROOT / "docs" / "results"
    said = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    beside = ("-differences", "-examples", "-validation", "cost")  # of the same runs; of benchmarks
    records = {file.name for file in folder.iterdir() if file.suffix in (".csv", ".json")}
    records = {name for name in records if not any(part in name for part in beside)}
    assert records == set(load("docs/make_tables.py").RECORDS)
    for page in folder.glob("*.md"):
        assert f"](results/{page.name})" in said, page.name
    for text in (
        page.read_text(encoding="utf-8") for page in (*folder.glob("*.md"), ROOT / "docs/claims.md")
    ):
        assert "†" not in text and "not run yet" not in text


def test_the_example_of_a_family_runs_as_written(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from hydra_ensembles.hosts import tiny_vit, transformers_families  # noqa: F401
    from hydra_ensembles.hosts.families import families  # what is registered already stays

    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text[text.index("## Add a model family in 20 lines") :]
    example = re.search(r"```python\n(.*?)```", section, re.S)
    assert example is not None and len(example[1].splitlines()) <= 20
    monkeypatch.setattr(families, "_entries", dict(families._entries))  # it registers one
    exec(example[1], {})
    assert "mine" in families
    said = capsys.readouterr().out
    assert "can be fused, heads can be removed physically" in said and "family    mine" in said


def test_the_example_of_a_task_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    import hydra_ensembles as hydra
    from hydra_ensembles.tasks import tasks
    from tests import zoo
    from tests.fusion.test_fusion import EARLY

    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text[text.index("## Add a task in 30 lines") :]
    example = re.search(r"```python\n(.*?)```", section, re.S)
    assert example is not None and len(example[1].splitlines()) <= 35
    monkeypatch.setattr(tasks, "_entries", dict(tasks._entries))  # it registers one
    module = types.ModuleType("example")  # dataclasses look their module up
    monkeypatch.setitem(sys.modules, "example", module)
    exec(example[1], module.__dict__)
    ensemble = hydra.fuse(zoo._bert(num_labels=1).eval(), EARLY, task="counts")
    batch, counts = zoo.batch("bert"), torch.tensor([0.0, 1.0, 2.0, 5.0])
    rates = ensemble.member_logits(batch).exp()
    torch.testing.assert_close(ensemble.predict(batch).values, rates.mean(1))
    loss = (rates.mean(1)[:, 0] - counts * rates.mean(1)[:, 0].log()).mean()
    torch.testing.assert_close(ensemble(**batch, labels=counts).loss, loss)
