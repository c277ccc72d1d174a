"""KeptItems: the items of a stream that a run does not leave out, with their numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from trainwright._types import Item
from trainwright.data.sample_filter import SampleFilter


class KeptItems(Iterator[Item]):
    """The items of a stream that are not excluded.

    Args:
        items: the items from a position on.
        position: number of items before the first of these.
        find_filter: returns which samples are left out now.
        number: returns the number of the last item read; None if its position is its number.
        names_items: whether numbers identify items in every epoch and for every reader of the stream.

    Attributes:
        position: number of items before the next one, including excluded ones.
    """

    def __init__(
        self,
        items: Iterator[Item],
        position: int,
        find_filter: Callable[[], SampleFilter],
        *,
        number: Callable[[], int] | None = None,
        names_items: bool = True,
    ) -> None:
        self.position = position
        self._items = items
        self._find_filter = find_filter
        self._number = number
        self._names_items = names_items
        self._given: list[int] = []

    def __next__(self) -> Item:
        while True:
            item = next(self._items)
            number = self.position if self._number is None else self._number()
            self.position += 1
            if not self._find_filter().excludes(item, number):
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
            number -= not self._find_filter().excludes(item, place)
        return self.position > position
