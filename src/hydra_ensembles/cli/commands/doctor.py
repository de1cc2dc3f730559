"""`doctor`: is a folder whole, and if not, what can be saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import options
from ..errors import Stop
from ..output import print_json, say


def command(
    folder: Annotated[
        Path, typer.Argument(help="A saved ensemble, a run's folder, or an exported artefact.")
    ],
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Finish a stopped save; delete what a rerun makes again."),
    ] = False,
    public_key: Annotated[
        Path | None,
        typer.Option(help="The ssh key that must have signed the artefact's checksums."),
    ] = None,
    json: options.Json = False,
) -> None:
    """Check every file of a folder: present, whole, of a known format; say what a rerun will do.

    The exit code is 0 when the folder is sound, and 1 when it is not.
    """
    from ...serving.checkup import check_folder
    from ...serving.checkup import repair as mend

    checkup = check_folder(folder, public_key=public_key)
    done: list[str] = []
    if repair:
        done = mend(checkup)
        for words in done:
            say(words, json=json)
        checkup = check_folder(folder, public_key=public_key)
    if not checkup.findings:
        raise Stop(f"{folder} holds nothing that hydra-ensembles wrote.", 3)
    if json:
        print_json({**checkup.to_dict(), "repaired": done})
    else:
        typer.echo(str(checkup))
    if not checkup.is_sound:
        raise typer.Exit(1)
