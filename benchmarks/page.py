"""Write docs/results/cost.md, its picture and cost.csv from the JSON files in benchmarks/results.

    python benchmarks/page.py
    python benchmarks/page.py --print gpu    # the tables of benchmarks/results/gpu, on the screen

Prose stands here, figures come from the files.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra_ensembles._records import write_whole

RESULTS = Path(__file__).parent / "results"
FOLDER = Path(__file__).parents[1] / "docs" / "results"
SHAPES = {"vit-s": "ViT-S", "vit-b": "ViT-B", "deit-tiny": "DeiT-tiny", "minilm": "MiniLM"}
PRINTED = {**SHAPES, "smoke": "small ViT"}
MODES = [(dtype, mode) for dtype in ("float32", "bfloat16") for mode in ("eager", "compiled")]
SHOWN = (
    *("single readout", "hydra last 1", "hydra last 2", "hydra last 3"),
    *("hydra first", "loop", "deep ensemble", "mc dropout", "batch ensemble", "packed ensemble"),
)
COLUMNS = (
    *(("vit-s", "counted"), ("vit-s", 1), ("vit-s", 8), ("vit-s", 32)),
    *(("vit-b", 1), ("deit-tiny", 1), ("minilm", 1)),
)
HEAD = """# What an ensemble costs, counted and measured

How close does measured time come to counted multiply-adds, and what do other ensembles cost on
the same machine?

## Setup

- Ratios to the plain single model: the median of paired ratios, round by round in one interleaved
  run.
- M = 3 members; a third of the heads each (ViT-S/16, ViT-B/16, DeiT-tiny/16), half of them
  (MiniLM-L6, 64 tokens). Random weights: speed does not depend on them.
- `single readout` is one model whose last block computes only what the classifier reads; `hydra
  last k` branches at the last k blocks, `hydra first` at the first, as in the paper; `loop` runs
  members one by one.
- float32, 2 threads, a shared 2-core CPU: intervals (95 %, over rounds) are often ± 0.05 to 0.1.

## Figures
"""
SAYS = """## What it says

- **Branching at the last two blocks costs 1.05 to 1.07 on ViT-S and 1.01 to 1.05 on ViT-B**, at
  1.03 and 1.04 counted; all intervals hold the counted ratio. Against the single model with the
  readout-only last block the same is 1.06 to 1.13.
- **Branching at the last block is free**: 0.95 to 0.98 on ViT-S, 0.87 to 0.96 on MiniLM.
- **Small models show their operators, not their arithmetic**: DeiT-tiny's last two blocks take
  1.10 and 1.15 at batch 1 and 8 (1.02 counted), and 1.00 at batch 32.
- **Branching at the first block, as in the paper, costs two models here** (1.89 to 1.99 on the
  ViTs; 2.0 counted): the paper's 1.07 x is a latency in
  bfloat16 whose hardware, batch and load are not published, not arithmetic.
- **Fused members beat the same members one by one**: 0.81 and 0.64 of the loop's time at batch 1
  (DeiT-tiny, MiniLM), level at batch 8 on DeiT-tiny.
- At batch 1 Deep Ensembles cost 2.6 to 3.2, MC dropout 2.3 to 3.3, BatchEnsemble 2.9 to 4.3,
  `torch.func.vmap` over stacked members 3.3 to 5.5. `packed ensemble` is a narrower network
  trained from scratch.
- **Each further member costs next to nothing**: -0.01 [-0.04, +0.01] of a model on ViT-S and
  0.003 on MiniLM in the mean of M = 1 to 8 (counted: below 0.005).

**None of this was measured on a GPU.** `sh benchmarks/gpu.sh` measures all of it on CUDA, in
float32 and bfloat16, eager and compiled, and prints this page's table for each; it has been tried
on a CPU only, with a small model.

