"""Draws docs/pictures/step-light.svg and step-dark.svg from the table of steps in RESULTS.md.

python benchmarks/chart.py
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[1]
ROWS = {"mlp": "small MLP", "own": "own Dataset and collator", "mlp x 8": "accumulation of 8"}
SUBJECTS = {"trainwright": "Trainwright", "lightning": "Lightning 2.6", "transformers": "transformers 5.23"}
MODES = {
    "light": ("#1f2328", "#d1d9e0", ("#0969da", "#9a6700", "#818b98")),
    "dark": ("#f0f6fc", "#3d444d", ("#4493f8", "#d29922", "#9198a1")),
}


def ratios() -> dict[str, dict[str, float]]:
    """Machine instructions of each subject's step as a ratio to the loop by hand, by row."""
    text = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    found: dict[str, dict[str, float]] = {}
    for row, subject, ratio in re.findall(
        r"^(\w[\w ,]*?) {2,}([a-z]+) +(\d+\.\d+) +\d+\.\d+", text, flags=re.MULTILINE
    ):
        found.setdefault(row, {}).setdefault(subject, float(ratio))
    return found


def draw(mode: str, values: dict[str, dict[str, float]]) -> None:
    ink, line, colours = MODES[mode]
    mpl.rcParams |= {"svg.hashsalt": "trainwright", "svg.fonttype": "path", "font.size": 11, "text.color": ink}
    figure, axes = plt.subplots(figsize=(7.6, 3.0), layout="constrained")
    width = 0.26
    for place, ((subject, label), colour) in enumerate(zip(SUBJECTS.items(), colours, strict=True)):
        heights = [values[row][subject] for row in ROWS]
        where = [number + (place - 1) * width for number in range(len(ROWS))]
        bars = axes.bar(where, heights, width * 0.92, label=label, color=colour)
        axes.bar_label(bars, fmt="%.2f", padding=2, color=ink, fontsize=10)
    axes.axhline(1.0, color=ink, linewidth=1, linestyle="--")
    axes.text(0.5, 1.06, "loop by hand", ha="center", fontsize=9, color=ink)
    axes.set_xticks(range(len(ROWS)), list(ROWS.values()), color=ink)
    axes.set_ylabel("instructions of a step, ratio", color=ink)
    axes.tick_params(colors=ink)
    axes.spines[["top", "right"]].set_visible(False)
    for spine in axes.spines.values():
        spine.set_color(line)
    axes.legend(frameon=False, labelcolor=ink)
    figure.savefig(ROOT / "docs" / "pictures" / f"step-{mode}.svg", transparent=True, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    for mode in MODES:
        draw(mode, ratios())


if __name__ == "__main__":
    main()
