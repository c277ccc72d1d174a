"""RowBatcher: forms batches of packed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainwright._types import Model
from trainwright.capabilities.packing.packed_rows import CURE, PackedCollator, PackedOrder, as_tensors, find_layout
from trainwright.config.fields import get_value
from trainwright.config.plans import SamplingPlan
from trainwright.config.resolve import asked_sizes
from trainwright.data.batcher import Batcher
from trainwright.data.length_sampler import Lengths
from trainwright.support import model_facts

HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class RowBatcher(Batcher):
    """Batches of `batch_size` rows of `row_length` tokens."""

    plan: SamplingPlan

    @property
    def setting(self) -> str:
        return "packing_length"

    @property
    def limit(self) -> int:
        assert self.plan.row_length is not None
        return self.plan.row_length

    @property
    def cure(self) -> str:
        return CURE

    @property
    def splits_long(self) -> bool:
        return self.plan.splits_long

    @property
    def packed_input(self) -> str:
        return self.plan.length_of

    def make_order(self, lengths: Sequence[int] | Lengths, *, seed: int, drop_last: bool) -> PackedOrder:
        return PackedOrder(
            lengths,
            self.limit,
            self.plan.batch_size,
            seed=seed,
            splits_long=self.splits_long,
            drop_last=drop_last,
            length_of=self.plan.length_of,
            batcher=self,
        )

    def choose_sample_collator(self, collator: Any, *, default: Any) -> Any:
        return as_tensors if collator is default else collator

    def make_row_collator(
        self, args: Any, collate: Callable[..., Any], model: Model, processing_class: Any
    ) -> PackedCollator:
        layout = find_layout(
            model,
            row_length=self.limit,
            num_rows=args.train_batch_size,
            takes_positions="position_ids" in model_facts.forward_parameters(model),
            length_of=self.packed_input,
            half=HALF_TYPES.get(args.mixed_precision),
            is_alone=_has_whole_rows(args),
        )
        return PackedCollator(
            collate,
            layout,
            length_of=self.packed_input,
            pad_token_id=getattr(processing_class, "pad_token_id", None) or 0,
            masks_first=model_facts.shifts_labels(model) or model_facts.is_causal_lm(model),
            multiple_of=get_value(args, "pad_to_multiple_of"),
        )


def _has_whole_rows(args: Any) -> bool:
    """Returns whether each process has all tokens of its rows: no cp_size and sp_size."""
    sizes = asked_sizes(args) or {}
    return all(sizes.get(name, 1) == 1 for name in ("cp_size", "sp_size"))


def find_batcher(plan: SamplingPlan) -> RowBatcher | None:
    """Returns the batcher of a plan that packs rows; None for another plan."""
    return None if plan.row_length is None else RowBatcher(plan)
