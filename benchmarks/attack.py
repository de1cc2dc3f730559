"""The service under attack: malformed, slow, oversized and abusive requests beside valid ones.

python benchmarks/attack.py --name after [--valid 3500] [--malformed 2900] [--seconds 300]

A small ensemble that reads digits is served by `hydra-ensembles serve` in a process of its own, on
loopback, with at most 6 GB of address space. Several clients send valid requests (files, forms,
base64 in JSON, tensors in JSON and in the binary form) and compare every answer with the one that
the ensemble gives directly. First they are alone, for the latency of a quiet service; then the
attackers join, in step with them, so that both end together. The count of requests and the time
are bounded: what is not sent by then is reported as such.

Where the service knows tokens, everybody has one, the attackers too, but for one kind of attack.
Images of extreme aspect have at most 400,000 pixels here: a service without a limit on the aspect
can be killed by larger ones, or take the machine's memory where nothing else limits it.

Writes `benchmarks/results/attack.json`, one entry per `--name`. Exits with 1 when a valid request
was answered wrongly or not at all.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import inspect
import io
import json
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

RESULTS = Path(__file__).parent / "results" / "attack.json"
START = "from hydra_ensembles.cli.main import run; run()"
TOKEN = "a-token-for-the-attack-only"
ADDRESS_SPACE = 6 * 2**30
READ_SECONDS = 2.0
"""The service's `--read-timeout`, so that slow bodies end soon."""
AHEAD = 0.02
"""Share of its requests that one side may be ahead of the other."""
PATIENCE = 30.0
"""Seconds after which a request counts as not answered."""


# --- the model and the service --------------------------------------------------------------------


def make_ensemble(folder: Path) -> None:
    """Save an untrained ensemble of two members that reads digits and crops images."""
    import torch

    import hydra_ensembles as hydra
    from hydra_ensembles.data import digits
    from hydra_ensembles.data.transforms import ImageTransform
    from hydra_ensembles.hosts.tiny_vit import TinyViT, TinyViTConfig

    host = TinyViT(TinyViTConfig(width=24, heads=4, layers=2, mlp_width=24), seed=1).eval()
    with torch.no_grad():
        for parameter in host.parameters():
            if parameter.ndim == 2:
                parameter.mul_(3.0)  # answers that differ from image to image
    full = [[True] * len(row) for row in hydra.HeadMask.full(host)]
    masks = [hydra.HeadMask([*full[:-1], [h != gone for h in range(4)]]) for gone in (0, 3)]
    ensemble = hydra.fuse(host, masks)
    ensemble.id2label = [f"digit {number}" for number in range(10)]
    ensemble.transform = ImageTransform(
        size=host.shape.image_size, crop=0.875, interpolation="bilinear", mean=(0.5,), std=(0.5,)
    )
    ensemble.fit_novelty_(digits(16, seed=0).test.subset(range(64)), progress=False)
    ensemble.save_pretrained(folder)


class Service:
    """`hydra-ensembles serve` in a process of its own."""

    def __init__(self, folder: Path, work: Path) -> None:
        from hydra_ensembles.cli.commands import serve

        options = ["--port", "0", "--name", "digits", "--threads", "1"]
        options += ["--read-timeout", str(READ_SECONDS)]
        self.has_tokens = "token_file" in inspect.signature(serve.command).parameters
        if self.has_tokens:
            file = work / "token"
            file.write_text(TOKEN + "\n")
            file.chmod(0o600)
            options += ["--token-file", str(file)]
        self.log = work / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", START, "serve", str(folder), *options],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE,) * 2),
            )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found = re.search(r"Listening at http://(127\.0\.0\.1):(\d+)", line)
            if found:
                self.host, self.port = found.group(1), int(found.group(2))
                return
        raise SystemExit(f"The service did not start:\n{self.log.read_text()[-2000:]}")

    def megabytes(self, key: str) -> float:
        """Return `VmRSS` or `VmHWM` (the peak); 0 when the process is gone."""
        try:
            status = Path(f"/proc/{self.process.pid}/status").read_text()
        except OSError:
            return 0.0
        found = re.search(rf"{key}:\s+(\d+)", status)
        return round(int(found.group(1)) / 1024, 1) if found else 0.0

    def stop(self) -> int:
        """Send SIGTERM and return the exit code; a service that does not end is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.communicate(timeout=45)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.communicate()
        return self.process.returncode


# --- requests -------------------------------------------------------------------------------------


def post(path: str, body: bytes, kind: str, *headers: str, token: str | None = TOKEN) -> bytes:
    """Return a whole POST request."""
    lines = [f"POST {path} HTTP/1.1", "host: x", f"content-length: {len(body)}", *headers]
    if kind:
        lines.append(f"content-type: {kind}")
    if token:
        lines.append(f"authorization: Bearer {token}")
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def head(path: str, *headers: str, method: str = "POST") -> bytes:
    """Return the head of a request, with the token."""
    lines = [f"{method} {path} HTTP/1.1", "host: x", f"authorization: Bearer {TOKEN}", *headers]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"


def form(*parts: tuple[str, bytes]) -> tuple[bytes, str]:
    """Return a form and its content type."""
    body = b""
    for disposition, content in parts:
        body += f"--edge\r\ncontent-disposition: {disposition}\r\n\r\n".encode() + content + b"\r\n"
    return body + b"--edge--\r\n", "multipart/form-data; boundary=edge"


FILE = 'form-data; name="file"; filename="x.png"'
INFER = "/v2/models/digits/infer"
JSON = "application/json"


def tensor(data: Any, shape: Any, datatype: Any = "FP32", name: Any = "pixel_values") -> bytes:
    """Return a request of the Open Inference Protocol for probabilities, as JSON."""
    entry = {"name": name, "datatype": datatype, "shape": shape, "data": data}
    return json.dumps({"inputs": [entry], "outputs": [{"name": "probabilities"}]}).encode()


def encoded(image: Image.Image, kind: str = "PNG") -> bytes:
    """Return the bytes of an image's file."""
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def claims(width: int, height: int) -> bytes:
    """Return a PNG of a few bytes whose header claims so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        mark = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + mark

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0))
    pixels = chunk(b"IDAT", zlib.compress(b"\0" * 100_000, 9))
    return b"\x89PNG\r\n\x1a\n" + header + pixels + chunk(b"IEND", b"")


class Valid:
    """One valid request and the answer that the ensemble gives directly."""

    def __init__(self, request: bytes, probabilities: np.ndarray, *, v2: bool) -> None:
        self.request, self.expected, self.v2 = request, probabilities, v2

    def is_right(self, body: bytes) -> bool:
        """Compare an answer's probabilities with the expected ones."""
        told = json.loads(body)
        if self.v2:
            found = told["outputs"][0]["data"]
        else:
            found = told["answers"][0]["probabilities"]
        return bool(np.allclose(found, self.expected, atol=2e-4))


def valid_requests(folder: Path, count: int = 12) -> list[Valid]:
    """Return requests in every form, with the answers of the ensemble itself."""
    from hydra_ensembles import HydraEnsemble

    ensemble = HydraEnsemble.from_pretrained(folder)
    noise = np.random.default_rng(0)
    found = []
    for number in range(count):
        side = 16 + 4 * number
        pixels = noise.integers(0, 256, (side, side + 3), dtype=np.uint8)
        image = Image.fromarray(pixels)
        expected = ensemble.predict([image]).probabilities[0].numpy()
        values = ensemble.transform(image).numpy()[None]  # type: ignore[misc]
        file, path = encoded(image), "/predict?probabilities=1"
        coded = json.dumps({"image": base64.b64encode(file).decode()}).encode()
        size = {"binary_data_size": values.nbytes}
        entry = {"name": "pixel_values", "datatype": "FP32", "shape": values.shape}
        wanted = [{"name": "probabilities", "parameters": {"binary_data": False}}]
        binary = json.dumps({"inputs": [{**entry, "parameters": size}], "outputs": wanted}).encode()
        lengths = f"inference-header-content-length: {len(binary)}"
        found += [
            Valid(post(path, file, "image/png"), expected, v2=False),
            Valid(post(path, *form((FILE, file))), expected, v2=False),
            Valid(post(path, coded, JSON), expected, v2=False),
            Valid(post(INFER, tensor(values.tolist(), values.shape), JSON), expected, v2=True),
            Valid(
                post(INFER, binary + values.tobytes(), "application/octet-stream", lengths),
                expected,
                v2=True,
            ),
        ]
    return found


