"""The line about packed rows in the plan of a run: what computes their attention."""

from __future__ import annotations

from typing import Any

from trainwright._types import DatasetLike, is_instance_of
from trainwright.config.plans import StepPlan
from trainwright.data.collator_layers import CollatorLayer
from trainwright.data.sources import DataHandler

PACKED_ROWS = "trainwright.capabilities.packing.packed_rows"  # loaded where rows are packed
LINES = {
    "documents": "attention by document: sdpa without a mask",
    "positions": "attention with the masks that transformers makes of the position ids",
    "blocks": "attention with a mask for each pair of tokens",
    "flat": "attention by document, in the model's kernel",
}


class PackingHandler(DataHandler):
    """Describes packed rows; they have no data of a form of their own."""

    def check(self, args: Any, dataset: DatasetLike) -> None:
        """Raises nothing: the arguments fit all data."""

    def describe(self, args: Any, loader: Any, plan: StepPlan, *, dispatches: bool) -> list[str]:
        collator = getattr(getattr(loader, "reading", None), "collator", None)
        while isinstance(collator, CollatorLayer):
            if is_instance_of(collator, PACKED_ROWS, "PackedCollator"):
                layout: Any = vars(collator)["layout"]
                return [f"packing   {LINES[layout.form]}"]
            collator = collator.data_collator
        return []


HANDLER = PackingHandler()
