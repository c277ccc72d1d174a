"""Sample: what a user's own collator gets. It iterates over what the model takes, and has the rest where asked by name.

So a collator that treats all entries alike does what it does under the original, which drops the others, and one that
reads a column of its own finds it. Columns of a `datasets.Dataset` are not read unless they are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch.utils.data import Dataset


class ExtraEntries(Protocol):
    """Entries by name that are read when they are asked for."""

    def __contains__(self, name: object) -> bool: ...
    def __getitem__(self, name: str) -> Any: ...


class Sample(dict[str, Any]):
    """A dict of the entries that the model takes, with others behind it."""

    __slots__ = ("_others",)

    def __init__(self, taken: Mapping[str, Any], others: ExtraEntries) -> None:
        super().__init__(taken)
        self._others = others

    def __missing__(self, name: str) -> Any:
        if name not in self._others:
            raise KeyError(name)
        return self._others[name]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._others

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, default) if name not in self._others or super().__contains__(name) else self[name]

    def pop(self, name: str, *default: Any) -> Any:
        return super().pop(name, *default) if super().__contains__(name) or name not in self._others else self[name]

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


class _OtherColumns:
    """Of one row of a `datasets.Dataset`."""

    __slots__ = ("_columns", "_index")

    def __init__(self, columns: Mapping[str, Any], index: int) -> None:
        self._columns = columns
        self._index = index

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Any:
        return self._columns[name][self._index][name]


class DatasetWithExtras(Dataset[Sample]):
    """A `datasets.Dataset` of the columns that the model takes; behind each row the others, read when asked for.

    Args:
        dataset: with all columns.
        names: of those that the model does not take.
    """

    def __init__(self, dataset: Any, names: Sequence[str]) -> None:
        self.taken = dataset.remove_columns(names)
        self.others = {name: dataset.select_columns(name) for name in names}

    def __len__(self) -> int:
        return len(self.taken)

    def __getattr__(self, name: str) -> Any:
        """What is asked of a dataset is answered by the one that the model takes."""
        if name in ("taken", "others"):  # not set yet: being unpickled or copied
            raise AttributeError(name)
        return getattr(self.taken, name)

    def __getitem__(self, index: int) -> Sample:
        return Sample(self.taken[index], _OtherColumns(self.others, index))

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        items = self.taken.__getitems__(list(indices))
        return [Sample(item, _OtherColumns(self.others, i)) for item, i in zip(items, indices, strict=True)]
