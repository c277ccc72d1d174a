"""Cursor: where in the data a run stands, in samples, and what is needed to stand there again."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in the training data.

    Attributes:
        epoch: the epoch, from 0.
        samples: samples of that epoch whose optimizer step is done, over all processes.
        seed: base of the shuffled order; None where the order comes from elsewhere.
        unit: what counts as a sample where that is a batch formed by length: the settings it was formed by.
        num_samples: samples in an epoch, where that is known.
        batches: on each process, where samples do not tell: its size over all processes is `chunk` if it is full.
        shift: optimizer steps done beyond those that the position stands for (see `resume_plan.py`).
    """

    epoch: int
    samples: int
    seed: int | None = None
    num_samples: int | None = None
    shift: int = 0
    unit: str | None = None
    batches: int | None = None
    chunk: int | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Cursor:
        return cls(
            epoch=int(values["epoch"]),
            samples=int(values["samples"]),
            seed=values.get("seed"),
            num_samples=values.get("num_samples"),
            shift=int(values.get("shift", 0)),
            unit=values.get("unit"),
            batches=values.get("batches"),
            chunk=values.get("chunk"),
        )


@dataclass(slots=True, kw_only=True)
class LoaderRandomness:
    """Random states that belong to a position; they lie beside the process's own in the checkpoint.

    Attributes:
        epoch_start: python's, numpy's and torch's states from before anything of this epoch was drawn, its order first.
        before_ahead: the same from before the batch that was fetched ahead.
        stream: what of the epoch is trained of a stream, with its own state, as `EpochProgress` has it.
        dataloader: the state that a user's dataloader tells of itself.
    """

    epoch_start: dict[str, Any] | None = None
    before_ahead: dict[str, Any] | None = None
    stream: dict[str, Any] | None = None
    dataloader: dict[str, Any] | None = None
