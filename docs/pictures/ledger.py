"""Draws docs/pictures/ledger.svg: mean losses of the ledger of a real run in which a twentieth of the labels is wrong.

python docs/pictures/ledger.py
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import svg
import torch
from sklearn.datasets import load_digits

from trainwright import Trainer, TrainingArguments
from trainwright.capabilities.ledger.table import LEDGER_NAME, read_table

WIDTH = 720
HEIGHT = 300
LEFT = 60
RIGHT = 20
TOP = 36
BOTTOM = 44
COLORS = {"labels as they were": "#4c78a8", "labels that were changed": "#e4863a"}
# Range of the logarithm of the mean loss.
LOW = -2.0
HIGH = 1.0
BINS = 40


class Classifier(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        logits = self.layers(x)
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}


def digits(seed: int) -> tuple[list[dict[str, Any]], set[int]]:
    """The digits of scikit-learn, and which of them have another label than they should."""
    draw = random.Random(seed)
    data = load_digits()
    rows = [
        {"x": torch.tensor(x / 16, dtype=torch.float32), "labels": int(y)}
        for x, y in zip(data.data, data.target, strict=True)
    ]
    changed = set(draw.sample(range(len(rows)), len(rows) // 20))
    for number in sorted(changed):
        rows[number]["labels"] = (rows[number]["labels"] + draw.randrange(1, 10)) % 10
    return rows, changed


def mean_losses(rows: list[dict[str, Any]], folder: str, seed: int) -> Any:
    """Mean loss of each row in a run of ten epochs, by its ledger."""
    torch.manual_seed(seed)
    args = TrainingArguments(
        output_dir=folder,
        ledger=True,
        num_train_epochs=10,
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    Trainer(model=Classifier(), args=args, train_dataset=rows).train()
    return read_table(Path(folder) / LEDGER_NAME)[0]["mean_loss"].to_numpy()


def main() -> None:
    rows, changed = digits(0)
    with tempfile.TemporaryDirectory() as folder:
        losses = mean_losses(rows, folder, 0)
    is_changed = np.isin(np.arange(len(rows)), list(changed))
    limit = float(np.log10(np.sort(losses)[-len(changed)]))
    floor = HEIGHT - BOTTOM
    parts = []

    def across(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (value - LOW) / (HIGH - LOW)

    logs = np.clip(np.log10(losses), LOW, HIGH)
    groups = [np.histogram(logs[chosen], BINS, (LOW, HIGH))[0] / chosen.sum() for chosen in (~is_changed, is_changed)]
    most = max(float(group.max()) for group in groups)
    for exponent in range(int(LOW), int(HIGH) + 1):
        x = across(exponent)
        parts.append(svg.line((x, x), (TOP, floor)))
        parts.append(svg.text(x, floor + 18, f"{10.0**exponent:g}", anchor="middle"))
    for percent in range(0, int(most * 100) + 1, 10):
        y = floor - (floor - TOP) * percent / 100 / most
        parts.append(svg.text(LEFT - 8, y + 4, f"{percent} %", anchor="end"))
    for place, ((name, color), group) in enumerate(zip(COLORS.items(), groups, strict=True)):
        for i, share in enumerate(group):
            left, right = (across(LOW + (HIGH - LOW) * edge / BINS) for edge in (i, i + 1))
            height = (floor - TOP) * share / most
            parts.append(
                f'<rect x="{left:.1f}" y="{floor - height:.1f}" width="{right - left - 1:.1f}" '
                f'height="{height:.1f}" fill="{color}" fill-opacity="0.75"/>'
            )
        parts.append(svg.text(LEFT + 10, TOP + 16 + 18 * place, name, color=color))
    x = across(limit)
    parts.append(svg.line((x, x), (TOP, floor), color=svg.GREY, dashes="4 3"))
    parts.append(svg.text(x - 6, TOP + 52, "the top 5 % lie to the right", anchor="end"))
    parts.append(svg.text(LEFT, 20, "Share of the rows of each kind, by mean loss over ten epochs"))
    parts.append(svg.text((WIDTH + LEFT) / 2, HEIGHT - 6, "mean loss", anchor="middle"))
    svg.write("ledger.svg", parts, width=WIDTH, height=HEIGHT)


if __name__ == "__main__":
    main()
