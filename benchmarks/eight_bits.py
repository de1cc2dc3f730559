"""What 8-bit weights cost on real models and data, and whether the 8-bit program's alarms hold.

    python benchmarks/eight_bits.py minilm --host FOLDER --data DATA
    python benchmarks/eight_bits.py deit-tiny --data DATA

The models and data of `export.py`. Novelty and the policy of the 8-bit program are fitted to its
own features, on the data that they were fitted on for the full weights; the policy guarantees that
10 % of known data is called new and that 10 % is answered and wrong. Both programs then answer the
test data in batches of 16; the 8-bit one also answers some of it one by one, since a batch shares
the scale by which activations are rounded. Figures go to `results/eight-bits.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import export
import torch

from hydra_ensembles import runtime
from hydra_ensembles._records import write_whole

RESULT = Path(__file__).parent / "results" / "eight-bits.json"
SINGLE = 300
"""Test examples that are answered one by one."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=("minilm", "deit-tiny", "smollm2"))
    parser.add_argument("--host", type=Path, help="of minilm and smollm2: a folder")
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.data is None:
        raise SystemExit("Say where the data is: pass --data, or set HYDRA_DATA.")
    torch.set_num_threads(1)
    makers = {
        "minilm": lambda: export.minilm(Path(args.data), args.host),
        "deit-tiny": lambda: export.deit(Path(args.data)),
        "smollm2": lambda: export.decoder(Path(args.data), args.host),
    }
    found = measure(makers[args.model]())
    print(json.dumps(found, indent=1))
    record = json.loads(args.out.read_text()) if args.out.exists() else {}
    record[args.model] = found
    write_whole(args.out, json.dumps(record, indent=1) + "\n")


def measure(subject: export.Subject) -> dict[str, Any]:
    """Export the full and the 8-bit program, and compare what they decide."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        made = subject.ensemble.export(
            Path(name) / "exported",
            example=subject.batch(subject.test[0][:17]),
            int8=True,
            known=subject.known,
            held_out=subject.held_out,
        )
        found["largest_difference"] = made.differences
        found["mebibytes"] = {
            kind: export.size_of(made.folder / file) for kind, file in made.programs.items()
        }
        programs = {
            kind: runtime.load(made.folder, program=kind, threads=1) for kind in made.programs
        }
        for kind, program in programs.items():
            found[kind] = export.quality(subject, program)
        for size in (1, 16):
            answer = programs["int8"].predict(subject.test[0][:SINGLE], batch_size=size)
            found[f"int8, the first {SINGLE} in batches of {size}: called new"] = float(
                (answer.code >= 2).mean()
            )
    return found


if __name__ == "__main__":
    main()
