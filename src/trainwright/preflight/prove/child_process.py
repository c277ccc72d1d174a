"""A process of its own that trains one step by the recipe on its standard input, and keeps the gradients."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import safetensors.torch

from trainwright.preflight.prove.gradient_capture import GradientCapture
from trainwright.preflight.prove.launcher import GRADIENTS


def main() -> None:
    folder = Path(sys.argv[1])
    # From the process that started this one, through a pipe that nobody else can write to.
    recipe: dict[str, Any] = pickle.load(sys.stdin.buffer)
    keeper = GradientCapture()
    args = recipe["arguments"](**{**recipe["settings"], "output_dir": str(folder / "run")})
    trainer = recipe["trainer"](args=args, callbacks=[keeper], **recipe["parts"])
    trainer.train()
    if os.environ["RANK"] == "0":
        safetensors.torch.save_file({n: g.contiguous() for n, g in keeper.gradients.items()}, folder / GRADIENTS)
    trainer.end()


if __name__ == "__main__":
    main()
