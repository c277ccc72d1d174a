"""Names of the samples of a training dataset, and the fingerprints of their rows.

A name is the row as the user knows it: an index before `Subset` or `train_test_split` held rows out, a line of a file
if the dataset has an `origin`, a position in a stream, or the value of a column. Each kind of source is a class;
`row_names` chooses it. Content is only read from the dataset when a fingerprint is asked for.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import IterableDataset, Subset

from trainwright._types import DatasetLike, JSONObject, has_length, is_instance_of
from trainwright.data.identity import SampleId, as_hex, fingerprint
from trainwright.data.seeding import drawing_apart
from trainwright.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

ONE_SOURCE = "train"  # source name of a single dataset
# Any: rows are the user's own types.


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """Origin of the samples of a dataset, which is the attribute `origin` of the dataset.

    Attributes:
        names: name of each sample.
        contents: fingerprint of the row of each sample, 64 bits.
    """

    names: Sequence[SampleId]
    contents: NDArray[np.uint64]


class SourceRows(ABC):
    """Names of the samples of one source, by their positions from 0.

    Attributes:
        name: name of the source.
        size: number of its samples; None for a stream.
    """

    def __init__(self, name: str, size: int | None) -> None:
        self.name = name
        self.size = size

    @abstractmethod
    def find_name(self, place: int) -> SampleId:
        """Returns the name of a sample."""

    @abstractmethod
    def find_places(self, name: SampleId) -> Sequence[int]:
        """Returns the positions with a name; a name without a part covers all parts of its row."""

    @abstractmethod
    def read_content(self, place: int) -> int | None:
        """Returns the fingerprint of a sample's row; None if it cannot be read."""

    @property
    def keeps_contents(self) -> bool:
        """True if fingerprints are available without reading rows."""
        return False


class RowKeys(ABC):
    """Keys of the rows of a source, by which a user names them; `NoKeys` if there is no id column."""

    @abstractmethod
    def find_key(self, place: int) -> str | int | None:
        """Returns the key of a sample; DataError if its row should have one."""

    @abstractmethod
    def find_places(self, name: SampleId, by_index: Callable[[int], Sequence[int]]) -> Sequence[int]:
        """Returns the positions with a name; `by_index` returns those of a row."""


class NoKeys(RowKeys):
    """Rows are named by index."""

    def find_key(self, place: int) -> None:
        return None

    def find_places(self, name: SampleId, by_index: Callable[[int], Sequence[int]]) -> Sequence[int]:
        return () if name.key is not None or name.file is not None else by_index(name.row)


class ColumnKeys(RowKeys):
    """Rows are named by the values of a column.

    Args:
        column: the column.
        source: name of the source, for messages.
        dataset: the dataset.
        read: reads a row.
    """

    def __init__(self, column: str, source: str, dataset: Any, read: Callable[[int], Any]) -> None:
        self._name = column
        self._source = source
        self._dataset = dataset
        self._read = read

    def find_key(self, place: int) -> str | int:
        """Returns the id of a sample; DataError if its row has none."""
        column = self._name
        if self._column is not None:
            key = self._column[place]
        else:
            with drawing_apart():
                row = self._read(place)
            try:
                key = row[column]
            except (KeyError, TypeError, IndexError):
                raise DataError(f"id_column={column!r} is not in row {place} of the source {self._source!r}.") from None
            key = key.item() if hasattr(key, "item") else key
        if not isinstance(key, str | int) or isinstance(key, bool):
            raise DataError(
                f"id_column={column!r} holds {key!r} in row {place} of the source {self._source!r}; ids must be "
                "strings or integers."
            )
        return key

    def find_places(self, name: SampleId, by_index: Callable[[int], Sequence[int]]) -> Sequence[int]:
        return self._places_by_key.get(name.key, ())

    @cached_property
    def _column(self) -> Sequence[Any] | None:
        """Returns the ids of a `datasets.Dataset`; None for other datasets, which are read row by row."""
        column = self._name
        if not hasattr(self._dataset, "column_names"):
            return None
        if column not in self._dataset.column_names:
            raise DataError(
                f"id_column={column!r} is not a column of the source {self._source!r}, which has "
                f"{', '.join(self._dataset.column_names)}."
            )
        return self._dataset.with_format(None)[column][:]  # type: ignore[no-any-return]

    @cached_property
    def _places_by_key(self) -> Mapping[object, Sequence[int]]:
        return _places([self.find_key(place) for place in range(len(self._dataset))])


