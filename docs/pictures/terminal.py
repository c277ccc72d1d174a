"""Runs commands on a terminal of their own and draws what it shows as SVG, in a dark and in a light theme."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shlex
import signal
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

HERE = Path(__file__).parent
WIDTH = 100
BAR = re.compile(r"^\s*\d+%\||^\d+ steps \[|^evaluation:")
STYLES = {"Killed": "bold red", "WARNING": "yellow"}  # by the first word of a line
OF_OTHERS = re.compile(
    r"^(Failed to load|W\d{4} |Loading weights|Writing model shards|Warning: |\s*\[\d{4}-.*real_accelerator)"
)  # lines of other packages


@dataclass(frozen=True)
class Command:
    """A command as it is typed. `kill_at`: text at whose appearance it gets SIGKILL. `hides`: lines left out.

    A picture is drawn only if the command ends with `code`, or by that signal.
    """

    typed: str
    kill_at: str | None = None
    hides: str | None = None
    code: int = 0


def run(command: Command, folder: Path) -> list[str]:
    """Runs a command on a terminal and returns the lines that stay on it, without bars."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm", "PYTHONWARNINGS": "ignore"}
    environment.pop("COLUMNS", None)
    words = []
    for word in named(shlex.split(command.typed)):
        words += sorted(str(path.relative_to(folder)) for path in folder.glob(word)) if "*" in word else [word]
    process = subprocess.Popen(words, cwd=folder, stdout=child, stderr=child, env=environment, start_new_session=True)
    os.close(child)
    written = ""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:  # the terminal is gone with the process
            break
        if not part:
            break
        written += part.decode(errors="replace")
        if command.kill_at is not None and re.search(command.kill_at, written):
            os.killpg(process.pid, signal.SIGKILL)
            break
    os.close(parent)
    code = process.wait()
    if code != (command.code if command.kill_at is None else -signal.SIGKILL):
        raise RuntimeError(f"{command.typed} ended with {code}:\n{written}")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written)
    lines = [line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").split("\n")]
    hidden = re.compile(command.hides) if command.hides else None
    lines = [line for line in lines if line and not BAR.search(line) and not OF_OTHERS.search(line)]
    lines = [line for line in lines if hidden is None or not hidden.search(line)]
    if code == -signal.SIGKILL:
        lines.append("Killed")
    return [shortened(line, folder) for line in lines]


def named(words: list[str]) -> list[str]:
    """The program of a command, from the environment of this process."""
    if words[0] == "trainwright":
        return [sys.executable, "-m", *words]
    return [sys.executable, *words[1:]] if words[0] == "python" else words


def shortened(line: str, folder: Path) -> str:
    """A line with the paths of this machine as a user would have them."""
    line = line.replace(f"{folder.resolve()}/", "").replace(str(folder.resolve()), "~/project")
    return re.sub(r"/\S*/site-packages/", ".venv/", line)


def pictures(name: str, title: str, commands: list[Command], folder: Path) -> dict[str, str]:
    """Runs the commands one after the other; returns file name -> SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for command in commands:
        console.print(Text.assemble(("$ ", "bold green"), (command.typed, "bold")), soft_wrap=False)
        for line in run(command, folder):
            console.print(Text(line, style=STYLES.get(line.partition(" ")[0], "")))
        console.print()
    drawn = {}
    for mode, theme in (("", SVG_EXPORT_THEME), ("-light", DEFAULT_TERMINAL_THEME)):
        text = console.export_svg(title=title, theme=theme, clear=False, unique_id=f"trainwright-{name}{mode}")
        # The fonts would be fetched from elsewhere.
        drawn[f"{name}{mode}.svg"] = re.sub(r"@font-face \{.*?\}\n", "", text, flags=re.S)
    return drawn


def draw(name: str, title: str, commands: list[Command], folder: Path) -> None:
    """Writes the pictures of some commands beside this file."""
    folder.mkdir(parents=True, exist_ok=True)
    for file, drawn in pictures(name, title, commands, folder).items():
        (HERE / file).write_text(drawn, encoding="utf-8")
