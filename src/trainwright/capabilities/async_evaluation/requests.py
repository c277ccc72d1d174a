"""Evaluations that a run asks of another process, as files: the request with its weights, and the result.

```
RUN/_evaluations/
    open.json                 while a run takes results
    step-10-3f2a90c1/
        request.json written last: facts of the step
        eval/                 the weights, as `from_pretrained` loads them
        eval_average/         further weights of the step, by the prefix of their metrics
        random_states.pth     with which the evaluation begins
        result.json           its logs and metrics; the weights are deleted when the run has heard of them
```
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainwright._types import JSONObject, plain_numbers, write_text
from trainwright.support.door import MALFORMED, OwnFolder, RelativeName, parse_number, parse_step, read_json

FOLDER = "_evaluations"  # names that begin with an underscore are not uploaded
OPEN_NAME = "open.json"
REQUEST_NAME = "request.json"
RESULT_NAME = "result.json"
STATES_NAME = "random_states.pth"
MAIN_PART = "eval"  # prefix of the metrics of the trained weights
MAX_BYTES = 1 << 26
MAX_ITEMS = 100  # of a list in a request, and of requests in a checkpoint; a run has two open
LOG = "log"
EVALUATE = "evaluate"
SIGNS = "watcher-*.json"  # that a process which watches the run lives
WATCHER_GONE_S = 60.0  # without a sign of life; watchers give one every few seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """An evaluation that is due.

    Attributes:
        name: of its directory.
        step: optimizer step that the weights belong to.
        epoch: where the run stood then.
        max_steps: steps of the run.
        num_tokens: input tokens seen by then; 0 if they are not counted.
        parts: prefixes of metrics, each with weights of its own, in their order.
        ignore_keys: entries of the model's output that are no predictions; None: as in its configuration.
    """

    name: str
    step: int
    epoch: float
    max_steps: int
    num_tokens: int = 0
    parts: tuple[str, ...] = (MAIN_PART,)
    ignore_keys: tuple[str, ...] | None = None

    def with_part(self, prefix: str) -> EvaluationRequest:
        """Returns the request with further weights."""
        return replace(self, parts=(*self.parts, prefix))

    def to_dict(self) -> JSONObject:
        """Returns plain values, as for JSON and checkpoints."""
        values = asdict(self)
        values["name"] = str(self.name)
        values["parts"] = [str(part) for part in self.parts]
        values["ignore_keys"] = None if self.ignore_keys is None else list(self.ignore_keys)
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EvaluationRequest:
        """Reads the form of `to_dict`, whoever wrote it; ValueError if it is something else."""
        try:
            keys = values["ignore_keys"]
            return cls(
                name=RelativeName.parse(values["name"], parts=1),
                step=parse_step(values["step"]),
                epoch=parse_number(values["epoch"], least=0.0),
                max_steps=sys.maxsize if values["max_steps"] == sys.maxsize else parse_step(values["max_steps"]),
                num_tokens=parse_step(values["num_tokens"]),
                parts=tuple(RelativeName.parse(part) for part in parse_list(values["parts"])),
                ignore_keys=None if keys is None else tuple(map(_text, parse_list(keys))),
            )
        except MALFORMED as error:
            raise ValueError(f"it is not a request for an evaluation: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a request.

    Attributes:
        events: logs ("log") and ends of evaluations ("evaluate") with their values, in their order.
        metrics: of all evaluations together.
        missing: why there are no metrics; the run continues without them.
        error: traceback of an error in the evaluation, which ends the run.
    """

    events: tuple[tuple[str, JSONObject], ...] = ()
    metrics: JSONObject = field(default_factory=dict)
    missing: str = ""
    error: str = ""

    def write(self, folder: Path) -> None:
        """Writes the result into the directory of its request, with plain numbers; arrays become lists."""
        values = {"events": [list(event) for event in self.events], "metrics": self.metrics}
        write_text(folder / RESULT_NAME, json.dumps(plain_numbers(values), default=_listed))

    @classmethod
    def read(cls, folder: Path) -> Result | None:
        """Reads the result of a request; None if there is none, ValueError if it is something else."""
        try:
            values = read_json(folder / RESULT_NAME, max_bytes=MAX_BYTES)
        except FileNotFoundError:
            return None
        try:
            events = tuple((str(kind), _mapping(logged)) for kind, logged in values["events"])
            metrics = _mapping(values["metrics"])
        except MALFORMED as error:
            raise ValueError(f"{folder / RESULT_NAME} is not the result of an evaluation: {error!r}") from error
        if any(kind not in (LOG, EVALUATE) for kind, _ in events):
            raise ValueError(f"{folder / RESULT_NAME} is not the result of an evaluation")
        return cls(events=events, metrics=metrics)


