"""The service under load: 64 clients on loopback against one request at a time.

python benchmarks/service_load.py --data DATA --host CHECKPOINT [--seconds 60]

Two models read sentences of SST-2: a tiny random BERT, where a call costs more than its arithmetic,
and a fine-tuned MiniLM; each as a fused ensemble of three members with novelty. The service is the
command `hydra-ensembles serve` in a process of its own with one thread for the model. The clients
run in this process, each with one connection and one request under way, one sentence per request.

Phases: `load`, 64 clients for the whole time, memory read from /proc every second; `alone` (one
client) and `together` (64 clients), three times in turn; `unbatched`, 64 clients and one with
`--max-batch 1`; `overload`, 64 clients with 8 sentences each against a queue of 64. Rates are per
second and per second of the service's processor time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
CLIENTS = 64
BATCHES = {"tiny": 32, "minilm": 16}
START = "from hydra_ensembles.cli.main import run; run()"


# --- models ---------------------------------------------------------------------------------------


def sentences(data: Path, count: int) -> list[str]:
    """Return sentences of SST-2's validation set."""
    for name in ("dev.tsv", "validation.tsv", "test.tsv"):
        path = data / "text" / "sst2" / name
        if path.is_file():
            with path.open(encoding="utf-8", newline="") as lines:
                rows = list(csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE))
            key = next(column for column in rows[0] if column != "label")
            return [row[key] for row in rows][:count]
    raise SystemExit(f"There is no SST-2 in {data}/text/sst2.")


def make_ensemble(kind: str, checkpoint: Path, texts: list[str], folder: Path) -> None:
    """Save a fused ensemble of three members that knows the texts."""
    import torch
    import transformers

    from hydra_ensembles import HeadMask, fuse

    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    if kind == "tiny":
        config = transformers.AutoConfig.from_pretrained(checkpoint)
        config.update(
            {
                "hidden_size": 48,
                "num_attention_heads": 6,
                "num_hidden_layers": 4,
                "intermediate_size": 96,
            }
        )
        torch.manual_seed(0)
        host = transformers.AutoModelForSequenceClassification.from_config(config)
    else:
        host = transformers.AutoModelForSequenceClassification.from_pretrained(checkpoint)
    host.eval()
    full = [[True] * len(row) for row in HeadMask.full(host)]
    heads = len(full[-1])
    masks = [
        HeadMask([*full[:-1], [head % 3 == member for head in range(heads)]]) for member in range(3)
    ]
    ensemble = fuse(host, masks)
    ensemble.tokenizer = tokenizer
    ensemble.id2label = ["negative", "positive"]
    known = [
        dict(tokenizer(texts[i : i + 16], padding=True, return_tensors="pt"))
        for i in range(0, 320, 16)
    ]
    ensemble.fit_novelty_(known, names=texts[:320], progress=False)
    ensemble.save_pretrained(folder)


# --- the service ----------------------------------------------------------------------------------


class Service:
    """`hydra-ensembles serve` in a process of its own."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, "serve", str(folder), "--port", "0", *options],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.search(r"Listening at http://([\d.]+):(\d+)", line)
            if found:
                self.host, self.port = found.group(1), int(found.group(2))
                return
        raise SystemExit("The service did not start.")

    def memory(self) -> float:
        """Return the resident memory in megabytes."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", status).group(1)) / 1024  # type: ignore[union-attr]

    def processor_seconds(self) -> float:
        """Return the processor time that the service has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def __enter__(self) -> Service:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=60)
        return self.process.returncode


# --- clients --------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What clients got."""

    rows: int = 0
    statuses: Counter[int] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    words: set[str] = field(default_factory=set)
    seconds: list[float] = field(default_factory=list)


async def client(
    service: Service, bodies: list[bytes], rows: int, end: float, tally: Tally
) -> None:
    """Send one request after another over one connection until the time is over."""
    reader, writer = await asyncio.open_connection(service.host, service.port)
    number = 0
    while time.monotonic() < end:
        body = bodies[number % len(bodies)]
        number += 1
        head = (
            f"POST /predict HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        start = time.monotonic()
        try:
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"content-length: (\d+)", answer).group(1))  # type: ignore
            content = await reader.readexactly(length)
        except (OSError, asyncio.IncompleteReadError, AttributeError) as error:
            tally.errors[type(error).__name__] += 1
            reader, writer = await asyncio.open_connection(service.host, service.port)
            continue
        status = int(answer[9:12])
        tally.statuses[status] += 1
        if status == 200:
            tally.rows += rows
            tally.seconds.append(time.monotonic() - start)
        else:
            tally.words.add(re.sub(r"\d+", "N", json.loads(content)["error"]))
            await asyncio.sleep(0.02)  # a client that is told to come later does
    writer.close()


