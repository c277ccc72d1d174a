"""`trainwright env`: versions and hardware, for a report of an error."""

from __future__ import annotations

import typer

from trainwright.cli.exit_codes import reporting


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
                typer.echo(f"{name:<14}{value}")