def parse_list(value: object) -> list[Any]:
    """Returns a list that was read; ValueError if it is none, or too long."""
    if not isinstance(value, list):
        raise ValueError(f"a list was expected, not {type(value).__name__}")
    if len(value) > MAX_ITEMS:
        raise ValueError(f"a list has {len(value)} items, and at most {MAX_ITEMS} are read")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"text was expected, not {type(value).__name__}")
    return value


def _mapping(value: object) -> JSONObject:
    if not isinstance(value, dict):
        raise ValueError(f"an object was expected, not {type(value).__name__}")
    return value


def _listed(value: Any) -> Any:  # metrics come from any library
    """Returns a value of a metric in the form of JSON."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


class Requests:
    """The requests of the run that writes into a directory.

    Args:
        run_folder: the directory.
    """

    def __init__(self, run_folder: str | Path) -> None:
        self._run_folder = OwnFolder(run_folder)
        self.folder = Path(run_folder) / FOLDER

    def place(self, name: str) -> Path:
        """Returns the directory of a request."""
        return self._run_folder.path(_name(name))

    def weights(self, name: str, part: str) -> Path:
        """Returns the directory of weights of a request; ValueError if the part leads out of it."""
        return self._run_folder.path(_name(name, part))

    # -- the run -------------------------------------------------------------------------------------------------------

    def open(self, *, is_fresh: bool) -> None:
        """Begins to take results; a fresh run deletes the files of an earlier run. OSError if the folder is a link."""
        if is_fresh:
            self._remove()
        self._run_folder.root.mkdir(parents=True, exist_ok=True)
        self._run_folder.make_folder(_name())
        write_text(self.folder / OPEN_NAME, json.dumps({"pid": os.getpid()}))

    def close(self) -> None:
        """Takes no further result; an empty directory is removed."""
        self._remove(OPEN_NAME)
        with suppress(OSError):
            self.folder.rmdir()

    @staticmethod
    def new_name(step: int) -> str:
        """Returns the name of a new request: a branch of the run may ask for the same step again."""
        return f"step-{step}-{uuid.uuid4().hex[:8]}"

    def begin(self, name: str) -> Path:
        """Makes the directory of a request, for its weights."""
        self._remove(name)
        return self._run_folder.make_folder(_name(name))

    def submit(self, request: EvaluationRequest) -> None:
        """Completes a request once its weights are written."""
        write_text(self.place(request.name) / REQUEST_NAME, json.dumps(request.to_dict()))

    def drop_weights(self, request: EvaluationRequest) -> None:
        """Deletes weights and random states; request and result stay, for a resume from an older checkpoint."""
        for part in (*request.parts, STATES_NAME):
            self._remove(request.name, part)

    def drop(self, name: str) -> None:
        """Deletes a request with all that belongs to it."""
        self._remove(name)

    def drop_others(self, names: set[str]) -> None:
        """Deletes requests without a result that a resumed run does not know: it makes their steps again."""
        for name in self._names():
            if name not in names and not (self.place(name) / RESULT_NAME).is_file():
                self._remove(name)

    def _remove(self, *names: str) -> None:
        """Removes what has a name below the directory of requests, or that directory; what cannot be removed stays."""
        with suppress(OSError):
            self._run_folder.remove(_name(*names))

    # -- whoever evaluates ---------------------------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Returns True if a run takes results, or was killed while it did."""
        return (self.folder / OPEN_NAME).is_file()

    def read(self, name: str) -> EvaluationRequest | None:
        """Reads a request; None if it is not complete, or none."""
        try:
            request = EvaluationRequest.from_dict(read_json(self.place(name) / REQUEST_NAME, max_bytes=MAX_BYTES))
        except (OSError, ValueError):
            return None
        return request if request.name == name else None

    def waiting(self) -> list[EvaluationRequest]:
        """Returns the complete requests without a result, earlier steps first."""
        names = [name for name in self._names() if not (self.place(name) / RESULT_NAME).is_file()]
        found = [request for name in names if (request := self.read(name)) is not None]
        return sorted(found, key=lambda request: request.step)

    def _names(self) -> list[RelativeName]:
        """Returns the names of the requests, complete or not."""
        if not self._run_folder.is_folder(_name()):
            return []
        names = OwnFolder(self.folder).names()
        return [name for name in names if name.startswith("step-") and self._run_folder.is_folder(_name(name))]


def _name(*names: str) -> RelativeName:
    """Returns a name below the directory of a run; ValueError if a part leads out of that of the requests."""
    return RelativeName.parse("/".join((FOLDER, *names)))
