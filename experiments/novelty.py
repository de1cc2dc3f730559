"""Novelty against other detectors on the same features: `docs/results/novelty.md`.

    python experiments/novelty.py features imagenet --data DATA --hosts HOSTS --cache CACHE
    python experiments/novelty.py table imagenet --cache CACHE
    python experiments/novelty.py page

`features` runs a host once over all sets of a task (imagenet 10, cifar10 4, text 4 minutes of one
core); `table` fits every detector on five draws of known data and writes
`docs/results/novelty-TASK.json`; `page` writes the page and its picture from those records.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from lab import known
from lab.known_sets import MAKERS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("step", choices=("features", "table", "page"))
    parser.add_argument("task", nargs="?", choices=tuple(MAKERS))
    parser.add_argument("--data", type=Path)
    parser.add_argument("--hosts", type=Path)
    parser.add_argument("--cache", type=Path, default=os.environ.get("HYDRA_CACHE"))
    parser.add_argument("--seed", type=int, default=0, help="of the host")
    parser.add_argument("--only", nargs="*", default=(), help="names of sets")
    parser.add_argument("--keep-rivals", action="store_true", help="table: only novelty anew")
    args = parser.parse_args()
    if args.step == "page":
        from lab.known_page import write_page

        return write_page()
    if args.task is None or args.cache is None:
        parser.error("name a task, and --cache (or HYDRA_CACHE)")
    cache = Path(args.cache)
    if args.step == "features":
        return known.keep_features(
            args.task,
            data=args.data,
            hosts=args.hosts,
            cache=cache,
            seed=args.seed,
            only=args.only,
        )
    from lab.known_table import write_table

    return write_table(cache, args.task, others=not args.keep_rivals)


if __name__ == "__main__":
    main()
