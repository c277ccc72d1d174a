"""Lists in the results of an evaluation: lists of samples are appended, lists of parts are joined by place.

Models, collators and metrics return both as plain lists. The content shows which one it is:

    texts                                             samples
    another number of entries than of samples         parts
    arrays that do not have a row for each sample     samples (boxes of an image), as are numbers and lists of them
    arrays with a row for each sample                 parts, unless a later batch shows otherwise

The last case is open: the four arrays of a batch of four samples may be four layers, or the boxes of images that have
four boxes each. It is decided by the first batch, of any process, that shows it; earlier batches wait until then. If no
batch does, mappings and entries of the collator are samples, and arrays of a model are parts. What a list was found to
be holds for the rest of the evaluation, so also for a last batch of other size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import torch

from trainwright._types import Nested
from trainwright.support.tensor_tree import map_nested, nested_concat

ListPath: TypeAlias = tuple[object, ...]  # keys and positions that lead to a list, from the root of the results
ListKinds: TypeAlias = dict[ListPath, bool]  # whether the list has an entry for each sample


class SampleList(list[Any]):
    """List with an entry for each sample."""


@dataclass(frozen=True, slots=True)
class ListPiece:
    """List that one process has of one batch."""

    entries: Sequence[Any]
    num_rows: int  # samples of the batch; 0: it does not count


@dataclass(frozen=True, slots=True)
class OpenList:
    """List of one batch, of all processes, of which it is not yet known whether it is one of samples or of parts."""

    pieces: Sequence[ListPiece]
    path: ListPath
    found: ListKinds  # of the evaluation; later batches add to it
    default: bool

    @property
    def is_decided(self) -> bool:
        return self.path in self.found

    def decide(self) -> Nested:
        """Returns the list as what it was found to be, or as what it is by default."""
        if self.found.get(self.path, self.default):
            return SampleList(entry for piece in self.pieces if piece.num_rows for entry in piece.entries)
        return join_parts([piece.entries for piece in self.pieces])


class ResultGatherer:
    """Gathers one kind of results (predictions, labels, ...) of all processes, batch by batch.

    All processes decide by the pieces of all of them, so they decide alike.
    """

    def __init__(
        self,
        gather: Callable[[Nested], Nested],
        gather_objects: Callable[[Any], list[Any]] | None,
        *,
        is_collated: bool,
        num_fields: int = 1,
    ) -> None:
        self._gather = gather  # nested tensors
        self._gather_objects = gather_objects  # any objects; None with a single process
        self._is_collated = is_collated  # the results are entries of batches, and not of a model
        self._num_fields = num_fields  # entries of a batch that the results are a tuple of, if there are several
        self._found: ListKinds = {}
        self._is_bare = False  # results without a container came before

    def gather(self, value: Nested, num_rows: int) -> Nested:
        """Returns the results of a batch of all processes, in the order of samples; 0 rows: this one's do not count.

        Lists of samples become a `SampleList`, and lists that may be either an `OpenList`.
        """
        if num_rows == 0:
            value = map_nested(_no_rows, value)
        if isinstance(value, list) and len(value) == 1 and self._is_bare:
            value = value[0]
        self._is_bare = self._is_bare or isinstance(value, torch.Tensor)
        return self._gather_at((), value, num_rows)

    def _gather_at(self, path: ListPath, value: Nested, num_rows: int) -> Nested:
        if not _has_candidates(value, is_collated=self._is_collated):
            return self._gather(value)
        is_fields = path == () and isinstance(value, tuple) and len(value) == self._num_fields > 1
        if not is_fields and _is_candidate(value, is_collated=self._is_collated):
            is_samples = self._found.get(path)
            if is_samples is None or (is_samples and self._gather_objects is not None):
                return self._gather_list(path, value, num_rows)
            if is_samples:
                return SampleList(value if num_rows else ())
        if isinstance(value, Mapping):
            parts = {key: self._gather_at((*path, key), part, num_rows) for key, part in value.items()}
            return type(value)(parts)  # type: ignore[call-arg]
        gathered = [self._gather_at((*path, place), part, num_rows) for place, part in enumerate(value)]
        return type(value)(*gathered) if hasattr(value, "_fields") else type(value)(gathered)

    def _gather_list(self, path: ListPath, value: Sequence[Any], num_rows: int) -> Nested:
        """Gathers a list as an object; decides what it is, if a process shows it."""
        pieces = [ListPiece(map_nested(_on_cpu, value), num_rows)]
        if self._gather_objects is not None:
            pieces = self._gather_objects(pieces[0])
        if path not in self._found:
            verdicts = [_has_entry_per_sample(piece, is_collated=self._is_collated) for piece in pieces]
            clear = [verdict for verdict in verdicts if verdict is not None]
            if clear:
                self._found[path] = any(clear)
        is_of_mappings = bool(value) and isinstance(value[0], Mapping)
        default = isinstance(value, list) and (self._is_collated or is_of_mappings)
        result = OpenList(pieces, path, self._found, default)
        if not result.is_decided:
            return result
        if self._found[path]:
            return result.decide()
        if self._gather_objects is None:  # its parts may have lists of samples in them
            return self._gather_at(path, value, num_rows)
        return self._join_parts(path, pieces)

    def _join_parts(self, path: ListPath, pieces: Sequence[ListPiece]) -> Nested:
        """Joins the parts of all processes by place; the first batch of which it was known that they are parts."""
        parts: list[Nested] = []
        for place, part in enumerate(pieces[0].entries):
            several = [ListPiece(piece.entries[place], piece.num_rows) for piece in pieces]
            if _is_candidate(part, is_collated=self._is_collated):
                default = isinstance(part, list)
                parts.append(OpenList(several, (*path, place), self._found, default))
            else:
                parts.append(join_parts([piece.entries for piece in several]))
        return type(pieces[0].entries)(parts)  # type: ignore[call-arg]


def join_parts(values: Sequence[Any]) -> Nested:
    """Joins nested values of one structure by place: arrays by rows; of other leaves the first is taken."""
    first = values[0]
    if isinstance(first, (list, tuple)):
        parts = [join_parts(several) for several in zip(*values, strict=True)]
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)
    if isinstance(first, Mapping):
        joined = {key: join_parts([value[key] for value in values]) for key in first}
        return type(first)(joined)  # type: ignore[call-arg]
    return reduce(nested_concat, values) if _is_array(first) else first


def map_results(function: Callable[[Any], Any], value: Nested) -> Nested:
    """Applies a function to every leaf of nested results; a list of samples and an open list are leaves."""
    if isinstance(value, (list, tuple)) and not isinstance(value, SampleList):
        parts = [map_results(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, Mapping):
        return type(value)({key: map_results(function, part) for key, part in value.items()})  # type: ignore[call-arg]
    return function(value)


def is_open(value: Nested) -> bool:
    """Returns whether nested results have a list of which it is not yet known what it is."""
    return any(isinstance(leaf, OpenList) and not leaf.is_decided for leaf in _leaves(value))


def decide_lists(value: Nested) -> Nested:
    """Returns nested results without open lists: each is what it was found to be, or what it is by default."""
    return map_results(lambda leaf: leaf.decide() if isinstance(leaf, OpenList) else leaf, value)


def as_plain_lists(value: Nested) -> Nested:
    """Returns nested results with plain lists in place of lists of samples."""
    return map_results(lambda leaf: list(leaf) if isinstance(leaf, SampleList) else leaf, decide_lists(value))


def _leaves(value: Nested) -> Iterator[Any]:
    if isinstance(value, (list, tuple)) and not isinstance(value, SampleList):
        for part in value:
            yield from _leaves(part)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
    else:
        yield value


def _has_candidates(value: Nested, *, is_collated: bool) -> bool:
    """Returns whether nested results have a list, or a tuple, that may have an entry for each sample."""
    if isinstance(value, Mapping):
        return any(_has_candidates(part, is_collated=is_collated) for part in value.values())
    if not isinstance(value, (list, tuple)):
        return False
    return _is_candidate(value, is_collated=is_collated) or any(
        _has_candidates(part, is_collated=is_collated) for part in value
    )


def _is_candidate(value: Nested, *, is_collated: bool) -> bool:
    """Returns whether a value may have an entry for each sample.

    Any list may, and any tuple of a collator. A model's tuple of arrays or containers is one of parts, as in
    transformers.
    """
    if isinstance(value, list):
        return True
    if not isinstance(value, tuple) or hasattr(value, "_fields"):
        return False
    if is_collated:
        return True
    has_parts = any(isinstance(entry, (torch.Tensor, np.ndarray, list, tuple)) for entry in value)
    return not has_parts and any(isinstance(entry, (str, bytes, Mapping, int, float)) for entry in value)


def _has_entry_per_sample(piece: ListPiece, *, is_collated: bool) -> bool | None:
    """Returns whether a list has an entry for each sample, or parts; None if its content does not show it."""
    entries = piece.entries
    if piece.num_rows == 0:
        return None
    if len(entries) == 0:
        return False
    if any(isinstance(entry, (str, bytes)) for entry in entries):
        return True
    sizes = {len(leaf) for leaf in _leaves(entries) if _is_array(leaf) and leaf.ndim > 0}
    has_row_per_sample = sizes == {piece.num_rows}
    if len(entries) != piece.num_rows:
        is_of_mappings = all(isinstance(entry, Mapping) for entry in entries)
        return is_of_mappings and is_collated and not has_row_per_sample
    return None if has_row_per_sample else True


def _is_array(value: object) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray))


def _no_rows(leaf: Any) -> Any:
    return torch.atleast_1d(leaf)[:0] if isinstance(leaf, torch.Tensor) else leaf  # type: ignore[no-untyped-call]


def _on_cpu(leaf: Any) -> Any:
    return leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf
