"""Preemption: requeues a Slurm job that a signal ended, and writes a checkpoint that other code requests.

`train()` itself saves on SIGTERM, SIGINT and SIGUSR1. `CheckpointManager` and `JITCheckpointCallback` serve code that
requests a checkpoint itself, or waits for a signal outside of training.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, TypeAlias

from trainwright.callbacks.base import TrainerCallback
from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.support.deadline import run_command

logger = logging.getLogger(__name__)
SavingTrainer: TypeAlias = Any  # a trainer of ours or of transformers, or None

# Exit codes; SIGINT is a person who wants it to end.
BY_THE_CLUSTER = tuple(128 + getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


LIMIT_S = 60.0


def _run(command: list[str]) -> None:
    run_command(command, seconds=LIMIT_S).check_returncode()


class SlurmRequeue(TrainerCallback):
    """Calls `scontrol requeue` for this job, once, from the first process of all."""

    def __init__(self, job: str | None = None, *, run: Callable[[list[str]], object] = _run) -> None:
        self.job = job  # number of the job; None for that of the environment, SLURM_JOB_ID
        self._run = run  # runs a command (list of words); raises OSError or SubprocessError if it fails

    def on_exception(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        error = kwargs.get("exception")
        if not isinstance(error, SystemExit) or error.code not in BY_THE_CLUSTER or not state.is_world_process_zero:
            return
        job = self.job or os.environ.get("SLURM_JOB_ID")
        if not job:
            logger.warning(
                "slurm_requeue=True, and SLURM_JOB_ID is not set: this is not a job of Slurm. Nothing is queued"
            )
            return
        try:
            self._run(["scontrol", "requeue", job])
        except (OSError, subprocess.SubprocessError) as failure:
            words = (getattr(failure, "stderr", None) or str(failure)).strip()
            logger.warning("Job %s could not be put back into the queue: %s. Start it again by hand.", job, words)
        else:
            logger.warning("Job %s is back in the queue (scontrol requeue).", job)


class CheckpointManager:
    """Notes the request for a checkpoint and writes it.

    Args:
        trainer: writes the checkpoint, by its `_save_checkpoint`.
        kill_wait: seconds from the signal to the request; 0 asks at once.

    Attributes:
        is_checkpoint_requested: whether a request is open.
    """

    def __init__(self, trainer: SavingTrainer, kill_wait: float = 3) -> None:
        self.trainer = trainer
        self.kill_wait = kill_wait
        self.is_checkpoint_requested = self._is_set_up = False
        self._previous: Callable[[int, FrameType | None], Any] | int | None = None  # as `signal` returns it

    def setup_signal_handler(self) -> None:
        """Makes SIGTERM a request for a checkpoint, until `restore_signal_handler`."""
        self._previous = signal.signal(signal.SIGTERM, self._on_signal)
        self._is_set_up = True

    def restore_signal_handler(self) -> None:
        """Restores the handler of SIGTERM from before `setup_signal_handler`."""
        if self._is_set_up:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)
            self._is_set_up = False

    def _on_signal(self, number: int, frame: object) -> None:
        if not self.kill_wait:
            self._request()
            return
        timer = threading.Timer(self.kill_wait, self._request)
        timer.daemon = True
        timer.start()

    def _request(self) -> None:
        self.is_checkpoint_requested = True

    def execute_jit_checkpoint(self) -> None:
        """Writes the checkpoint of the step that the trainer has done."""
        self.is_checkpoint_requested = False
        self.trainer._save_checkpoint(self.trainer.model, trial=None)


class JITCheckpointCallback(TrainerCallback, original="transformers.trainer_jit_checkpoint"):
    """Saves the last finished step and stops after a checkpoint was requested: at the next of its events.

    A trainer with `enable_jit_checkpoint` adds one.
    """

    def __init__(self) -> None:
        self.trainer: SavingTrainer = None
        self.jit_manager: CheckpointManager | None = None

    def set_trainer(self, trainer: SavingTrainer) -> None:
        """Connects the callback to a trainer; `enable_jit_checkpoint` of its arguments turns it on."""
        self.trainer = trainer
        if trainer.args.enable_jit_checkpoint:
            self.jit_manager = CheckpointManager(trainer)  # signals within a training are the trainer's own business

    def on_step_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self.jit_manager is not None and self.jit_manager.is_checkpoint_requested:
            control.should_save = False  # it is saved here
            control.should_training_stop = True
            self.jit_manager.execute_jit_checkpoint()

    on_pre_optimizer_step = on_step_end = on_epoch_end = on_step_begin

    def on_train_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self.jit_manager is not None:
            self.jit_manager.restore_signal_handler()
