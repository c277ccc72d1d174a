"""SlurmRequeue: requeues the Slurm job after a signal ended it and its checkpoint is on disk."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable

from trainwright.callbacks.base import TrainerCallback
from trainwright.config.protocol import Arguments
from trainwright.state.control import TrainerControl
from trainwright.state.trainer_state import TrainerState

logger = logging.getLogger(__name__)

BY_THE_CLUSTER = tuple(
    128 + getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)
)  # exit codes; SIGINT is a person who wants it to end
TIMEOUT_S = 60


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)


class SlurmRequeue(TrainerCallback):
    """Calls `scontrol requeue` for this job, once, from the first process of all.

    Args:
        job: number of the job; None for that of the environment, SLURM_JOB_ID.
        run: runs a command (list of words); raises OSError or SubprocessError if it fails.
    """

    def __init__(self, job: str | None = None, *, run: Callable[[list[str]], None] = _run) -> None:
        self.job = job
        self._run = run

    def on_exception(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        error = kwargs.get("exception")
        if not isinstance(error, SystemExit) or error.code not in BY_THE_CLUSTER or not state.is_world_process_zero:
            return
        job = self.job or os.environ.get("SLURM_JOB_ID")
        if not job:
            logger.warning(
                "slurm_requeue=True, but SLURM_JOB_ID is not set: this is no job of Slurm. Nothing is queued."
            )
            return
        try:
            self._run(["scontrol", "requeue", job])
        except (OSError, subprocess.SubprocessError) as failure:
            words = (getattr(failure, "stderr", None) or str(failure)).strip()
            logger.warning("Job %s could not be put back into the queue: %s. Start it again by hand.", job, words)
        else:
            logger.warning("Job %s is back in the queue (scontrol requeue).", job)
