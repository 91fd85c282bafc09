"""The command line: all commands, and what becomes of errors."""

import os
import sys
from typing import Annotated, Any

import typer

from moeplan import __version__
from moeplan.cli.options import Json
from moeplan.cli.planning_commands import compare, explain, export, predict, search
from moeplan.cli.scoring_commands import check, fit, validate
from moeplan.cli.training_commands import calibrate, run, tokenize
from moeplan.errors import MoeplanError

app = typer.Typer(
    name="moeplan",
    help="Plan, run and check Mixture-of-Experts training: memory, communication and compute, jointly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# In the order of --help.
_COMMANDS = (search, predict, explain, compare, check, run, tokenize, export, calibrate, validate, fit)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moeplan {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Errors go to stderr as `error:` and `hint:`. Exit codes: 0 ok, 2 input, 3 no plan, 4 tolerance, 1 our fault."""


for _command in _COMMANDS:
    app.command()(_command)


def _add_catalogue(kind: str, about: str, shows: str, what: str) -> None:
    """``moeplan KIND`` lists all of a kind, ``moeplan KIND show NAME`` shows one; bodies: moeplan.cli.show."""
    group = typer.Typer(help=about)
    app.add_typer(group, name=kind, invoke_without_command=True)

    @group.callback()
    def list_all(context: typer.Context, as_json: Json = False) -> None:
        if context.invoked_subcommand is None:
            from moeplan.cli.show import CATALOGUES

            CATALOGUES[kind].list_all(as_json)

    @group.command("show", help=shows)
    def show_one(name: Annotated[str, typer.Argument(help=what)], as_json: Json = False) -> None:
        from moeplan.cli.show import CATALOGUES

        CATALOGUES[kind].show_one(name, as_json)


_add_catalogue(
    "models",
    "List model presets, or show one with its parameters, FLOPs and source.",
    "Show one model: sizes, parameters, FLOPs, source.",
    "Preset or file.",
)
_add_catalogue(
    "hardware",
    "List hardware profiles, or show one with the source of every number.",
    "Show every number of a profile with its source.",
    "Profile or file.",
)
_add_catalogue(
    "stacks",
    "List software stacks (engine and release), or show one with the source of its figures.",
    "Show what a stack executes, and every figure with its source.",
    "Stack or file.",
)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: one ``error:`` line and one ``hint:`` line instead of a traceback for what users can cause."""
    usage_error: Any = typer.BadParameter.__mro__[1]  # click's UsageError, wherever this typer keeps click
    try:
        code = app(args=arguments, standalone_mode=False)
    except MoeplanError as error:
        _report(error.message, error.hint)
        code = error.exit_code
    except usage_error as error:
        _report(error.format_message(), "moeplan COMMAND --help lists the options")
        code = 2
    except (KeyboardInterrupt, typer.Abort):
        _report("interrupted", "nothing was left half-written")
        code = 130
    except BrokenPipeError:  # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    except Exception as error:
        if os.environ.get("MOEPLAN_DEBUG"):
            raise
        _report(
            f"internal error: {type(error).__name__}: {error}", "set MOEPLAN_DEBUG=1 for the traceback and report it"
        )
        code = 1
    sys.exit(code if isinstance(code, int) else 0)


def _report(message: str, hint: str) -> None:
    one_line = " ".join(message.split())
    print(f"error: {one_line}", file=sys.stderr)  # noqa: T201 - the command line's own output
    if hint:
        print(f"hint: {hint}", file=sys.stderr)  # noqa: T201
