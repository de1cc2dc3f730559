"""`serve`: a saved ensemble behind the endpoints that platforms know."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import options
from ..errors import Stop
from ..output import say, waiting

if TYPE_CHECKING:
    from ...serving.backends import Backend


def command(
    folder: Annotated[
        Path,
        typer.Argument(help="A saved ensemble, or an exported one.", show_default=False),
    ],
    name: Annotated[
        str | None, typer.Option(help="What clients call the model; by default the folder's name.")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 picks a free one.")] = 8000,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File of tokens, one per line; clients send one as Authorization: Bearer TOKEN. "
            "Needed when other machines can connect.",
            show_default=False,
        ),
    ] = None,
    no_token: Annotated[
        bool, typer.Option("--no-token", help="A gateway in front of the service authenticates.")
    ] = False,
    alarm: Annotated[
        float | None,
        typer.Option(
            help="False-alarm rate: abstain when novelty exceeds 1 - alarm. Overrides the saved "
            "policy; 0.05 if there is none."
        ),
    ] = None,
    max_batch: Annotated[int, typer.Option(min=1, help="Largest batch of inputs.")] = 32,
    max_wait: Annotated[
        float, typer.Option(min=0, help="Milliseconds that an input waits for others.")
    ] = 2.0,
    max_queue: Annotated[int, typer.Option(min=1, help="Largest number of waiting inputs.")] = 1024,
    max_rows: Annotated[
        int, typer.Option(min=1, help="Largest number of inputs per request.")
    ] = 256,
    max_body: Annotated[
        float, typer.Option(min=0.001, help="Largest request in megabytes.")
    ] = 16.0,
    max_pixels: Annotated[
        float, typer.Option(min=0.001, help="Millions of pixels per request.")
    ] = 40.0,
    max_decoding: Annotated[
        float, typer.Option(min=0.001, help="Millions of pixels decoded at once.")
    ] = 80.0,
    max_text: Annotated[
        int, typer.Option(min=1, help="Largest number of characters per text.")
    ] = 20_000,
    timeout: Annotated[float, typer.Option(min=0.01, help="Seconds until a request fails.")] = 30.0,
    read_timeout: Annotated[
        float, typer.Option(min=0.01, help="Seconds for a client to send its request.")
    ] = 10.0,
    drift_window: Annotated[int, typer.Option(min=20, help="Answers per test for drift.")] = 500,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per model call; torch's default.")
    ] = None,
    class_names: options.ClassNames = None,
    device: options.Device = None,
    dtype: options.Dtype = "float32",
    config: options.Config = None,
) -> None:
    """Answer over HTTP: Open Inference Protocol v2, /predict, /metrics, and a page at /.

    Stops at Ctrl-C or SIGTERM when the requests under way are answered.
    """
    from ... import __version__
    from ...serving.app import check_packages, make_app, run
    from ...serving.limits import Limits
    from ...serving.service import Service

    check_packages()
    tokens = _tokens(host, token_file, no_token=no_token)
    limits = Limits(
        body=int(max_body * 2**20),
        pixels=int(max_pixels * 1e6),
        decoding=int(max_decoding * 1e6),
        text=max_text,
        rows=max_rows,
        batch=max_batch,
        wait=max_wait / 1000,
        queue=max_queue,
        read_seconds=read_timeout,
        answer_seconds=timeout,
    )
    if alarm is not None and not 0 < alarm < 1:
        raise Stop(f"--alarm {alarm}: expected a number between 0 and 1, such as 0.05.", 2)
    backend = load_backend(
        folder, alarm=alarm, threads=threads, class_names=class_names, device=device, dtype=dtype
    )
    service = Service(
        backend, name or folder.resolve().name, limits=limits, drift_window=drift_window
    )
    say(f"{service.name}: {backend.members} members, {backend.gives}; {backend.rule}")
    app = make_app(service, version=__version__, tokens=tokens)
    run(app, host=host, port=port, say=say)
    say("Stopped: every request under way was answered.")


def _tokens(host: str, file: Path | None, *, no_token: bool) -> tuple[bytes, ...]:
    """Return the tokens of a file; demand one where other machines can connect."""
    from ...serving.tokens import MAKE_ONE, is_loopback, read_tokens

    if file is not None and no_token:
        raise Stop("Give --token-file or --no-token, not both.", 2)
    if file is not None:
        return read_tokens(file)
    if not no_token and not is_loopback(host):
        raise Stop(
            f"--host {host} lets other machines connect: give --token-file FILE, or --no-token if "
            f"a gateway in front of the service authenticates. Make a token: {MAKE_ONE}.",
            2,
        )
    return ()


def load_backend(
    folder: Path,
    *,
    alarm: float | None = None,
    threads: int | None = None,
    class_names: str | None = None,
    device: str | None = None,
    dtype: str = "float32",
) -> Backend:
    """Load what is to be served: an exported folder by ONNX Runtime, a saved one by torch."""
    if not folder.is_dir():
        raise Stop(f"There is no folder {folder}. Give a saved or an exported ensemble.", 3)
    if (folder / "contract.json").is_file():
        if alarm is not None or device is not None or dtype != "float32":
            raise Stop(
                f"{folder} is an exported ensemble, whose policy and type are fixed: leave out "
                "--alarm, --device and --dtype, or export it again.",
                2,
            )
        from ...runtime import load  # without torch
        from ...serving.backends import ExportedBackend
        from ..class_names import read_names

        with waiting(f"Loading {folder}"):
            exported = load(folder, threads=threads)
            return ExportedBackend(exported, class_names=read_names(class_names))
    import torch

    from ...fusion.ensemble import HydraEnsemble
    from ...serving.torch_backend import TorchBackend
    from ..models import load_model

    if threads is not None:
        torch.set_num_threads(threads)
    loaded = load_model(str(folder), class_names=class_names, device=device, dtype=dtype)
    ensemble = loaded.model
    if not isinstance(ensemble, HydraEnsemble):
        raise Stop(
            f"{folder} is a host model, not an ensemble. Build one first: hydra-ensembles build "
            f"{folder} --data DATA.",
            4,
        )
    return TorchBackend(ensemble, class_names=loaded.class_names, alarm=alarm)
