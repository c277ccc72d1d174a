"""Draws the chart of the README, instructions of a step, from the table beneath it: step-light.svg and step-dark.svg.

python docs/pictures/step.py
"""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
ROWS = {
    "step of a small MLP": "small MLP",
    "the same with a Dataset": "own Dataset and collator",
    "the same with accumulation": "accumulation of 8",
}
COLUMNS = {"Trainwright": "#3b82f6", "Lightning 2.6": "#b45309", "transformers 5.23": "#6e7681"}
WIDTH = 800
HEIGHT = 400
BOTTOM = 350
LEFT = 20
BAR = 66
GAP = 8
UNIT = 56
MODES = {"light": "#1f2328", "dark": "#e6edf3"}


def table() -> dict[str, dict[str, str]]:
    """Returns the cells of the README's table, by row and column."""
    lines = (HERE.parents[1] / "README.md").read_text(encoding="utf-8").splitlines()
    cells = [[cell.strip() for cell in line.strip("| ").split("|")] for line in lines if line.startswith("|")]
    names = next(row for row in cells if "Trainwright" in row[0])
    return {row[0]: dict(zip(names, row[1:], strict=False)) for row in cells}


def drawn(ink: str) -> str:
    """Returns the chart as SVG."""
    parts: list[str] = []
    x = LEFT + 8
    for i, (name, colour) in enumerate(COLUMNS.items()):
        at = LEFT + 8 + i * 250
        parts.append(f'<rect x="{at}" y="14" width="20" height="20" rx="4" fill="{colour}"/>')
        parts.append(f'<text x="{at + 28}" y="32">{name}</text>')
    found = table()
    for start, label in ROWS.items():
        values = next(row for name, row in found.items() if name.startswith(start))
        for name, colour in COLUMNS.items():
            height = float(values[name]) * UNIT
            y = BOTTOM - height
            parts.append(
                f'<rect x="{x}" y="{y:.1f}" width="{BAR}" height="{height:.1f}" rx="4" fill="{colour}"/>'
                f'<text x="{x + BAR / 2}" y="{y + 27:.1f}" fill="#fff" text-anchor="middle">{values[name]}</text>'
            )
            x += BAR + GAP
        middle = x - GAP - 1.5 * BAR - GAP
        parts.append(f'<text x="{middle}" y="{BOTTOM + 30}" text-anchor="middle">{label}</text>')
        x += 40
    line = BOTTOM - UNIT
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{line}" y2="{line}" stroke="{ink}" stroke-dasharray="6 5"/>')
    parts.append(f'<line x1="{LEFT + 8}" x2="{LEFT + 28}" y1="60" y2="60" stroke="{ink}" stroke-dasharray="6 5"/>')
    parts.append(f'<text x="{LEFT + 36}" y="67">loop by hand: 1</text>')
    parts.append(f'<line x1="{LEFT}" x2="{WIDTH}" y1="{BOTTOM}" y2="{BOTTOM}" stroke="{ink}"/>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" fill="{ink}" '
        f'font-family="system-ui, sans-serif" font-size="21">{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    for mode, ink in MODES.items():
        (HERE / f"step-{mode}.svg").write_text(drawn(ink), encoding="utf-8")
