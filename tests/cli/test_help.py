"""Help and completion: they fit a screen, and they come at once, without torch."""

from __future__ import annotations

import pytest

from trainwright.cli.main import app

from .._support.subprocesses import run_python
from .commands import call

COMMANDS = [info.callback.__name__ for info in app.registered_commands if info.callback and not info.hidden]
HEAVY = ("torch", "transformers", "accelerate", "numpy", "datasets", "pyarrow")


def python(code: str, **environment: str) -> str:
    return run_python("-c", code, **environment).stdout


def test_the_commands_are_those_that_the_issue_names() -> None:
    before = ["init", "check", "train", "resume", "branch", "extend", "runs", "report", "compare", "verify", "export"]
    before.insert(before.index("compare") + 1, "diff")
    rest = ["chat", "eval", "predict", "push", "ctl", "ledger", "replay", "schema", "env", "mcp"]
    assert [*before, *rest] == COMMANDS


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_fits_a_screen(command: str) -> None:
    shown = call(*command.split(), "--help")
    assert shown.exit_code == 0
    lines = shown.output.strip("\n").split("\n")
    assert len(lines) <= (24 if command else 5 + len(COMMANDS)), (
        "all commands are listed, also if a screen has fewer lines"
    )
    assert "Any" not in shown.output
    assert max(map(len, lines)) <= 80
    assert [name for name in COMMANDS if not command and f"│ {name} " not in shown.output] == []


@pytest.mark.process
def test_help_and_completion_load_nothing_heavy() -> None:
    code = f"""
import sys
from typer.testing import CliRunner
from trainwright.cli.main import app
for words in (["--help"], ["train", "--help"], ["--version"], ["init", "--help"]):
    assert CliRunner().invoke(app, words).exit_code == 0
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert python(code).strip() == "[]"


@pytest.mark.process
def test_init_and_the_check_of_a_file_load_no_torch() -> None:
    code = f"""
import os, sys
from typer.testing import CliRunner
from trainwright.cli.main import app
assert CliRunner().invoke(app, ["init", "causal-lm", "config.yaml"]).exit_code == 0
from pathlib import Path
from trainwright.errors import RecipeError
from trainwright.cli.recipe.recipe_reader import checked, read_tree
try:
    checked(read_tree(Path("config.yaml"), ["training.learning_rate=fast"]), Path())
except RecipeError as error:
    print(error)
print([name for name in {HEAVY} if name in sys.modules])
"""
    shown = python(code)
    assert "learning_rate='fast' is not a number" in shown
    assert shown.strip().endswith("[]")


@pytest.mark.process
@pytest.mark.parametrize(("typed", "expected"), [("trainwright ver", "verify"), ("trainwright init text", "text-cl")])
def test_a_shell_completes_commands_and_tasks(typed: str, expected: str) -> None:
    code = "from trainwright.cli.main import app; app(prog_name='trainwright')"
    words = typed.split()
    shown = python(code, _TRAINWRIGHT_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(words) - 1))
    assert expected in shown


@pytest.mark.process
def test_a_completion_script_is_shown() -> None:
    code = "from trainwright.cli.main import app; app(prog_name='trainwright')"
    assert "_TRAINWRIGHT_COMPLETE=complete_bash" in python(code, _TRAINWRIGHT_COMPLETE="source_bash")


def test_the_version_is_shown() -> None:
    from trainwright import __version__

    assert call("--version").output.strip() == __version__
