"""Draws docs/pictures/mixture.svg: the shares of three sources in a real run with a linear schedule, step by step.

python docs/pictures/mixture.py
"""

from __future__ import annotations

import tempfile
from typing import Any, ClassVar

import svg
import torch

from trainwright import Trainer, TrainingArguments

WIDTH = 720
HEIGHT = 300
LEFT = 60
TOP = 36
BOTTOM = 44
COLORS = {"web": "#4c78a8", "code": "#e4863a", "chat": "#4fa37a"}
STEPS = 400
BATCH = 16
WINDOW = 10
SCHEDULE = [
    (0, {"web": 0.8, "code": 0.15, "chat": 0.05}),
    (200, {"web": 0.5, "code": 0.4, "chat": 0.1}),
    (400, {"web": 0.1, "code": 0.3, "chat": 0.6}),
]


class Regression(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def forward(self, x: Any, labels: Any) -> dict[str, Any]:
        return {"loss": ((self.layer(x)[:, 0] - labels) ** 2).mean()}


class Counting(Trainer):
    """Counts the samples of each source; a sample's input is the number of its source."""

    counts: ClassVar[list[list[int]]] = []

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        self.counts.append([int((inputs["x"] == number).sum()) for number in range(len(COLORS))])
        return super().training_step(model, inputs, num_items_in_batch)


def counts_of_a_run() -> list[list[int]]:
    sizes = {"web": 8_000, "code": 2_000, "chat": 500}
    sources = {
        name: [{"x": [float(number)], "labels": 0.5}] * size for number, (name, size) in enumerate(sizes.items())
    }
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            mixture_schedule=SCHEDULE,
            mixture_schedule_type="linear",
            report_to="none",
            save_strategy="no",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Counting(model=Regression(), args=args, train_dataset=sources)
        trainer.train()
    return trainer.counts


def line(values: list[float], color: str) -> str:
    across = (WIDTH - LEFT - 70) / (STEPS - WINDOW)
    down = HEIGHT - TOP - BOTTOM
    points = " ".join(f"{LEFT + i * across:.1f},{TOP + down * (1 - value):.1f}" for i, value in enumerate(values))
    return f'<polyline fill="none" stroke="{color}" stroke-width="2" points="{points}"/>'


def main() -> None:
    counts = counts_of_a_run()
    floor = HEIGHT - BOTTOM
    parts = []
    for percent in (0, 20, 40, 60, 80, 100):
        y = floor - (floor - TOP) * percent / 100
        parts.append(svg.line((LEFT, WIDTH - 70), (y, y)))
        parts.append(svg.text(LEFT - 8, y + 4, f"{percent} %", anchor="end"))
    for step in range(0, STEPS + 1, 100):
        x = LEFT + (WIDTH - LEFT - 70) * step / STEPS
        parts.append(svg.text(x, floor + 18, str(step), anchor="middle"))
    for number, (name, color) in enumerate(COLORS.items()):
        values = [
            sum(one[number] for one in counts[first : first + WINDOW]) / (WINDOW * BATCH)
            for first in range(STEPS - WINDOW)
        ]
        parts.append(line(values, color))
        y = floor - (floor - TOP) * values[-1] + 4
        parts.append(svg.text(WIDTH - 62, y, name, color=color))
    parts.append(svg.text(LEFT, 20, f"Share of the samples, over {WINDOW} steps of {BATCH}"))
    parts.append(svg.text((WIDTH - 70 + LEFT) / 2, HEIGHT - 6, "step", anchor="middle"))
    svg.write("mixture.svg", parts, width=WIDTH, height=HEIGHT)


if __name__ == "__main__":
    main()
