"""What a person sees of a run: one bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from typing import Any

from tqdm.auto import tqdm

from trainwright.callbacks.base import TrainerCallback
from trainwright.config.plans import OPEN_END
from trainwright.state.control import TrainerControl
from trainwright.state.trainer_state import TrainerState
from trainwright.types import has_length

MAX_STR_LEN = 100


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
    """A tqdm bar for training and one for evaluation; one plain line per log where there is no terminal.

    Args:
        max_str_len: longest text value shown in full, in characters.
    """

    def __init__(self, max_str_len: int = MAX_STR_LEN) -> None:
        self.training_bar: Any = None
        self.prediction_bar: Any = None
        self.max_str_len = max_str_len
        self.current_step = 0
        self._is_live = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_live = _can_redraw()
        self.current_step = state.global_step
        if state.is_world_process_zero and self._is_live:
            self.training_bar = tqdm(total=known_steps(state), initial=state.global_step, dynamic_ncols=True)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.training_bar is not None:
            self.training_bar.update(state.global_step - self.current_step)
            self.current_step = state.global_step

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        loader = kwargs.get("eval_dataloader")
        if not state.is_world_process_zero or not has_length(loader) or not _can_redraw():
            return
        if self.prediction_bar is None:
            self.prediction_bar = tqdm(total=len(loader), leave=self.training_bar is None, dynamic_ncols=True)
        self.prediction_bar.update(1)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction_bar()

    def on_predict(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_prediction_bar()

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        shown = readable(kwargs["logs"], self.max_str_len)
        if self.training_bar is not None:
            self.training_bar.write(str(shown))
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
        if state.is_local_process_zero:
            _print_line(str(readable(kwargs["logs"])))


def known_steps(state: TrainerState) -> int | None:
    """Steps of the whole run; None where it ends when data of unknown length do."""
    return None if state.max_steps == OPEN_END else state.max_steps


def _can_redraw() -> bool:
    """Whether carriage returns are welcome: a terminal or a notebook, not a file or a pipe."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


def _print_line(text: str) -> None:
    print(text, flush=True)
