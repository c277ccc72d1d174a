"""Draws docs/pictures/live_control.svg: learning rate and loss of a run that got two commands, from its journal.

python docs/pictures/live_control.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import svg
import torch
from torch import nn

from trainwright import Trainer, TrainerCallback, TrainingArguments, set_seed
from trainwright.capabilities.control.inbox import Inbox
from trainwright.journal.record import Record, read

WIDTH = 720
HEIGHT = 340
LEFT = 60
RIGHT = 20
STEPS = 300
PANELS = {"learning_rate": (30, 140, 0.012), "loss": (190, 300, 2.4)}
COLORS = {"learning_rate": "#4c78a8", "loss": "#e4863a"}
COMMANDS = {90: ["lr", 0.01], 200: ["lr", 0.001]}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x).squeeze(-1), labels)}


class Sends(TrainerCallback):
    """Sends a command, as `trainwright ctl` does, and waits until the run has taken it."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if (words := COMMANDS.get(state.global_step)) is not None:
            inbox = Inbox(args.output_dir)
            inbox.send({"words": words, "by": "ann@desk"})
            while list(inbox.folder.glob("new-*")):
                time.sleep(0.01)


def recorded() -> Record:
    set_seed(1)
    x = torch.randn(2048, 8)
    y = torch.sin(x).sum(dim=1)
    rows = [{"x": one, "labels": float(label)} for one, label in zip(x, y, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=32,
            learning_rate=2e-3,
            lr_scheduler_type="constant_with_warmup",
            warmup_steps=20,
            logging_steps=3,
            live_control=True,
            journal=True,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        Trainer(model=Network(), args=args, train_dataset=rows, callbacks=[Sends()]).train()
        return read(Path(folder))


def main() -> None:
    record = recorded()
    across = (WIDTH - LEFT - RIGHT) / STEPS
    parts = []
    for name, (top, floor, highest) in PANELS.items():
        for value in (0, highest / 2, highest):
            y = floor - (floor - top) * value / highest
            parts.append(svg.line((LEFT, WIDTH - RIGHT), (y, y)))
            parts.append(svg.text(LEFT - 8, y + 4, f"{value:g}", anchor="end"))
        steps, values = record.series(name)
        points = " ".join(
            f"{LEFT + step * across:.1f},{floor - (floor - top) * min(value / highest, 1):.1f}"
            for step, value in zip(steps, values, strict=True)
        )
        parts.append(f'<polyline fill="none" stroke="{COLORS[name]}" stroke-width="2" points="{points}"/>')
        parts.append(svg.text(LEFT, top - 10, name, color=COLORS[name]))
    for entry in record.of("command"):
        x = LEFT + entry["step"] * across
        parts.append(svg.line((x, x), (30, 300), color=svg.GREY, dashes="4 3"))
        parts.append(svg.text(x + 5, 44, f"ctl lr {entry['value']:g}"))
    for step in range(0, STEPS + 1, 50):
        parts.append(svg.text(LEFT + step * across, 318, str(step), anchor="middle"))
    parts.append(svg.text((WIDTH - RIGHT + LEFT) / 2, HEIGHT - 4, "step", anchor="middle"))
    svg.write("live_control.svg", parts, width=WIDTH, height=HEIGHT)


if __name__ == "__main__":
    main()