class IndexedRows(SourceRows):
    """Rows of a dataset with a length, by index.

    Args:
        name: name of the source.
        dataset: the dataset, which is read for fingerprints and keys.
        indices: index of each sample in the dataset before rows were held out; None for all of its rows, in order.
        id_column: column of row names; None if rows are named by index.
    """

    def __init__(
        self, name: str, dataset: Any, indices: NDArray[np.int64] | None = None, *, id_column: str | None = None
    ) -> None:
        super().__init__(name, len(dataset))
        self._read = _reader(dataset)
        self._before = indices
        self._keys: RowKeys = NoKeys() if id_column is None else ColumnKeys(id_column, name, dataset, self._read)

    def find_name(self, place: int) -> SampleId:
        row = place if self._before is None else int(self._before[place])
        return SampleId(self.name, row, key=self._keys.find_key(place))

    def find_places(self, name: SampleId) -> Sequence[int]:
        return self._keys.find_places(name, self._places_at)

    def _places_at(self, row: int) -> Sequence[int]:
        """Returns the positions of a row by its index."""
        assert self.size is not None
        if self._before is not None:
            return self._places_by_index.get(row, ())
        return (row,) if row < self.size else ()

    def read_content(self, place: int) -> int | None:
        return self._content(place) if self._is_stable else None

    def _content(self, place: int) -> int | None:
        """Reads a row. If the dataset draws random numbers for it, they are the same each time."""
        try:
            with drawing_apart():
                return fingerprint(self._read(place))
        except Exception:  # any error of the user's dataset; training raises it if the row is needed
            logger.debug("Row %d of %s has no fingerprint.", place, self.name, exc_info=True)
            return None

    @cached_property
    def _is_stable(self) -> bool:
        """False if the first row differs when it is read again."""
        if not self.size:
            return False
        is_stable = self._content(0) == self._content(0)
        if not is_stable:
            logger.warning(
                "Rows of %s differ each time they are read, so they are named by index alone, which is wrong once rows "
                "are added or removed. Use id_column=... to name them by a column.",
                self.name,
            )
        return is_stable

    @cached_property
    def _places_by_index(self) -> Mapping[object, Sequence[int]]:
        assert self._before is not None
        return _places(self._before.tolist())


class OriginRows(SourceRows):
    """Rows of a dataset that records their origin itself.

    Args:
        name: new name of the source, used in the names of its rows.
        origin: origin of the dataset.
        places: positions of the samples in the origin; None for all, in order.
    """

    def __init__(self, name: str, origin: RowOrigin, places: NDArray[np.int64] | None = None) -> None:
        super().__init__(name, len(origin.names) if places is None else len(places))
        self._origin = origin
        self._chosen = places

    def find_name(self, place: int) -> SampleId:
        found = self._origin.names[self._at(place)]
        return found if found.source == self.name else replace(found, source=self.name)

    def find_places(self, name: SampleId) -> Sequence[int]:
        return self._by_name.get(name.place, ())

    def read_content(self, place: int) -> int | None:
        return int(self._origin.contents[self._at(place)])

    @property
    def keeps_contents(self) -> bool:
        return True

    def _at(self, place: int) -> int:
        return place if self._chosen is None else int(self._chosen[place])

    @cached_property
    def _by_name(self) -> Mapping[object, Sequence[int]]:
        assert self.size is not None
        found: defaultdict[object, list[int]] = defaultdict(list)
        for place in range(self.size):
            name = self.find_name(place)
            found[name.place].append(place)
            if name.part is not None:
                found[replace(name, part=None).place].append(place)
        return found


class StreamRows(SourceRows):
    """Items of a stream, by their positions in it. Their content cannot be read again."""

    def __init__(self, name: str) -> None:
        super().__init__(name, None)

    def find_name(self, place: int) -> SampleId:
        return SampleId(self.name, place)

    def find_places(self, name: SampleId) -> Sequence[int]:
        return (name.row,) if name.key is None and name.file is None else ()

    def read_content(self, place: int) -> int | None:
        return None


