"""`trainwright runs`, `report`, `compare`, `push`, `export`, `verify` and `env`: runs, checkpoints, this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from trainwright._types import printable
from trainwright.cli.exit_codes import FAILED, echo, reporting
from trainwright.cli.training_commands import Output


def report(
    run: Annotated[Path, typer.Argument(help="Output directory of a run or a search, or a journal.jsonl.")],
    output: Output = None,
) -> None:
    """Write an HTML file that shows a run or a search."""
    with reporting():
        from trainwright.report.run_page import write_report
        from trainwright.report.search_page import has_search, write_search_report

        write = write_search_report if has_search(run) else write_report
        echo(f"Written: {write(run, output)}")


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Output directories of two runs or more.")],
    output: Output = None,
) -> None:
    """Write an HTML file that shows where several runs part, and why."""
    with reporting():
        from trainwright.report.run_page import write_comparison

        echo(f"Written: {write_comparison(runs, output or 'comparison.html')}")


def runs(
    folder: Annotated[Path, typer.Argument(help="Directory to look below.", metavar="DIR", exists=True)] = Path("."),
) -> None:
    """Show the runs below a directory: state, best, steps, time."""
    with reporting():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        from trainwright.report.run_table import ago, find_runs, readable_time

        found, now = find_runs(folder), time.time()
        if not found:
            echo(f"No run is below {folder}: none has a journal.jsonl.")
            return
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in ("run", "state", "best", "step", "time", "written"):
            table.add_column(name, justify="right" if name in ("step", "time") else "left", overflow="fold")
        for one in found:
            cells = one.name, one.state, one.best_text, one.steps_text, readable_time(one.seconds)
            table.add_row(*(Text(printable(cell)) for cell in (*cells, ago(one.written_at, now))))
        Console().print(table)


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
        echo(f"Uploaded: {num_waiting}")


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
        echo(f"Written: {folder}, {len(written)} files, {size / 1e6:.1f} MB")


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
            echo(f"{folder}: {'damaged' if found else intact(folder)}")
            for problem in found:
                echo(f"    {problem}")
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


def env() -> None:
    """Show versions and hardware, for a report of an error."""
    with reporting():
        from trainwright.distributed.world import World
        from trainwright.journal.environment_info import environment

        found = environment(World.detect().device)
        found.pop("script")
        packages = found.pop("packages")
        found["memory_bytes"] = f"{found['memory_bytes'] / 1e9:.1f} GB"
        rows = {**packages, **{name.removesuffix("_bytes"): value for name, value in found.items()}}
        for name, value in rows.items():
            if value is not None:
                echo(f"{name:<14}{value}")
