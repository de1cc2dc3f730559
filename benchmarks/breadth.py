"""Which transformers can be scored, pruned, fused and saved, exactly? One tiny model of each class.

    python benchmarks/breadth.py

Builds every class of transformers for our tasks (those for sequences also as multi-label and as
regression), one timm, torchvision and open_clip model of every kind, and zero-shot and prompted
classifiers, tiny, with weights scaled so that biases and positions matter. Compares what `explain`
promises with what happens: gated against pruned, fused members against the gated host (texts
without padding, padded right and padded left), saved against loaded.
Every model runs in a process of its own with a time limit. Resumes; `--fresh` begins anew,
`--before` keeps the counts of what is there as the figures before. Writes
`benchmarks/results/breadth.json` and `docs/results/breadth.md`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import breadth_others
import breadth_transformers
import breadth_zero_shot
import torch
from breadth_checks import examine, verdict
from breadth_page import counts, write_page

import hydra_ensembles as hydra
from hydra_ensembles._records import write_whole

RESULTS = Path(__file__).parent / "results" / "breadth.json"
SECONDS = 60


def all_cases() -> list[str]:
    """Return the names of all models, `library/class`."""
    return [
        *breadth_transformers.cases(),
        *breadth_others.cases(),
        *breadth_zero_shot.cases(),
    ]


def run_case(name: str) -> dict[str, Any]:
    """Build a model and ask everything of it; return plain data."""
    torch.manual_seed(0)
    try:
        model, batches, real = make(name)
    except Exception as error:  # our recipe, not the library, falls short
        return {"verdict": "not built", "reason": f"{type(error).__name__}: {error}"[:300]}
    if not batches:  # refused, whatever its inputs
        reason = hydra.explain(model).reason
        return {"verdict": "refused", "reason": reason[:300], "steps": {"explain": "kept"}}
    start = time.process_time()
    try:
        result = examine(name, model, batches, real)
    except Exception as error:
        return {"verdict": "not built", "reason": f"{type(error).__name__}: {error}"[:300]}
    result["notes"] = {step: note[:300] for step, note in result["notes"].items()}
    result["reason"] = result.get("reason", "")[:300]
    result["seconds"] = round(time.process_time() - start, 2)
    result["verdict"] = verdict(result)
    return result


def make(name: str) -> tuple[Any, list[Any], list[Any]]:
    """Return a tiny model, its batches and, for texts, which tokens are real.

    There are no batches for a model that does not take ours and is refused anyway.
    """
    if name.startswith("transformers/"):
        task, model_type, cls = breadth_transformers.cases()[name]
        variant = name.partition(", ")[2]
        model = breadth_transformers.build(task, model_type, cls, variant).eval()
        try:
            return model, *_batches(model, task)
        except Exception:
            if hydra.explain(model).supported:
                raise
            return model, [], []
    if name in breadth_zero_shot.cases():
        return breadth_zero_shot.make(name)
    model, size = breadth_others.build(*breadth_others.cases()[name])
    model.eval()
    images = breadth_others.images(size)
    with torch.no_grad():
        model(images)
    return model, [images], [None]


def _batches(model: Any, task: str) -> tuple[list[Any], list[Any]]:
    """Return batches that a model of transformers takes, and of texts which tokens are real."""
    texts = model.main_input_name == "input_ids"
    paddings = ("none", "right", "left") if texts else ("none",)
    batches = [
        breadth_transformers.inputs(model, task, padding, seed)
        for seed, padding in enumerate(paddings)
    ]
    by_token = texts and task != "choice"
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    return batches, [b["attention_mask"].bool() if by_token else None for b in batches]


def _child(name: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    pipe.send(run_case(name))
    pipe.close()


def sweep(names: list[str], record: dict[str, Any], jobs: int, out: Path) -> None:
    """Run cases in processes of their own, a few at a time; keep each result when it is there."""
    context = multiprocessing.get_context("fork")
    waiting, running = list(names), {}
    done = 0
    while waiting or running:
        while waiting and len(running) < jobs:
            name = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(name, theirs))
            process.start()
            theirs.close()
            running[name] = (process, ours, time.monotonic())
        wait([pipe for _, pipe, _ in running.values()], timeout=1.0)
        for name, (process, pipe, start) in list(running.items()):
            result = None
            if pipe.poll():
                try:
                    result = pipe.recv()
                except EOFError:
                    result = {"verdict": "crashed", "reason": "the process died", "steps": {}}
            elif time.monotonic() - start > SECONDS * 4:  # a crowded machine is no reason to fail
                process.kill()
                result = {"verdict": "not built", "reason": f"more than {SECONDS} seconds"}
            if result is None:
                continue
            process.join()
            del running[name]
            record["models"][name] = result
            done += 1
            shown = result.get("reason") or result.get("notes") or ""
            print(f"{done}/{len(names)} {name}: {result['verdict']} {shown}"[:200], flush=True)
            if done % 5 == 0:
                keep(record, out)
    keep(record, out)


def keep(record: dict[str, Any], out: Path) -> None:
    """Write the record, models in the order of their names."""
    record["models"] = dict(sorted(record["models"].items()))
    record["counts"] = counts(record["models"])
    write_whole(out, json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="parts of names")
    parser.add_argument("--fresh", action="store_true", help="run what is there already, too")
    parser.add_argument("--before", action="store_true", help="keep the counts as `before`")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    import open_clip  # noqa: F401  (imported once, here, not in every process)
    import timm  # noqa: F401
    import torchvision  # noqa: F401
    import transformers
    import transformers.models.bert.modeling_bert
    import transformers.models.llama.modeling_llama

    import hydra_ensembles.criteria
    import hydra_ensembles.fusion  # noqa: F401

    transformers.logging.set_verbosity_error()
    record = json.loads(args.out.read_text()) if args.out.exists() else {"models": {}}
    if args.before:
        record["before"] = {
            "counts": counts(record["models"]),
            "verdicts": {name: result["verdict"] for name, result in record["models"].items()},
        }
    names = [n for n in all_cases() if not args.only or any(part in n for part in args.only)]
    names = [n for n in names if args.fresh or n not in record["models"]]
    sweep(names, record, args.jobs, args.out)
    for what, number in record["counts"].items():
        print(f"{what:26} {number:4}")
    if args.out == RESULTS:
        write_page(record)


if __name__ == "__main__":
    main()
