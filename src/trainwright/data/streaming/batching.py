"""Which way batches are formed by length, for orders of a whole dataset and for look-aheads into a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.config.plans import SamplingPlan
from trainwright.data.batch_sampler import BatchOrder
from trainwright.data.lengths import Lengths
from trainwright.data.packing.sampler import CURE, PackedOrder
from trainwright.data.token_budget import TokenBudget
from trainwright.errors import DataError


def formed_by_length(
    lengths: Sequence[int] | Lengths, plan: SamplingPlan, *, seed: int, drop_last: bool
) -> TokenBudget | PackedOrder:
    """Batches of samples with these lengths, as the plan forms them.

    Raises:
        DataError: a sample is empty, or longer than a batch or row takes.
    """
    if plan.max_tokens is not None:
        return TokenBudget(lengths, plan.max_tokens, seed=seed, multiple_of=plan.pad_to)
    assert plan.row_length is not None
    return PackedOrder(
        lengths,
        plan.row_length,
        plan.batch_size,
        seed=seed,
        splits_long=plan.splits_long,
        drop_last=drop_last,
        length_of=plan.length_of,
    )


@dataclass(frozen=True, slots=True)
class BatchFormer:
    """Forms batches of the samples of a look-ahead into a stream (`lookahead_buffer.py`).

    Attributes:
        size: samples of a look-ahead, at least.
        min_batches: batches that can be formed of it, at least.
        block: items that are read at once.
    """

    plan: SamplingPlan
    size: int = 1024
    min_batches: int = 16
    block: int = 64

    @property
    def packed_input(self) -> str | None:
        """The entry whose tokens are packed into rows; None where samples stay rows of their own."""
        return self.plan.length_of if self.plan.row_length is not None else None

    @property
    def unit(self) -> str:
        return f"{formed_by_length([1], self.plan, seed=0, drop_last=False).unit} from look-aheads of {self.size}"

    def order(self, lengths: Sequence[int], *, seed: int = 0, drop_last: bool = False) -> BatchOrder:
        return formed_by_length(lengths, self.plan, seed=seed, drop_last=drop_last and self.plan.drop_last)

    def length(self, item: Any, number: int) -> int:
        """Tokens of an item of the stream, counted: there is no index by which a column could be asked.

        Raises:
            DataError: it has none, or more than fit.
        """
        name, plan = self.plan.length_of, self.plan
        if not isinstance(item, Mapping) or name not in item:
            has = ", ".join(sorted(item)) if isinstance(item, Mapping) else f"a {type(item).__name__}"
            raise DataError(
                f"Batches are formed by the length of {name!r}, and item {number} of the stream has {has}. Give the "
                "items that entry (tokenize the stream by map), or pass a processing_class whose first input they have."
            )
        length = len(item[name])
        limit, cure = plan.row_length, CURE
        if plan.max_tokens is not None:
            limit, cure = plan.max_tokens, "Raise the budget, or cut the samples."
        if length < 1 or (length > (limit or length) and not plan.splits_long):
            setting = "max_tokens_per_batch" if plan.max_tokens is not None else "packing_length"
            what = f"more than {setting}={limit}. {cure}" if length else "none. Leave such samples out."
            raise DataError(f"Item {number} of the stream has {length} tokens, {what}")
        return length
