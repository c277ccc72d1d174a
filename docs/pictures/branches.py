"""Draws docs/pictures/branches.svg: rate and evaluation loss of a run and of its cooldowns, from their journals.

python docs/pictures/branches.py
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import svg
import torch
from sklearn.datasets import load_digits
from torch import nn

from trainwright import Trainer, TrainingArguments, set_seed
from trainwright.journal.record import Record, read

WIDTH = 720
HEIGHT = 340
LEFT = 60
RIGHT = 20
STEPS = 600
STARTS = (150, 300, 450)
SHARE = 0.2  # of a branch that is its cooldown
RATE = 0.02
PANELS = {"learning_rate": (30, 130, 0.0, RATE), "eval_loss": (190, 300, 0.1, 0.4)}
NAMES = {"learning_rate": "learning rate", "eval_loss": "loss on evaluation data"}
COLORS = {"stable": svg.GREY, **dict(zip(STARTS, ("#4c78a8", "#e4863a", "#4fa37a"), strict=True))}


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.5), nn.Linear(64, 10))

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(image)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def trained(folder: Path, rows: list[dict[str, Any]], **settings: Any) -> Record:
    """Trains in a directory, and returns the record of the run."""
    set_seed(0)
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=16,
        learning_rate=RATE,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=30,
        logging_steps=5,
        eval_strategy="steps",
        eval_steps=15,
        per_device_eval_batch_size=360,
        save_strategy="steps",
        save_steps=150,
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    Trainer(model=Reader(), args=args, train_dataset=rows[:1437], eval_dataset=rows[1437:]).train()
    return read(folder)


def runs() -> dict[Any, Record]:
    """Returns the records of the run and of its branches."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1
    rows = [{"image": image, "labels": int(label)} for image, label in zip(images, digits.target, strict=True)]
    random.Random(0).shuffle(rows)  # the digits of a person come one after the other
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[Any, Record] = {"stable": trained(folder / "stable", rows, max_steps=STEPS)}
        for start in STARTS:
            found[start] = trained(
                folder / f"from-{start}",
                rows,
                branch_from=str(folder / "stable" / f"checkpoint-{start}"),
                cooldown="linear",
                max_steps=round(start / (1 - SHARE)),
            )
    return found


def main() -> None:
    records = runs()
    across = (WIDTH - LEFT - RIGHT) / STEPS
    parts = []
    for name, (top, floor, lowest, highest) in PANELS.items():
        for value in (lowest, (lowest + highest) / 2, highest):
            y = floor - (floor - top) * (value - lowest) / (highest - lowest)
            parts.append(svg.line((LEFT, WIDTH - RIGHT), (y, y)))
            parts.append(svg.text(LEFT - 8, y + 4, f"{value:g}", anchor="end"))
        parts.append(svg.text(LEFT, top - 10, NAMES[name]))
        for who, record in records.items():
            steps, values = record.series(name)
            heights = [min(max((value - lowest) / (highest - lowest), 0), 1) for value in values]
            points = " ".join(
                f"{LEFT + step * across:.1f},{floor - (floor - top) * height:.1f}"
                for step, height in zip(steps, heights, strict=True)
            )
            width = 1.5 if who == "stable" else 2
            parts.append(f'<polyline fill="none" stroke="{COLORS[who]}" stroke-width="{width}" points="{points}"/>')
    for start in STARTS:
        x = LEFT + start * across
        parts.append(svg.line((x, x), (30, 300), color=svg.GREY, dashes="4 3"))
        parts.append(svg.text(x + 5, 146, f"branch --at {start}", color=COLORS[start]))
    for step in range(0, STEPS + 1, 100):
        parts.append(svg.text(LEFT + step * across, 318, str(step), anchor="middle"))
    parts.append(svg.text((WIDTH - RIGHT + LEFT) / 2, HEIGHT - 4, "step", anchor="middle"))
    svg.write("branches.svg", parts, width=WIDTH, height=HEIGHT)


if __name__ == "__main__":
    main()
