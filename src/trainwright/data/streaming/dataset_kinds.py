"""What kind of stream a dataset is, as far as the ways to share and resume it differ."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from trainwright._types import is_instance_of
from trainwright.errors import DataError


def is_hf_stream(dataset: Any) -> bool:
    return is_instance_of(dataset, "datasets", "IterableDataset")


def check_is_whole(dataset: Any, num_processes: int, *, purpose: str) -> None:
    """Where every process reads the same items and takes its part of them, a part must not be one already.

    Raises:
        DataError: the stream was split between the processes before.
    """
    if num_processes > 1 and _split_of(dataset) is not None:
        raise DataError(
            f"The stream was split with split_dataset_by_node, and {purpose} needs the whole of it: it shares the data "
            f"between the {num_processes} processes itself. Pass the stream as it was before."
        )


@dataclass(frozen=True, slots=True)
class Split:
    """A stream of which each process has a part of its own."""

    rank: int
    num_parts: int


def split_for(dataset: Any, *, rank: int, num_processes: int) -> Split | None:
    """How a stream was split between the processes that train; None where each reads all of it.

    Raises:
        DataError: it was split between others.
    """
    split = _split_of(dataset) if num_processes > 1 else None
    if split is None or split == Split(rank, num_processes):
        return split
    raise DataError(
        f"The stream was split with split_dataset_by_node(rank={split.rank}, world_size={split.num_parts}), and this "
        f"is process {rank} of {num_processes}: parts would be trained twice or not at all. Split it with the rank and "
        "world size of the process (args.process_index, args.world_size), or pass the whole stream."
    )


def _split_of(dataset: Any) -> Split | None:
    config = getattr(dataset, "_distributed", None) if is_hf_stream(dataset) else None
    return None if config is None else Split(config.rank, config.world_size)


def keeps_state(dataset: Any) -> bool:
    """Whether a dataset can tell where it stands and go on from there, with nothing lost.

    A `datasets` stream with a shuffle buffer loses what is in the buffer, so it is read again.
    """
    if not (callable(getattr(dataset, "state_dict", None)) and callable(getattr(dataset, "load_state_dict", None))):
        return False
    return not (is_hf_stream(dataset) and _has_buffer(getattr(dataset, "_ex_iterable", None)))


def own_state(dataset: Any) -> Any:
    """Where a dataset that keeps state stands, as a value that does not move on with it."""
    return copy.deepcopy(dataset.state_dict())


def _has_buffer(source: Any) -> bool:
    if source is None:
        return False
    inner = [getattr(source, "ex_iterable", None), *(getattr(source, "ex_iterables", None) or ())]
    return hasattr(source, "buffer_size") or any(map(_has_buffer, inner))
