"""What is installed: wheels that share no file, dependencies that are explained, one version."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import hydra_ensembles

ROOT = Path(__file__).parents[1]
PROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
BUILD = "import sys; from hatchling.build import build_wheel; print(build_wheel(sys.argv[1]))"


def extras() -> dict[str, list[str]]:
    table = PROJECT.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    return {
        name: ast.literal_eval(values)
        for name, values in re.findall(r"^(\w+) = (\[.*?\])$", table, flags=re.M | re.S)
    }


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[>\[]", text)[0].lower().replace("_", "-") for text in requirements}


def dependencies() -> set[str]:
    found = re.search(r"^dependencies = (\[.*?^\])$", PROJECT, flags=re.M | re.S)
    assert found is not None
    return names(ast.literal_eval(found[1]))


def wheel(project: Path, folder: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)],
        cwd=project,
        capture_output=True,
        text=True,
        check=True,
    )
    return folder / done.stdout.split()[-1]


def test_both_wheels_can_be_installed_in_either_order(tmp_path: Path) -> None:
    pytest.importorskip("hatchling")
    wheels = [wheel(ROOT, tmp_path), wheel(ROOT / "packaging" / "runtime", tmp_path)]
    whole, runtime = (set(zipfile.ZipFile(file).namelist()) for file in wheels)
    assert "hydra_ensembles/__init__.py" in whole and not whole & runtime
    assert "hydra_ensembles/report/templates/page.html" in whole
    zipfile.ZipFile(wheels[1]).extractall(tmp_path / "site")
    code = (
        "import sys, hydra_ensembles_runtime as r; print(r.load.__name__, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path / "site",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["load", "False"]


def test_the_small_install_is_small() -> None:
    lazy = {"scikit-learn", "accelerate", "matplotlib", "jinja2", "peft", "pandas", "transformers"}
    assert not dependencies() & lazy
    assert {"accelerate", "peft"} <= names(extras()["train"])
    assert {"matplotlib", "jinja2", "pillow"} <= names(extras()["report"])
    assert extras()["demo"][0] == "hydra-ensembles[train,report]"


def test_the_checks_name_tests_that_exist() -> None:
    files = [*sorted((ROOT / ".ci").iterdir()), ROOT / ".github" / "workflows" / "ci.yml"]
    named = {
        path for file in files for path in re.findall(r"tests/[\w/.]*\w", file.read_text("utf-8"))
    }
    assert len(named) > 8 and not [path for path in named if not (ROOT / path).exists()]


def test_extras_in_messages_exist_and_bring_the_package() -> None:
    asked = re.compile(r'imported\(\s*"([\w.]+)",.*?"(\w+)"\s*\)')
    pip_names = {
        "sklearn": "scikit-learn",
        "laplace": "laplace-torch",
        "open_clip": "open-clip-torch",
    }
    pip_names |= {"torch_uncertainty": "torch-uncertainty", "mlflow": "mlflow-skinny"}
    pip_names |= {"markupsafe": "jinja2", "hydra_ensembles": "hydra-ensembles"}
    found = 0
    for file in (ROOT / "src").rglob("*.py"):
        for module, extra in asked.findall(file.read_text(encoding="utf-8")):
            package = module.partition(".")[0]
            brought = names(extras()[extra])
            wanted = pip_names.get(package, package)
            assert wanted in brought or extra == "demo", f"{file.name}: {extra} lacks {wanted}"
            found += 1
    assert found > 15


def test_contributing_says_what_each_dependency_is_for() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("## Dependencies")[2].partition("\n## ")[0]
    rows = set(re.findall(r"^\| `([\w-]+)`", table, flags=re.M))
    users = ("transformers", "timm", "openclip", "train", "report", "demo", "data", "ray")
    wanted = dependencies().union(*(names(extras()[name]) for name in (*users, "serve", "export")))
    assert rows == wanted - {"hydra-ensembles"}


def test_the_version_is_the_same_everywhere() -> None:
    version = hydra_ensembles.__version__
    assert f'\nversion = "{version}"\n' in PROJECT
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    first = re.search(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert first is not None and first[1].startswith(f"{version} (")


@pytest.mark.parametrize(
    ("package", "statement", "extra"),
    [
        ("sklearn", "from hydra_ensembles.data import digits; digits()", "demo"),
        ("matplotlib", "from hydra_ensembles.report.svg import axes; axes(None)", "report"),
        (
            "jinja2",
            "from hydra_ensembles.report.page import write_page as w; w('x', [], title='')",
            "report",
        ),
        (
            "accelerate",
            "from hydra_ensembles.training import accelerator as a; next(a.accelerator('no').gen)",
            "train",
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    package: str, statement: str, extra: str, tmp_path: Path
) -> None:
    code = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == {package!r}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Absent())
from hydra_ensembles.errors import MissingDependencyError
try:
    {statement}
except MissingDependencyError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert f"needs {package}: pip install 'hydra-ensembles[{extra}]'." in done.stdout
