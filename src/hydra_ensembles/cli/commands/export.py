"""`export`: a saved ensemble as an ONNX program that runs without torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options
from ..errors import Stop
from ..inputs import READING, Reading, reads_data
from ..output import print_json, say, waiting


@reads_data(leave_out=["class_names", "device", "dtype"])
def command(
    ensemble: Annotated[
        str, typer.Argument(help="A saved ensemble: its folder or hub name.", show_default=False)
    ],
    output: options.Output = Path("exported"),
    int8: Annotated[
        bool, typer.Option("--int8", help="Also write a program with 8-bit weights.")
    ] = False,
    example: Annotated[
        Path | None,
        typer.Option(help="Real inputs to compare with: an image, a folder or a text file."),
    ] = None,
    known: Annotated[
        str | None,
        typer.Option(help="With --int8: in-distribution data to refit novelty."),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(help="With --int8: labelled data to refit the policy."),
    ] = None,
    alarm: Annotated[
        float | None,
        typer.Option(help="Without a policy: rate of known data that is called new."),
    ] = 0.05,
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Export a saved ensemble: an ONNX program, preprocessing and a contract.

    Every program is loaded again and compared with the ensemble before the folder is written. An
    8-bit program needs --known if the ensemble has novelty, and --held-out if it has a policy.
    """
    from ...fusion import HydraEnsemble
    from ...serving.exporter import export
    from ..models import check_sources

    check_sources(known)
    check_sources(held_out)
    with waiting(f"loading {ensemble}"):
        loaded = HydraEnsemble.from_pretrained(ensemble)
    data: dict[str, Any] = {}
    if known or held_out:
        source = replace(reading.load_model(ensemble), model=loaded)
        places = {"known": known, "held_out": held_out}
        data = {name: reading.load_known(source, place) for name, place in places.items() if place}
    inputs = None if example is None else _read(example, text=loaded.tokenizer is not None)
    with waiting("tracing, exporting and comparing"):
        made = export(
            loaded,
            output,
            example=inputs,
            int8=int8,
            **data,
            alarm=alarm,
        )
    if json:
        files = {kind: str(made.folder / name) for kind, name in made.programs.items()}
        print_json({"programs": files, "largest_difference": made.differences})
    else:
        say(str(made))


def _read(path: Path, *, text: bool) -> list[Any]:
    """Return the first images of a folder, the first lines of a file, or one image."""
    from ...data.image_data import SUFFIXES
    from ...serving.export_example import ROWS

    if not path.exists():
        raise Stop(f"--example {path} does not exist.", 3)
    if path.is_dir():
        files = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
        found: list[Any] = [str(file) for file in files[:ROWS]]
    elif text:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found = [line for line in lines if line.strip()][:ROWS]
    else:
        found = [str(path)]
    if not found:
        raise Stop(f"--example {path} holds neither images nor lines of text.", 3)
    return found
