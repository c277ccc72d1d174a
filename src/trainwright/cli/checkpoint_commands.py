"""`trainwright export` and `verify`: the model and the files of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.cli.exit_codes import FAILED, reporting


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


def verify(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, or the output directory of a run: all in it.")],
) -> None:
    """Check that every file of a checkpoint is there and unchanged."""
    with reporting():
        from trainwright.checkpoint.manifest import problems
        from trainwright.checkpoint.store import CheckpointStore
        from trainwright.errors import CheckpointNotFoundError

        store = CheckpointStore(checkpoint)
        folders = [store.path(step) for step in store.steps()] or [checkpoint]
        if not checkpoint.is_dir():
            raise CheckpointNotFoundError(f"There is no directory {checkpoint}.")
        damaged = 0
        for folder in folders:
            found = list(problems(folder))
            damaged += bool(found)
            typer.echo(f"{folder}: {'damaged' if found else intact(folder)}")
            for problem in found:
                typer.echo(f"    {problem}")
        if damaged:
            raise typer.Exit(FAILED)


def intact(folder: Path) -> str:
    """Verifies a checkpoint and returns a line about it."""
    from trainwright.checkpoint.manifest import Manifest

    manifest = Manifest.read(folder)
    if manifest is None:
        return "complete; it has no manifest, so its files could not be compared"
    size = sum(entry["size"] for entry in manifest.files.values())
    return f"intact, step {manifest.step}, {len(manifest.files)} files, {size / 1e6:.1f} MB"