# --- attacks --------------------------------------------------------------------------------------

Attack = Callable[["Field", random.Random], Awaitable[str]]
ATTACKS: dict[str, tuple[float, Attack]] = {}
"""By name: how often it is drawn, against the others, and what it does; it returns the outcome."""


def attack(name: str, weight: float = 1.0) -> Callable[[Attack], Attack]:
    """Register an attack."""

    def register(function: Attack) -> Attack:
        ATTACKS[name] = weight, function
        return function

    return register


class Field:
    """Where the attack takes place: the service's address, and large bodies that are made once."""

    def __init__(self, service: Service) -> None:
        self.host, self.port = service.host, service.port
        self.file = encoded(Image.fromarray(np.arange(400, dtype=np.uint8).reshape(20, 20)))

    @cached_property
    def large(self) -> bytes:
        """An image of 40 million pixels in 50 kB."""
        return encoded(Image.new("L", (6324, 6324), 90))

    @cached_property
    def photo(self) -> bytes:
        """An image of 12 million pixels."""
        return encoded(Image.new("RGB", (4000, 3000), (90, 120, 30)), "JPEG")

    @cached_property
    def huge(self) -> list[bytes]:
        """JSON of 15.6 MB: millions of short lists, and millions of numbers."""
        numbers = tensor([0], [1, 1, 16, 16]).replace(b"[0]", b"[" + b"1," * 7_800_000 + b"1]")
        return [b'{"inputs": [' + b"[1]," * 3_900_000 + b"[1]]}", numbers]

    async def send(
        self, *parts: bytes, pause: float = 0.0, abort: bool = False, until: float = PATIENCE
    ) -> str:
        """Send parts, then read the status; return it, or what happened instead.

        As urllib does, a connection that breaks while parts are sent is not read any more.
        """
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
        except OSError:
            return "no connection"
        try:
            for part in parts:
                writer.write(part)
                await writer.drain()
                if pause:
                    await asyncio.sleep(pause)
                    if reader.at_eof():
                        break
            if abort:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return "aborted by the client"
            line = await asyncio.wait_for(reader.readline(), until)
            return line[9:12].decode("latin-1") if line.startswith(b"HTTP/1.1 ") else "closed"
        except asyncio.TimeoutError:
            return "no answer"
        except (OSError, asyncio.IncompleteReadError, ValueError):
            return "reset"
        finally:
            writer.transport.abort() if abort else writer.close()


def choice(requests: Callable[[Field, random.Random], list[bytes]]) -> Attack:
    """Return an attack that sends one of several requests."""

    async def send(field: Field, draw: random.Random) -> str:
        return await field.send(draw.choice(requests(field, draw)))

    return send


