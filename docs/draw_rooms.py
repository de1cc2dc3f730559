"""Draw the rooms of the library and who imports whom: `python docs/draw_rooms.py [--check]`.

Arrows come from the import statements in `src`, also those inside functions. An arrow that
follows from two others is left out. Needs the standard library only.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "hydra_ensembles"
PICTURE = ROOT / "docs" / "assets" / "rooms.svg"

ROOMS = {
    "errors": "what can go wrong",
    "registry": "strings that name things",
    "_records": "files, records, resuming",
    "_tensors": "digests of tensors",
    "_tables": "tables for notebooks and pages",
    "prediction": "the one answer",
    "task_predictions": "the answers of other tasks",
    "prediction_sets": "sets with a guarantee",
    "answer_each": "one bad input never costs others",
    "runtime": "exported, without torch",
    "uncertainty": "scores, calibration, policies",
    "tasks": "what outputs mean",
    "data": "batches, loaders, running models",
    "hosts": "families, probes, one block",
    "heads": "masks, gating, the plan",
    "costs": "counting, budget, frontier",
    "criteria": "how much a head matters",
    "evaluation": "metrics, tables, timing",
    "search": "which heads to keep",
    "fusion": "M members, one model",
    "training": "fine-tuning, distilling",
    "refit": "folding by least squares",
    "builder": "build and replay",
    "methods": "options of build",
    "integrations": "pipelines, callbacks, MLflow",
    "report": "pages and pictures",
    "serving": "export and service",
    "research": "rivals, sweeps, head roles",
    "cli": "commands",
}
"""The rooms in order; each imports only rooms that stand before it."""

LEAVES = (
    "errors",
    "registry",
    "_records",
    "_tensors",
    "_tables",
    "prediction",
    "task_predictions",
    "prediction_sets",
    "answer_each",
)
WIDTH, HEIGHT, GAP, STEP = 208, 46, 22, 92


def modules() -> dict[str, Path]:
    """Return the library's files by module name; a package bears its folder's name."""
    files = {}
    for path in sorted(SOURCE.rglob("*.py")):
        name = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        files[name.removesuffix(".__init__")] = path
    files.pop("__init__")  # the table of public names: it points at every room
    return files


def imports(name: str, files: dict[str, Path], *, types: bool = True) -> set[str]:
    """Return the modules that a module imports: at the top, inside functions, for types only."""
    path = files[name]
    package = list(path.relative_to(SOURCE).parts[:-1])
    targets = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    if not types:
        tree.body = [node for node in tree.body if not _is_for_types(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets |= {a.name for a in node.names if a.name.startswith("hydra_ensembles.")}
        elif isinstance(node, ast.ImportFrom):
            module = node.module.split(".") if node.module else []
            if node.level:
                module = ["hydra_ensembles", *package[: len(package) + 1 - node.level], *module]
            if module[:1] == ["hydra_ensembles"]:
                targets |= {".".join([*module, alias.name]) for alias in node.names}
    names = (target.removeprefix("hydra_ensembles.") for target in targets)
    known = (n if n in files else n.rpartition(".")[0] for n in names)
    return {n for n in known if n in files and n != name}


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def graph(*, types: bool = True) -> dict[str, set[str]]:
    """Return what every module imports; without `types`, only what runs."""
    files = modules()
    return {name: imports(name, files, types=types) for name in files}


def cycles(arrows: dict[str, set[str]]) -> list[list[str]]:
    """Return every group of modules that import each other, however far around."""

    def reach(start: str) -> set[str]:
        seen: set[str] = set()
        todo = [start]
        while todo:
            for target in arrows[todo.pop()] - seen:
                seen.add(target)
                todo.append(target)
        return seen

    reached = {name: reach(name) for name in arrows}
    groups = {
        tuple(sorted({b for b in reached[a] if a in reached[b]} | {a}))
        for a in arrows
        if a in reached[a]
    }
    return [list(group) for group in sorted(groups)]


def room_arrows() -> dict[str, set[str]]:
    """Return which rooms a room imports, leaves together as one."""
    arrows: dict[str, set[str]] = {}
    for name, targets in graph().items():
        rooms = {_box(target) for target in targets} - {_box(name)}
        arrows.setdefault(_box(name), set()).update(rooms)
    return arrows


def _box(name: str) -> str:
    room = name.split(".")[0]
    return "leaves" if room in LEAVES else room


def without_implied(arrows: dict[str, set[str]]) -> dict[str, set[str]]:
    """Leave out the arrows that follow from others (there is no cycle)."""
    depth: dict[str, set[str]] = {}

    def reach(room: str) -> set[str]:
        if room not in depth:
            depth[room] = set(arrows[room]).union(*(reach(r) for r in arrows[room]))
        return depth[room]

    return {
        room: {t for t in targets if not any(t in reach(other) for other in targets - {t})}
        for room, targets in arrows.items()
    }


def draw() -> str:
    """Return the picture as SVG."""
    arrows = without_implied(room_arrows())
    order = ["leaves", *(room for room in ROOMS if room in arrows and room != "leaves")]
    level: dict[str, int] = {}
    for room in order:  # a room stands one floor above the highest room that it imports
        level[room] = 1 + max((level[target] for target in arrows[room]), default=-1)
    floors = [[r for r in order if level[r] == n] for n in range(max(level.values()) + 1)]
    across = max(map(len, floors))
    width = across * (WIDTH + GAP) + GAP
    height = len(floors) * STEP + GAP
    place: dict[str, tuple[float, float]] = {}
    for n, floor in enumerate(floors):
        # below the middle of what it imports, so that few arrows cross
        floor.sort(
            key=lambda room: sum(place[t][0] for t in arrows[room]) / (len(arrows[room]) or 1)
        )
        left = (width - len(floor) * (WIDTH + GAP) + GAP) / 2
        for i, room in enumerate(floor):
            place[room] = (left + i * (WIDTH + GAP), n * STEP + GAP)
    lines, boxes = [], []
    for room in order:
        x, y = place[room]
        targets = sorted(arrows[room], key=place.__getitem__)
        for number, target in enumerate(targets):
            tx, ty = place[target]
            users = sorted((r for r in order if target in arrows[r]), key=place.__getitem__)
            x1 = x + WIDTH * (number + 1) / (len(targets) + 1)
            x2 = tx + WIDTH * (users.index(room) + 1) / (len(users) + 1)
            y1, y2 = y, ty + HEIGHT + 5
            # straight up past a floor in between: around the box that stands there
            above = level[room] - level[target] > 1 and abs(x1 - x2) < WIDTH / 4
            bend = -0.8 * WIDTH if above else 0
            lines.append(
                f'<path d="M{x1:.0f} {y1:.0f}C{x1 + bend:.0f} {y1 - 40:.0f} '
                f'{x2 + bend:.0f} {y2 + 40:.0f} {x2:.0f} {y2:.0f}"/>'
            )
        note = ", ".join(LEAVES) if room == "leaves" else ROOMS[room]
        boxes.append(
            f'<g><rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}" rx="8"/>'
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 20:.0f}" class="room">{escape(room)}</text>'
            f'<text x="{x + WIDTH / 2:.0f}" y="{y + 37:.0f}">{escape(note)}</text></g>'
        )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            'role="img" aria-label="Rooms of hydra-ensembles; arrows point at what is imported">',
            "<style>rect{fill:#eef2f7;stroke:#7488a1}path{fill:none;stroke:#7488a1;"
            "stroke-width:1.3;marker-end:url(#tip)}text{font:12px sans-serif;text-anchor:middle;"
            "fill:#3c4a5c}.room{font-weight:600;font-size:14px;fill:#16202c}</style>",
            f'<rect width="{width}" height="{height}" style="fill:#fff;stroke:none"/>',
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" '
            'style="fill:#7488a1;stroke:none"/></marker></defs>',
            *lines,
            *boxes,
            "</svg>\n",
        ]
    )


def main() -> int:
    """Write the picture, or with `--check` say whether it is up to date."""
    text = draw()
    if "--check" in sys.argv[1:]:
        same = PICTURE.exists() and PICTURE.read_text(encoding="utf-8") == text
        sys.stdout.write("up to date\n" if same else "docs/assets/rooms.svg is out of date\n")
        return int(not same)
    PICTURE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
