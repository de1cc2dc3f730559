"""`doctor`: are the files of a folder sound, and if not, what can be saved."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..errors import Stop
from ..output import print_json, say


def command(
    folder: Annotated[
        Path, typer.Argument(help="A saved ensemble, the folder of a run, or an exported folder.")
    ],
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Finish a stopped save; delete leftovers."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Check every file of a folder by the code that reads it; say what a rerun will do.

    The exit code is 0 when the folder is sound, and 1 when it is not.
    """
    from ...serving.folder_check import check_folder
    from ...serving.folder_check import repair as repair_folder

    checkup = check_folder(folder)
    done = repair_folder(checkup) if repair else []
    if repair:
        for words in done:
            say(words, json=json)
        checkup = check_folder(folder)
    if not checkup.findings:
        raise Stop(f"{folder} holds nothing that hydra-ensembles wrote.", 3)
    if json:
        record = {**asdict(checkup), "folder": str(folder), "sound": checkup.is_sound}
        print_json({**record, "repaired": done})
    else:
        typer.echo(str(checkup))
    if not checkup.is_sound:
        raise typer.Exit(1)
