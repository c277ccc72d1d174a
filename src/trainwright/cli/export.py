"""`trainwright export`: the model of a checkpoint alone, for `from_pretrained`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.exit_codes import reporting


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or the output directory of a run.")],
    folder: Annotated[Path, typer.Argument(help="Directory to write; it must be empty, or not there.", metavar="DIR")],
) -> None:
    """Write the model of a checkpoint alone, for from_pretrained."""
    with reporting():
        from trainwright.checkpoint.model_export import export_model
        from trainwright.engine import sharded_state

        written = export_model(checkpoint, folder, parts=sharded_state)
        size = sum(path.stat().st_size for path in written)
        typer.echo(f"Written: {folder}, {len(written)} files, {size / 1e6:.1f} MB")
