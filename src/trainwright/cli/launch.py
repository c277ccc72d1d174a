"""Processes of one run on this machine, started by torchrun."""

from __future__ import annotations

import os

import typer

from trainwright.cli.recipe.schema import Recipe
from trainwright.distributed.world import World


def rebuild_command(context: typer.Context) -> list[str]:
    """Returns the words of the command that a process repeats; a resume reads the number of processes from them."""
    words = [str(context.info_name)]
    for parameter in context.command.params:
        value = context.params.get(str(parameter.name))
        if parameter.name == "processes" or value in (None, False, [], ()):
            continue
        if parameter.param_type_name == "argument":
            words.append(str(value))
            continue
        option = max(parameter.opts, key=len)  # --set, not -s
        for one in value if isinstance(value, (list, tuple)) else [value]:
            words += [option] if one is True else [option, str(one)]
    processes = context.params.get("processes")
    return [*words, *([] if processes is None else [f"launch.processes={processes}"]), *context.args]


def launch(num_processes: int, words: list[str]) -> int:
    """Runs `python -m trainwright WORDS` in several processes that form a group, and returns the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    os.environ["PYTHONSAFEPATH"] = "1"  # the processes, and theirs, import nothing from the working directory
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    try:
        main(["--standalone", f"--nproc-per-node={num_processes}", "-m", "trainwright", *words])
    except ChildFailedError as error:
        code = int(error.get_first_failure()[1].exitcode)
        return code if code > 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    return 0


def launched(recipe: Recipe, processes: int | None, context: typer.Context) -> bool:
    """Starts the processes that are asked for, each with this command; False if it is to be done here."""
    number = processes or (1 if recipe.launch is None else recipe.launch.processes)
    if number == 1 or World.detect().world_size > 1:
        return False
    code = launch(number, rebuild_command(context))
    if code:
        raise typer.Exit(code)
    return True
