"""SampleFilter: which samples of the training data a run leaves out.

With samples 2 and 3 of 0 to 5 left out, an epoch in the order 4 2 0 3 5 1 becomes 4 0 5 1. A position in it refers to
the whole order: after 4 0 it is 4, of 6. A resume finds it whatever is left out by then: everything before it is done,
and everything after it is trained unless it is excluded.

If samples are excluded during an epoch, the run fetches the rest of the epoch again, as a resume would.

If the order of an epoch cannot be computed (a sampler's), or batches are formed by length, batches lose the sample, and
the number of batches stays the same. If sources have shares, an epoch keeps its length: the next sample of the same
source takes the place of an excluded one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from trainwright._types import Item
from trainwright.errors import DataError

Sample: TypeAlias = int | tuple[str, int | str]  # a number, or a column and its value


class SampleFilter(ABC):
    """Which samples are left out, and what names them.

    Attributes:
        samples: the samples that are left out.
        file_name: file that names them, for a message.
        example_by_column: how to name one by the value of a column, for a message.
    """

    samples: frozenset[Sample]
    file_name: str
    example_by_column: str

    @abstractmethod
    def excludes(self, item: Item, number: int) -> bool:
        """Returns whether an item of a stream is left out; DataError if it cannot be identified."""

    @abstractmethod
    def find_substitutes(self, num_samples: int, starts: Sequence[int]) -> Mapping[int, int]:
        """Returns the replacement for each excluded sample of `num_samples`, of the same source if one is left.

        `starts` are the first samples of the sources. Raises DataError if no sample would remain.
        """

    def check_places(self) -> None:
        """Raises DataError for samples named by their position, in a stream where it does not identify them."""
        if any(isinstance(sample, int) for sample in self.samples):
            raise DataError(
                "A position only identifies a sample of a stream if all processes and workers read the whole stream, "
                "in the same order in each epoch. Name samples by a column of unique values: "
                f"{self.example_by_column}."
            )


class KeepsEverySample(SampleFilter):
    """No sample is left out."""

    samples: frozenset[Sample] = frozenset()
    file_name = ""
    example_by_column = ""

    def excludes(self, item: Item, number: int) -> bool:
        return False

    def find_substitutes(self, num_samples: int, starts: Sequence[int]) -> Mapping[int, int]:
        return {}


EVERY_SAMPLE = KeepsEverySample()
