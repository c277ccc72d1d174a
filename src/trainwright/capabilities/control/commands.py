"""`trainwright ctl`: a command to a live run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainwright.command_line import FAILED, AsJson, amount, print_json, print_line, warn_user


def ctl(
    run: Annotated[Path, typer.Argument(help="Output directory of a run with live_control=True.", metavar="RUN")],
    words: Annotated[
        list[str], typer.Argument(help="save, evaluate, stop, lr RATE, log STEPS or profile STEPS.", metavar="COMMAND")
    ],
    wait_s: Annotated[
        float, typer.Option("--wait", parser=amount, metavar="SECONDS", help="Longest wait for the run's answer.")
    ] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Make a live run save, evaluate, stop, or change its learning rate."""
    from trainwright.capabilities.control.sender import give

    step, refused = give(run, words, wait_s=wait_s)
    if as_json:
        print_json({"step": step, "refused": refused})
    if refused is not None:
        warn_user(f"Refused: {refused}")
        raise typer.Exit(FAILED)
    if as_json:
        return
    print_line(f"Carried out after step {step}: {' '.join(words)}")