`sh benchmarks/run_all.sh && python benchmarks/page.py` · all figures: [cost.csv](cost.csv)
"""


def rows(folder: Path = RESULTS, suffix: str = "") -> list[dict[str, Any]]:
    """Return every model and batch size of every latency file, its ratio and interval."""
    found = []
    for shape in PRINTED:
        for kind in (f"latency-{shape}-*", f"fused-vs-loop-{shape}", f"growth-members-{shape}"):
            for file in sorted(folder.glob(f"{kind}{suffix}.json")):
                for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
                    found.append({"file": file.stem, "shape": shape, **row})
    return found


def cells(found: list[dict[str, Any]]) -> dict[tuple[str, str, Any], str]:
    """Return the shown ratios by model, shape and column."""
    result: dict[tuple[str, str, Any], str] = {}
    for row in found:
        if row["file"].startswith("latency"):
            key = (row["name"], row["shape"])
            result[(*key, "counted")] = f"{row['counted_ratio']:.2f}"
            result[(*key, row["batch_size"])] = f"{row['ratio']['value']:.2f}"
    return result


def table(
    found: list[dict[str, Any]], columns: Sequence[tuple[str, Any]], names: Sequence[str]
) -> list[str]:
    """Return one table: models by name, ratios by shape and size of batch."""
    known = cells(found)
    heads = [
        f"{PRINTED[shape]} {'counted' if column == 'counted' else f'b{column}'}"
        for shape, column in columns
    ]
    lines = [f"|  | {' | '.join(heads)} |", "|---|" + "---:|" * len(heads)]
    for name in names:
        shown = [known.get((name, *column), "–") for column in columns]
        lines.append(f"| {name} | {' | '.join(shown)} |")
    return lines


def printed(folder: Path) -> str:
    """Return a table per precision and mode of what `gpu.sh` measured, and its other ratios."""
    lines = []
    for dtype, mode in MODES:
        found = rows(folder, f"-{dtype}-{mode}")
        if not found:
            continue
        ratios = [row for row in found if row["file"].startswith("latency")]
        shapes = list(dict.fromkeys(row["shape"] for row in ratios))
        sizes = ["counted", *sorted({row["batch_size"] for row in ratios})]
        names = list(dict.fromkeys(row["name"] for row in ratios if row["ratio"]["value"] != 1))
        columns = [(shape, size) for shape in shapes for size in sizes]
        lines += [f"{dtype}, {mode}: time relative to the plain model", ""]
        lines += [*table(found, columns, names), ""]
        for row in found:
            if not row["file"].startswith("latency"):
                low, high = row["ratio"]["low"], row["ratio"]["high"]
                value = f"{row['ratio']['value']:.2f} [{low:.2f}, {high:.2f}]"
                lines.append(f"{row['file']}, {row['name']}, batch {row['batch_size']}: {value}")
        lines.append("")
    return "\n".join(lines)


def picture(found: list[dict[str, Any]]) -> None:
    """Draw measured against counted ratios, one dot per model, shape and batch size."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4.6))
    for place, (shape, title) in enumerate(SHAPES.items()):
        own = [
            row
            for row in found
            if row["shape"] == shape and row["file"].startswith("latency") and row["name"] in SHOWN
        ]
        for marker, ours in (("o", True), ("x", False)):
            some = [row for row in own if row["name"].startswith(("hydra", "single")) == ours]
            axis.plot(
                [row["counted_ratio"] for row in some],
                [row["ratio"]["value"] for row in some],
                marker,
                color=f"C{place}",
                label=title if ours else None,
                markersize=5,
            )
    axis.plot([0.3, 3.2], [0.3, 3.2], color="#999", linewidth=0.9)
    axis.set_xlabel("counted multiply-adds, against one model")
    axis.set_ylabel("measured time, against one model")
    axis.set_title("Dots: one model and Hydra; crosses: loop and rivals; line: equal", fontsize=9)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(FOLDER / "cost.png", dpi=80, metadata={"Software": ""})
    plt.close(figure)


def write_csv(found: list[dict[str, Any]]) -> None:
    """Write all ratios with their intervals."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["measurement", "model", "batch", "counted", "ratio", "low", "high"])
    for row in found:
        ratio = row["ratio"]
        span = [f"{ratio[key]:.3f}" for key in ("value", "low", "high")]
        counted = "" if row["counted_ratio"] is None else f"{row['counted_ratio']:.3f}"
        writer.writerow([row["file"], row["name"], row["batch_size"], counted, *span])
    write_whole(FOLDER / "cost.csv", text.getvalue())


def main() -> None:
    """Write page, picture and CSV; or print other results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--print", help="print the tables of a folder below benchmarks/results")
    other = parser.parse_args().print
    if other is not None:
        text = printed(RESULTS / other)
        if not text:
            parser.exit(1, f"No results in {RESULTS / other}: run sh benchmarks/gpu.sh.\n")
        print(text)
        return
    found = rows()
    write_csv(found)
    picture(found)
    caption = "Measured time against counted multiply-adds"
    lines = [HEAD, *table(found, COLUMNS, SHOWN), "", f"![{caption}](cost.png)", "", SAYS]
    write_whole(FOLDER / "cost.md", "\n".join(lines))
    print("wrote docs/results/cost.md")


if __name__ == "__main__":
    main()
