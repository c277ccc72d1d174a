"""Progress of a run on the console: bars on a terminal, plain lines elsewhere; and the callbacks of every trainer."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from tqdm.auto import tqdm
from tqdm.std import EMA  # type: ignore[attr-defined]

from trainwright._types import has_length, printable
from trainwright.callbacks.base import NO_LOGS, Logs, TrainerCallback
from trainwright.callbacks.flow import DefaultFlowCallback
from trainwright.callbacks.log_table import LogTable
from trainwright.config.plans import OPEN_END
from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.support.units import count_text

QUIET = {"error", "critical"}  # levels of a console that shows only errors
WEIGHT = 0.05  # weight of the newest step in the running mean


class Eta:
    """Measures the time of steps and of the pauses between them, by a monotonic clock in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = EMA(WEIGHT)
        self._pauses = defaultdict[str, EMA](EMA)
        self._last: float | None = None
        self._next_pause: str | None = None

    def step_done(self, *, pause: str | None = None) -> None:
        """Marks the end of a step, and the kind of pause before the next one ("evaluation", "save"; None: none)."""
        now = self._clock()
        if self._last is not None:
            took = now - self._last
            if self._next_pause is None:
                self._step(took)
            else:
                self._pauses[self._next_pause](max(0.0, took - self._step()))
        self._last = now
        self._next_pause = pause

    @property
    def step_s(self) -> float | None:
        """Seconds of a step without pauses; None before two are done."""
        seconds: float = self._step()
        return seconds or None

    def left_s(self, num_steps: int, num_pauses: Mapping[str, int]) -> float | None:
        """Estimates the seconds left, with pauses by kind as measured so far; None before two steps are done."""
        if self.step_s is None:
            return None
        pauses: float = sum(num * self._pauses[kind]() for kind, num in num_pauses.items())
        return num_steps * self.step_s + pauses


Bar: TypeAlias = "tqdm[Any]"  # updated by hand, without an iterable

MAX_STR_LEN = 100
FORMAT = "{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{left}, {rate_fmt}{postfix}]"
WITHOUT_END = "{n_fmt} steps [{elapsed}, {rate_fmt}{postfix}]"
TIMES = ("_runtime", "_per_second")
SHOWN = {"loss": "loss", "learning_rate": "lr", "train_tokens_per_second": "tokens/s"}


def readable(logs: Mapping[str, object], max_str_len: int = MAX_STR_LEN) -> dict[str, object]:
    """Returns logs for the console: floats with four digits, long texts cut, no run times (the journal has them)."""
    shown = {name: value for name, value in logs.items() if name != "total_flos" and not name.endswith(TIMES)}
    for name, value in shown.items():
        if isinstance(value, float):
            shown[name] = f"{value:.4g}"
        elif isinstance(value, str) and len(value) > max_str_len:
            shown[name] = f"{value[:max_str_len]}... ({len(value)} characters; raise max_str_len to see more)"
    return shown


