"""Plain English: habits that the source and the pages must not fall back into."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "hydra_ensembles"

HABITS = {
    r"(?<!there )\b(is|are|was|were) no (?!longer|more|less|other|better|worse|\w+er\b)\w+": (
        "'is not a ...', 'has no ...' or 'there is no ...'"
    ),
    r"\banew\b": "'again', or a verb with re-: refit, restart",
    r"\bby (itself|themselves)\b": "'alone', 'only' or 'automatically'",
    r"\bin the place of\b": "'instead of' or 'for'",
    r"\b(say|says|said|saying) nothing to\b": "'has no option ...' or 'is ignored by'",
    r"\bof these[,;:.]|[,;:] of these\b": "name the things, or start a sentence",
    r"\bpromis(e|es|ed|ing)\b": "'guarantee'",
    r"\bpictures?\b": "'image', or 'figure' for what is drawn",
}
"""What we do not write, and what we write instead."""

ALLOWED = {
    ("src/hydra_ensembles/data/image_data.py", "picture"): "a usual name of a column",
}
"""Files that need one of these words, mostly in a quotation, and why."""

ROOMS_TO_DO = [
    *("fusion", "serving", "runtime", "cli", "integrations"),
    *("report", "evaluation", "research"),
]
PAGES_TO_DO = [
    *("CONTRIBUTING.md", "docs/architecture.md", "docs/try.md", "docs/tutorials/index.md"),
    *("docs/concepts/integrations.md", "docs/concepts/novelty.md", "docs/concepts/policy.md"),
    *("docs/concepts/rivals.md", "docs/concepts/serving.md", "docs/concepts/uncertainty.md"),
]
"""Rooms and pages that are not checked yet. These lists only shrink: what has no offence leaves."""


def prose_of_source(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string (docstrings, errors, help) and comment."""
    tree = ast.parse(text)
    inside = {
        part for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (str(getattr(part, "value", "")) for part in node.values)
            fixed = (isinstance(part, ast.Constant) for part in node.values)
            pairs = zip(parts, fixed, strict=True)
            yield node.lineno, "".join(part if given else "{}" for part, given in pairs)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in inside:
            yield node.lineno, node.value
    comment: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comment.append(token.string.lstrip("# "))
            line = token.start[0]
        elif comment and token.type not in (tokenize.NL, tokenize.NEWLINE):
            yield line, " ".join(comment)
            comment = []
    if comment:
        yield line, " ".join(comment)


def prose_of_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield each paragraph of a page with its first line; marks for scripts are not read."""
    text = re.sub(r"<!--.*?-->", "", text)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        yield line, paragraph
        line += paragraph.count("\n")


def offences(path: Path) -> list[tuple[str, str, str]]:
    """Return file, word and message of each offence."""
    prose = prose_of_source if path.suffix == ".py" else prose_of_page
    name = path.relative_to(ROOT).as_posix()
    return [
        (name, match[0].lower(), f"{name}:{line}: {match[0]!r}: write {instead}")
        for line, text in prose(path.read_text(encoding="utf-8"))
        for habit, instead in HABITS.items()
        for match in re.finditer(habit, " ".join(text.split()), flags=re.I)
    ]


def test_source_and_pages_are_in_plain_english() -> None:
    source = [path for path in SOURCE.rglob("*") if path.suffix in (".py", ".html", ".js")]
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    published = ROOT / "docs" / "results"  # records of their time
    pages = [path for path in pages if published not in path.parents]
    assert len(source) > 100 and len(pages) > 20
    found = [offence for path in sorted([*source, *pages]) for offence in offences(path)]
    unused = ALLOWED.keys() - {(name, word) for name, word, _ in found}
    assert not unused, f"Remove from ALLOWED: {sorted(unused)}"
    found = [offence for offence in found if offence[:2] not in ALLOWED]
    to_do = [f"src/hydra_ensembles/{room}/" for room in ROOMS_TO_DO] + PAGES_TO_DO
    bad = [message for name, _, message in found if not name.startswith(tuple(to_do))]
    assert not bad, "\n".join(bad)
    done = [place for place in to_do if not any(name.startswith(place) for name, *_ in found)]
    assert not done, f"Remove from the lists of what is to do: {done}"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        ('raise ValueError(f"{name} is no "\n    "mask")', 1),
        ("x = 1  # start\n# anew", 1),
        ('"""A vector, by\nitself."""', 1),
        ('help = "The promised rate in the place of another"', 2),
        ('"Give one more, of these the last."', 1),
        ('"There is no file; it is no longer read."', 0),
        ("picture = promised = 1", 0),
        ('"Any of these files."', 0),
    ],
)
def test_habits_are_found_over_line_ends_and_not_in_names(code: str, count: int) -> None:
    texts = [" ".join(text.split()) for _, text in prose_of_source(code)]
    assert (
        sum(len(re.findall(habit, text, flags=re.I)) for text in texts for habit in HABITS) == count
    )
