"""What is said about the share of time that training waits for data."""

from __future__ import annotations

import logging

from trainwright.state.waiting import DataWait

logger = logging.getLogger(__name__)
MUCH = 0.2
ENOUGH_S = 1.0  # less is start-up: the first batch, workers that come into being


def tell_share(wait: DataWait, *, num_workers: int) -> float:
    """Logs the share since the last look, and once the advice that goes with a large one; returns it."""
    waited, total, num = wait.look()
    share = waited / total if total > 0 else 0.0
    logger.info(
        "data_wait %.1f %% of the time since the last log, %.1f ms a step", share * 100, waited / max(num, 1) * 1e3
    )
    if share > MUCH and total >= ENOUGH_S and num > 1 and not wait.is_said:
        wait.is_said = True
        logger.warning(
            "Training waited for data %.0f %% of the time since the last log (%.1f s of %.1f s). Raise "
            "dataloader_num_workers, which is %d, or make the samples cheaper to read.",
            share * 100, waited, total, num_workers,
        )  # fmt: skip
    return share
