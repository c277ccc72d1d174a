"""`trainwright push`: sends to the Hub what a training could not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.exit_codes import FAILED, reporting


def push(
    run: Annotated[Path, typer.Argument(help="Output directory of a run.")],
    token: Annotated[str | None, typer.Option(help="Of the Hub; by default that of the login.")] = None,
) -> None:
    """Upload to the Hub what a training with push_to_hub could not."""
    with reporting():
        from trainwright.hub.client import HubClient
        from trainwright.hub.outbox import Outbox
        from trainwright.hub.uploader import Uploader

        num_waiting = len(Outbox(run).waiting())
        if Uploader(run, run.resolve().name, client=HubClient(token)).finish():
            raise typer.Exit(FAILED)
        typer.echo(f"Uploaded: {num_waiting}")
