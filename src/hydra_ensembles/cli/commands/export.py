"""`export`: a saved ensemble as programs that run without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options
from ..exits import Stop
from ..show import print_json, say, waiting


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
    alarm: Annotated[
        float | None,
        typer.Option(help="Without a policy: abstain when newer than all but this share."),
    ] = 0.05,
    sign: Annotated[
        Path | None,
        typer.Option(help="A private key of ssh: sign the artefact's SHA256SUMS with it."),
    ] = None,
    config: options.Config = None,
    json: options.Json = False,
) -> None:
    """Export a saved ensemble: ONNX, a torch.export archive, preprocessing and a contract.

    Every program is loaded again and compared with the ensemble before it is put in its place.
    """
    from ...fusion import HydraEnsemble
    from ...serving.exporting import export

    with waiting(f"loading {ensemble}"):
        loaded = HydraEnsemble.from_pretrained(ensemble)
    inputs = None if example is None else _inputs(example, text=loaded.tokenizer is not None)
    with waiting("tracing, exporting and comparing"):
        made = export(
            loaded,
            output,
            formats=formats or ["onnx", "torch"],
            example=inputs,
            int8=int8,
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
    from ...data.folders import SUFFIXES
    from ...serving.example import ROWS

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
