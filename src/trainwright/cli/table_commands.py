"""Commands of capabilities that need recipes or a whole trainer, so they are here; the rows of the table name them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from trainwright import errors
from trainwright._types import counted
from trainwright.cli.parameters import Changed, Processes
from trainwright.command_line import FAILED, AnyPlace, AsJson, answering, place, print_json, print_line, print_status


def branch(
    context: typer.Context,
    run: Annotated[
        AnyPlace, typer.Argument(help="Output directory of the run, which is not changed.", metavar="RUN", parser=place)
    ],
    at: Annotated[int, typer.Option(min=1, help="Step to start from.", metavar="STEP")],
    out: Annotated[
        Path,
        typer.Option(
            "--output", "-o", "--out", help="Output directory of the new run.", metavar="DIR", file_okay=False
        ),
    ],
    cooldown: Annotated[
        str | None, typer.Option(help="Decay the learning rate to 0 over N steps, or P% of the run.", metavar="N|P%")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="linear (default), cosine, 1-sqrt.", metavar="SHAPE")] = None,
    overrides: Changed = None,
    processes: Processes = None,
    as_json: AsJson = False,
) -> None:
    """Start a run from a checkpoint of another, as for a cooldown."""
    from trainwright.cli.branch import branched
    from trainwright.cli.launch import launched
    from trainwright.cli.tasks.recipe_run import run as carry_out

    recipe, tree = branched(
        run, out.absolute(), at=at, cooldown=cooldown, shape=shape, overrides=overrides or (), typed=context.args
    )
    if not launched(recipe, processes, context):
        with answering(as_json) as answer:
            answer |= carry_out(recipe, tree, print_status)


def ledger(
    run: Annotated[Path, typer.Argument(help="Run with ledger=True, or a checkpoint of it.", metavar="RUN")],
    question: Annotated[str, typer.Argument(help="top, never, repeated, by-source or text.", metavar="WHAT")] = "top",
    other: Annotated[
        Path | None, typer.Argument(help="The other run, for `ledger diff RUN OTHER`.", metavar="OTHER")
    ] = None,
    number: Annotated[int, typer.Option("--number", "-n", min=1, help="Number of samples to show.", metavar="N")] = 20,
    data: Annotated[Path | None, typer.Option(help="The training data, for its texts.")] = None,
    quarantine: Annotated[
        Path | None, typer.Option(help="Exclude these samples from runs in DIR.", metavar="DIR")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show the samples a run learnt least, never saw, or saw again."""
    from trainwright.cli.ledger import answer, difference, difference_lines, exclude, lines

    if str(run) == "diff":
        if other is None or quarantine is not None or data is not None:
            raise errors.ArgumentError("Compare two runs as: trainwright ledger diff RUN OTHER.")
        compared = difference(Path(question), other, number=number)
        if as_json:
            print_json(compared)
            return
        for line in difference_lines(compared):
            print_line(line)
        return
    if other is not None:
        raise errors.ArgumentError(f"{other} is one argument too many. Two runs: trainwright ledger diff RUN OTHER.")
    found = answer(run, question, number=number, data=data)
    if quarantine is not None and question == "by-source":
        raise errors.ArgumentError("--quarantine takes samples, and by-source lists sources.")
    if as_json:
        print_json(found)
    else:
        for line in lines(found):
            print_line(line)
    if quarantine is not None:
        exclude(run, quarantine, found)
        print_line(f"In quarantine in {quarantine}: {counted(len(found), 'sample')}.", err=True)


def replay(
    folder: Annotated[Path, typer.Argument(help="Incident bundle: output_dir/incidents/step-...", metavar="DIR")],
    model: Annotated[
        str | None, typer.Option(help="module:function that returns the model, or a Trainer with it.", metavar="NAME")
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="fp32, bf16 or fp16, instead of the run's.", metavar="TYPE")
    ] = None,
    one_by_one: Annotated[bool, typer.Option("--one-by-one", help="Also run each sample by itself.")] = False,
    as_json: AsJson = False,
) -> None:
    """Repeat the step of an incident, without the dataset."""
    from trainwright.cli.replay import replay

    if precision not in (None, "fp32", "bf16", "fp16"):
        raise errors.ArgumentError(f"--precision {precision}: write fp32, bf16 or fp16.")
    with answering(as_json) as answer:
        result = replay(folder, model=model, precision=precision, one_by_one=one_by_one)
        answer |= dataclasses.asdict(result)
        for line in result.lines:
            print_line(line)
    if not result.is_same and precision is None:
        raise typer.Exit(FAILED)
