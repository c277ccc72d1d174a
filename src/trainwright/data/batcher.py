"""Batcher: forms batches by the lengths of samples. `capability_table.py` names the modules that have one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from trainwright._types import JSONObject, Model
from trainwright.capability_table import TABLE, load
from trainwright.config.plans import Batching, SamplingPlan
from trainwright.data.length_sampler import BatchOrder, Lengths

TOKEN_STEP = 64  # suggested numbers of tokens are multiples of this


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PaddedBatches:
    """Batches of a fixed number of samples, in place of which a batcher may suggest its own.

    Attributes:
        batch_size: samples of a batch.
        longest_tokens: tokens of the longest sample.
        mean_tokens: mean of all samples.
        can_join_samples: the model may take several samples in a row.
    """

    batch_size: int
    longest_tokens: int
    mean_tokens: float
    can_join_samples: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSuggestion:
    """Settings with which a batcher forms batches of about as many tokens.

    Attributes:
        name: of this way to form batches, for a table.
        settings: the arguments that ask for it.
        batching: what they plan.
        batch_size: samples of a batch, or rows.
        note: other changes to make.
    """

    name: str
    settings: JSONObject
    batching: Batching
    batch_size: int = 1
    note: str = ""


def suggest_batches(padded: PaddedBatches) -> Iterator[BatchSuggestion]:
    """Yields what each batcher of the table suggests."""
    for row in TABLE:
        found: BatchSuggestion | None = load(row.batch_suggestion)(padded) if row.batch_suggestion else None
        if found is not None:
            yield found


def round_tokens(tokens: float) -> int:
    """Returns the next multiple of a step."""
    return -(-ceil(tokens) // TOKEN_STEP) * TOKEN_STEP