@attack("broken request line")
@choice
def _lines(field: Field, draw: random.Random) -> list[bytes]:
    return [
        *(
            b"GET\r\n\r\n",
            b"nonsense\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"\x16\x03\x01\x02\0\x01",
        ),
        *(
            b"GET / HTTP/1.1 more\r\n\r\n",
            b"G\0T / HTTP/1.1\r\nhost: x\r\n\r\n",
            b"\r\n" * 500 + b"x\r\n",
        ),
        draw.randbytes(draw.randint(1, 300)) + b"\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ]


@attack("broken headers")
@choice
def _headers(field: Field, draw: random.Random) -> list[bytes]:
    lines = [
        "no colon",
        "a : b",
        "content-length: -1",
        "content-length: 1e3",
        "content-length: \xb2",
    ]
    lines += ["content-length: 5\r\ncontent-length: 6", "content-length: " + "9" * 5000]
    lines += ["transfer-encoding: chunked\r\ncontent-length: 5", "transfer-encoding: gzip, chunked"]
    lines += ["a: b\r\n folded", "a: \0", ": empty", "expect: the unexpected\r\ncontent-length: 0"]
    lines += [
        "inference-header-content-length: \xb2\r\ncontent-length: 2",
        "upgrade: h2c\r\nconnection: upgrade",
    ]
    chunks = [
        b"zz\r\nabc\r\n0\r\n\r\n",
        b"-5\r\nabc",
        b"f" * 40 + b"\r\n",
        b"3\r\nabcde\r\n0\r\n\r\n",
    ]
    chunked = [head("/predict", "transfer-encoding: chunked") + chunk for chunk in chunks]
    return [*(head(INFER, line) + b"{}" for line in lines), *chunked]


@attack("flood of headers")
@choice
def _flood(field: Field, draw: random.Random) -> list[bytes]:
    many = [f"x-{i}: {'y' * 20}" for i in range(5000)]
    return [head("/predict", *many), head("/v2/health/live", *many, method="GET")]


@attack("long header or path in one burst")
@choice
def _burst(field: Field, draw: random.Random) -> list[bytes]:
    size = draw.choice([66_000, 100_000, 250_000])
    return [
        head("/v2/health/live", "a: " + "b" * size, method="GET"),
        head("/" + "b" * size, method="GET"),
    ]


@attack("endless header", 0.3)
async def _endless(field: Field, draw: random.Random) -> str:
    return await field.send(b"GET / HTTP/1.1\r\na: ", *[b"b" * 20_000] * 100, until=3)


@attack("slow headers")
async def _slow_headers(field: Field, draw: random.Random) -> str:
    letters = b"GET / HTTP/1.1\r\nslow: header\r\n"
    said = await field.send(*(letters[i : i + 1] for i in range(15)), pause=0.2, until=0.1)
    return "held until the client gave up" if said == "no answer" else said


@attack("slow body")
async def _slow_body(field: Field, draw: random.Random) -> str:
    return await field.send(
        head("/predict", "content-length: 500"), *[b"x"] * 13, pause=0.2, until=5
    )


@attack("silent body")
async def _silent(field: Field, draw: random.Random) -> str:
    path = draw.choice(["/predict", INFER, "/nothing"])
    return await field.send(head(path, "content-length: 100000"), b"x", until=5)


@attack("oversized body", 0.25)
async def _oversized(field: Field, draw: random.Random) -> str:
    return await field.send(head("/predict", "content-length: 40000000"), *[b"x" * 500_000] * 80)


@attack("oversized chunked body", 0.25)
async def _chunked(field: Field, draw: random.Random) -> str:
    part = b"7a120\r\n" + b"x" * 500_000 + b"\r\n"
    start = head("/predict", "transfer-encoding: chunked")
    return await field.send(start, *[part] * 50, b"0\r\n\r\n")


@attack("wrong content type")
@choice
def _types(field: Field, draw: random.Random) -> list[bytes]:
    kinds = [
        "application/xml",
        "text/html",
        "multipart/mixed",
        "image",
        "a" * 3000,
        "text/plain",
        ";",
    ]
    packed = post("/predict", zlib.compress(b"x" * 10_000), JSON, "content-encoding: gzip")
    return [*(post("/predict", field.file, kind) for kind in kinds), packed]


@attack("broken form")
@choice
def _forms(field: Field, draw: random.Random) -> list[bytes]:
    whole, kind = form((FILE, field.file))
    return [
        post("/predict", whole, "multipart/form-data"),
        post("/predict", whole[: draw.randint(0, len(whole) - 12)], kind),
        post("/predict", whole, "multipart/form-data; boundary=other"),
        post("/predict", whole, "multipart/form-data; boundary=" + "e" * 500),
        post("/predict", *form(("attachment", b"x"))),
        post("/predict", *form(*[(FILE, b"x")] * 300)),
        post("/predict", *form(('form-data; name="other"', b"x"))),
        post("/predict", b"--edge\r\n" + b"a: b\r\n" * 20_000, kind),
        post("/predict", b"--edge\r\n\0\0\0\r\n\r\nx\r\n--edge--", kind),
    ]


@attack("broken JSON")
@choice
def _json(field: Field, draw: random.Random) -> list[bytes]:
    bodies = [b"{", b"", b"\xff\xfe", b"[1]", b"null", b'{"image": NaN}', b"[" * 90_000]
    bodies += [
        b'{"a":' * 9000,
        b'{"n": ' + b"9" * 100_000 + b"}",
        b'{"image": 5}',
        b'{"images": {}}',
    ]
    bodies += [
        b'{"image": "%%%"}',
        b'{"image": "/etc/passwd"}',
        b'{"image": "\\ud800"}',
        b'{"images": []}',
    ]
    bodies += [b'{"text": "a"}', b'{"images": [' + b'"",' * 400 + b'""]}', draw.randbytes(200)]
    return [post(draw.choice(["/predict", INFER]), body, JSON) for body in bodies]


@attack("wrong tensors")
@choice
def _tensors(field: Field, draw: random.Random) -> list[bytes]:
    square = [[[[0.0] * 16] * 16]]
    bodies = [
        tensor([[1.0], [1.0, 2.0]], [2, 2]),
        tensor(square, [1, 1, 16, 16]).replace(b"0.0", b"NaN", 1),
        tensor(square, [1, 1, 16, 16]).replace(b"0.0", b"1e999", 1),
        tensor([3e38] * 256, [1, 1, 16, 16]),
        tensor(square, [1, 1, 16, 17]),
        tensor([], [0, 1, 16, 16]),
        tensor([0.0], [2**31 - 1] * 8),
        tensor([0.0], [-1, 1, 16, 16]),
        tensor([0.0], [2**70]),
        tensor([0.0], "shape"),
        tensor(["a"] * 256, [1, 1, 16, 16]),
        tensor(square, [1, 1, 16, 16], "FP99"),
        tensor([1] * 256, [1, 1, 16, 16], "INT64"),
        tensor(square, [1, 1, 16, 16], name="other"),
        tensor(square, [1, 1, 16, 16], name=None),
        tensor(["AAAA"], [1], "BYTES", "image"),
        tensor([[["x"]]], [1], "FP32", "image"),
        b'{"inputs": [' + b"{}," * 1000 + b"{}]}",
    ]
    return [post(INFER, body, JSON) for body in bodies]


@attack("huge JSON", 0.08)
async def _huge(field: Field, draw: random.Random) -> str:
    return await field.send(post(draw.choice(["/predict", INFER]), draw.choice(field.huge), JSON))


@attack("lying binary tensors")
@choice
def _binary(field: Field, draw: random.Random) -> list[bytes]:
    requests = []
    for size in (-1, 3, 10**12, None, "x"):
        entry = {"name": "pixel_values", "datatype": "FP32", "shape": [1, 1, 16, 16]}
        text = json.dumps(
            {"inputs": [{**entry, "parameters": {"binary_data_size": size}}]}
        ).encode()
        for length in (str(len(text)), "0", "99999999", "9" * 5000, "\xb2", "-1"):
            header = f"inference-header-content-length: {length}"
            requests.append(post(INFER, text + draw.randbytes(1024), "", header))
    return requests


@attack("image that claims too many pixels")
@choice
def _claims(field: Field, draw: random.Random) -> list[bytes]:
    sizes = [(60_000, 60_000), (12_000, 12_000), (2**31 - 1, 2**31 - 1), (2**31 - 1, 1), (0, 5)]
    return [post("/predict", claims(*size), "image/png") for size in sizes]


@attack("image of extreme aspect", 0.5)
async def _aspect(field: Field, draw: random.Random) -> str:
    long = draw.choice([20_000, 100_000, 400_000])
    size = draw.choice([(long, 1), (1, long)])
    return await field.send(post("/predict", encoded(Image.new("L", size)), "image/png"))


@attack("24 large images at once", 0.03)
async def _large(field: Field, draw: random.Random) -> str:
    request = post("/predict", field.large, "image/png")
    said = await asyncio.gather(*(field.send(request, until=60) for _ in range(24)))
    return ", ".join(f"{count} x {status}" for status, count in sorted(Counter(said).items()))


@attack("photo of 12 megapixels", 0.3)
async def _photo(field: Field, draw: random.Random) -> str:
    return await field.send(post("/predict", field.photo, "image/jpeg"))


@attack("foreign or damaged image", 2.0)
async def _damaged(field: Field, draw: random.Random) -> str:
    foreign = [
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"<svg width='9' height='9'/>",
        b"%PDF-1.7\n",
    ]
    foreign += [
        b"8BPS\0\1" + b"\0" * 40,
        b"\0\0\1\0\1\0",
        b"II*\0\x08\0\0\0\xff\xff" + b"\0" * 200,
        b"",
        b"GIF89a",
    ]
    image = Image.fromarray(np.frombuffer(draw.randbytes(900), np.uint8).reshape(30, 30))
    file = bytearray(
        encoded(image, draw.choice(["PNG", "JPEG", "GIF", "BMP", "TIFF", "PPM", "WEBP"]))
    )
    if draw.random() < 0.4:
        content = bytes(file[: draw.randint(1, len(file) - 1)])
    elif draw.random() < 0.7:
        for _ in range(draw.randint(1, 9)):
            file[draw.randrange(len(file))] = draw.randrange(256)
        content = bytes(file)
    else:
        content = draw.choice(foreign)
    return await field.send(post("/predict", content, "application/octet-stream"))


@attack("wrong method or path")
@choice
def _paths(field: Field, draw: random.Random) -> list[bytes]:
    paths = [
        "/../../etc/passwd",
        "/%00",
        "//",
        "/%ff%fe",
        "/v2/models/other",
        "/v2/models/digits/versions/9",
    ]
    methods = ["PUT", "DELETE", "TRACE", "OPTIONS", "PATCH", "HEAD", "BREW"]
    return [
        *(head(path, method="GET") for path in (*paths, "*", "http://other/", "/" + "a/" * 2000)),
        *(head("/predict", "content-length: 0", method=method) for method in methods),
        head("other:80", method="CONNECT"),
    ]


@attack("garbage after a request")
@choice
def _pipelined(field: Field, draw: random.Random) -> list[bytes]:
    request = post("/predict", field.file, "image/png")
    return [
        request + draw.randbytes(500),
        request * 5 + b"\r\n\r\nGET",
        head("/v2", method="GET") * 50,
        request + b"POST /predict HTTP/1.1\r\ncontent-length: 999999\r\n\r\n",
    ]


@attack("connection aborted")
async def _aborted(field: Field, draw: random.Random) -> str:
    request = post("/predict", field.file, "image/png")
    end = draw.choice([0, 10, len(request) // 2, len(request)])
    return await field.send(request[:end], abort=True)


@attack("body shorter than told")
async def _short(field: Field, draw: random.Random) -> str:
    return await field.send(head("/predict", "content-length: 5000") + b"x" * 90, abort=True)


@attack("no token or a wrong one")
async def _token(field: Field, draw: random.Random) -> str:
    wrong = draw.choice([None, "wrong", TOKEN[:-1], TOKEN + "x"])
    return await field.send(post("/predict", field.file, "image/png", token=wrong))


# --- the run --------------------------------------------------------------------------------------


class Tally:
    """What became of the valid requests."""

    def __init__(self) -> None:
        self.right = self.wrong = 0
        self.lost: Counter[str] = Counter()
        self.seconds: list[float] = []

    @property
    def done(self) -> int:
        return self.right + self.wrong + self.lost.total()

    def milliseconds(self) -> dict[str, float]:
        """Return percentiles of the latency."""
        times = sorted(self.seconds) or [0.0]
        shares = {"p50": 0.5, "p95": 0.95, "p99": 0.99, "max": 1.0}
        places = {name: min(len(times) - 1, int(s * len(times))) for name, s in shares.items()}
        return {name: round(1000 * times[place], 1) for name, place in places.items()}


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, request: bytes) -> Any:
    """Send a request over an open connection; return the status and the body."""
    writer.write(request)
    answer = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", answer)
    body = await reader.readexactly(int(length.group(1))) if length else b""
    return int(answer[9:12]), body


async def client(
    field: Field, requests: list[Valid], draw: random.Random, turn: Callable[[], Any], tally: Tally
) -> None:
    """Send valid requests, one after another, as long as `turn` says so."""
    connection = None
    while await turn():
        valid, start = draw.choice(requests), time.monotonic()
        try:
            if connection is None:
                connection = await asyncio.open_connection(field.host, field.port)
            status, body = await asyncio.wait_for(ask(*connection, valid.request), PATIENCE)
        except (OSError, EOFError, asyncio.TimeoutError, asyncio.LimitOverrunError) as error:
            tally.lost[type(error).__name__] += 1
            if connection is not None:
                connection[1].close()
            connection = None
            continue
        tally.seconds.append(time.monotonic() - start)
        if status != 200:
            tally.lost[str(status)] += 1
        elif valid.is_right(body):
            tally.right += 1
        else:
            tally.wrong += 1
    if connection is not None:
        connection[1].close()


async def quiet(field: Field, requests: list[Valid], count: int, clients: int) -> Tally:
    """Send valid requests while nobody attacks."""
    left, tally = [count], Tally()

    async def turn() -> bool:
        left[0] -= 1
        return left[0] >= 0

    draws = [random.Random(number) for number in range(clients)]
    await asyncio.gather(*(client(field, requests, draw, turn, tally) for draw in draws))
    return tally


class Progress:
    """How far the valid requests and the attack are, over both processes, so that they go in step.

    The attackers run in a process of their own: what it costs to attack must not show as latency.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        memory = multiprocessing.get_context("fork")
        self.valid, self.attacked = memory.Value("q", 0), memory.Value("q", 0)
        self.args, self.end = args, time.monotonic() + args.seconds

    def share(self, count: Any, total: int) -> float:
        """Return how much of its requests a side has behind it."""
        return 1.0 if time.monotonic() > self.end else count.value / max(1, total)

    @property
    def valid_share(self) -> float:
        return self.share(self.valid, self.args.valid)

    @property
    def attack_share(self) -> float:
        return self.share(self.attacked, self.args.malformed)


async def ask_in_step(
    field: Field, service: Service, requests: list[Valid], progress: Progress
) -> Tally:
    """Send valid requests, in step with the attack."""
    args, tally, started = progress.args, Tally(), 0

    async def turn() -> bool:
        nonlocal started
        progress.valid.value = tally.done
        while started < args.valid and time.monotonic() < progress.end:
            if service.process.poll() is not None:
                return False
            if progress.attack_share >= 1 or started / args.valid <= progress.attack_share + AHEAD:
                started += 1
                return True
            await asyncio.sleep(0.005)
        return False

    draws = [random.Random(args.seed + number) for number in range(args.clients)]
    await asyncio.gather(*(client(field, requests, draw, turn, tally) for draw in draws))
    progress.valid.value = args.valid  # the attack need not wait any more
    return tally


def attack_in_step(field: Field, progress: Progress, file: Path) -> None:
    """Attack, in step with the valid requests; write what happened as JSON."""
    args, draw = progress.args, random.Random(progress.args.seed)
    plan = list(ATTACKS)[: args.malformed]  # each at least once
    weights = [weight for weight, _ in ATTACKS.values()]
    plan += draw.choices(list(ATTACKS), weights, k=max(0, args.malformed - len(plan)))
    draw.shuffle(plan)
    found: dict[str, Counter[str]] = defaultdict(Counter)

    async def attacker(number: int) -> None:
        own = random.Random(args.seed + 1000 + number)
        while plan and time.monotonic() < progress.end:
            if progress.valid_share < 1 and progress.attack_share > progress.valid_share + AHEAD:
                await asyncio.sleep(0.005)
                continue
            name = plan.pop()
            found[name][await ATTACKS[name][1](field, own)] += 1
            with progress.attacked.get_lock():
                progress.attacked.value += 1

    async def attackers() -> None:
        await asyncio.gather(*(attacker(number) for number in range(args.attackers)))

    asyncio.run(attackers())
    told = {name: dict(sorted(found[name].items())) for name in sorted(found)}
    file.write_text(json.dumps({"not_sent": len(plan), "by_kind": told}))


def under_attack(
    field: Field, service: Service, requests: list[Valid], args: argparse.Namespace, work: Path
) -> tuple[Tally, dict[str, Any]]:
    """Send valid and malformed requests in step; return what became of them."""
    progress, file = Progress(args), work / "attackers.json"
    process = multiprocessing.get_context("fork").Process(
        target=attack_in_step, args=(field, progress, file), daemon=True
    )
    process.start()
    tally = asyncio.run(ask_in_step(field, service, requests, progress))
    process.join(2 * PATIENCE + 10)
    if process.is_alive() or not file.is_file():
        process.kill()
        raise SystemExit("The attackers did not end.")
    malformed = json.loads(file.read_text())
    sent = sum(sum(counts.values()) for counts in malformed["by_kind"].values())
    return tally, {"sent": sent, **malformed}


def run(args: argparse.Namespace, folder: Path | None = None) -> dict[str, Any]:
    """Attack a service of a saved ensemble of digits; return what happened."""
    with tempfile.TemporaryDirectory() as work:
        if folder is None:
            folder = Path(work) / "digits"
            make_ensemble(folder)
        requests = valid_requests(folder)
        service = Service(folder, Path(work))
        try:
            field, begin = Field(service), time.monotonic()
            asyncio.run(quiet(field, requests, 4 * args.clients, args.clients))  # warm
            calm = asyncio.run(quiet(field, requests, max(20, args.valid // 7), args.clients))
            before = service.megabytes("VmHWM")
            tally, malformed = under_attack(field, service, requests, args, Path(work))
            took = time.monotonic() - begin
            peak, died = service.megabytes("VmHWM"), service.process.poll()
        finally:
            code = service.stop()
        log = service.log.read_text(errors="replace")
    quiet_times, attack_times = calm.milliseconds(), tally.milliseconds()
    return {
        "seconds": round(took, 1),
        "clients": args.clients,
        "attackers": args.attackers,
        "tokens": service.has_tokens,
        "valid": {
            "sent": tally.done,
            "right": tally.right,
            "wrong": tally.wrong + calm.wrong,
            "lost": dict(tally.lost + calm.lost),
            "not_sent": args.valid - tally.done,
        },
        "malformed": malformed,
        "milliseconds_of_valid": {"quiet": quiet_times, "attack": attack_times},
        "attack_over_quiet": {
            name: round(attack_times[name] / max(quiet_times[name], 0.1), 1)
            for name in attack_times
        },
        "peak_megabytes": {"quiet": before, "attack": peak},
        "service": {
            "died": died,
            "exit_code": code,
            "tracebacks": log.count("Traceback"),
            "log_lines": log.count("\n"),
        },
    }


def parser() -> argparse.ArgumentParser:
    """Return the options."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore
    options.add_argument("--name", default="run", help="Name of the entry in the results.")
    options.add_argument("--valid", type=int, default=3500)
    options.add_argument("--malformed", type=int, default=2900)
    options.add_argument("--clients", type=int, default=6, help="Clients with valid requests.")
    options.add_argument("--attackers", type=int, default=24)
    options.add_argument("--seconds", type=float, default=300, help="The attack ends by then.")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument("--output", type=Path, default=RESULTS)
    return options


def main() -> int:
    """Attack, print and write what happened."""
    args = parser().parse_args()
    found = run(args)
    record = json.loads(args.output.read_text()) if args.output.is_file() else {}
    record["command"] = "python benchmarks/attack.py --name NAME"
    record["processors"] = os.cpu_count()
    record.setdefault("runs", {})[args.name] = found
    args.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(found, indent=2))
    valid = found["valid"]
    return int(bool(valid["wrong"] or valid["lost"] or found["service"]["died"] is not None))


if __name__ == "__main__":
    sys.exit(main())
