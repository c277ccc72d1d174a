"""`trainwright ...`: the commands. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

from typing import Annotated

import typer

from trainwright.cli.run_commands import compare, env, export, push, report, runs, verify
from trainwright.cli.training_commands import check, init, resume, train

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # its tracebacks show the values of variables, tokens among them
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (init, check, train, resume, runs, report, compare, verify, export, env):
    app.command()(_command)
app.command(hidden=True)(push)  # the message that names it is enough; the help fits a screen


def _version(is_asked: bool) -> None:
    if is_asked:
        from trainwright import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    # No docstring: typer would show it, and the help would no longer fit a screen of 24 lines.
    pass


if __name__ == "__main__":
    app()
