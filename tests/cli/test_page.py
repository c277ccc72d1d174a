"""docs/command_line.md: every command on it is run, and prints what the page says."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest

from trainwright.cli.recipe.schema import TASKS, DataPart, ModelPart, list_names

from .commands import ROOT, call

pytestmark = pytest.mark.filterwarnings("default")

PAGE = (ROOT / "docs" / "command_line.md").read_text(encoding="utf-8")
LAUNCHERS = ("torchrun", "accelerate")  # in test_launchers.py


def commands() -> list[tuple[str, list[str]]]:
    """Each command with the lines below it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", PAGE, flags=re.M | re.S):
        for line in block.split("\n"):
            if line.startswith("$ "):
                found.append((line.removeprefix("$ "), []))
            elif line.strip():
                found[-1][1].append(line)
    return found


@pytest.mark.more
@pytest.mark.costly
@pytest.mark.timeout(300)
def test_every_command_prints_what_the_page_says(tmp_path: Path) -> None:
    ran = [(command, said) for command, said in commands() if not command.startswith(LAUNCHERS)]
    assert len(ran) >= 12
    for command, said in ran:
        words = shlex.split(command, comments=True)
        assert words[0] == "trainwright"
        result = call(*words[1:])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        code = re.search(r"# exit code (\d+)", command)
        assert result.exit_code == (int(code[1]) if code else 0), result.output
        for line in said:
            pattern = ".*".join(re.escape(part.strip()) for part in line.split("..."))
            assert re.search(pattern, result.output.replace("\n    ", "\n")), (command, line, result.output)


def test_the_page_names_every_command_task_and_entry() -> None:
    from trainwright.cli.main import app

    names = [info.callback.__name__ for info in app.registered_commands if info.callback is not None]
    entries = [*list_names(ModelPart), *list_names(DataPart)]
    hooks = runpy.run_path(str(ROOT / "tools" / "docs_hooks.py"))
    missing = [name for name in TASKS if not re.search(rf"[`| ]{name}[`|, ]", PAGE)]
    missing += [name for name in entries if f"| `{name}` |" not in hooks["entries"]()]
    assert missing + [name for name in names if f"`{name}`" not in PAGE and f"trainwright {name}" not in PAGE] == []


def test_the_pictures_ask_no_address() -> None:
    for name in re.findall(r"\]\((pictures/[^)]+)\)", PAGE):
        text = (ROOT / "docs" / name).read_text(encoding="utf-8")
        assert "<svg" in text
        assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?https?:", text)
