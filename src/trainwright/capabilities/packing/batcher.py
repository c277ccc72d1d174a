"""RowBatcher: forms batches of packed rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainwright._types import Model
from trainwright.capabilities.packing.packed_rows import CURE, PackedCollator, PackedOrder, as_tensors, find_layout
from trainwright.capabilities.packing.plan import RowPlan
from trainwright.config.fields import get_value
from trainwright.config.plans import SamplingPlan
from trainwright.config.resolve import asked_sizes
from trainwright.data.batcher import Batcher, BatchSuggestion, PaddedBatches, round_tokens
from trainwright.data.length_sampler import Lengths
from trainwright.support import model_facts

HALF_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, slots=True)
class RowBatcher(Batcher):
    """Batches of `batch_size` rows of `row_length` tokens."""

    plan: SamplingPlan
    rows: RowPlan

    @property
    def setting(self) -> str:
        return "packing_length"

    @property
    def limit(self) -> int:
        return self.rows.row_length

    @property
    def cure(self) -> str:
        return CURE

    @property
    def splits_long(self) -> bool:
        return self.rows.splits_long

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
    return RowBatcher(plan, plan.batching) if isinstance(plan.batching, RowPlan) else None


def suggest_batches(padded: PaddedBatches) -> BatchSuggestion | None:
    """Returns rows of the longest sample, as many as hold a batch; None if the model cannot take them."""
    if not padded.can_join_samples:
        return None
    length = round_tokens(padded.longest_tokens)
    num_rows = max(round(padded.batch_size * padded.mean_tokens / length), 1)
    return BatchSuggestion(
        name="packing",
        settings={"packing": "best_fit", "packing_length": length, "per_device_train_batch_size": num_rows},
        batching=RowPlan(text="", row_length=length),
        batch_size=num_rows,
    )
