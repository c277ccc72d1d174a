"""Progress of a run in a notebook: one display with a bar and a table of steps, losses and metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tqdm.std import tqdm

from trainwright._types import has_length
from trainwright.callbacks.base import NO_LOGS, Logs, TrainerCallback
from trainwright.callbacks.progress import Eta, is_quiet, known_steps, latest, next_pause, pauses_left
from trainwright.config.protocol import Arguments
from trainwright.state.trainer_state import TrainerControl, TrainerState
from trainwright.support.html_table import cell_text
from trainwright.support.units import count_text

INTERVAL_S = 0.25  # between two updates of the display, other than the last one
MAX_ROWS = 50  # rows of the table; beyond that, older rows are thinned out
NUM_NEWEST = 15  # rows of the table that are always shown
MAX_LEN = 40  # characters shown of a text value
NOT_SHOWN = ("_runtime", "_per_second", "_preparation_time", "total_flos", "_tokens_seen")
OF_THE_BAR = ("epoch", "step", "grad_norm", "learning_rate")
CELL = "text-align: right; padding: .15em .6em"
# Colours of the bar, on light and on dark.
RUNNING = "#3b82f6"
DONE = "#22a35a"
FAILED = "#d9534f"

Column = tuple[str, str]  # "training" or the name of an evaluated set, and the name of a value
Values = dict[Column, object]


class NotebookProgressCallback(TrainerCallback, original="transformers.utils.notebook"):
    """Bar of a run and below it a table of steps, losses and metrics, in one display that is updated.

    Plain HTML: it shows wherever a notebook does, without widgets.
    """

    def __init__(self) -> None:
        self._panel: _Panel | None = None
        self._is_training = False
        self._pace = Eta()

    def on_train_begin(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        self._panel = None
        self._pace = Eta()
        self._is_training = True
        if state.is_world_process_zero and not is_quiet(args):
            self._panel = _Panel(state.trial_name or "")
            for entry in state.log_history:  # entries from before a resume
                self._panel.table.add(entry.get("step", 0), entry)
            self._show_training(args, state)

    def on_step_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self._panel is not None:
            self._pace.step_done(pause=next_pause(control))
            if self._panel.is_due():
                self._show_training(args, state)

    def on_prediction_step(
        self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        if self._panel is None and state.is_world_process_zero and not is_quiet(args):
            self._panel = _Panel("")
        if self._panel is None:
            return
        self._panel.num_batches += 1
        if not self._panel.is_due():
            return
        loader = kwargs.get("eval_dataloader")
        self._panel.num_all_batches = len(loader) if has_length(loader) else None
        if self._is_training:
            self._show_training(args, state)
        else:
            self._panel.show(None, [])

    def on_log(
        self, args: Arguments, state: TrainerState, control: TrainerControl, logs: Logs = NO_LOGS, **kwargs: object
    ) -> None:
        if self._panel is None:
            return
        self._panel.table.add(state.global_step, logs)
        if "loss" in logs:
            self._panel.latest = latest(logs)
        if self._is_training and self._panel.is_due():
            self._show_training(args, state)

    def on_evaluate(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self._panel is None:
            return
        self._panel.num_batches = 0
        if not self._is_training:
            self._panel.show((1, 1), ["evaluated"], colour=DONE)
            self._panel = None

    def on_predict(
        self, args: Arguments, state: TrainerState, control: TrainerControl, metrics: Logs = NO_LOGS, **kwargs: object
    ) -> None:
        if self._panel is not None and not self._is_training:
            self._panel.table.add(state.global_step, metrics)
            self._panel.num_batches = 0
            self._panel.show((1, 1), ["predicted"], colour=DONE)
            self._panel = None

    def on_train_end(self, args: Arguments, state: TrainerState, control: TrainerControl, **kwargs: object) -> None:
        if self._panel is not None and self._is_training:
            self._show_training(args, state, "finished", colour=DONE)
        self._panel = None
        self._is_training = False

    def on_exception(
        self,
        args: Arguments,
        state: TrainerState,
        control: TrainerControl,
        exception: BaseException | None = None,
        **kwargs: object,
    ) -> None:
        if self._panel is not None:
            how = f"failed: {type(exception).__name__}" if isinstance(exception, Exception) else "interrupted"
            self._show_training(args, state, how, colour=FAILED)
        self._panel = None
        self._is_training = False

    def _show_training(self, args: Arguments, state: TrainerState, end: str = "", *, colour: str = RUNNING) -> None:
        if self._panel is None:
            return
        total = known_steps(state)
        step = self._pace.step_s
        words = [end] if end else []
        words.append(f"step {state.global_step}" + (f"/{total}" if total else ""))
        words.append(f"epoch {state.epoch or 0:.2f}" + (f"/{state.num_train_epochs:g}" if total else ""))
        words += [self._panel.elapsed()]
        left = None if end else self._pace.left_s(state.max_steps - state.global_step, pauses_left(args, state))
        words += [f"{tqdm.format_interval(round(left))} left"] if left is not None and total else []
        words += [f"{count_text(1 / step)} steps/s" if step < 1 else f"{step:.3g} s a step"] if step else []
        words += [self._panel.latest] if self._panel.latest and not end else []
        self._panel.table.best_step = state.best_global_step if args.metric_for_best_model else None
        self._panel.show((state.global_step, total) if total else None, words, colour=colour)


class _Panel:
    """The display of a notebook cell and its contents."""

    def __init__(self, title: str) -> None:
        self.table = MetricsTable()
        self.latest = ""
        self.num_batches = 0  # batches of the current evaluation
        self.num_all_batches: int | None = None
        self._title = title
        self._began = time.monotonic()
        self._shown_at = 0.0
        self._handle: Any = None  # IPython's display handle, which is untyped

    def is_due(self) -> bool:
        return time.monotonic() - self._shown_at >= INTERVAL_S

    def elapsed(self) -> str:
        return tqdm.format_interval(round(time.monotonic() - self._began))

    def show(self, done: tuple[int, int] | None, words: list[str], *, colour: str = RUNNING) -> None:
        """Shows the bar with its text and the table, replacing the previous display."""
        from IPython.display import display

        words = [self._title, *words] if self._title else words
        bars = [bar(done, words, colour)] if words else []
        if self.num_batches:
            total = self.num_all_batches
            count = f"evaluation: batch {self.num_batches}" + (f"/{total}" if total else "")
            bars.append(bar((self.num_batches, total) if total else None, [count], RUNNING))
        bundle = {"text/html": f"<div>{''.join(bars)}{self.table.html()}</div>", "text/plain": " · ".join(words)}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(bundle, raw=True)
        self._shown_at = time.monotonic()


def bar(done: tuple[int, int] | None, words: Iterable[str], colour: str) -> str:
    """Returns a bar with words to its right; no bar if the total is unknown."""
    track = ""
    if done is not None:
        share = min(done[0] / max(done[1], 1), 1.0)
        track = (
            '<div style="flex: 0 0 14em; height: .6em; border-radius: .3em; overflow: hidden; '
            f'background: rgba(128, 128, 128, .3)"><div style="width: {share:.1%}; height: 100%; '
            f'background: {colour}"></div></div>'
        )
    text = " · ".join(map(cell_text, words))
    return (
        '<div style="display: flex; flex-wrap: wrap; gap: .2em .8em; align-items: center; margin: .3em 0">'
        f"{track}<span>{text}</span></div>"
    )


class MetricsTable:
    """Rows of steps, and columns of losses and metrics by training and evaluated set."""

    def __init__(self) -> None:
        self.best_step: int | None = None  # step of the bold row
        self._rows: list[tuple[int, Values]] = []
        self._columns: dict[Column, None] = {("training", "loss"): None}

    def add(self, step: int, logs: Mapping[str, object]) -> None:
        """Adds a log; a log of the same step with other values extends that row."""
        values = dict(name_columns(logs))
        if not values:
            return
        self._columns |= dict.fromkeys(values)
        if self._rows and self._rows[-1][0] == step and values.keys().isdisjoint(self._rows[-1][1]):
            self._rows[-1][1].update(values)
        else:
            self._rows.append((step, values))

    def shown(self) -> list[tuple[int, Values]]:
        """Returns the rows, at most `MAX_ROWS`: the newest, and before them evaluations at equal distances."""
        if len(self._rows) <= MAX_ROWS:
            return self._rows
        older = self._rows[:-NUM_NEWEST]
        older = [row for row in older if any(group != "training" for group, _ in row[1])] or older
        stride = -(-len(older) // (MAX_ROWS - NUM_NEWEST))
        return older[::stride] + self._rows[-NUM_NEWEST:]

    def html(self) -> str:
        """Returns the table; empty text before the first log."""
        if not self._rows:
            return ""
        used = {column for _, values in self._rows for column in values}
        groups: dict[str, list[str]] = {}
        for group, name in self._columns:
            if (group, name) in used:
                groups.setdefault(group, []).append(name)
        columns = [(group, name) for group, names in groups.items() for name in names]
        head = "".join(
            f'<th colspan="{len(names)}" style="{CELL}; text-align: center">{cell_text(group)}</th>'
            for group, names in groups.items()
        )
        names = "".join(f'<th style="{CELL}">{cell_text(name)}</th>' for _, name in columns)
        rows = self.shown()
        lines = [self._line(step, [values.get(column, "") for column in columns]) for step, values in rows]
        note = f"<div>{len(rows)} of {len(self._rows)} rows; all are in trainer.state.log_history</div>"
        return (
            f'<table><thead><tr><th></th>{head}</tr><tr><th style="{CELL}">step</th>{names}</tr></thead>'
            f"<tbody>{''.join(lines)}</tbody></table>{note if len(rows) < len(self._rows) else ''}"
        )

    def _line(self, step: int, values: list[object]) -> str:
        style = CELL + ("; font-weight: bold" if step == self.best_step else "")
        texts = (f"{value:#.4g}" if isinstance(value, float) else str(value)[:MAX_LEN] for value in (step, *values))
        return "<tr>" + "".join(f'<td style="{style}">{cell_text(text)}</td>' for text in texts) + "</tr>"


def name_columns(logs: Mapping[str, object]) -> Iterator[tuple[Column, object]]:
    """Yields the losses and metrics of a log with their columns; an evaluation is known by the name of its run time."""
    if "train_runtime" in logs:  # the summary at the end of a run
        return
    timed = [name for name in logs if name.endswith("_runtime")] if "loss" not in logs else []
    prefix = timed[0].removesuffix("_runtime") if timed else ""
    group = {"": "training", "eval": "validation"}.get(prefix, prefix)
    if prefix.startswith("eval_"):
        group = f"validation: {prefix.removeprefix('eval_')}"
    for name, value in logs.items():
        if name.startswith(prefix) and not (name in OF_THE_BAR or name.endswith(NOT_SHOWN) or "_mem_" in name):
            yield (group, name.removeprefix(f"{prefix}_") if prefix else name), value
