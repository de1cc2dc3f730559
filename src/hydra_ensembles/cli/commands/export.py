"""`export`: a saved ensemble as programs that run without torch."""

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
    output: Annotated[Path, typer.Argument(help="Folder for the programs.", show_default=False)],
    formats: Annotated[
        list[str] | None,
        typer.Option("--format", help="onnx or torch; may be repeated. Both by default."),
    ] = None,
    int8: Annotated[
        bool, typer.Option("--int8", help="Also an ONNX program with 8-bit weights.")
    ] = False,
    example: Annotated[
        Path | None,
        typer.Option(help="Real inputs to compare with: a picture, a folder or a text file."),
    ] = None,
    known: Annotated[
        str | None,
        typer.Option(help="Of --int8: known data, that its novelty is fitted on anew."),
    ] = None,
    held_out: Annotated[
        str | None,
        typer.Option(help="Of --int8: labelled data, that its policy is fitted on anew."),
    ] = None,
    alarm: Annotated[
        float | None,
        typer.Option(help="Without a policy: abstain when newer than all but this share."),
    ] = 0.05,
    sign: Annotated[
        Path | None,
        typer.Option(help="A private key of ssh: sign the artefact's SHA256SUMS with it."),
    ] = None,
    reading: Reading = READING,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Export a saved ensemble: ONNX, a torch.export archive, preprocessing and a contract.

    Every program is loaded again and compared with the ensemble before it is put in its place. An
    8-bit program of an ensemble with novelty needs --known: it moves the features.
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
    inputs = None if example is None else _inputs(example, text=loaded.tokenizer is not None)
    with waiting("tracing, exporting and comparing"):
        made = export(
            loaded,
            output,
            formats=formats or ["onnx", "torch"],
            example=inputs,
            int8=int8,
            **data,
            alarm=alarm,
            key=sign,
        )
    if json:
        files = {kind: str(made.folder / name) for kind, name in made.programs.items()}
        print_json({"programs": files, "largest_difference": made.differences})
    else:
        say(str(made))


def _inputs(path: Path, *, text: bool) -> list[Any]:
    """Read some pictures or lines."""
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
        raise Stop(f"--example {path} holds neither pictures nor lines of text.", 3)
    return found
