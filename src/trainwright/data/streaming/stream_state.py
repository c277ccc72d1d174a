"""State of a stream for checkpoints: origin of each batch, what of an epoch is trained, and the dataset's own state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

from trainwright._types import Item, SampleIds, is_instance_of
from trainwright.data.shards import ChunkPart
from trainwright.errors import DataError

# Any: datasets and their states are the user's own types.


@dataclass(frozen=True, slots=True)
class Split:
    """Part of a stream that this process reads: the whole of it, unless the user split it between the processes."""

    rank: int = 0
    num_parts: int = 1

    @property
    def is_whole(self) -> bool:
        """True if each process reads the whole stream."""
        return self.num_parts == 1

    @property
    def part(self) -> tuple[int, int] | None:
        """The part as checkpoints have it."""
        return None if self.is_whole else (self.rank, self.num_parts)


WHOLE = Split()


class StreamPlace(NamedTuple):
    """A position in the items that a process or one of its workers reads."""

    samples: int = 0  # items before it; where batches are formed by length, batches of all processes
    state: Any = None  # the dataset's own state at or before it, if it has one
    state_at: int = 0  # items before that state; 0 without one
    start: int = 0  # where batches are formed by length, items before the look-ahead that they are taken from
    taken: int = 0  # batches taken out of that look-ahead
    multiple: int = 0  # of so many batches the look-ahead was made

    @classmethod
    def from_values(cls, values: tuple[Any, ...]) -> StreamPlace:
        """The place in a checkpoint; the first ones had the samples and the state after them, and nothing else."""
        samples, state, *more = values
        return cls(samples, state, *(more or (0 if state is None else samples,)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOrigin:
    """Origin of a batch in a stream."""

    size: int  # what it adds to the position, over all processes; over this one as long as only it is known
    worker: int  # who made it; 0 where the batches are those of a stream read without workers
    num_workers: int  # that take turns: 1 where the batches are those of a stream read without workers
    place: StreamPlace | None  # behind the batch; None for one that only stands in
    part: ChunkPart | None  # of a chunk that is not full
    num_samples: int | None = None  # samples in the batches of all processes, where that is not the size
    samples: SampleIds = ()  # ids of this process's batch; empty where its samples have none


class BatchItems(list[Item]):
    """The items of one batch on their way to the collator."""

    origin: BatchOrigin


@dataclass(slots=True, kw_only=True)
class EpochProgress:
    """Trained part of an epoch, and the places from which reading resumes. Plain values: it lies in checkpoints."""

    samples: int = 0  # over all processes and workers; batches where they are formed by length
    num_workers: int = 1  # that take turns in making batches
    next_worker: int = 0  # whose turn it is
    of_worker: dict[int, StreamPlace] = field(default_factory=dict)  # worker -> where it stands
    batches: int = 0  # on each process
    # of a stream that was split between the processes: which one this is, and of how many
    part: tuple[int, int] | None = None

    def add(self, origin: BatchOrigin) -> None:
        """A batch is given to training."""
        self.samples += origin.size
        self.batches += 1
        if origin.place is None:
            return
        self.of_worker[origin.worker] = origin.place
        self.num_workers = origin.num_workers
        self.next_worker = (origin.worker + 1) % origin.num_workers

    @classmethod
    def passed_over(cls, samples: int, split: Split = WHOLE) -> EpochProgress:
        """The progress after some samples of all processes; nothing is known of workers or the dataset's own state."""
        place = StreamPlace(samples=samples // split.num_parts)
        return cls(samples=samples, of_worker={0: place} if samples else {}, part=split.part)

    def copy(self) -> EpochProgress:
        """A progress that stays as it is when this one moves on."""
        return replace(self, of_worker=dict(self.of_worker))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        places = {worker: tuple(place) for worker, place in self.of_worker.items()}
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"of_worker": places}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EpochProgress:
        """The progress in a checkpoint; older ones lack some of the values."""
        places = {int(worker): StreamPlace.from_values(place) for worker, place in values["of_worker"].items()}
        part = values.get("part")
        return cls(**{**values, "of_worker": places, "part": None if part is None else tuple(part)})


