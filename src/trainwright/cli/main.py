"""`trainwright ...`: the commands, each in a file of its own. Nothing heavy is imported before one of them runs."""

from __future__ import annotations

from typing import Annotated

import typer

from trainwright.cli.check import check
from trainwright.cli.compare import compare
from trainwright.cli.env import env
from trainwright.cli.export import export
from trainwright.cli.init import init
from trainwright.cli.push import push
from trainwright.cli.report import report
from trainwright.cli.resume import resume
from trainwright.cli.runs import runs
from trainwright.cli.train import train
from trainwright.cli.verify import verify

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
