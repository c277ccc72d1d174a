"""Batcher: forms batches by the lengths of samples. `capability_table.py` names the modules that have one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from trainwright._types import Model
from trainwright.capability_table import TABLE, load
from trainwright.config.plans import SamplingPlan
from trainwright.data.length_sampler import BatchOrder, Lengths


class Batcher(ABC):
    """Forms batches of the samples of a dataset, or of the next samples of a stream."""

    @property
    @abstractmethod
    def setting(self) -> str:
        """Argument with the limit of tokens, as messages name it."""

    @property
    @abstractmethod
    def limit(self) -> int:
        """Most tokens of a sample."""

    @property
    @abstractmethod
    def cure(self) -> str:
        """What to change if a sample has more."""

    @property
    @abstractmethod
    def splits_long(self) -> bool:
        """True if a sample with more tokens is split, not refused."""

    @property
    @abstractmethod
    def packed_input(self) -> str | None:
        """Entry of a sample whose tokens are packed into rows; None if a row has one sample."""

    @abstractmethod
    def make_order(self, lengths: Sequence[int] | Lengths, *, seed: int, drop_last: bool) -> BatchOrder:
        """Returns the batches of samples with these lengths; DataError for an empty or too long sample."""

    def choose_sample_collator(self, collator: Any, *, default: Any) -> Any:
        """Returns the collator for single samples: the user's, or one instead of the default."""
        return collator

    def make_row_collator(self, args: Any, collate: Callable[..., Any], model: Model, processing_class: Any) -> Any:
        """Returns the collator of whole batches, around `collate`; ModelError if the model cannot take them."""
        return collate


def find_batcher(plan: SamplingPlan) -> Batcher | None:
    """Returns what forms the batches of a plan by length; None if they have a fixed number of samples."""
    for row in TABLE:
        found: Batcher | None = load(row.batcher)(plan) if row.batcher else None
        if found is not None:
            return found
    return None
