"""Where in a stream a run stands: what a batch tells of its origin, and what of an epoch is trained. Reads nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from trainwright.data.sharding import ChunkPart
from trainwright.data.streaming.dataset_kinds import Split
from trainwright.errors import DataError


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlace:
    """A position in the items that a process or one of its workers reads.

    Attributes:
        samples: items before it; where batches are formed by length, batches of all processes.
        state: the dataset's own state at or before it, if it has one.
        state_at: items before that state; 0 without one.
        start: where batches are formed by length, items before the look-ahead that they are taken from.
        taken: batches taken out of that look-ahead.
        multiple: of so many batches the look-ahead was made.
    """

    samples: int = 0
    state: Any = None
    state_at: int = 0
    start: int = 0
    taken: int = 0
    multiple: int = 0

    @classmethod
    def from_values(cls, values: tuple[Any, ...]) -> StreamPlace:
        """Of a checkpoint; the first ones had the samples and a state right behind them, and nothing else."""
        samples, state, *more = values
        state_at, start, taken, multiple = more or (0 if state is None else samples, 0, 0, 0)
        return cls(samples=samples, state=state, state_at=state_at, start=start, taken=taken, multiple=multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchOrigin:
    """Where in a stream a batch comes from.

    Attributes:
        size: what it adds to the position, over all processes; over this one as long as only it is known.
        worker: who made it; 0 where the batches are those of a stream read without workers.
        num_workers: that take turns: 1 where the batches are those of a stream read without workers.
        place: behind the batch; None for one that only stands in.
        part: of a chunk that is not full.
        num_samples: samples in the batches of all processes, where that is not the size.
    """

    size: int
    worker: int
    num_workers: int
    place: StreamPlace | None
    part: ChunkPart | None
    num_samples: int | None = None


class BatchItems(list[Any]):
    """The items of one batch on their way to the collator."""

    origin: BatchOrigin


@dataclass(slots=True, kw_only=True)
class EpochProgress:
    """What of an epoch is trained, and what is needed to go on behind it. Plain values: it lies in checkpoints.

    Attributes:
        samples: over all processes and workers; batches where they are formed by length.
        num_workers: that take turns in making batches.
        next_worker: whose turn it is.
        of_worker: worker -> where it stands.
        batches: on each process.
        part: of a stream that was split between the processes: which one this is, and of how many.
    """

    samples: int = 0
    num_workers: int = 1
    next_worker: int = 0
    of_worker: dict[int, StreamPlace] = field(default_factory=dict)
    batches: int = 0
    part: tuple[int, int] | None = None

    def add(self, origin: BatchOrigin) -> None:
        self.samples += origin.size
        self.batches += 1
        if origin.place is None:
            return
        self.of_worker[origin.worker] = origin.place
        self.num_workers = origin.num_workers
        self.next_worker = (origin.worker + 1) % origin.num_workers

    @classmethod
    def passed_over(cls, samples: int, split: Split | None = None) -> EpochProgress:
        """So many samples of a stream that the workers do not share, with nothing known of its state."""
        own = samples if split is None else samples // split.num_parts
        return cls(samples=samples, of_worker={0: StreamPlace(samples=own)} if samples else {}, part=part_of(split))

    def copy(self) -> EpochProgress:
        return replace(self, of_worker=dict(self.of_worker))

    def to_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "num_workers": self.num_workers,
            "next_worker": self.next_worker,
            "of_worker": {worker: _values(place) for worker, place in self.of_worker.items()},
            "batches": self.batches,
            "part": self.part,
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> EpochProgress:
        places = {int(worker): StreamPlace.from_values(place) for worker, place in values["of_worker"].items()}
        part = values.get("part")
        return cls(**{**values, "of_worker": places, "part": None if part is None else tuple(part)})


def progress_at(samples: int, saved: dict[str, Any] | None, split: Split | None) -> EpochProgress:
    """What of an epoch is trained at a position: as this process saved it, or as far as the samples tell.

    Raises:
        DataError: each process reads a part of its own, and where this one stood is not known.
    """
    progress = None if saved is None else EpochProgress.from_dict(saved)
    if progress is None or progress.samples != samples:  # begun again, or of another process's file
        if samples > 0 and split is not None:
            _raise_unknown(split)
        return EpochProgress.passed_over(samples, split)
    if samples > 0 and progress.part != part_of(split):
        _raise_unknown(split)
    return progress


def part_of(split: Split | None) -> tuple[int, int] | None:
    return None if split is None else (split.rank, split.num_parts)


def _raise_unknown(split: Split | None) -> NoReturn:
    who = "this process" if split is None else f"process {split.rank}"
    raise DataError(
        f"The checkpoint does not say where {who} stood in its part of the stream: each reads a part of its own, and "
        "its file of random states (rng_state_*.pth) is missing or another's. Resume from another checkpoint, or begin "
        "the epoch again with ignore_data_skip=True."
    )


def _values(place: StreamPlace) -> tuple[Any, ...]:
    return place.samples, place.state, place.state_at, place.start, place.taken, place.multiple
