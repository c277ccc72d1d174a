"""Page of an evaluation: metrics, confusion matrix, hardest rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainwright._types import JSONObject
from trainwright.report.page import card, document, grid, readable, table, tiles
from trainwright.support.html_table import cell_text

NOT_A_TILE = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


def evaluation_page(
    *,
    title: str,
    note: str,
    metrics: Mapping[str, float],
    labels: Sequence[str],
    confusion: Sequence[Sequence[int]],
    hardest: Sequence[JSONObject],
) -> str:
    """Returns the page as text.

    Args:
        title: of the page.
        note: beneath it.
        metrics: by name.
        labels: names of the labels, in the order of `confusion`.
        confusion: numbers by correct label, then by predicted label; empty without labels.
        hardest: rows with `name`, `loss`, `text`, and `right` and `predicted` if they have a label.
    """
    headline = [(readable(name), f"{value:.4g}", "") for name, value in metrics.items() if name not in NOT_A_TILE]
    has_labels = bool(hardest) and "right" in hardest[0]
    rows: list[tuple[object, ...]] = [("row", "loss", *(("right", "predicted") if has_labels else ()), "text")]
    for one in hardest:
        pair = (one["right"], one["predicted"]) if has_labels else ()
        rows.append((one["name"], f"{one['loss']:.4g}", *pair, one["text"]))
    cards = [_matrix(labels, confusion), table("Hardest rows", rows if hardest else [])]
    return document(title, [tiles(headline), grid(cards)], note=note)


def _matrix(labels: Sequence[str], confusion: Sequence[Sequence[int]]) -> str:
    """Returns the matrix, each row shaded by its shares; nothing without labels."""
    if not confusion:
        return ""
    head = "".join(f"<th>{cell_text(label)}</th>" for label in labels)
    body = ""
    for label, counts in zip(labels, confusion, strict=True):
        total = max(sum(counts), 1)
        cells = "".join(
            f'<td style="background:color-mix(in srgb, var(--c0) {count / total:.0%}, transparent)">{count}</td>'
            for count in counts
        )
        body += f"<tr><th>{cell_text(label)}</th>{cells}</tr>"
    shown = f'<div class="scroll"><table><tr><th>right \\ predicted</th>{head}</tr>{body}</table></div>'
    return card("Confusion matrix", shown)
