"""Kill builds and searches with SIGKILL at random moments; compare what resuming gives, in bytes.

    python benchmarks/build_resume.py [--kills 20] [--seed 0] [--only text images circuit]

`text` and `images` are builds, by turns with the default method and with `circuit`, which makes
proxies of the data; `circuit` is `find_circuit` with several objectives. Hosts are small, random.
For every moment the work starts again in an empty folder, in a process of its own that is killed
once a random number of steps and tensors is kept, a random moment later; a second process goes on
in the folder. All files that it writes must equal those of work that nobody stopped. Every process
makes its own tokenizer, whose vocabulary has another order each time. Writes
`benchmarks/results/build-resume.json`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from hydra_ensembles import build, find_circuit
from hydra_ensembles._records import write_whole
from hydra_ensembles.data import text_data
from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig
from hydra_ensembles.methods import Select

RESULTS = Path(__file__).parent / "results" / "build-resume.json"
WORDS = [
    *("the", "a", "film", "story", "was", "very", "good", "bad", "dull", "bright", "and", "not"),
    *("電", "影", "良", "悪", "長", "短", "кино", "день", "ночь", "свет"),
]


def text_host() -> tuple[Any, Any]:
    """Return a random BERT and sentences for it."""
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[UNK]": 2}
    vocabulary.update({word: 3 + number for number, word in enumerate(WORDS)})
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="[PAD]", cls_token="[CLS]", unk_token="[UNK]"
    )
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=3,
        initializer_range=0.4,
    )
    torch.manual_seed(0)
    model = BertForSequenceClassification(config).eval()
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS[:12], k=draw.randint(3, 9))) for _ in range(45)]
    return model, text_data(texts, tokenizer, labels=[i % 3 for i in range(45)], batch_size=15)


def image_host() -> tuple[Any, Any]:
    """Return a random vision transformer and noise for it."""
    model = TinyViT(TinyViTConfig(layers=3, heads=4, width=32, mlp_width=48, classes=3), seed=0)
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(45, 1, 16, 16, generator=generator)
    return model.eval(), list(zip(images.split(15), (torch.arange(45) % 3).split(15), strict=True))


def work(kind: str, turn: int, folder: Path) -> None:
    """Do the work; write its result to `folder / "result"`."""
    result = folder / "result"
    model, data = text_host() if kind == "text" else image_host()
    if kind == "circuit":
        found = find_circuit(
            model,
            id=data,
            objective="average",
            keep=1,
            folder=folder / "state",
            effects=True,
            progress=False,
        )
        result.mkdir(exist_ok=True)
        (result / "circuit.json").write_text(found.to_json())
        return
    ensemble = build(
        model,
        data,
        method="circuit" if turn % 2 else Select(masks=24),
        members=2,
        max_cost=1.5,
        folder=folder / "state",
        progress=False,
    )
    ensemble.save_pretrained(result)


def start(kind: str, turn: int, folder: Path) -> int:
    """Start the work in a process of its own; return its number."""
    folder.mkdir(exist_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work(kind, turn, folder)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def ended(child: int) -> int:
    """Wait for a process; return its exit code, negative when it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def digest(folder: Path) -> dict[str, str]:
    """Hash every file of a result."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((folder / "result").iterdir())
    }


def kept(folder: Path) -> int:
    """Count what a process has kept: finished steps, and tensors."""
    state = folder / "state"
    steps = sum(len(json.loads(path.read_text())["steps"]) for path in state.glob("*.json"))
    return steps + len(list((state / "candidates").glob("*.safetensors")))


def watch(child: int, folder: Path, enough: int | None = None) -> int:
    """Wait until so much is kept, or until the process ends; return the most that was kept."""
    most = 0
    while enough is None or most < enough:
        most = max(most, kept(folder))
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            break
        time.sleep(0.003)
    return most


def kill_and_resume(kind: str, kills: int, seed: int) -> dict[str, Any]:
    """Kill the work at random moments; resume each time."""
    moments = random.Random(f"{kind} {seed}")
    left: list[int] = []
    equal = missed = 0
    with tempfile.TemporaryDirectory() as scratch:
        whole, most = [], []
        for turn in (0, 1):
            folder = Path(scratch) / f"whole-{turn}"
            child = start(kind, turn, folder)
            most.append(watch(child, folder))
            if ended(child):
                raise SystemExit(f"{kind} failed")
            whole.append(digest(folder))
        while len(left) < kills:
            turn = len(left) % 2
            folder = Path(scratch) / f"kill-{len(left)}-{missed}"
            child = start(kind, turn, folder)
            watch(child, folder, moments.randint(1, most[turn]))
            time.sleep(0.2 * moments.random())
            os.kill(child, signal.SIGKILL)
            if ended(child) == 0:
                missed += 1  # it was done before
                continue
            left.append(kept(folder))
            equal += ended(start(kind, turn, folder)) == 0 and digest(folder) == whole[turn]
            print(f"{kind}: {equal} of {len(left)} equal", file=sys.stderr, flush=True)
    return {
        "work": kind,
        "steps and tensors of the whole": most,
        "steps and tensors left by each kill": left,
        "ended before it was killed": missed,
        "files": sorted(whole[0]),
        "byte-equal": equal,
        "of": kills,
    }


def main() -> None:
    """Run, print and write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", default=["text", "images", "circuit"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    torch.set_num_threads(1)  # forks of a threaded process may hang
    runs = [kill_and_resume(kind, args.kills, args.seed) for kind in args.only]
    record = {
        "command": "python benchmarks/build_resume.py",
        "what": "work killed by SIGKILL at random moments, resumed, compared byte by byte",
        "runs": runs,
    }
    text = json.dumps(record, indent=1)
    print(text)
    write_whole(args.out, text + "\n")
    if any(run["byte-equal"] != args.kills for run in runs):
        raise SystemExit("resumed work differs")


if __name__ == "__main__":
    main()
