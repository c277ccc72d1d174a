"""State of a stream for checkpoints.

The origin of each batch, the trained part of an epoch, and the dataset's state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from trainwright._types import Item, SampleIds, is_instance_of
from trainwright.data.shards import ChunkPart
from trainwright.data.sources import SourceStream
from trainwright.errors import DataError

# Any: datasets and their states are the user's own types.


@dataclass(frozen=True, slots=True)
class StreamSplit:
    """Part of a stream that this process reads: all of it, unless the user split it between the processes."""

    rank: int = 0
    num_parts: int = 1

    @property
    def is_whole(self) -> bool:
        """True if each process reads the whole stream."""
        return self.num_parts == 1

    @property
    def part(self) -> tuple[int, int] | None:
        """The part in the form stored in checkpoints."""
        return None if self.is_whole else (self.rank, self.num_parts)


WHOLE = StreamSplit()


class StreamPlace(NamedTuple):
    """A position in the items read by a process or by one of its workers."""

    samples: int = 0  # items before it; if batches are formed by length, batches of all processes
    state: Any = None  # the dataset's own state at or before it, if it has one
    state_at: int = 0  # items before that state; 0 without one
    start: int = 0  # items before the look-ahead that batches are taken from, if they are formed by length
    taken: int = 0  # batches taken from that look-ahead
    multiple: int = 0  # the number of batches in the look-ahead is a multiple of this

    @classmethod
    def from_values(cls, values: tuple[Any, ...]) -> StreamPlace:
        """Returns the position in a checkpoint; the oldest ones only have the samples and the state after them."""
        samples, state, *more = values
        return cls(samples, state, *(more or (0 if state is None else samples,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOrigin:
    """Origin of a batch in a stream."""

    size: int  # advance of the position over all processes; of this process alone until the others are known
    worker: int  # the worker that made it; 0 if the stream is read without workers
    num_workers: int  # number of workers that take turns; 1 if the stream is read without workers
    place: StreamPlace | None  # position after the batch; None for a filler batch
    part: ChunkPart | None  # part of a chunk that is not full
    num_samples: int | None = None  # samples in the batches of all processes, if that differs from the size
    samples: SampleIds = ()  # ids of this process's batch; empty if its samples have none


class BatchItems(list[Item]):
    """The items of one batch on their way to the collator."""

    origin: BatchOrigin


@dataclass(slots=True, kw_only=True)
class EpochProgress:
    """Trained part of an epoch, and the positions at which reading resumes. Plain values, stored in checkpoints."""

    samples: int = 0  # over all processes and workers; counts batches if they are formed by length
    num_workers: int = 1  # number of workers that take turns in making batches
    next_worker: int = 0  # the worker whose turn it is
    of_worker: dict[int, StreamPlace] = field(default_factory=dict)  # worker -> its position
    batches: int = 0  # on each process
    # this process's part of a stream split between processes, and the number of parts
    part: tuple[int, int] | None = None

    def add(self, origin: BatchOrigin) -> None:
        """Records that a batch was handed to training."""
        self.samples += origin.size
        self.batches += 1
        if origin.place is None:
            return
        self.of_worker[origin.worker] = origin.place
        self.num_workers = origin.num_workers
        self.next_worker = (origin.worker + 1) % origin.num_workers

    @classmethod
    def passed_over(cls, samples: int, split: StreamSplit = WHOLE) -> EpochProgress:
        """Returns the progress after some samples of all processes, without knowledge of workers or dataset states."""
        place = StreamPlace(samples=samples // split.num_parts)
        return cls(samples=samples, of_worker={0: place} if samples else {}, part=split.part)

    def copy(self) -> EpochProgress:
        """Returns a copy, unaffected when this one advances."""
        return replace(self, of_worker=dict(self.of_worker))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for a checkpoint."""
        places = {worker: tuple(place) for worker, place in self.of_worker.items()}
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"of_worker": places}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpochProgress:
        """Returns the progress stored in a checkpoint; older ones lack some of the values."""
        places = {int(worker): StreamPlace.from_values(place) for worker, place in values["of_worker"].items()}
        part = values.get("part")
        return cls(**{**values, "of_worker": places, "part": None if part is None else tuple(part)})


