"""Time of a run by phase for the console: the largest shares and their cures, and advice about waiting for data."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from trainwright.state import clock

logger = logging.getLogger(__name__)

MUCH_WAITING = 0.2  # of the time since the last log
ENOUGH_S = 1.0  # less is start-up: the first batch, workers that come into being

# Phase -> share of the wall time from which on advice is worth giving, and the advice.
HINTS: dict[str, tuple[float, str]] = {
    clock.DATA: (0.1, "load in other processes: dataloader_num_workers"),
    clock.HOST_TO_DEVICE: (0.1, "pin memory (dataloader_pin_memory) and copy without waiting (non_blocking)"),
    clock.LOGGING: (0.05, "log less often: logging_steps"),
    clock.EVALUATION: (0.3, "evaluate less often (eval_steps), or with a larger per_device_eval_batch_size"),
    clock.SAVING: (0.1, "save less often: save_steps"),
    clock.CALLBACKS: (0.05, "do less in each event of it"),
}


def summary(seconds: Mapping[str, float]) -> dict[str, float]:
    """Seconds by phase, largest first, rounded to what matters."""
    return {phase: round(value, 4) for phase, value in sorted(seconds.items(), key=lambda item: -item[1]) if value > 0}


def line(seconds: Mapping[str, float]) -> str:
    """One line: the shares of the wall time above a hundredth, and what to change about the large ones."""
    total = sum(seconds.values())
    if total <= 0:
        return "time      nothing was measured"
    shares = {phase: value / total for phase, value in sorted(seconds.items(), key=lambda item: -item[1])}
    parts = ", ".join(f"{readable(phase)} {share:.0%}" for phase, share in shares.items() if share >= 0.01)
    said = [f"{readable(phase)}: {hint}" for phase, share in shares.items() if (hint := hint_for(phase, share))]
    return f"time      {total:.1f} s: {parts}" + "".join(f"\n          {one}" for one in said)


def hint_for(phase: str, share: float) -> str:
    """Returns the advice for a phase that takes more than its share; else empty."""
    above, hint = HINTS.get(phase.partition(".")[0], (1.0, ""))
    return hint if share > above else ""


def readable(phase: str) -> str:
    """`callbacks.MyCallback` -> `MyCallback`; `host_to_device` -> `host to device`."""
    kind, _, name = phase.partition(".")
    return name or kind.replace("_", " ")


class DataWait:
    """The share of a clock's time that went into waiting for data, from look to look."""

    def __init__(self, measured: clock.Clock) -> None:
        self._clock = measured
        self._waited, self._total = self._read()
        self._is_said = False  # advice is given once

    def tell(self, *, num_steps: int, num_workers: int) -> float:
        """Logs the share since the last look, and once the advice that goes with a large one; returns it."""
        before, (self._waited, self._total) = (self._waited, self._total), self._read()
        waited, total = self._waited - before[0], self._total - before[1]
        share = waited / total if total > 0 else 0.0
        each_ms = waited / max(num_steps, 1) * 1e3
        logger.info("data_wait %.1f %% of the time since the last log, %.1f ms a step", share * 100, each_ms)
        if share > MUCH_WAITING and total >= ENOUGH_S and num_steps > 1 and not self._is_said:
            self._is_said = True
            logger.warning(
                "Training waited for data %.0f %% of the time since the last log (%.1f s of %.1f s). Raise "
                "dataloader_num_workers, which is %d, or make the samples cheaper to read.",
                share * 100, waited, total, num_workers,
            )  # fmt: skip
        return share

    def _read(self) -> tuple[float, float]:
        seconds = self._clock.read()
        return seconds.get(clock.DATA, 0.0), sum(seconds.values())