class RowNames:
    """Names of the samples of training data, by the numbers that the trainer uses.

    Args:
        sources: at least one, in the order of the data.
        is_interleaved: whether sample numbers are row x sources + source, as in a `SourceStream`; otherwise each source
            follows the previous one.
        id_column: column of row names, or None.
    """

    def __init__(
        self, sources: Sequence[SourceRows], *, is_interleaved: bool = False, id_column: str | None = None
    ) -> None:
        self.sources = list(sources)
        self.id_column = id_column
        self._is_interleaved = is_interleaved
        self._start_order = {source.name: number for number, source in enumerate(self.sources)}
        sizes = [source.size or 0 for source in self.sources]
        self._starts = [0, *accumulate(sizes)][:-1]
        has_end = not is_interleaved and all(source.size is not None for source in self.sources)
        self._length = sum(sizes) if has_end else None

    @property
    def sizes(self) -> dict[str, int | None]:
        """Number of samples of each source; None for a stream."""
        return {source.name: source.size for source in self.sources}

    def __len__(self) -> int:
        """Number of samples; 0 for data with a stream, which has no known end."""
        return self._length or 0

    def __iter__(self) -> Iterator[SampleId]:
        """Yields the names of data with a length, in order."""
        return map(self.find_name, range(len(self)))

    def source_and_place(self, number: int) -> tuple[SourceRows, int]:
        """Returns the source of a sample and its position there; IndexError if the data has no such number."""
        if self._is_interleaved:
            place, source = divmod(number, len(self.sources))
        else:
            source = bisect_right(self._starts, number) - 1
            place = number - self._starts[source]
        size = self.sources[source].size
        if number < 0 or (size is not None and place >= size):
            raise IndexError(f"the training data has no sample {number}")
        return self.sources[source], place

    def find_name(self, number: int) -> SampleId:
        """Returns the name of a sample; IndexError if the data has no such number."""
        source, place = self.source_and_place(number)
        return source.find_name(place)

    def number_at(self, source: str, place: int) -> int | None:
        """Returns the number of the sample at a position of a source; None if there is none."""
        number = self._start_order.get(source)
        if number is None or place >= (self.sources[number].size or place + 1):
            return None
        return self._number(number, place)

    def find_numbers(self, name: SampleId) -> list[int]:
        """Returns the numbers of the samples with a name; several if the row is repeated or was cut."""
        if name.key is None and name.file is None:
            chosen = [self._start_order[name.source]] if name.source in self._start_order else []
        else:  # a key or a file identifies rows in any source
            chosen = list(range(len(self.sources)))
        return [self._number(source, place) for source in chosen for place in self.sources[source].find_places(name)]

    def _number(self, source: int, place: int) -> int:
        return place * len(self.sources) + source if self._is_interleaved else self._starts[source] + place

    def find_size(self, name: SampleId) -> int | None:
        """Returns the number of samples in the source of a name; None for a stream or an unknown source."""
        return self.sizes.get(name.source)

    def read_fingerprint(self, number: int) -> int | None:
        """Reads a sample's row and returns its fingerprint; None if it cannot be read."""
        source, place = self.source_and_place(number)
        return source.read_content(place)

    def contents(self) -> Iterator[tuple[int, int | None]]:
        """Yields the number and fingerprint of each sample, reading all rows; streams are skipped."""
        for number, source in enumerate(self.sources):
            for place in range(source.size or 0):
                yield self._number(number, place), source.read_content(place)

    def find(self, text: str) -> list[int]:
        """Returns the numbers of the samples named by a text such as `reviews.csv:130`, `chat[17]` or `doc-3`.

        Raises DataError if there is none.
        """
        found = _parsed(text, self.sources)
        numbers = [number for name in found for number in self.find_numbers(name)]
        if not numbers:
            example = next(iter(self), None)
            shown = "" if example is None else f" Sample names look like {str(example)!r}."
            raise DataError(f"The training data has no sample {text!r}.{shown}")
        return numbers


