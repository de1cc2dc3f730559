"""Bulk prediction by Ray Data while its workers are killed: is every row answered exactly once?

    python benchmarks/ray_faults.py

A small ensemble answers images of digits, Parquet in and out, in a pool of two actors. Three
times one of them gets SIGKILL while parts are half done. The rows are then counted and compared
with those of a run in one process. Another run is killed as a whole, three times, and started
again. `results/ray-faults.json` has the counts.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "ray-faults.json"
KILLS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--rows-per-part", type=int, default=250)
    parser.add_argument("--answer", nargs=3, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.answer:
        answer(*given.answer, given.rows_per_part, ray=True)
        return
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        prepare(root, given.rows)
        answer(root / "ensemble", root / "rows", root / "alone", given.rows_per_part, ray=False)
        record = {
            "rows": given.rows,
            "parts": -(-given.rows // given.rows_per_part),
            "killed_workers": kill_workers(root, given),
            "killed_runs": kill_runs(root, given),
        }
    from hydra_ensembles._records import write_whole

    write_whole(RESULT, json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


def prepare(root: Path, rows: int) -> None:
    """Save an ensemble, and a Parquet file of encoded images."""
    import pyarrow
    import pyarrow.parquet
    import torch
    from PIL import Image

    import hydra_ensembles as hydra
    from hydra_ensembles.data import ImageTransform, digits
    from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig

    host = TinyViT(TinyViTConfig(), seed=1).eval()
    full = hydra.HeadMask.full(host)
    masks = [full.with_layer(3, torch.arange(8) % 3 == member) for member in range(3)]
    ensemble = hydra.fuse(host, masks)
    ensemble.transform = ImageTransform(
        size=16, crop=None, interpolation="bilinear", mean=(0.5,), std=(0.5,)
    )
    data = digits(16, seed=0)
    ensemble.fit_novelty_(data.validation, progress=False)
    ensemble.save_pretrained(root / "ensemble")
    encoded = []
    for batch in data.test:
        for image in batch["pixel_values"]:
            content = io.BytesIO()
            pixels = ((image * 0.5 + 0.5).clamp(0, 1) * 255).round().to(torch.uint8)
            Image.fromarray(pixels[0].numpy()).save(content, "png")
            encoded.append(content.getvalue())
    table = pyarrow.table(
        {
            "id": [f"row {number}" for number in range(rows)],
            "image": [encoded[number % len(encoded)] for number in range(rows)],
        }
    )
    (root / "rows").mkdir()
    pyarrow.parquet.write_table(table, root / "rows" / "rows.parquet", row_group_size=250)


def answer(ensemble: Path, rows: Path, output: Path, rows_per_part: int, *, ray: bool) -> None:
    """Answer the rows."""
    from hydra_ensembles.serving.bulk import predict_files

    predict_files(
        ensemble, [rows], output, rows_per_part=rows_per_part, ray=ray, workers=2, progress=False
    )


def start(root: Path, output: Path, given: argparse.Namespace) -> subprocess.Popen[bytes]:
    """Start a run with Ray in a process group of its own."""
    command = [sys.executable, __file__, "--rows-per-part", str(given.rows_per_part), "--answer"]
    command += [str(root / "ensemble"), str(root / "rows"), str(output)]
    return subprocess.Popen(command, start_new_session=True)


def kill_workers(root: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Kill an actor three times while the run goes on."""
    output = root / "killed-workers"
    run = start(root, output, given)
    killed: list[dict[str, int]] = []
    most = -(-given.rows // given.rows_per_part)
    while run.poll() is None:
        done = len(list(output.glob("rows-*")))
        # spread over the run: after each quarter of the parts
        if len(killed) < KILLS and done >= (len(killed) + 1) * most // (KILLS + 1):
            workers = actors(run.pid)
            if workers:
                os.kill(workers[0], signal.SIGKILL)
                killed.append({"pid": workers[0], "parts_done": done})
        time.sleep(0.05)
    return {"exit_code": run.returncode, "kills": killed, **counted(root, output, given)}


def kill_runs(root: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Kill the whole run, workers and all, when a part of it is done; start it again."""
    output = root / "killed-runs"
    kept = []
    for turn in range(KILLS):
        run = start(root, output, given)
        goal = (turn + 1) * -(-given.rows // given.rows_per_part) // (KILLS + 1)
        while run.poll() is None and len(list(output.glob("rows-*"))) < goal:
            time.sleep(0.05)
        children = descendants(run.pid)
        for process in [run.pid, *children]:
            try:
                os.kill(process, signal.SIGKILL)
            except ProcessLookupError:
                continue
        run.wait()
        kept.append(len(list(output.glob("rows-*"))))
    last = start(root, output, given)
    code = last.wait()
    return {"exit_code": code, "parts_kept_after_kills": kept, **counted(root, output, given)}


def counted(root: Path, output: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Count the rows, and compare the answers with those of one process."""
    rows, alone = read(output), read(root / "alone")
    return {
        "rows": len(rows),
        "distinct_rows": len({row["row"] for row in rows}),
        "every_row_once": [row["row"] for row in rows] == list(range(given.rows)),
        "equal_to_one_process": rows == alone,
        "half_written_files": len(list(output.glob(".*.partial"))),
    }


def read(folder: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet

    files = sorted(folder.glob("rows-*.parquet"))
    rows = [row for file in files for row in pyarrow.parquet.read_table(file).to_pylist()]
    return sorted(rows, key=lambda row: row["row"])


def descendants(pid: int) -> list[int]:
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def actors(pid: int) -> list[int]:
    """Return the processes that run our actors, busiest first; Ray names them by their class."""
    import psutil

    found = []
    for child in descendants(pid):
        try:
            process = psutil.Process(child)
            title = " ".join(process.cmdline())
            if title.startswith("ray::") and "IDLE" not in title:
                found.append((sum(process.cpu_times()[:2]), child))
        except psutil.Error:
            continue
    return [child for _, child in sorted(found, reverse=True)]


if __name__ == "__main__":
    main()
