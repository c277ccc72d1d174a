"""Excluded samples: what becomes of an order, a batch and a stream without them. The quarantine says which they are.

With samples 2 and 3 of 0 to 5 in quarantine, an epoch in the order 4 2 0 3 5 1 becomes 4 0 5 1. A position in it
refers to the whole order: after 4 0 it is 4, of 6. A resume finds it whatever is in quarantine by then: everything
before it is done, and everything after it is trained unless it is excluded.

If samples are put in quarantine during an epoch, the run fetches the rest of the epoch again, as a resume would.

If the order of an epoch cannot be computed (a sampler's), or batches are formed by length, batches lose the sample, and
the number of batches stays the same. With shares of a mixture, an epoch keeps its length: the next sample of the same
source takes the place of an excluded one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence, Set
from itertools import chain
from typing import Any, TypeAlias

from trainwright._types import QUARANTINE_NAME, Item
from trainwright.errors import DataError

NO_PLACES = (
    "A position only identifies a sample of a stream if all processes and workers read the whole stream, in the same "
    "order in each epoch. Name samples by a column of unique values: trainer.quarantine(['doc-3'], column='id')."
)
Sample: TypeAlias = int | tuple[str, int | str]  # a number, or a column and its value


class KeptItems(Iterator[Item]):
    """The items of a stream that are not excluded.

    Args:
        items: the items from a position on.
        position: number of items before the first of these.
        excluded: returns the currently excluded samples.
        number: returns the number of the last item read; None if its position is its number.
        names_items: whether numbers identify items in every epoch and for every reader of the stream.

    Attributes:
        position: number of items before the next one, including excluded ones.
    """

    def __init__(
        self,
        items: Iterator[Item],
        position: int,
        excluded: Callable[[], Set[Sample]],
        *,
        number: Callable[[], int] | None = None,
        names_items: bool = True,
    ) -> None:
        self.position = position
        self._items = items
        self._excluded = excluded
        self._number = number
        self._names_items = names_items
        self._given: list[int] = []

    def __next__(self) -> Item:
        while True:
            item = next(self._items)
            number = self.position if self._number is None else self._number()
            self.position += 1
            if not self._is_excluded(item, number):
                if self._names_items:
                    self._given.append(number)
                return item

    def numbers_given(self) -> list[int]:
        """Returns the numbers of the items yielded since the last call; empty if numbers do not identify items."""
        numbers = self._given
        self._given = []
        return numbers

    def pass_over(self, number: int, *, stop: int) -> bool:
        """Skips `number` items, but none at or after `stop`; returns False if the stream has ended."""
        position = self.position
        while number > 0 and self.position < stop:
            try:
                item = next(self._items)
            except StopIteration:
                break
            place = self.position if self._number is None else self._number()
            self.position += 1
            number -= not self._is_excluded(item, place)
        return self.position > position

    def _is_excluded(self, item: Item, number: int) -> bool:
        excluded = self._excluded()
        if not excluded:
            return False
        if number in excluded:
            return True
        columns = {one[0] for one in excluded if isinstance(one, tuple)}
        try:
            values = [(column, item[column]) for column in columns]
            return any((name, one.item() if hasattr(one, "item") else one) in excluded for name, one in values)
        except (KeyError, TypeError, IndexError):
            raise DataError(
                f"{QUARANTINE_NAME} names samples by {' and '.join(sorted(columns))}, but rows of the stream do "
                "not have this column (remove_unused_columns=True removes columns that the model does not take)."
            ) from None


def substitutes(excluded: Collection[int], num_samples: int, starts: Sequence[int] = (0,)) -> dict[int, int]:
    """Returns the replacement for each excluded sample; DataError if no sample would remain.

    It is the next sample of the same source, continuing at the first after the last; of another source only if nothing
    remains of that one. `starts` are the first samples of the sources. Indices beyond the end of the dataset have no
    effect.
    """
    excluded = {sample for sample in excluded if sample < num_samples}
    if excluded and len(excluded) >= num_samples:
        raise DataError(f"All {num_samples} samples are in quarantine. Delete {QUARANTINE_NAME}, or some of its lines.")
    found: dict[int, int] = {}
    for sample in excluded:
        source = bisect_right(starts, sample)
        first = starts[source - 1]
        stop = starts[source] if source < len(starts) else num_samples
        others = chain(range(sample + 1, stop), range(first, sample), range(stop, num_samples), range(first))
        found[sample] = next(other for other in others if other not in excluded)
    return found


def without(group: list[Any], excluded: Collection[int]) -> list[Any]:
    """Returns a batch formed by length (indices, or rows of pieces of samples) without its excluded samples."""
    if group and isinstance(group[0], list):
        return [row for one in group if (row := without(one, excluded))]
    return [one for one in group if (one[0] if isinstance(one, tuple) else one) not in excluded]