def progress_at(samples: int, saved: Mapping[str, Any] | None, split: StreamSplit) -> EpochProgress:
    """Returns the trained part of an epoch at a position: as saved by this process, or derived from the samples.

    Raises DataError if each process reads its own part and this one's position is unknown.
    """
    progress = None if saved is None else EpochProgress.from_dict(saved)
    is_known = progress is not None and progress.part == split.part
    if progress is None or progress.samples != samples:  # the epoch was restarted, or the file is another process's
        progress = EpochProgress.passed_over(samples, split)
        is_known = split.is_whole
    if samples > 0 and not is_known:
        who = "this process" if split.is_whole else f"process {split.rank}"
        raise DataError(
            f"The checkpoint does not record the position of {who} in its part of the stream: each process reads its "
            "own part, and its file (data_position_*.pth) is missing or another's. Resume from another checkpoint, or "
            "restart the epoch with ignore_data_skip=True."
        )
    return progress


# -- kinds of streams ----------------------------------------------------------------------------------------------


def is_hf_stream(dataset: object) -> bool:
    """Returns True if a dataset is a `datasets.IterableDataset`."""
    return is_instance_of(dataset, "datasets", "IterableDataset")


def is_shuffled_stream(dataset: object) -> bool:
    """Returns True if a `datasets` stream, alone or as a source, is shuffled, so that each epoch has its own order."""
    if isinstance(dataset, SourceStream):
        return any(map(is_shuffled_stream, dataset.sources.values()))
    return is_hf_stream(dataset) and _has_buffer(getattr(dataset, "_ex_iterable", None))


def check_is_whole(dataset: object, num_processes: int, *, purpose: str) -> None:
    """Raises DataError if a stream that `purpose` needs as a whole was already split between the processes."""
    if isinstance(dataset, SourceStream):
        for source in dataset.sources.values():
            check_is_whole(source, num_processes, purpose=purpose)
    if num_processes > 1 and not _read_split(dataset).is_whole:
        raise DataError(
            f"The stream was split with split_dataset_by_node, but {purpose} needs the whole stream: it divides the "
            f"data between the {num_processes} processes itself. Pass the stream before the split."
        )


def split_for(dataset: object, *, rank: int, num_processes: int) -> StreamSplit:
    """Returns the part of a stream that this process trains on; DataError if it was split for other processes."""
    if isinstance(dataset, SourceStream):
        check_is_whole(dataset, num_processes, purpose=dataset.description)
    split = _read_split(dataset) if num_processes > 1 else WHOLE
    if split.is_whole or split == StreamSplit(rank, num_processes):
        return split
    raise DataError(
        f"The stream was split with split_dataset_by_node(rank={split.rank}, world_size={split.num_parts}), but this "
        f"is process {rank} of {num_processes}: parts would be trained twice or not at all. Split it with the rank and "
        "world size of the process (args.process_index, args.world_size), or pass the whole stream."
    )


def _read_split(dataset: object) -> StreamSplit:
    config = getattr(dataset, "_distributed", None) if is_hf_stream(dataset) else None
    return WHOLE if config is None else StreamSplit(config.rank, config.world_size)


def keeps_state(dataset: object) -> bool:
    """Returns True if a dataset can save its position and continue from it without losing items.

    A `datasets` stream loses the contents of its shuffle buffer, so it is read again.
    """
    tells = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    return tells and not is_shuffled_stream(dataset)


def _has_buffer(source: object) -> bool:
    if source is None:
        return False
    inner = [getattr(source, "ex_iterable", None), *(getattr(source, "ex_iterables", None) or ())]
    return hasattr(source, "buffer_size") or any(map(_has_buffer, inner))
