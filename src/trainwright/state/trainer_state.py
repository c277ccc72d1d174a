"""TrainerState and TrainerControl: record and flags of a run; `trainer_state.json` has the format of the original."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import reprlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from operator import is_
from pathlib import Path
from typing import Any, Self

from trainwright._types import JSONObject, recordable, write_pieces
from trainwright.support.counterparts import Counterpart
from trainwright.support.door import parse_json, read_bytes

logger = logging.getLogger(__name__)


class ExportableState(Counterpart, original="transformers.trainer_callback"):
    """Object with state that a checkpoint stores.

    `state()` returns `{"args": {...}, "attributes": {...}}` of JSON values: `args` has the constructor's arguments,
    `attributes` is set afterwards. `from_state` makes an equal object.
    """

    def state(self) -> JSONObject:
        """Returns the state.

        Returns:
            `{"args": {...}, "attributes": {...}}` with JSON values.
        """
        raise NotImplementedError(
            f"{type(self).__name__} is an ExportableState and must define state() -> "
            "{'args': {...}, 'attributes': {...}} with JSON values."
        )

    @classmethod
    def from_state(cls, state: JSONObject) -> Self:
        """Makes an object with a state.

        Args:
            state: a result of `state()`.
        """
        instance = cls(**state["args"])
        for name, value in state["attributes"].items():
            setattr(instance, name, value)
        return instance


def collect_states(objects: list[Any]) -> JSONObject:
    """Collects states by class name, as a list if several share a class; objects without `state` are skipped."""
    states: dict[str, list[JSONObject]] = {}
    for thing in objects:
        if callable(getattr(thing, "state", None)):
            states.setdefault(type(thing).__name__, []).append(thing.state())
    return {name: found if len(found) > 1 else found[0] for name, found in states.items()}


NUM_RECENT = 100  # the newest entries, which callbacks may still change, are serialized each time
NUM_IN_PIECE = 4000  # entries: some hundred kilobytes, which are written without being copied together first


class HistoryText:
    """A JSON array with one entry a line.

    Entries that are removed, replaced, or given more or fewer values are noticed wherever they are; another value
    under a name that was there is noticed among the newest `NUM_RECENT`.
    """

    def __init__(self) -> None:
        self._entries: list[JSONObject] = []  # entries with cached text
        self._sizes: list[int] = []  # how many values each had
        self._pieces: list[bytes] = []  # their text, with a comma after each

    def pieces(self, history: Sequence[JSONObject]) -> Iterator[bytes]:
        """Yields a history as UTF-8 text in pieces; entries of the last call are not serialized again."""
        is_same = len(self._entries) < max(len(history), 1) and all(map(is_, self._entries, history))
        if not is_same or list(map(len, self._entries)) != self._sizes:
            self._entries = []
            self._sizes = []
            self._pieces = []
        settled = max(len(history) - NUM_RECENT, 0)
        for first in range(len(self._entries), settled, NUM_IN_PIECE):
            entries = history[first : min(first + NUM_IN_PIECE, settled)]
            self._entries += entries
            self._sizes += map(len, entries)
            self._pieces.append(b"".join(_line(entry) + b",\n" for entry in entries))
        recent = history[len(self._entries) :]
        if not recent:  # nothing is settled without something recent after it
            yield b"[]"
            return
        yield b"[\n"
        yield from self._pieces
        yield b",\n".join(map(_line, recent)) + b"\n  ]"


def _line(entry: JSONObject) -> bytes:
    try:
        text = json.dumps(entry, sort_keys=True)
    except (TypeError, ValueError, RecursionError):  # an entry that did not come through `Trainer.log`
        dropped: dict[str, str] = {}
        text = json.dumps(recordable(entry, dropped), sort_keys=True)
        logger.warning("trainer_state.json is written without %s of log_history.", dropped)
    return f"    {text}".encode()


MAX_BYTES = 1 << 30
_NUMBER = (int, float)
_KINDS: dict[str, type | tuple[type, ...]] = {  # types of the fields that a resume reads; null has a rule of its own
    "epoch": _NUMBER,
    "global_step": int,
    "max_steps": int,
    "num_train_epochs": int,
    "num_input_tokens_seen": int,
    "total_flos": _NUMBER,
    "best_metric": _NUMBER,
    "best_global_step": int,
    "best_model_checkpoint": str,
    "log_history": list,
    "stateful_callbacks": dict,
    "train_batch_size": int,
}

_COUNTS = (
    "epoch",
    "global_step",
    "max_steps",
    "num_train_epochs",
    "num_input_tokens_seen",
    "total_flos",
    "best_global_step",
    "train_batch_size",
)


@dataclass
class TrainerState(Counterpart, original="transformers.trainer_callback"):
    """Progress, logs and best evaluation of a run.

    Attributes:
        epoch: epochs done, with the share of the current one as its fraction.
        global_step: optimizer steps done.
        max_steps: optimizer steps of the whole run; `sys.maxsize` until data of unknown length show their
            end; below `global_step`, the length is not known.
        logging_steps, eval_steps, save_steps: intervals in optimizer steps (shares are already turned into counts).
        train_batch_size: samples per device and micro-batch.
        num_input_tokens_seen: input tokens trained on, if they are counted.
        total_flos: floating-point operations so far, by the 6 x parameters x tokens rule.
        log_history: every log, each with its `step`.
        best_metric, best_global_step, best_model_checkpoint: the best evaluation so far.
        stateful_callbacks: class name -> state of the callbacks that have one.
    """

    epoch: float = 0
    global_step: int = 0
    max_steps: int = 0
    logging_steps: float = 500
    eval_steps: float | None = 500
    save_steps: float = 500
    train_batch_size: int | None = None
    num_train_epochs: int = 0
    num_input_tokens_seen: int = 0
    total_flos: float = 0
    log_history: list[JSONObject] = dataclasses.field(default_factory=list)
    best_metric: float | None = None
    best_global_step: int | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    is_hyper_param_search: bool = False
    trial_name: str | None = None
    trial_params: JSONObject | None = None
    stateful_callbacks: Any = None  # a list of callbacks when made, a dict of their states from then on

    def __post_init__(self) -> None:
        if self.log_history is None:
            self.log_history = []
        if self.stateful_callbacks is None:
            self.stateful_callbacks = {}
        elif not isinstance(self.stateful_callbacks, dict):
            for callback in self.stateful_callbacks:
                if not callable(getattr(callback, "state", None)):
                    raise TypeError(f"A callback whose state is saved needs a state() method; {callback!r} has none.")
            self.stateful_callbacks = collect_states(list(self.stateful_callbacks))
        self._history_text = HistoryText()

    def init_training_references(self, trainer: Any, max_steps: int, num_train_epochs: int, trial: Any) -> None:
        """Fills in the fields of one training.

        Args:
            trainer: the trainer, which knows its trial and its place among the processes.
            max_steps: optimizer steps of the run.
            num_train_epochs: epochs of the run.
            trial: trial of a search, or None.
        """
        self.max_steps = max_steps
        self.num_train_epochs = num_train_epochs
        self.is_local_process_zero = trainer.is_local_process_zero()
        self.is_world_process_zero = trainer.is_world_process_zero()

    def save_to_json(self, json_path: str | Path) -> None:
        """Writes the record; log entries of the last save are not serialized again.

        Args:
            json_path: the file.
        """
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        values["log_history"] = []
        try:
            text = json.dumps(values, indent=2, sort_keys=True)
        except (TypeError, ValueError, RecursionError):
            text = json.dumps(_writable(values), indent=2, sort_keys=True)
        # Two spaces before it: only the record's own field, not a field in a callback's state.
        before, after = text.split('\n  "log_history": []', 1)
        history = self._history_text.pieces(self.log_history)
        write_pieces(json_path, chain([f'{before}\n  "log_history": '.encode()], history, [f"{after}\n".encode()]))

    @classmethod
    def load_from_json(cls, json_path: str | Path) -> TrainerState:
        """Reads a record; unknown fields are ignored.

        Args:
            json_path: the file.

        Returns:
            The record.

        Raises:
            ValueError: the file is no JSON, or not that of a record.
        """
        return cls.from_json(read_bytes(json_path, max_bytes=MAX_BYTES))

    @classmethod
    def from_json(cls, content: bytes) -> TrainerState:
        """Reads a record as `load_from_json` does, from the content of its file.

        Args:
            content: of the file.

        Returns:
            The record.

        Raises:
            ValueError: it is no JSON, or not that of a record.
        """
        values = parse_json(content)
        if not isinstance(values, dict):
            raise ValueError(f"a record is a JSON object, and this is a {type(values).__name__}")
        for name, kinds in _KINDS.items():
            value = values.get(name)
            is_too_large = isinstance(value, int) and abs(value) > sys.maxsize  # whole numbers of 64 bits
            if value is not None and (is_too_large or not isinstance(value, kinds)):
                raise ValueError(f"invalid {name}: {reprlib.repr(value)}")
        for name in ("global_step", "epoch", "max_steps", "total_flos", "num_input_tokens_seen"):
            if name in values and values[name] is None:
                raise ValueError(f"{name} is null")
        for name in _COUNTS:
            value = values.get(name)
            # so also NaN
            if value is not None and not 0 <= value < math.inf:
                raise ValueError(f"invalid {name}: {reprlib.repr(value)}")
        if not all(isinstance(entry, dict) for entry in values.get("log_history") or ()):
            raise ValueError("log_history has an entry that is not a JSON object")
        known = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in values.items() if name in known})

    def compute_steps(self, args: Any, max_steps: int) -> None:
        """Sets the three intervals.

        Args:
            args: training arguments; an interval below 1 is a share of `max_steps`.
            max_steps: optimizer steps of the run.
        """
        for kind in ("logging", "eval", "save"):
            interval = getattr(args, f"{kind}_steps")
            if interval is not None:
                setattr(self, f"{kind}_steps", math.ceil(max_steps * interval) if interval < 1 else interval)


def _writable(values: JSONObject) -> JSONObject:
    """Returns the fields without values that JSON cannot hold: the state of a callback, a parameter of a trial."""
    dropped: dict[str, str] = {}
    parts = {k: recordable(value, dropped) if isinstance(value, dict) else value for k, value in values.items()}
    kept = recordable(parts, dropped)
    logger.warning(
        "trainer_state.json cannot hold %s; it is written without.",
        " and ".join(f"{name} ({what})" for name, what in dropped.items()),
    )
    return kept


@dataclass
class TrainerControl(ExportableState, original="transformers.trainer_callback"):
    """Flags that a callback sets and the loop obeys.

    Attributes:
        should_training_stop: end training after this step; stays set until the next `train()`.
        should_epoch_stop: end this epoch; cleared when the next one begins.
        should_save: save a checkpoint after this step; cleared when the next step begins.
        should_evaluate: evaluate after this step; cleared when the next step begins.
        should_log: log after this step; cleared when the next step begins.
    """

    should_training_stop: bool = False
    should_epoch_stop: bool = False
    should_save: bool = False
    should_evaluate: bool = False
    should_log: bool = False

    def _new_training(self) -> None:
        self.should_training_stop = False

    def _new_epoch(self) -> None:
        self.should_epoch_stop = False

    def _new_step(self) -> None:
        self.should_save = False
        self.should_evaluate = False
        self.should_log = False

    def state(self) -> JSONObject:
        """Returns the flags as plain values."""
        return {"args": asdict(self), "attributes": {}}
