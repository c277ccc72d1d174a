"""Where in a stream a run stands: what a batch tells of its origin, and what of an epoch is trained. Reads nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trainwright.data.share import Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
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
    def from_values(cls, values: tuple[Any, ...]) -> Place:
        """Of a checkpoint; the first ones had the samples and a state right behind them, and nothing else."""
        samples, state, *more = values
        state_at, start, taken, multiple = more or (0 if state is None else samples, 0, 0, 0)
        return cls(samples=samples, state=state, state_at=state_at, start=start, taken=taken, multiple=multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where in a stream a batch comes from.

    Attributes:
        size: what it adds to the position, over all processes.
        worker: who made it; 0 where the batches are those of a stream read without workers.
        num_workers: that take turns: 1 where the batches are those of a stream read without workers.
        place: behind the batch.
        part: of a chunk that is not full.
        num_samples: samples in the batches of all processes, where that is not the size.
    """

    size: int
    worker: int
    num_workers: int
    place: Place
    part: Part | None
    num_samples: int | None = None


class Rows(list[Any]):
    """The items of one batch on their way to the collator."""

    origin: Origin


@dataclass(slots=True, kw_only=True)
class Progress:
    """What of an epoch is trained, and what is needed to go on behind it. Plain values: it lies in checkpoints.

    Attributes:
        samples: over all processes and workers; batches where they are formed by length.
        num_workers: that take turns in making batches.
        next_worker: whose turn it is.
        of_worker: worker -> where it stands.
    """

    samples: int = 0
    num_workers: int = 1
    next_worker: int = 0
    of_worker: dict[int, Place] = field(default_factory=dict)

    def add(self, origin: Origin) -> None:
        self.of_worker[origin.worker] = origin.place
        self.samples += origin.size
        self.num_workers = origin.num_workers
        self.next_worker = (origin.worker + 1) % origin.num_workers

    @classmethod
    def passed_over(cls, samples: int) -> Progress:
        """So many samples of a stream that the workers do not share, with nothing known of its state."""
        return cls(samples=samples, of_worker={0: Place(samples=samples)} if samples else {})

    def copy(self) -> Progress:
        return Progress(
            samples=self.samples,
            num_workers=self.num_workers,
            next_worker=self.next_worker,
            of_worker=dict(self.of_worker),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "samples": self.samples,
            "num_workers": self.num_workers,
            "next_worker": self.next_worker,
            "of_worker": {worker: _values(place) for worker, place in self.of_worker.items()},
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Progress:
        places = {int(worker): Place.from_values(place) for worker, place in values["of_worker"].items()}
        return cls(**{**values, "of_worker": places})


def _values(place: Place) -> tuple[Any, ...]:
    return place.samples, place.state, place.state_at, place.start, place.taken, place.multiple