def progress_at(samples: int, saved: Mapping[str, Any] | None, split: Split) -> EpochProgress:
    """Returns the trained part of an epoch at a position: as this process saved it, or as far as the samples tell.

    Raises DataError where each process reads a part of its own, and where this one stood is not known.
    """
    progress = None if saved is None else EpochProgress.from_dict(saved)
    is_known = progress is not None and progress.part == split.part
    if progress is None or progress.samples != samples:  # begun again, or of another process's file
        progress = EpochProgress.passed_over(samples, split)
        is_known = split.is_whole
    if samples > 0 and not is_known:
        who = "this process" if split.is_whole else f"process {split.rank}"
        raise DataError(
            f"The checkpoint does not say where {who} stood in its part of the stream: each reads a part of its own, "
            "and its file (data_position_*.pth) is missing or another's. Resume from another checkpoint, or begin the "
            "epoch again with ignore_data_skip=True."
        )
    return progress


# -- what the stream is ------------------------------------------------------------------------------------------------


def is_hf_stream(dataset: object) -> bool:
    """Returns True if a dataset is a `datasets.IterableDataset`."""
    return is_instance_of(dataset, "datasets", "IterableDataset")


def is_mixture_stream(dataset: object) -> bool:
    """Returns True if a dataset is a mixture with streams, whose samples have numbers."""
    return is_instance_of(dataset, "trainwright.data.streaming.mixture_stream", "MixtureStream")


def is_shuffled_stream(dataset: object) -> bool:
    """Returns True if a `datasets` stream, or one of a mixture, is shuffled, so that each epoch has its own order."""
    if is_mixture_stream(dataset):
        return any(map(is_shuffled_stream, dataset.sources.values()))  # type: ignore[attr-defined]
    return is_hf_stream(dataset) and _has_buffer(getattr(dataset, "_ex_iterable", None))


def check_is_whole(dataset: object, num_processes: int, *, purpose: str) -> None:
    """Raises DataError where a stream, of which `purpose` needs the whole, was split between the processes before."""
    if is_mixture_stream(dataset):
        for source in dataset.sources.values():  # type: ignore[attr-defined]
            check_is_whole(source, num_processes, purpose=purpose)
    if num_processes > 1 and not _split_of(dataset).is_whole:
        raise DataError(
            f"The stream was split with split_dataset_by_node, and {purpose} needs the whole of it: it shares the data "
            f"between the {num_processes} processes itself. Pass the stream as it was before."
        )


def split_for(dataset: object, *, rank: int, num_processes: int) -> Split:
    """Returns the part of a stream that this process reads in training; DataError where it was split between others."""
    if is_mixture_stream(dataset):
        check_is_whole(dataset, num_processes, purpose="a mixture")
    split = _split_of(dataset) if num_processes > 1 else WHOLE
    if split.is_whole or split == Split(rank, num_processes):
        return split
    raise DataError(
        f"The stream was split with split_dataset_by_node(rank={split.rank}, world_size={split.num_parts}), and this "
        f"is process {rank} of {num_processes}: parts would be trained twice or not at all. Split it with the rank and "
        "world size of the process (args.process_index, args.world_size), or pass the whole stream."
    )


def _split_of(dataset: object) -> Split:
    config = getattr(dataset, "_distributed", None) if is_hf_stream(dataset) else None
    return WHOLE if config is None else Split(config.rank, config.world_size)


def keeps_state(dataset: object) -> bool:
    """Returns True if a dataset can tell where it stands and go on from there, with nothing lost.

    A `datasets` stream with a shuffle buffer loses what is in the buffer, so it is read again.
    """
    tells = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
    return tells and not is_shuffled_stream(dataset)


def _has_buffer(source: object) -> bool:
    if source is None:
        return False
    inner = [getattr(source, "ex_iterable", None), *(getattr(source, "ex_iterables", None) or ())]
    return hasattr(source, "buffer_size") or any(map(_has_buffer, inner))
