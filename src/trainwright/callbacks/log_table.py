"""Table of a run on a terminal: a line per evaluation (per log without evaluations), in columns that fit the width."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trainwright._types import printable

FIRST = ("step", "epoch", "loss")
ROUTINE = ("learning_rate", "grad_norm")  # in a table of evaluations, they are in the bar and the journal only
NARROWEST = 9  # characters of a column: the longest number of four digits, such as 1.235e-05
GAP = "  "
REPEATED_AFTER = 40  # lines until the head is shown again


class LogTable:
    """Makes the lines. The first row sets the columns; a row with further names is preceded by a new head.

    Args:
        by_evaluation: one line per evaluation with the latest training loss, instead of one per log.
        width: returns the characters of a line of the terminal.
    """

    def __init__(self, *, by_evaluation: bool, width: Callable[[], int]) -> None:
        self._by_evaluation = by_evaluation
        self._width = width
        self._names: list[str] = []
        self._loss: object = None  # training loss since the last evaluation
        self._num_rows = 0

    def lines(self, step: str, shown: Mapping[str, object]) -> list[str]:
        """Returns the lines for a log: none, a row, or a head and a row.

        Args:
            step: steps done, as they are shown.
            shown: names and values as they are shown.

        Returns:
            The lines, which end before the edge of the terminal where three columns fit.
        """
        values = {name: value for name, value in shown.items() if name != "step"}
        is_training = "loss" in values
        is_evaluation = any(name.endswith("_loss") and name != "train_loss" for name in values)
        if not (is_training or is_evaluation):
            pairs = (f"{printable(str(name))} {printable(str(value))}" for name, value in values.items())
            return [GAP.join(pairs)] if values.keys() - {"epoch"} else []
        if self._by_evaluation and is_training:
            self._loss = values["loss"]
            return []
        if self._by_evaluation:
            values = {"loss": "" if self._loss is None else self._loss, **values}
            values = {name: value for name, value in values.items() if name not in ROUTINE}
            self._loss = None
        return self._row({"step": step, **values})

    def _row(self, values: Mapping[str, object]) -> list[str]:
        head: list[str] = []
        if values.keys() - self._names or self._num_rows % REPEATED_AFTER == 0:
            known = dict.fromkeys([*FIRST, *self._names, *values])
            self._names = [name for name in known if name in values or name in self._names]
            head = [self._line(self._names, self._names)]
        self._num_rows += 1
        return [*head, self._line(self._names, [values.get(name, "") for name in self._names])]

    def _line(self, names: list[str], cells: list[object] | list[str]) -> str:
        shown = ""
        for name, cell in zip(names, cells, strict=True):
            part = f"{printable(str(cell)):>{max(len(printable(name)), NARROWEST)}}"
            joined = f"{shown}{GAP}{part}" if shown else part
            if len(joined) >= self._width() and shown:
                break  # the journal has the other columns
            shown = joined
        return shown.rstrip()
