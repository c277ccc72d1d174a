"""Lengths of samples, as far as the time for reading them goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trainwright._types import Item
from trainwright.data.columns import is_columnar
from trainwright.data.length_sampler import fetch_items
from trainwright.preflight.trainer_copy import AnyTrainer
from trainwright.run.input_pipeline import length_input

if TYPE_CHECKING:
    from numpy.typing import NDArray

LENGTHS_S = 0.2  # seconds in which lengths of samples are read


class LengthReader:
    """Reads the lengths of samples.

    Args:
        trainer: the trainer, for the entry of a sample that has its length.
        now: returns the time in seconds.
    """

    def __init__(self, trainer: AnyTrainer, now: Callable[[], float]) -> None:
        self._train_dataset = trainer.train_dataset
        self._length_of = length_input(trainer.processing_class) or "input_ids"
        self._now = now

    def read(self, dataset: Any, samples: Sequence[int]) -> tuple[NDArray[np.int64] | None, float]:
        """Returns lengths of the first of these samples, as time allows, and the time per sample in seconds."""
        lengths: list[int] = []
        begun = self._now()
        for start in range(0, len(samples), 64):
            found = self._count_lengths(fetch_items(dataset, samples[start : start + 64]))
            if found is None:
                return None, 0.0
            lengths += found
            if self._now() - begun > LENGTHS_S:
                break
        is_table = is_columnar(dataset) and dataset.format["type"] != "custom"  # which knows the lengths of its lists
        return np.asarray(lengths, dtype=np.int64), 0.0 if is_table else (self._now() - begun) / max(len(lengths), 1)

    def _count_lengths(self, items: Sequence[Item]) -> list[int] | None:
        found = [item.get(self._length_of) if isinstance(item, Mapping) else None for item in items]
        try:
            return [len(value) for value in found]  # type: ignore[arg-type]  # TypeError: it has no length
        except TypeError:
            return None

    def count_in_training(self, samples: Sequence[int]) -> list[int]:
        """Returns the lengths of samples of the training data."""
        lengths = self._count_lengths(fetch_items(self._train_dataset, samples))
        assert lengths is not None, "other samples have lengths"
        return lengths
