"""The typer application that holds all commands."""

from __future__ import annotations

import logging
import os
from typing import Annotated

import typer

from .. import __version__
from .bench import bench
from .command import check_output
from .demo import demo
from .doctor import doctor
from .grafana import grafana
from .plan import plan
from .render import prepare_output
from .reset import reset
from .stats import stats
from .try_command import try_command

_HELP = (
    "Inspect, try and reset what a fleet shares through Redis: rate limits, concurrency limits, "
    "pauses of upstreams and circuit breakers."
)

app = typer.Typer(
    name="distwindow",
    help=_HELP,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    # typer's tracebacks print local variables, and the URL among them contains the password.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"distwindow {__version__}")
        raise typer.Exit


@app.callback(help=_HELP)
def _main_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass


app.command()(demo)
app.command()(stats)
app.command("try")(try_command)
app.command()(reset)
app.command()(doctor)
app.command()(bench)
app.command()(plan)
app.command()(grafana)


def run() -> None:
    """Run the command that `sys.argv` names, then end the process."""
    if not os.environ.get("DISTWINDOW_DEBUG"):  # an error is one line, and no record of it besides
        logging.getLogger("distwindow").addHandler(logging.NullHandler())
    try:
        with check_output():  # help and the version are printed outside of any command
            prepare_output()
            app()
    except typer.Exit as end:
        raise SystemExit(end.exit_code) from None