class NamesOf:
    """Names of a dataset's samples, determined when they are first asked for.

    Args:
        dataset, id_column, source: as for `row_names`.
    """

    def __init__(self, dataset: DatasetLike, *, id_column: str | None = None, source: str = ONE_SOURCE) -> None:
        self._dataset = dataset
        self._id_column = id_column
        self._source = source

    def __call__(self) -> RowNames:
        return self._names

    @cached_property
    def _names(self) -> RowNames:
        return row_names(self._dataset, id_column=self._id_column, source=self._source)

    def text(self, sample: object) -> str:
        """Returns the name of a sample for a message that must not fail: `chat[17]`, or `sample 17` if it has none.

        Args:
            sample: a number, or the pieces of samples packed into one row (`_types.Row`).
        """
        return " + ".join(str(one["name"]) for one in self.described(sample, with_content=False))

    def described(self, sample: object, *, with_content: bool = True) -> list[JSONObject]:
        """Returns the names of a sample, or of the pieces packed into a row, in the form used in files; never fails.

        `with_content` also reads the rows for their fingerprints.
        """
        numbers: list[Any] = [piece[0] for piece in sample] if isinstance(sample, list) else [sample]
        found = []
        for number in dict.fromkeys(numbers):
            try:
                values = self._names.find_name(number).to_dict()
                content = self._names.read_fingerprint(number) if with_content else None
            except Exception:
                values = {"name": f"sample {number}"}
                content = None
            found.append(values if content is None else {**values, "fingerprint": as_hex(content)})
        return found


def row_names(dataset: DatasetLike, *, id_column: str | None = None, source: str = ONE_SOURCE) -> RowNames:
    """Returns the names of a training dataset's samples.

    Args:
        dataset: a dataset, a stream, or named sources of both kinds, as the trainer holds it.
        id_column: column of row names for data with indices; None if rows are named by index.
        source: source name for a dataset without named sources.
    """
    sources = getattr(dataset, "sources", None)
    has_sources = isinstance(sources, Mapping) and hasattr(dataset, "find_source")
    if not has_sources:
        return RowNames([_source(source, dataset, id_column)], id_column=id_column)
    is_stream = isinstance(dataset, IterableDataset)
    rows = [_source(name, source, id_column) for name, source in sources.items()]  # type: ignore[union-attr]
    return RowNames(rows, is_interleaved=is_stream, id_column=id_column)


def _source(name: str, dataset: Any, id_column: str | None) -> SourceRows:
    """Returns the rows of one source."""
    if isinstance(dataset, IterableDataset) or not has_length(dataset):
        return StreamRows(name)
    inner = dataset
    indices: Any = None
    while type(inner) is Subset:
        chosen = np.asarray(inner.indices, dtype=np.int64)
        indices = chosen if indices is None else chosen[indices]
        inner = inner.dataset
    origin = getattr(inner, "origin", None)
    if isinstance(origin, RowOrigin):
        return OriginRows(name, origin, indices)
    if is_instance_of(inner, "datasets", "Dataset"):
        rows = table_rows(inner)
        if rows is not None:
            indices = rows if indices is None else rows[indices]
    return IndexedRows(name, dataset, indices, id_column=id_column)


def table_rows(dataset: Any) -> NDArray[np.int64] | None:
    """Returns the table row of each sample of a `datasets.Dataset` after a shuffle or a selection.

    None for all rows.
    """
    chosen = dataset._indices  # the package has no public name for it
    return None if chosen is None else chosen.column(0).to_numpy().astype(np.int64)


def _reader(dataset: Any) -> Callable[[int], Any]:
    """Returns a function that reads a row as stored, without a transform, which may draw random numbers."""
    if is_instance_of(dataset, "datasets", "Dataset"):
        stored = dataset.with_format("arrow")
        return lambda place: stored[place].to_pylist()[0]
    if type(dataset) is Subset:
        inner = _reader(dataset.dataset)
        return lambda place: inner(int(dataset.indices[place]))
    return lambda place: dataset[place]


def _places(values: Sequence[Any]) -> Mapping[object, Sequence[int]]:
    found: defaultdict[object, list[int]] = defaultdict(list)
    for place, value in enumerate(values):
        found[value].append(place)
    return found


def _parsed(text: str, sources: Sequence[SourceRows]) -> Iterator[SampleId]:
    """Yields the names that a text may refer to."""
    yield SampleId("", 0, key=text)
    if text.isdecimal():
        yield SampleId("", 0, key=int(text))
    whole, _, part = text.rpartition("#")
    part_number = int(part) if whole and part.isdecimal() else None
    shown = whole if part_number is not None else text
    for opening, closing, is_line in (("[", "]", False), (":", "", True)):
        before, _, after = shown.rpartition(opening)
        number = after.removesuffix(closing)
        if not before or not number.isdecimal() or not shown.endswith(closing):
            continue
        if not is_line:
            yield from (SampleId(one.name, int(number), part=part_number) for one in sources if one.name == before)
        yield SampleId("", int(number), before, is_line, part_number)
