"""Which heads can go? Sweeps and Proposition 1 on real models; makes docs/results/pruning.md.

    python experiments/pruning.py --data DATA --checkpoint CHECKPOINTS/sst2/seed0 --work WORK

Measures what `docs/results/` does not hold yet (delete a JSON there to measure it anew), resumes
mask by mask from the work folder, then draws the pictures and writes the page.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pruning_measure import SETUPS, measure

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--checkpoint", type=Path, help="MiniLM fine-tuned on SST-2, a folder")
    parser.add_argument("--work", type=Path, default=Path("work/pruning"), help="to resume from")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    parser.add_argument("--only", nargs="+", choices=SETUPS, default=list(SETUPS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--page-only", action="store_true", help="draw from the JSON that is there")
    args = parser.parse_args()
    if not args.page_only:
        if args.data is None:
            parser.error("--data (or HYDRA_DATA) is needed: the folder of real models and data")
        if "sst2" in args.only and args.checkpoint is None:
            parser.error("--checkpoint is needed: the folder of MiniLM fine-tuned on SST-2")
        args.data = Path(args.data)
        measure(args)
    from pruning_page import write_page

    write_page(args.out)


if __name__ == "__main__":
    main()
