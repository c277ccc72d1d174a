"""What a person sees of a run: one bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from tqdm.auto import tqdm

from trainwright._types import has_length
from trainwright.callbacks.base import TrainerCallback
from trainwright.callbacks.eta import Eta
from trainwright.callbacks.progress_bar import latest, training_bar
from trainwright.config.plans import OPEN_END
from trainwright.state.control import TrainerControl
from trainwright.state.trainer_state import TrainerState

MAX_STR_LEN = 100
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


def readable(logs: dict[str, Any], max_str_len: int = MAX_STR_LEN) -> dict[str, Any]:
    """Logs as a person reads them: four digits, long texts cut, no FLOP count."""
    shown: dict[str, Any] = {}
    for name, value in logs.items():
        if name == "total_flos":
            continue
        if isinstance(value, float):
            shown[name] = f"{value:.4g}"
        elif isinstance(value, str) and len(value) > max_str_len:
            shown[name] = f"{value[:max_str_len]}... ({len(value)} characters; raise max_str_len to see more)"
        else:
            shown[name] = value
    return shown


class ProgressCallback(TrainerCallback):
    """A bar for training and one for evaluation below it; one plain line per log where there is no terminal.

    Args:
        max_str_len: longest text value shown in full, in characters.
    """

    def __init__(self, max_str_len: int = MAX_STR_LEN) -> None:
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.max_str_len = max_str_len
        self.current_step = 0
        self._pace = Eta()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.current_step, self._pace = state.global_step, Eta()
        if state.is_world_process_zero and _can_redraw() and not is_quiet(args):
            self.training_bar = training_bar(
                total=known_steps(state),
                done=state.global_step,
                step_s=lambda: self._pace.step_s,
                left_s=lambda: self._pace.left_s(state.max_steps - state.global_step, pauses_left(args, state)),
            )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            pause = "evaluation" if control.should_evaluate else "save" if control.should_save else None
            self._pace.step_done(pause=pause)
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        loader = kwargs.get("eval_dataloader")
        if not state.is_world_process_zero or not has_length(loader) or not _can_redraw() or is_quiet(args):
            return
        if self.prediction_bar is None:
            self.prediction_bar = tqdm(total=len(loader), desc="evaluation", leave=self.training_bar is None,
                                       dynamic_ncols=True, unit=" batches")  # fmt: skip
        self.prediction_bar.update(1)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction_bar()

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction_bar()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero or is_quiet(args):
            return
        shown = readable(kwargs["logs"], self.max_str_len)
        if self.training_bar is not None:
            self.training_bar.write(aligned(state, shown, is_coloured=_has_colours()))
            if (words := latest(kwargs["logs"])) and "loss" in kwargs["logs"]:
                self.training_bar.set_postfix_str(words, refresh=False)
        elif not _can_redraw():
            total = "" if known_steps(state) is None else f"/{state.max_steps}"
            _print_line(f"step {state.global_step}{total} {shown}" if state.max_steps else str(shown))

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_training_bar()

    def on_exception(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction_bar()
        self._close_training_bar()

    def _close_training_bar(self) -> None:
        if self.training_bar is not None:
            self.training_bar.close()
            self.training_bar = None

    def _close_prediction_bar(self) -> None:
        if self.prediction_bar is not None:
            self.prediction_bar.close()
            self.prediction_bar = None


class PrinterCallback(TrainerCallback):
    """Prints the logs, one line each; used where the bar is turned off."""

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_local_process_zero and not is_quiet(args):
            _print_line(str(readable(kwargs["logs"])))


def known_steps(state: TrainerState) -> int | None:
    """Steps of the whole run; None where it ends when data of unknown length do."""
    return None if state.max_steps == OPEN_END else state.max_steps


def is_quiet(args: Any) -> bool:
    """Whether only errors are to be shown (`log_level="error"`, or above)."""
    return bool(args.get_process_log_level() >= logging.ERROR)


def pauses_left(args: Any, state: TrainerState) -> dict[str, int]:
    """How often the rest of a run stops training to evaluate, and to save where it does not evaluate too."""
    steps = {what: _interval(args, state, what) for what in ("eval", "save")}
    due = {what: _times(state, every) for what, every in steps.items()}
    shared = due["eval"] if steps["eval"] and steps["eval"] == steps["save"] else 0
    return {"evaluation": due["eval"], "save": due["save"] - shared}


def _interval(args: Any, state: TrainerState, what: str) -> float:
    strategy = getattr(args, f"{what}_strategy")
    if strategy == "epoch":
        return state.max_steps / max(state.num_train_epochs, 1)
    return float(getattr(state, f"{what}_steps") or 0) if strategy == "steps" else 0.0


def _times(state: TrainerState, every: float) -> int:
    return 0 if every <= 0 else int(state.max_steps // every) - int(state.global_step // every)


def aligned(state: TrainerState, shown: dict[str, Any], *, is_coloured: bool) -> str:
    """A log as a line whose columns stand below those of the one before."""
    dim, plain = (DIM, PLAIN) if is_coloured else ("", "")
    total = known_steps(state)
    step = f"{state.global_step}" if total is None else f"{state.global_step:>{len(str(total))}}/{total}"
    values = (f"{dim}{name}{plain} {value!s:<9}" for name, value in shown.items() if name != "step")
    return f"{dim}step{plain} {step}  {'  '.join(values)}".rstrip()


def _has_colours() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def _can_redraw() -> bool:
    """Whether carriage returns are welcome: a terminal or a notebook, not a file or a pipe."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _print_line(text: str) -> None:
    print(text, flush=True)
