"""`hydra-ensembles`: the commands, the config file, and errors as one helpful line each."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import warnings
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from .. import __version__
from .errors import Stop, exit_code, one_line
from .output import click_module, is_first, number, status

COMMANDS = {
    "explain": "Explain what can be pruned and fused in a model, and why not.",
    "score": "Score the attention heads of a model; higher = keep.",
    "circuit": "Search the heads that carry an objective (HeadMap).",
    "build": "Build a fused ensemble from a model and calibration data.",
    "distill": "Distil one teacher into each member of a fused model.",
    "fold": "Fold fine-tuned copies of one model into one ensemble, without training.",
    "prune": "Remove heads and neurons to a budget; refit the rest, without training.",
    "eval": "Evaluate models, with outliers and corruptions; write a report.",
    "bench": "Time models against each other, as ratios.",
    "sweep": "Prune by each criterion to each ratio; measure the quality.",
    "policy": "Fit when a saved ensemble answers and when it abstains; save it with it.",
    "sets": "Fit sets of what may be right, with a guaranteed coverage, for a saved ensemble.",
    "predict": "Predict files or standard input to JSON lines; abstain at a risk.",
    "export": "Write an ONNX program that runs without torch.",
    "serve": "Answer over HTTP: Open Inference Protocol, /predict, /metrics, a page.",
    "report": "Write one HTML page from saved results.",
    "try": "Your model, your data: cost, calibration, your strangest files, as a page.",
    "demo": "Every step on embedded digits, in a few minutes.",
    "doctor": "Check a saved ensemble or a run's folder; say what can be saved.",
    "env": "Print the versions of everything that matters.",
}

KEPT = ("build", "circuit", "demo", "distill", "prune", "sweep", "try")
"""Commands that resume."""


class Commands(TyperGroup):
    """Commands that are imported when called, so that `--help` is quick."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names in the order of use."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command."""
        if cmd_name not in COMMANDS:
            return None
        file = "try_command" if cmd_name == "try" else cmd_name  # a word of the language
        module = importlib.import_module(f".commands.{file}", __package__)
        one = typer.Typer(add_completion=False, rich_markup_mode=None)
        one.command(cmd_name)(module.command)
        return typer.main.get_command(one)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List the commands without importing them."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


app = typer.Typer(
    name="hydra-ensembles",
    cls=Commands,
    help="A pretrained transformer in, one fused ensemble out, that knows when it does not know.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # importing rich's help takes longer than everything else here
    pretty_exceptions_enable=False,
    epilog=(
        "Exit codes: 0 fine, 1 unexpected, 2 wrong usage, 3 data, 4 model not supported, 5 damaged "
        "or foreign file, 6 package missing, 7 disk, 8 verification failed, 9 folder in use by "
        "another process, 130 interrupted."
    ),
)


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not report progress.")] = False,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Accept what stands before a command; `main` reads `--debug` and `--quiet` anywhere."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return its exit code; the entry point exits with it."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    debug, quiet = "--debug" in given, "--quiet" in given
    given = [argument for argument in given if argument not in ("--debug", "--quiet")]
    if given[:1] == ["--version"]:
        typer.echo(__version__)
        return 0
    command = typer.main.get_command(app)
    problems = click_module("exceptions")
    if not sys.warnoptions:
        warnings.showwarning = _note
    status.quiet, status.folder = quiet or not is_first(), None
    status.show_after(f"hydra-ensembles {_command_of(given) or ''}: starting")
    try:
        defaults = _config_of(given, command)
        with ExitStack() as stack:
            if not is_first():  # only the first of several processes prints
                nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
                stack.enter_context(redirect_stdout(nowhere))
            if quiet:
                from ..data.progress import silence

                silence()
                stack.callback(silence, False)
            code = int(command.main(given, standalone_mode=False, default_map=defaults) or 0)
        return _say(_stopped(given), 130) if code == 130 else code
    except (typer.Abort, KeyboardInterrupt):
        return _say(_stopped(given), 130)
    except typer.Exit as error:  # some versions of typer turn Ctrl-C into this, some return 130
        return _say(_stopped(given), 130) if error.exit_code == 130 else error.exit_code
    except problems.ClickException as error:
        error.show()
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has gone: be quiet
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if debug:
            raise
        code = exit_code(error)
        text = one_line(error)
        if code == 1:
            text = f"{type(error).__name__}: {text} (unexpected; --debug shows where)"
        return _say(text, code)
    finally:
        status.cancel()


def _command_of(given: list[str]) -> str | None:
    return next((argument for argument in given if argument in COMMANDS), None)


def _stopped(given: list[str]) -> str:
    """Return what an interrupted command has saved, and how to resume."""
    name = _command_of(given)
    if name not in KEPT:
        return "Stopped. No progress was saved: run the command again."
    if status.folder is None:
        return "Stopped before any progress was saved: run the same command again."
    return (
        f"Stopped. Progress is saved in {status.folder}. Run the same command to resume, or delete "
        "the folder to start over."
    )


def _note(message: Warning | str, *_: Any, **__: Any) -> None:
    """Show a warning as one line, without its location in the code."""
    typer.echo(f"hydra-ensembles: note: {message}", err=True)


def _say(text: str, code: int) -> int:
    status.cancel()
    who = "" if is_first() else f" (process {number()})"
    typer.echo(f"hydra-ensembles{who}: {text}", err=True)
    return code


def run() -> None:
    """Exit with what `main` returns."""
    sys.exit(main())


def _config_of(given: list[str], group: Any) -> dict[str, Any]:
    """Read `--config FILE` as defaults of the command; what is on the command line wins."""
    path = None
    for place, argument in enumerate(given):
        if argument == "--config" and place + 1 < len(given):
            path = given[place + 1]
        elif argument.startswith("--config="):
            path = argument.partition("=")[2]
    name = _command_of(given)
    if path is None or name is None:
        return {}
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Stop(f"The config file {path} does not exist.", 3) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise Stop(f"The config file {path} is not YAML: {one_line(error)}", 3) from None
    if not isinstance(content, dict):
        raise Stop(f"The config file {path} has no options; expected lines such as `seed: 0`.", 3)
    values = {str(key).replace("-", "_"): value for key, value in content.items()}
    made_for = values.pop("command", name)
    if made_for != name:
        raise Stop(f"The config file {path} is for `{made_for}`, not for `{name}`.", 2)
    known = [parameter.name for parameter in group.get_command(None, name).params]
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise Stop(
                f"The config file {path} sets {key!r}, which `{name}` does not know.{hint}", 2
            )
    return {name: values}
