"""The commands, put together."""

from __future__ import annotations

from typing import Annotated

import typer

from distwindow import __version__

from .bench import bench
from .demo.command import demo
from .doctor.command import doctor
from .errors import output_checked
from .output import prepare_output
from .reset import reset
from .stats import stats
from .trial import trial

app = typer.Typer(
    name="distwindow",
    help="Rate limits that a fleet shares through Redis: look at them, try them, forget them.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    # A traceback shows arguments, and the URL among them has the password.
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"distwindow {__version__}")
        raise typer.Exit


@app.callback()
def _front(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    """Rate limits that a fleet shares through Redis: look at them, try them, forget them."""


app.command()(demo)
app.command()(stats)
app.command("try")(trial)
app.command()(reset)
app.command()(doctor)
app.command()(bench)


def run() -> None:
    """Run the command that `sys.argv` names; ends the process."""
    try:
        with output_checked():  # help and the version are printed outside of any command
            prepare_output()
            app()
    except typer.Exit as end:
        raise SystemExit(end.exit_code) from None
