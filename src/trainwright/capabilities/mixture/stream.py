"""Named sources, streams and datasets with a length, as one stream that resumes exactly.

With shares, `ShareCurve.sources` gives the source of each position, and a source restarts when it ends. Without shares,
sources take turns until each has ended. The position of each source is tracked separately: by its own state if it has
one, else by the number of items, which a resume reads again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import IterableDataset

from trainwright._types import DatasetLike, Item, has_length
from trainwright.data.order import FeistelOrder
from trainwright.data.seeding import derive_seed
from trainwright.data.sources import SourceStream
from trainwright.data.streaming.stream_state import keeps_state
from trainwright.data.worker_internals import without_worker
from trainwright.errors import DataError

OWNERS = 4096  # number of positions for which sources are computed at once


class Shares(Protocol):
    """Sources by position."""

    def sources(self, first: int, stop: int) -> tuple[NDArray[np.int64], object]: ...
    def to_json(self) -> str: ...


class MixtureStream(IterableDataset[Item], SourceStream):
    """The items of several datasets, at least one of which is a stream.

    Args:
        sources: the datasets by name.

    Attributes:
        names: their names, in order.
    """

    description = "a mixture"

    def __init__(self, sources: Mapping[str, DatasetLike]) -> None:
        self.sources = dict(sources)
        self.names = list(sources)
        self._shares: Shares | None = None  # None: sources take turns until all have ended
        self._settings = ""
        self._read: Callable[[str], Shares] | None = None
        self._seed = 0
        self._shuffles = True
        self._epoch = 0
        self._places = [_Place() for _ in self.names]
        self._states: list[Any] = [None] * len(self.names)  # states of the sources, as in a checkpoint
        self._position = 0
        self._sample = -1
        self._loaded: dict[str, Any] | None = None

    def sample(self) -> int:
        """Number of the last item returned: the same for a row each time it is read, unless its stream is shuffled."""
        return self._sample

    def find_source(self, sample: int) -> tuple[str, int]:
        """Returns the name of a sample's source, and its row there, or its position in a stream."""
        row, number = divmod(sample, len(self.names))
        return self.names[number], row

    def find_sources(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the number of each sample's source: its index in `names`."""
        return samples % len(self.names)

    def use(
        self, shares: Shares | None, *, settings: str, read: Callable[[str], Shares], seed: int, shuffles: bool
    ) -> None:
        """Sets the order of sources, and of the rows of sources with a length.

        Args:
            shares: the source of each position; None lets sources take turns.
            settings: the settings behind the shares; a checkpoint with the same settings keeps the shares of its run.
            read: parses the text of shares in a checkpoint.
            seed: seed for the order of rows.
            shuffles: whether rows are shuffled.
        """
        self._shares = shares
        self._settings = settings
        self._read = read
        self._seed = seed
        self._shuffles = shuffles

    def set_epoch(self, epoch: int) -> None:
        """Starts the next iteration at this epoch."""
        self._epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Returns how far each source has been read."""
        places = {}
        for number, (name, source) in enumerate(self.sources.items()):
            place = self._places[number]
            state = self._states[number]
            if place.is_open:
                state = source.state_dict() if keeps_state(source) else None
            places[name] = {"passes": place.passes, "items": place.items, "has_ended": place.has_ended, "state": state}
        shares = None if self._shares is None else self._shares.to_json()
        return {"position": self._position, "places": places, "settings": self._settings, "shares": shares}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the next iteration from a state; DataError if the state is for other sources."""
        if list(state["places"]) != self.names:
            raise DataError(
                f"The checkpoint has the sources {', '.join(state['places'])}; resume with the same sources."
            )
        self._loaded = state

    def __iter__(self) -> Iterator[Item]:
        state = self._loaded
        self._loaded = None
        self._position = 0 if state is None else state["position"]
        saved = [{} if state is None else dict(state["places"][name]) for name in self.names]
        self._states = [one.pop("state", None) for one in saved]
        self._places = [_Place(**one) for one in saved]
        if state is not None and state["shares"] and state["settings"] == self._settings and self._read is not None:
            self._shares = self._read(state["shares"])
        items = [self._read_source(number) for number in range(len(saved))]
        return self._by_turns(items) if self._shares is None else self._by_shares(items, self._shares)

    def _by_turns(self, items: list[Iterator[Item]]) -> Iterator[Item]:
        while not all(place.has_ended for place in self._places):
            number = self._position % len(items)
            self._position += 1
            if not self._places[number].has_ended:
                with without_worker():  # workers take turns in making batches, so each reads all items
                    item = next(items[number], self)  # a sentinel: self cannot be an item
                if item is not self:
                    self._sample = self._places[number].row * len(items) + number
                    yield item

    def _by_shares(self, items: list[Iterator[Item]], shares: Shares) -> Iterator[Item]:
        while True:
            for number in shares.sources(self._position, self._position + OWNERS)[0].tolist():
                with without_worker():
                    item = next(items[number])
                self._position += 1
                self._sample = self._places[number].row * len(items) + number
                yield item

    def _read_source(self, number: int) -> Iterator[Item]:
        """Yields the items of a source from its position on; with shares, pass after pass without end."""
        state = self._states[number]
        place = self._places[number]
        source = self.sources[self.names[number]]
        name = self.names[number]
        while not place.has_ended:
            place.is_open = True
            if has_length(source) and not isinstance(source, IterableDataset):
                items = self._read_rows(source, name, place)
            else:
                if hasattr(source, "set_epoch"):
                    source.set_epoch(self._epoch + place.passes)
                if state is not None:
                    source.load_state_dict(state)
                left = iter(source) if state is not None else itertools.islice(source, place.items, None)
                items = enumerate(left, place.items)
                state = None
            for place.row, item in items:
                place.items += 1
                yield item
            if place.items == 0:
                raise DataError(f"The source {name!r} of train_dataset has no items.")
            if self._shares is None:
                place.has_ended = True
            else:
                place.passes += 1
                place.items = 0

    def _read_rows(self, source: DatasetLike, name: str, place: _Place) -> Iterator[tuple[int, Item]]:
        order = FeistelOrder(len(source), derive_seed((self._seed, *name.encode())))
        for row in range(place.items, len(source)):
            if self._shuffles:
                passes = np.array([self._epoch + place.passes], dtype=np.uint64)
                row = int(order.order_passes(np.array([row], dtype=np.uint64), passes)[0])
            yield row, source[row]


class _Place:
    """Progress in reading one source."""

    def __init__(self, passes: int = 0, items: int = 0, has_ended: bool = False) -> None:
        self.passes = passes
        self.items = items
        self.has_ended = has_ended
        self.is_open = False  # read since the last resume
        self.row = 0  # row of the last item read
