"""Novelty against other detectors on the same features: `docs/results/novelty.md`.

    python experiments/novelty.py features imagenet --data DATA --hosts HOSTS --cache CACHE
    python experiments/novelty.py table imagenet --cache CACHE
    python experiments/novelty.py page

`features` runs the hosts once over all sets of a task (0, 1 and 2; ImageNet has host 0 only), and
the single student that it distils from them (`--seeds 1`, `--seeds student`: one of them). `table`
fits every detector on five draws of known data and writes
`docs/results/novelty-TASK.json`; `page` writes the page and its picture from those records.
HYDRA_DATA, HYDRA_HOSTS (`work/hosts` unless said) and HYDRA_CACHE (`work/answers`) name folders.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from lab import known, plainly
from lab.known_sets import MAKERS
from run import read_table


def student_of(task: str) -> dict[str, Any]:
    """Return the row of a task's single student."""
    if task not in known.STUDENTS:
        raise SystemExit(f"{task} has one host, so that there is no student of several.")
    rows = read_table(known.STUDENTS[task][0])["rows"]
    return next(row for row in rows if row["name"] == "student")


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("step", choices=("features", "table", "page"))
    parser.add_argument("task", nargs="?", choices=tuple(MAKERS))
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--hosts", type=Path, default=os.environ.get("HYDRA_HOSTS"))
    parser.add_argument("--cache", type=Path, default=os.environ.get("HYDRA_CACHE", "work/answers"))
    parser.add_argument("--seeds", nargs="+", help="of the hosts, or `student`, with features")
    parser.add_argument("--only", nargs="*", default=(), help="names of sets, with features")
    parser.add_argument("--most", type=int, help="examples of a set, with features")
    parser.add_argument("--draws", type=int, help="of known data, with table")
    args = parser.parse_args()
    if args.step != "page" and args.task is None:
        parser.error(f"name a task: {', '.join(MAKERS)}")
    cache = Path(args.cache)
    if args.step == "features":
        every = [*known.SEEDS[args.task], *(["student"] if args.task in known.STUDENTS else [])]
        for seed in args.seeds or every:
            known.keep_features(
                args.task,
                data=args.data,
                hosts=args.hosts,
                cache=cache,
                seed=None if seed == "student" else int(seed),
                student=student_of(args.task) if seed == "student" else None,
                only=args.only,
                most=args.most,
            )
    elif args.step == "table":
        from lab.known_table import write_table

        write_table(cache, args.task, draws=args.draws)
    else:
        from lab.known_page import write_page

        write_page()


if __name__ == "__main__":
    plainly(main)