async def drive(
    service: Service, texts: list[str], *, clients: int, seconds: float, rows: int = 1
) -> dict[str, Any]:
    """Let clients ask for some time; return what they got."""
    if rows == 1:
        bodies = [json.dumps({"text": text}).encode() for text in texts]
    else:
        bodies = [
            json.dumps({"texts": texts[i : i + rows]}).encode()
            for i in range(0, len(texts) - rows, rows)
        ]
    tally, memory = Tally(), []
    start, used = time.monotonic(), service.processor_seconds()
    end = start + seconds
    tasks = [
        asyncio.create_task(
            client(service, bodies[i * 7 % len(bodies) :] + bodies, rows, end, tally)
        )
        for i in range(clients)
    ]
    while time.monotonic() < end:
        memory.append(service.memory())
        await asyncio.sleep(1)
    await asyncio.gather(*tasks)
    took, used = time.monotonic() - start, service.processor_seconds() - used
    times = sorted(tally.seconds)
    found = {
        "clients": clients,
        "rows_per_request": rows,
        "seconds": round(took, 1),
        "rows_a_second": round(tally.rows / took, 1),
        "rows_a_processor_second": round(tally.rows / used, 1),
        "statuses": {str(code): count for code, count in sorted(tally.statuses.items())},
        "broken_connections": dict(tally.errors),
        "milliseconds": {
            name: round(1000 * times[min(len(times) - 1, int(share * len(times)))], 1)
            for name, share in (("p50", 0.5), ("p95", 0.95), ("p99", 0.99))
        }
        if times
        else {},
    }
    if tally.words:
        found["refusals"] = sorted(tally.words)
    if len(memory) >= 20:
        tenth = len(memory) // 10
        found["megabytes"] = {
            "every_five_seconds": [round(value, 1) for value in memory[::5]],
            "first_tenth": round(statistics.mean(memory[:tenth]), 1),
            "last_tenth": round(statistics.mean(memory[-tenth:]), 1),
        }
    return found


def batch_sizes(service: Service) -> float:
    """Return the mean number of rows per batch, from `/metrics`."""
    from urllib.request import urlopen

    with urlopen(f"http://{service.host}:{service.port}/metrics") as page:
        text = page.read().decode()
    total, count = (
        float(re.search(rf"^hydra_batch_rows_{part} (\S+)", text, re.M).group(1))  # type: ignore
        for part in ("sum", "count")
    )
    return round(total / count, 1)


def measure(folder: Path, texts: list[str], seconds: float, batch: int) -> dict[str, Any]:
    """Run all phases against one model."""
    short = max(3.0, seconds / 10)
    options = ("--threads", "1", "--max-batch", str(batch))
    found: dict[str, Any] = {"max_batch": batch}
    with Service(folder, *options) as service:

        def ask(clients: int, time: float) -> dict[str, Any]:
            return asyncio.run(drive(service, texts, clients=clients, seconds=time))

        # the first calls of each length and the first test for drift fill the allocator's pools
        ask(CLIENTS, 2 * short)
        found["load"] = ask(CLIENTS, seconds)
        pairs = [(ask(1, short), ask(CLIENTS, short)) for _ in range(3)]
        found["alone"] = [alone for alone, _ in pairs]
        found["together"] = [together for _, together in pairs]
        found["mean_batch"] = batch_sizes(service)
        found["exit_code"] = service.stop()
    with Service(folder, "--threads", "1", "--max-batch", "1") as service:
        found["unbatched"] = ask(CLIENTS, short)
        found["unbatched_alone"] = ask(1, short)  # nobody waits for others here
    with Service(folder, *options, "--max-queue", "64") as service:
        found["overload"] = asyncio.run(
            drive(service, texts, clients=CLIENTS, seconds=short, rows=8)
        )
    found["together_over_alone"] = {
        key: [round(together[key] / alone[key], 2) for alone, together in pairs]
        for key in ("rows_a_second", "rows_a_processor_second")
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("HYDRA_DATA"))
    parser.add_argument("--host", type=Path, required=True, help="A fine-tuned MiniLM's folder.")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--models", default="tiny,minilm")
    args = parser.parse_args()
    texts = sentences(Path(args.data), 600)
    path = RESULTS / "service-load.json"
    record = json.loads(path.read_text()) if path.is_file() else {}
    record["command"] = "python benchmarks/service_load.py --data DATA --host CHECKPOINT"
    record["processors"] = os.cpu_count()
    record.setdefault("models", {})
    for kind in args.models.split(","):
        with tempfile.TemporaryDirectory() as folder:
            make_ensemble(kind, args.host, texts, Path(folder) / kind)
            found = measure(Path(folder) / kind, texts, args.seconds, BATCHES[kind])
            record["models"][kind] = found
        print(kind, json.dumps(record["models"][kind], indent=2), flush=True)
        path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
