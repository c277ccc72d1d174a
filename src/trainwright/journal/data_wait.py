"""Advice about the share of time that training waits for data."""

from __future__ import annotations

import logging

from trainwright.state.clock import DATA, Clock

logger = logging.getLogger(__name__)
MUCH = 0.2
ENOUGH_S = 1.0  # less is start-up: the first batch, workers that come into being


class DataWait:
    """The share of a clock's time that went into waiting for data, from look to look."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waited, self._total = self._read()
        self._is_said = False  # advice is given once

    def tell(self, *, num_steps: int, num_workers: int) -> float:
        """Logs the share since the last look, and once the advice that goes with a large one; returns it."""
        before, (self._waited, self._total) = (self._waited, self._total), self._read()
        waited, total = self._waited - before[0], self._total - before[1]
        share = waited / total if total > 0 else 0.0
        each_ms = waited / max(num_steps, 1) * 1e3
        logger.info("data_wait %.1f %% of the time since the last log, %.1f ms a step", share * 100, each_ms)
        if share > MUCH and total >= ENOUGH_S and num_steps > 1 and not self._is_said:
            self._is_said = True
            logger.warning(
                "Training waited for data %.0f %% of the time since the last log (%.1f s of %.1f s). Raise "
                "dataloader_num_workers, which is %d, or make the samples cheaper to read.",
                share * 100, waited, total, num_workers,
            )  # fmt: skip
        return share

    def _read(self) -> tuple[float, float]:
        seconds = self._clock.read()
        return seconds.get(DATA, 0.0), sum(seconds.values())
