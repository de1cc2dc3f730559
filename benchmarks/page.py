"""Write docs/results/cost.md from the JSON files in benchmarks/results.

python benchmarks/page.py
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import shapes

from hydra_ensembles._records import write_whole
from hydra_ensembles.evaluation.benchmark_results import (
    BenchmarkResult,
    markdown_table,
    paired_ratio,
)

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "results" / "cost.md"
PICTURES = "../../benchmarks/results"
SHAPE_NAMES = {
    "vit-s": "ViT-S/16, a third of the heads each",
    "vit-b": "ViT-B/16, a third of the heads each",
    "deit-tiny": "DeiT-tiny/16, one head of three each",
    "minilm": "MiniLM-L6 (64 tokens), half of the heads each",
}
INTRODUCTION = """# What an ensemble costs, counted and measured

*Made by `python benchmarks/page.py` from `benchmarks/results/*.json`, which
`sh benchmarks/run_all.sh` measures; do not edit by hand. How costs come about:
[cost](../concepts/cost.md).*

Every ratio is the median of **paired** ratios to the first row's model, round by round in one
interleaved run, with a 95 % bootstrap interval over rounds; "counted" is the same comparison in
multiply-adds, which needs no machine of ours. M = 3 members. Hosts have random weights: speed does
not depend on them. `single readout` is the single model whose last block computes only what the
classifier reads; `hydra last k` branches at the last k blocks; `hydra first` branches at the first
block, as in the paper.
"""

READING = """*yes*: the whole interval is within the limit; *median alone*: the median is, but the
interval reaches over it; *no, within noise*: the median is over it, but the interval reaches under;
*no*: all of the interval is over. `loop` runs its last block for all tokens, so its like is
`hydra first all tokens`.
"""


def load() -> dict[str, BenchmarkResult]:
    """Read all benchmark results by file name."""
    found = {
        path.stem: BenchmarkResult.from_json(path)
        for pattern in ("latency-*", "fused-vs-loop-*", "growth-members-*", "bfloat16-*")
        for path in RESULTS.glob(f"{pattern}.json")
    }
    return dict(sorted(found.items(), key=lambda pair: (pair[1].batch_sizes[0], pair[0])))


def table(results: list[BenchmarkResult]) -> str:
    """Put the batch sizes of one set side by side: one row a model."""
    names = list(dict.fromkeys(name for result in results for name in result.names))
    sizes = [(result, size) for result in results for size in result.batch_sizes]
    head = ["model", "counted"]
    for _, size in sizes:
        head += [f"batch {size}", "samples/s", "MiB"]
    rows = [head]
    for name in names:
        counted = next((r.counted(name, s) for r, s in sizes if name in r.names), None)
        row = [name, "" if counted is None else f"{counted:.3f}"]
        for result, size in sizes:
            if name in result.names:
                timing = result[name, size]
                row += [
                    str(result.ratio(name, size)),
                    f"{timing.throughput:.1f}",
                    f"{timing.peak_bytes / 2**20:.0f}",
                ]
            else:
                row += ["", "", ""]
        rows.append(row)
    return markdown_table(rows)


def notes(results: list[BenchmarkResult]) -> str:
    """Say how it was run and what did not run."""
    facts = results[0].settings
    rounds = ", ".join(
        f"{len(result.timings[0].seconds)} rounds at batch {size}"
        for result in results
        for size in result.batch_sizes
    )
    text = f"{facts['dtype']}, {facts['threads']} threads, torch {facts['torch']}; {rounds}."
    for name, reason in facts.get("not run", {}).items():
        text += f" Not run: {name} ({reason})."
    return text


def checks(results: dict[str, BenchmarkResult]) -> list[list[str]]:
    """Compare what was measured with the goals, one row each."""
    rows = [["goal", "shape", "batch", "measured [95 %]", "limit", "reached"]]

    def row(goal: str, shape: str, size: int, ratio: tuple[float, ...], limit: float) -> None:
        value, low, high = ratio
        if high <= limit:
            reached = "yes"
        elif value <= limit:
            reached = "median alone"
        else:
            reached = "no, within noise" if low <= limit else "no"
        shown = f"{value:.3f} [{low:.3f}, {high:.3f}]"
        rows.append([goal, shape, str(size), shown, f"{limit:.3f}", reached])

    branches = {"vit-s": "hydra last 2", "vit-b": "hydra last 2"}
    for shape in shapes.SHAPES:
        name = branches.get(shape, "hydra last 1")
        for result in (r for n, r in results.items() if n.startswith(f"latency-{shape}-core")):
            for size in result.batch_sizes:
                ratio = result.ratio(name, size)
                if shape in branches:
                    row(f"{name} <= 1.07 x single", shape, size, ratio, 1.07)
                    counted = result.counted(name, size)
                    scaled = tuple(part / counted for part in ratio)
                    row(f"{name} <= 1.08 x counted", shape, size, scaled, 1.08)
                else:
                    row(f"{name} <= 1.0 x single", shape, size, ratio, 1.0)
                    if shape == "deit-tiny":  # its last two blocks stay on the table too
                        row("hydra last 2", shape, size, result.ratio("hydra last 2", size), 1.0)
                against = result.ratio(name, size, to="single readout")
                rows.append([f"{name} / single readout", shape, str(size), str(against), "", ""])
        for result in (r for n, r in results.items() if n.startswith(f"latency-{shape}-rivals")):
            for size in result.batch_sizes:
                for name in ("hydra first", "hydra first all tokens"):
                    if name in result.names:
                        counted = result.counted(name, size)
                        scaled = tuple(part / counted for part in result.ratio(name, size))
                        row(f"{name} <= 1.1 x counted", shape, size, scaled, 1.1)
        loop = results.get(f"fused-vs-loop-{shape}")
        for size in loop.batch_sizes if loop else ():
            for name in ("hydra first", "hydra first all tokens"):
                ratio = loop.ratio(name, size)  # type: ignore[union-attr]
                row(f"{name} <= 1.02 x loop", shape, size, ratio, 1.02)
        growth = results.get(f"growth-members-{shape}")
        if growth:
            for what, limit in (("measured", 0.03), ("counted", 0.005)):
                members = growth.names[1:]
                values = [
                    growth.ratio(m, 1).value if what == "measured" else growth.counted(m, 1)
                    for m in members
                ]
                steps = [after - before for before, after in itertools.pairwise(values)]
                mean = sum(steps) / len(steps)
                if what == "measured":  # by round, as the ratios are, so that it has an interval
                    first, last, base = (
                        growth[name, 1].seconds
                        for name in (members[0], members[-1], growth.names[0])
                    )
                    each_round = [(b - a) / len(steps) for a, b in zip(first, last, strict=True)]
                    goal = f"each further member, measured, mean of M = 1 to {members[-1]}"
                    row(goal, shape, 1, paired_ratio(each_round, base), limit)
                kinds = [("largest", max(steps))]
                for kind, each in kinds if what == "measured" else [("mean", mean), *kinds]:
                    done = "yes" if each <= limit else "no"
                    goal = f"each further member, {what}, {kind} of M = 1 to {members[-1]}"
                    rows.append([goal, shape, "1", f"{each:+.4f}", f"{limit}", done])
    return rows


def page() -> str:
    """Return the page."""
    results = load()
    parts = [INTRODUCTION]
    parts += ["## Goals\n", READING, markdown_table(checks(results)), ""]
    for shape in shapes.SHAPES:
        parts.append(f"## {SHAPE_NAMES[shape]}\n")
        for which, title in (("core", "Branch layers"), ("rivals", "Against the rivals")):
            found = [
                result
                for name, result in results.items()
                if name.startswith(f"latency-{shape}-{which}")
            ]
            if found:
                parts += [f"### {title}\n", table(found), "", notes(found), ""]
                parts += pictures(f"latency-{shape}-{which}-b*")
        loop = results.get(f"fused-vs-loop-{shape}")
        if loop:
            parts += ["### Fused against its members one by one\n", table([loop]), ""]
            parts += [notes([loop]), ""]
    draw_growth(results)
    parts += ["## Growth\n", *pictures("growth-*")]
    for name, result in results.items():
        if name.startswith("bfloat16"):
            parts += ["## bfloat16\n", table([result]), "", notes([result])]
            parts.append(
                "This CPU has no fast bfloat16 arithmetic, so the figures tell ratios alone; the "
                "paper's 1.07 x is bfloat16 on a GPU.\n"
            )
    return "\n".join(parts)


def draw_growth(results: dict[str, BenchmarkResult]) -> None:
    """Draw the growth with members and with tokens."""
    from hydra_ensembles.report.cost_figures import plot_growth
    from hydra_ensembles.report.style import save

    for name, result in results.items():
        if name.startswith("growth-members"):
            save(plot_growth(result), RESULTS / f"{name}.png")
    tokens = RESULTS / "growth-tokens-minilm.json"
    if tokens.exists():
        payload = json.loads(tokens.read_text(encoding="utf-8"))
        save(plot_growth(payload), tokens.with_suffix(".png"))


def pictures(pattern: str) -> list[str]:
    """Link the pictures of a pattern."""
    found = sorted(RESULTS.glob(f"{pattern}.png"))
    return [f"![{path.stem}]({PICTURES}/{path.name})\n" for path in found]


def main() -> None:
    """Write the page."""
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    write_whole(PAGE, page().rstrip() + "\n")
    print(f"wrote docs/results/{PAGE.name}")


if __name__ == "__main__":
    main()
