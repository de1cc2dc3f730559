"""Write the tutorials from the scripts in examples: `python docs/make_tutorials.py [--check]`.

The page of a script is its docstring as prose, and its functions one by one: what a function is for
as text, its code below. So a page reads on a code host as it does on the site.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TITLES = {"vit": "Vision: ViT", "bert": "Text: BERT", "clip": "Zero-shot: CLIP"}


def page(name: str) -> str:
    """Return the page of a script."""
    path = f"examples/{name}.py"
    source = (ROOT / path).read_text(encoding="utf-8")
    tree = ast.parse(source)
    lines = source.splitlines()
    words = (ast.get_docstring(tree) or "").removeprefix("Tutorial: ").split("\n\n")
    prose = [text for text in words if f"python {path}" not in text]
    first = prose[0][0].upper() + prose[0][1:]
    run = f"Run it in a clone of the repository: `python {path}`. The tests run it too."
    parts = [f"# {TITLES[name]}", first, *prose[1:], run]
    body = tree.body[1:]  # after the docstring
    functions = [node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    start = body[0].lineno
    for node in functions:
        head = _code(lines[start - 1 : node.lineno - 1])
        if head:
            parts.append(head)
        said = (ast.get_docstring(node) or node.name).splitlines()[0]
        parts += [f"## {said.rstrip('.')}", _code(lines[node.lineno - 1 : node.end_lineno])]
        start = (node.end_lineno or 0) + 1
    rest = _code(lines[start - 1 :])
    return "\n\n".join([*parts, rest] if rest else parts) + "\n"


def _code(lines: list[str]) -> str:
    text = "\n".join(lines).strip("\n")
    return f"```python\n{text}\n```" if text else ""


def main() -> None:
    """Write the pages, or check that they are as the scripts are."""
    stale = []
    for name in TITLES:
        path = ROOT / "docs" / "tutorials" / f"{name}.md"
        if path.read_text(encoding="utf-8") != page(name):
            stale.append(path.name)
            if "--check" not in sys.argv:
                path.write_text(page(name), encoding="utf-8")
    if stale and "--check" in sys.argv:
        sys.exit(f"{', '.join(stale)}: run python docs/make_tutorials.py")
    sys.stdout.write(f"written: {', '.join(stale)}\n" if stale else "up to date\n")


if __name__ == "__main__":
    main()
