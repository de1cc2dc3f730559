"""Coverage-guided fuzzing of what is parsed in Python before anything is loaded, by atheris.

    pip install atheris
    python benchmarks/fuzz_guided.py --runs 20000

Three targets, each in a process of its own: `config.json` of a saved ensemble (`read_config`), the
header of its weights (`read_header`) and `contract.json` of an export (`read_contract`). Inputs
start from real files; JSON is changed value by value and its digest is written anew, as somebody
would who makes a folder by hand, so that the checks behind the digest are reached. Reading must
return, or raise our `FormatError`; anything else, ten seconds or 4 GB stop a target and are
counted. `results/fuzz-guided.json` has the counts and the coverage that atheris saw.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parent / "results" / "fuzz-guided.json"
TARGETS = ("config", "header", "contract")
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 10**9, -(10**20), 0.5, 1e300, float("nan"), float("inf")),
    *("", "x", "../../etc/passwd", "\x00", "0" * 64, [], {}, [[]], [0], {"a": 1}, [None], [[[1]]]),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20000, help="inputs per target")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", choices=TARGETS)
    parser.add_argument("--target", nargs=2, help=argparse.SUPPRESS)  # a name and its folder
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if args.target:
        fuzz(args.target[0], Path(args.target[1]), args.runs, args.seed)
        return
    record: dict[str, Any] = {
        "command": f"python benchmarks/fuzz_guided.py --runs {args.runs} --seed {args.seed}",
        "targets": {},
    }
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        make_seeds(place)
        for target in TARGETS if args.only is None else (args.only,):
            record["targets"][target] = run(target, place, args.runs, args.seed)
            print(target, json.dumps(record["targets"][target], indent=1), flush=True)
    from hydra_ensembles._records import write_whole

    write_whole(args.out, json.dumps(record, indent=1) + "\n")


def make_seeds(place: Path) -> None:
    """Write the corpora: one real file per target."""
    import torch

    import hydra_ensembles as hydra
    from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig

    host = TinyViT(TinyViTConfig(width=24, heads=4, layers=2, mlp_width=24), seed=1).eval()
    masks = [hydra.HeadMask([[1] * 4, row]) for row in ([1, 1, 0, 0], [0, 0, 1, 1])]
    ensemble = hydra.fuse(host, masks)
    ensemble.id2label = list("0123456789")
    pictures = torch.randn(32, 1, 16, 16, generator=torch.Generator().manual_seed(0))
    ensemble.fit_novelty_([pictures], progress=False)
    hydra.fit_policy(ensemble, [(pictures, torch.arange(32) % 10)], risk=0.9, progress=False)
    ensemble.save_pretrained(place / "saved")
    ensemble.export(place / "exported", example=pictures[:17])
    weights = (place / "saved" / "model.safetensors").read_bytes()
    seeds = {
        "config": (place / "saved" / "config.json").read_bytes(),
        "header": weights[: 8 + int.from_bytes(weights[:8], "little")],
        "contract": (place / "exported" / "contract.json").read_bytes(),
    }
    for target, content in seeds.items():
        (place / target / "corpus").mkdir(parents=True)
        (place / target / "corpus" / "real").write_bytes(content)


def run(target: str, place: Path, runs: int, seed: int) -> dict[str, Any]:
    """Fuzz one target in a process; return what atheris says."""
    command = [sys.executable, __file__, "--runs", str(runs), "--seed", str(seed)]
    command += ["--target", target, str(place)]
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    said = done.stderr + done.stdout
    finished = re.search(r"Done (\d+) runs? in", said)
    coverage = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", said)
    outcomes = re.search(r"outcomes (\{.*\})", said)
    return {
        "runs": int(finished[1]) if finished else None,
        "seconds": round(time.perf_counter() - begin),
        "branches": int(coverage[-1][0]) if coverage else None,
        "branches_of_the_real_file": int(coverage[0][0]) if coverage else None,
        "inputs_kept": int(coverage[-1][2]) if coverage else None,
        "outcomes": json.loads(outcomes[1]) if outcomes else None,
        "found": None if done.returncode == 0 else said[-3000:],
    }


def fuzz(target: str, place: Path, runs: int, seed: int) -> None:
    """Run atheris on a target; it ends the process."""
    import atheris

    with atheris.instrument_imports(include=["hydra_ensembles"]):
        from hydra_ensembles._records import SEAL
        from hydra_ensembles.errors import FormatError
        from hydra_ensembles.fusion import folder_reader as loading
        from hydra_ensembles.fusion import folder_schema as folder_format
        from hydra_ensembles.heads import head_mask as masks  # noqa: F401  (they parse parts of a config)
        from hydra_ensembles.runtime import contract
        from hydra_ensembles.uncertainty import policy as policies  # noqa: F401

    folder = place / target / "folder"
    folder.mkdir()
    config = folder_format.read_config(place / "saved")
    size = (place / "saved" / "model.safetensors").stat().st_size
    readers: dict[str, tuple[str, Callable[[], Any]]] = {
        "config": ("config.json", lambda: folder_format.read_config(folder)),
        "header": (
            "model.safetensors",
            lambda: loading.read_header(folder / "model.safetensors", config),
        ),
        "contract": ("contract.json", lambda: contract.read_contract(folder)),
    }
    name, read = readers[target]
    digest = {"config": folder_format.DIGEST, "contract": SEAL}.get(target)
    counts = {"refused": 0, "read": 0}

    def one(data: bytes) -> None:
        if target == "header":
            data = data + bytes(max(0, size - len(data)))
        (folder / name).write_bytes(data)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                read()
            counts["read"] += 1
        except FormatError:
            counts["refused"] += 1
        if counts["refused"] + counts["read"] == runs:
            print("outcomes", json.dumps(counts), flush=True)

    def mutate(data: bytes, most: int, number: int) -> bytes:
        return mutated(data, most, number, digest, binary=target == "header")

    options = [f"-runs={runs}", f"-seed={seed}", "-max_len=65536", "-timeout=10"]
    options += ["-rss_limit_mb=4096", f"-artifact_prefix={place}/", "-len_control=0"]
    atheris.Setup(
        [sys.argv[0], *options, str(place / target / "corpus")], one, custom_mutator=mutate
    )
    atheris.Fuzz()


def mutated(data: bytes, most: int, number: int, digest: Any, *, binary: bool) -> bytes:
    """Change some values of JSON and sign it anew; now and then, or for anything else, bytes."""
    import random

    import atheris

    from hydra_ensembles._records import sealed

    draw = random.Random(number)
    body = data[8:] if binary else data
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or draw.random() < 0.1:
        return bytes(atheris.Mutate(data, most))
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        change(content, draw, atheris)
    if digest is not None and draw.random() < 0.95:
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            content = sealed(content, digest)
    text = json.dumps(content).encode()
    if binary:
        text = len(text).to_bytes(8, "little") + text
    return text if len(text) <= most else data


def change(content: Any, draw: Any, atheris: Any) -> None:
    """Change, copy or remove one value somewhere in JSON, in place."""
    while True:
        places = list(content) if isinstance(content, dict) else list(range(len(content)))
        if not places:
            return
        place = draw.choice(places)
        inner = content[place]
        if isinstance(inner, (dict, list)) and inner and draw.random() < 0.8:
            content = inner
            continue
        break
    kind = draw.random()
    if kind < 0.1:
        del content[place]
    elif kind < 0.2 and isinstance(content, list):
        content.append(inner)
    elif kind < 0.3 and isinstance(content, dict):
        content[str(place) + "x"] = inner
    elif kind < 0.5 and isinstance(inner, str):
        changed = atheris.Mutate(inner.encode("utf-8", "replace"), len(inner) + 8)
        content[place] = bytes(changed).decode("utf-8", "replace")
    elif kind < 0.7 and type(inner) in (int, float):
        content[place] = inner + draw.choice((1, -1, 0.5, 100, -inner))
    else:
        content[place] = draw.choice(VALUES)


if __name__ == "__main__":
    main()
