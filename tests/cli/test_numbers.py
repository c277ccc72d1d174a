"""A number of the command line is finite: with `nan` a wait would have no end, and a comparison no result."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from trainwright.capability_table import TABLE, load
from trainwright.cli import main

from .commands import call

NUMBERS = [("ctl", "--wait"), ("compare", "--tolerance"), ("diff", "--tolerance")]


def test_every_option_with_a_number_is_of_the_list_above() -> None:
    of_capabilities = {inspect.getmodule(load(entry.function)) for row in TABLE for entry in row.commands}
    source = "".join(inspect.getsource(module) for module in (main, *of_capabilities) if module is not None)
    assert (
        len(re.findall(r"\bfloat( \| None)?,\s*typer\.Option", source)) == source.count("parser=amount") == len(NUMBERS)
    )


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e999", "ten"])
@pytest.mark.parametrize(("command", "option"), NUMBERS)
def test_a_number_that_is_not_finite_is_refused(command: str, option: str, value: str, tmp_path: Path) -> None:
    result = call(command, str(tmp_path), str(tmp_path), f"{option}={value}")
    assert result.exit_code == 2
    assert option in result.output
