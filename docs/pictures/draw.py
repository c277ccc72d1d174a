"""Draws the pictures of the README and of docs/command_line.md: runs real commands in a directory and shows what they
print as SVG, in a dark and in a light terminal.

python docs/pictures/draw.py WORKING_DIRECTORY [TASK]
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, SVG_EXPORT_THEME
from rich.text import Text

HERE = Path(__file__).parent
WIDTH = 118
LONGEST = 115  # characters of a line; a log line with every speed is longer
TASK = sys.argv[2] if len(sys.argv) > 2 else "image-classification"
PICTURES = {
    "train": [f"trainwright init {TASK}", "trainwright train config.yaml"],
    "runs": ["trainwright runs ."],
}


def output_of(command: str, folder: Path) -> str:
    """What a command prints, without what other packages say on the side."""
    words = [sys.executable, "-m", *command.split()]
    done = subprocess.run(words, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    text = done.stdout.replace(str(folder.resolve()), "~/project").replace(sys.prefix, "~/project/.venv")
    lines = (line for line in text.splitlines() if not line.startswith("["))
    return "\n".join(line if len(line) <= LONGEST else line[: LONGEST - 4] + " ..." for line in lines)


def pictures(name: str, folder: Path) -> dict[str, str]:
    """File name -> SVG."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for command in PICTURES[name]:
        console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
        console.print(output_of(command, folder))
        console.print()
    drawn = {}
    for mode, theme in (("", SVG_EXPORT_THEME), ("-light", DEFAULT_TERMINAL_THEME)):
        text = console.export_svg(
            title=PICTURES[name][-1], theme=theme, clear=False, unique_id=f"trainwright-{name}{mode}"
        )
        # The fonts would be fetched from elsewhere.
        drawn[f"{name}{mode}.svg"] = re.sub(r"@font-face \{.*?\}\n", "", text, flags=re.S)
    return drawn


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in PICTURES:
        for file, drawn in pictures(name, folder).items():
            (HERE / file).write_text(drawn, encoding="utf-8")


if __name__ == "__main__":
    main()
