"""Draws docs/pictures/async_evaluation.svg: steps over time of a run that waits for evaluations, and of one without.

python docs/pictures/async_evaluation.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import svg
import torch
from torch import nn

from trainwright import Trainer, TrainingArguments, set_seed
from trainwright.journal.record import Record, read

WIDTH = 720
HEIGHT = 320
LEFT = 60
RIGHT = 20
TOP = 30
FLOOR = 270
STEPS = 800
EVERY = 200
METRIC_S = 1.5
COLORS = {"waits": "#e4863a", "eval_async=True": "#4c78a8"}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        guesses = self.layers(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(guesses, labels), "logits": guesses}


def asks_a_service(prediction: Any) -> dict[str, float]:
    """A metric that takes long and computes elsewhere, as one that asks a judge does."""
    time.sleep(METRIC_S)
    return {"error": float(abs(prediction.predictions - prediction.label_ids).mean())}


def rows(number: int) -> list[dict[str, Any]]:
    x = torch.randn(number, 8)
    y = torch.sin(x).sum(dim=1)
    return [{"x": one, "labels": float(label)} for one, label in zip(x, y, strict=True)]


def recorded(*, is_async: bool) -> Record:
    set_seed(1)
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=64,
            learning_rate=2e-3,
            logging_steps=10,
            eval_strategy="steps",
            eval_steps=EVERY,
            eval_async=is_async,
            journal=True,
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        data = {"train_dataset": rows(2048), "eval_dataset": rows(512)}
        Trainer(model=Network(), args=args, compute_metrics=asks_a_service, **data).train()
        return read(Path(folder))


def main() -> None:
    torch.set_num_threads(1)
    records = {"waits": recorded(is_async=False), "eval_async=True": recorded(is_async=True)}
    logs = {name: [one for one in record.of("log") if "loss" in one["values"]] for name, record in records.items()}
    began = {name: found[0]["time"] for name, found in logs.items()}
    heard = {name: record.of("evaluation") for name, record in records.items()}
    last = max(heard[name][-1]["time"] - began[name] for name in records)
    across = (WIDTH - LEFT - RIGHT) / last
    up = (FLOOR - TOP) / STEPS
    parts = []
    for step in range(0, STEPS + 1, EVERY):
        y = FLOOR - step * up
        parts.append(svg.line((LEFT, WIDTH - RIGHT), (y, y)))
        parts.append(svg.text(LEFT - 8, y + 4, str(step), anchor="end"))
    for number, (name, found) in enumerate(logs.items()):
        color = COLORS[name]
        points = " ".join(
            f"{LEFT + (one['time'] - began[name]) * across:.1f},{FLOOR - one['step'] * up:.1f}" for one in found
        )
        parts.append(f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{points}"/>')
        for one in heard[name]:
            x = LEFT + (one["time"] - began[name]) * across
            parts.append(f'<circle cx="{x:.1f}" cy="{FLOOR - one["step"] * up:.1f}" r="4" fill="{color}"/>')
        parts.append(svg.text(LEFT + 10, TOP + 4 + 18 * number, name, color=color))
    for second in range(int(last) + 1):
        parts.append(svg.text(LEFT + second * across, FLOOR + 18, str(second), anchor="middle"))
    parts.append(svg.text((WIDTH - RIGHT + LEFT) / 2, HEIGHT - 8, "seconds since the first log", anchor="middle"))
    parts.append(svg.text(LEFT - 8, TOP - 12, "step", anchor="end"))
    svg.write("async_evaluation.svg", parts, width=WIDTH, height=HEIGHT)


if __name__ == "__main__":
    main()
