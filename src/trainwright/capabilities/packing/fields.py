"""The arguments `packing`, `packing_length` and `packing_overflow`."""

from __future__ import annotations

from trainwright.config.setting import FieldGroup, Range, tunable


class PackingFields(FieldGroup):
    """Several samples in a row."""

    packing: str | None = tunable(
        None,
        "Packs whole samples into rows of packing_length: best_fit (None: one sample a row).",
        choices=("best_fit",),
        place=7,
    )
    packing_length: int | None = tunable(
        None,
        "Tokens of a row that packing fills.",
        limits=Range(2, whole=True, optional=True),
        place=8,
    )
    packing_overflow: str = tunable(
        "error",
        "A sample longer than packing_length: error, or split over rows.",
        choices=("error", "split"),
        place=9,
    )
