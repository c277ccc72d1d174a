"""The picture of a model card: losses by step. Without matplotlib a card has none."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

CURVE_NAME = "training_curve.png"
INCHES = (7.0, 3.5)
Losses = Mapping[str, Sequence[tuple[int, float]]]


def losses_of(log_history: Sequence[Mapping[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """Returns (step, value) of each logged loss, those of evaluations under the names of their sets."""
    found: dict[str, list[tuple[int, float]]] = {}
    for entry in log_history:
        for name, value in entry.items():
            is_loss = name == "loss" or (name.startswith("eval_") and name.endswith("_loss"))
            if is_loss and isinstance(value, (int, float)):
                found.setdefault("training" if name == "loss" else name, []).append((entry.get("step", 0), value))
    return found


def draw(losses: Losses, path: Path) -> bool:
    """Draws losses into a PNG file; returns False without losses or matplotlib."""
    if not any(len(points) > 1 for points in losses.values()):
        return False
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        logger.info("The model card has no picture of the losses: pip install matplotlib.")
        return False
    figure = Figure(figsize=INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name, points in losses.items():
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, marker=None if len(points) > 50 else ".", label=name.replace("_", " "))
    axes.set(xlabel="step", ylabel="loss")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)
    return True
