"""A picture of a documentation page: an SVG whose words are readable on a light and on a dark page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

GREY = "#777"
FAINT = "#8884"


def text(x: float, y: float, said: str, *, anchor: str = "start", color: str = GREY) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" style="fill:{color}">{said}</text>'


def line(x: tuple[float, float], y: tuple[float, float], *, color: str = FAINT, dashes: str = "none") -> str:
    ends = f'x1="{x[0]:.1f}" x2="{x[1]:.1f}" y1="{y[0]:.1f}" y2="{y[1]:.1f}"'
    return f'<line {ends} stroke="{color}" stroke-dasharray="{dashes}"/>'


def write(name: str, parts: Sequence[str], *, width: int, height: int) -> None:
    """Writes a picture beside this file."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
    Path(__file__).with_name(name).write_text(f'{head}font-size="12">{"".join(parts)}</svg>\n', encoding="utf-8")