class ProgressCallback(TrainerCallback, original="transformers.trainer_callback"):
    """Shows a bar for training, and below it a bar for evaluation; without a terminal, one plain line per log.

    Args:
        max_str_len: longest text value shown in full, in characters.
    """

    def __init__(self, max_str_len: int = MAX_STR_LEN) -> None:
        self.training_bar: Bar | None = None
        self.prediction_bar: Bar | None = None
        self.max_str_len = max_str_len
        self.current_step = 0
        self._pace = Eta()
        self._table = log_table(by_evaluation=False)

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self.current_step = state.global_step
        self._pace = Eta()
        self._table = log_table(by_evaluation=args.eval_strategy != "no")
        if state.is_world_process_zero and _can_redraw() and not is_quiet(args):
            self.training_bar = training_bar(
                state,
                step_s=lambda: self._pace.step_s,
                left_s=lambda: self._pace.left_s(state.max_steps - state.global_step, pauses_left(args, state)),
            )

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self.training_bar is not None:
            self._pace.step_done(pause=next_pause(control))
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def on_prediction_step(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        loader = kwargs.get("eval_dataloader")
        if not state.is_world_process_zero or not has_length(loader) or not _can_redraw() or is_quiet(args):
            return
        if self.prediction_bar is None:
            self.prediction_bar = tqdm(
                total=len(loader),
                desc="evaluation",
                leave=self.training_bar is None,
                dynamic_ncols=True,
                unit=" batches",
            )
        self.prediction_bar.update(1)

    def on_evaluate(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._close("prediction_bar")

    on_predict = on_evaluate

    def on_log(
        self, args: Arguments, state: TrainerState, control: TrainerControl, logs: Logs = NO_LOGS, **kwargs: object
    ) -> None:
        if not state.is_world_process_zero or is_quiet(args):
            return
        shown = readable(logs, self.max_str_len)
        if self.training_bar is not None:
            *head, row = self._table.lines(steps_text(state), shown) or [""]
            for line in head:
                self.training_bar.write(dimmed(line))
            if row:
                self.training_bar.write(row)
            if (words := latest(logs)) and "loss" in logs:
                self.training_bar.set_postfix_str(words, refresh=False)
        elif not _can_redraw():
            print(format_line(state, shown), flush=True)

    def on_train_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._close("training_bar")

    def on_exception(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._close("prediction_bar", "training_bar")

    def _close(self, *names: str) -> None:
        for name in names:
            if (bar := getattr(self, name)) is not None:
                bar.close()
                setattr(self, name, None)


class PrinterCallback(TrainerCallback, original="transformers.trainer_callback"):
    """Prints the logs, one line each as in a file; used if the bar is turned off."""

    def on_log(
        self, args: Arguments, state: TrainerState, control: TrainerControl, logs: Logs = NO_LOGS, **kwargs: object
    ) -> None:
        if state.is_local_process_zero and not is_quiet(args):
            print(format_line(state, readable(logs)), flush=True)


is_word = re.compile(r"[^\s=]+").fullmatch


def format_line(state: TrainerState, shown: Mapping[str, object]) -> str:
    """Returns a log as one line that people and tools read: `step=10/75 loss=0.457 epoch=0.4`; other text is quoted."""
    words = []
    if state.max_steps:
        total = known_steps(state)
        words.append(f"step={state.global_step}/{total}" if total else f"step={state.global_step}")
    for name, value in shown.items():
        text = str(value)
        words.append(f"{name}={text if is_word(text) else json.dumps(text, ensure_ascii=False)}")
    return printable(" ".join(words))


def known_steps(state: TrainerState) -> int | None:
    """Returns the steps of the whole run; None where data of unknown length end it."""
    return None if state.max_steps == OPEN_END else state.max_steps


def is_quiet(args: Arguments) -> bool:
    """Returns whether the console shows only errors: `log_level="error"` or above, not a verbosity of transformers."""
    if QUIET.isdisjoint((args.log_level, args.log_level_replica)):  # finding the rank takes time
        return False
    level = args.log_level if args.should_log else args.log_level_replica
    return level != "passive" and args.get_process_log_level() >= logging.ERROR


def next_pause(control: TrainerControl) -> str | None:
    """Returns the pause after the step: "evaluation" (also if the run saves too), "save", or None."""
    if control.should_evaluate:
        return "evaluation"
    return "save" if control.should_save else None


def pauses_left(args: Arguments, state: TrainerState) -> dict[str, int]:
    """Returns the number of evaluations left, and of saves left at which the run does not evaluate too."""
    left = dict[str, int]()
    every = dict[str, float]()
    by_epoch = state.max_steps / max(state.num_train_epochs, 1)
    for what in ("eval", "save"):
        steps = {"epoch": by_epoch, "steps": float(getattr(state, f"{what}_steps") or 0)}
        every[what] = steps.get(getattr(args, f"{what}_strategy"), 0.0)
        done = state.global_step
        total = state.max_steps
        left[what] = int(total // every[what]) - int(done // every[what]) if every[what] > 0 else 0
    shared = left["eval"] if every["eval"] == every["save"] else 0
    return {"evaluation": left["eval"], "save": left["save"] - shared}


def log_table(*, by_evaluation: bool) -> LogTable:
    """Returns a table as wide as the terminal."""
    return LogTable(by_evaluation=by_evaluation, width=lambda: shutil.get_terminal_size().columns)


def dimmed(line: str) -> str:
    """Returns a line in a weaker colour, if the terminal has colours and the user wants them."""
    has_colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    return f"\x1b[2m{line}\x1b[0m" if has_colours else line


def steps_text(state: TrainerState) -> str:
    """Returns the steps done, and the total if it is known."""
    total = known_steps(state)
    return f"{state.global_step}" if total is None else f"{state.global_step}/{total}"


def _can_redraw() -> bool:
    """Returns True if the output takes carriage returns: a terminal or a notebook, not a file or a pipe."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def training_bar(state: TrainerState, *, step_s: Callable[[], float | None], left_s: Callable[[], float | None]) -> Bar:
    """Returns tqdm's bar of optimizer steps with a rate and a time left that evaluations do not change."""

    class TrainingBar(tqdm):  # type: ignore[type-arg]  # its class depends on the output: terminal or notebook
        @property
        def format_dict(self) -> Any:  # as tqdm declares it
            values = super().format_dict
            step = step_s()
            left = left_s()
            values["rate"] = 1 / step if step else values["rate"]
            values["left"] = "?" if left is None else tqdm.format_interval(round(left))
            return values

    total = known_steps(state)
    form = WITHOUT_END if known_steps(state) is None else FORMAT
    return TrainingBar(total=total, initial=state.global_step, dynamic_ncols=True, unit=" steps", bar_format=form)


def latest(logs: Mapping[str, object]) -> str:
    """Returns the latest loss, rate and tokens per second, as the bar shows them."""
    found = ((short, logs.get(name)) for name, short in SHOWN.items())
    return ", ".join(f"{short} {count_text(value)}" for short, value in found if isinstance(value, float))


# The original's names of the callbacks that every trainer has.
DEFAULT_CALLBACKS = [DefaultFlowCallback]
DEFAULT_PROGRESS_CALLBACK = ProgressCallback
