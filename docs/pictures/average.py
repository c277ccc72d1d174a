"""Draws docs/pictures/average.svg: accuracy of the weights and of three averages, in runs on digits of scikit-learn.

python docs/pictures/average.py
"""

from __future__ import annotations

import tempfile
from typing import Any

import svg
import torch
from sklearn.datasets import load_digits
from torch import nn

from trainwright import EvalPrediction, Trainer, TrainingArguments, set_seed

WIDTH = 720
HEIGHT = 300
LEFT = 60
RIGHT = 90
TOP = 36
BOTTOM = 44
STEPS = 600
EVERY = 20
LOWEST = 0.86
HIGHEST = 0.98
AVERAGES: dict[str, Any] = {
    "ema": {"kind": "ema", "decay": 0.98},
    "lawa": {"kind": "lawa", "last": 6, "every": 20},
    "swa": {"kind": "swa", "start": 0.5, "every": 5},
}
COLORS = {"weights": svg.GREY, "ema": "#4c78a8", "lawa": "#e4863a", "swa": "#4fa37a"}


class Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

    def forward(self, image: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.layers(image)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(axis=-1) == prediction.label_ids).mean())}


def curves() -> dict[str, list[tuple[int, float]]]:
    """Returns steps and accuracies. The weights are the same in all three runs: an average does not change them."""
    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1
    rows = [{"image": image, "labels": int(label)} for image, label in zip(images, digits.target, strict=True)]
    found: dict[str, list[tuple[int, float]]] = {}
    for name, average in AVERAGES.items():
        set_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            args = TrainingArguments(
                output_dir=folder,
                max_steps=STEPS,
                per_device_train_batch_size=8,
                learning_rate=1e-2,
                lr_scheduler_type="constant",
                average=average,
                eval_strategy="steps",
                eval_steps=EVERY,
                per_device_eval_batch_size=360,
                report_to="none",
                save_strategy="no",
                use_cpu=True,
                disable_tqdm=True,
            )
            trainer = Trainer(
                model=Reader(), args=args, train_dataset=rows[:1437], eval_dataset=rows[1437:], compute_metrics=accuracy
            )
            trainer.train()
        for key, metric in (("weights", "eval_accuracy"), (name, "eval_average_accuracy")):
            found[key] = [(one["step"], one[metric]) for one in trainer.state.log_history if metric in one]
    return found


def main() -> None:
    floor = HEIGHT - BOTTOM
    across = (WIDTH - LEFT - RIGHT) / STEPS
    down = (floor - TOP) / (HIGHEST - LOWEST)
    parts = []
    for percent in range(round(100 * LOWEST), round(100 * HIGHEST) + 1, 2):
        y = floor - (percent / 100 - LOWEST) * down
        parts.append(svg.line((LEFT, WIDTH - RIGHT), (y, y)))
        parts.append(svg.text(LEFT - 8, y + 4, f"{percent} %", anchor="end"))
    for step in range(0, STEPS + 1, 100):
        parts.append(svg.text(LEFT + step * across, floor + 18, str(step), anchor="middle"))
    ends: list[float] = []
    for name, points in sorted(curves().items(), key=lambda item: -item[1][-1][1]):
        places = [(LEFT + step * across, floor - max(value - LOWEST, 0) * down) for step, value in points]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        width = 1 if name == "weights" else 2
        parts.append(f'<polyline fill="none" stroke="{COLORS[name]}" stroke-width="{width}" points="{drawn}"/>')
        ends.append(max(places[-1][1] + 4, *(y + 14 for y in ends), 0))
        parts.append(svg.text(WIDTH - RIGHT + 8, ends[-1], name, color=COLORS[name]))
    parts.append(svg.text(LEFT, 20, "Accuracy on 360 held-out digits"))
    parts.append(svg.text((WIDTH - RIGHT + LEFT) / 2, HEIGHT - 6, "step", anchor="middle"))
    svg.write("average.svg", parts, width=WIDTH, height=HEIGHT)


if __name__ == "__main__":
    main()
