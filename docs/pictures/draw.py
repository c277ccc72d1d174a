"""Draws the pictures of docs/command_line.md: runs real commands in a directory and shows what they print as SVG.

python docs/pictures/draw.py WORKING_DIRECTORY [TASK]
"""

from __future__ import annotations

import sys
from pathlib import Path

from terminal import Command, draw

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    task = sys.argv[2] if len(sys.argv) > 2 else "image-classification"
    training = [Command(f"trainwright init {task}"), Command("trainwright train config.yaml")]
    draw("train", "trainwright train config.yaml", training, folder)
    draw("runs", "trainwright runs .", [Command("trainwright runs .")], folder)
