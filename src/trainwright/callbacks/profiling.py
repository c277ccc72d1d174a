"""StepProfiler: traces chosen steps with torch's profiler, into a file that chrome://tracing and Perfetto show."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from trainwright.callbacks.base import TrainerCallback
from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerControl, TrainerState

logger = logging.getLogger(__name__)

FOLDER = "profile"


class StepProfiler(TrainerCallback):
    """Writes the trace of `num` steps from `first` (from 1; None: after `warm_up` steps) into a file below `folder`."""

    def __init__(self, folder: str, first: int | None, num: int, *, warm_up: int = 2) -> None:
        self._folder = Path(folder) / FOLDER
        self._asked = first
        self._num = num
        self._warm_up = warm_up
        self._first = 0
        self._profiler: Any = None  # torch.profiler.profile while it traces; its methods have no types

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._first = state.global_step + self._warm_up + 1 if self._asked is None else self._asked

    def on_step_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if state.global_step + 1 == self._first:
            from torch.profiler import profile

            self._profiler = profile(record_shapes=True, profile_memory=True)
            self._profiler.start()

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self._profiler is not None and state.global_step >= self._first + self._num - 1:
            self._write(args, state)

    def on_train_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._write(args, state)
        if state.global_step < self._first:
            ended = state.global_step, self._first
            logger.warning("Nothing was traced: the training ended after step %d, before step %d (profile).", *ended)

    def on_exception(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._write(args, state)

    def _write(self, args: Arguments, state: TrainerState) -> None:
        if self._profiler is None:
            return
        profiler = self._profiler
        self._profiler = None
        path = self._folder / f"steps-{self._first}-{state.global_step}-rank{args.process_index}.json.gz"
        try:
            profiler.stop()
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
            logger.info("Traced steps %d to %d: %s.", self._first, state.global_step, path)
        except (OSError, RuntimeError) as error:
            logger.warning("The trace of steps %d to %d is lost: %s.", self._first, state.global_step, error)
