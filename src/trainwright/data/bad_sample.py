"""Names the sample that could not be read or collated, or the worker that hangs. Nothing runs until an error occurs.

torch's DataLoader fetches a batch with `fetch`, in this process or in a worker. The frames of the traceback below it
hold the indices of the batch, the samples that were read, and the position in a stream. A worker's error arrives as
text, so the sample is named in the worker.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from traceback import walk_tb
from types import FrameType
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, IterableDataset

from trainwright._types import counted
from trainwright.data.identity import listed
from trainwright.data.worker_internals import add_to_errors
from trainwright.errors import DataError
from trainwright.support.model_facts import TEXT_LABELS

PADDING_CURE = (
    "Their input_ids differ in length. Pad them with processing_class=tokenizer (it needs a pad token) or in a "
    "data_collator. If there is a label for each token, DataCollatorForSeq2Seq or DataCollatorForTokenClassification "
    "pads both."
)
MOST_NAMED = 16  # indices of a batch that a message lists at most
Name: TypeAlias = "Callable[[Any], str]"  # sample number -> sample name
Rows = Sequence[Any]  # samples as the user's dataset returns them
Pipe = tuple[Connection, Connection]  # from the workers of a loader: the reading end and the writing end
STACK_S = 2.0  # time for a worker to write its stack, or to end
QUIET_S = 0.2  # silence after which its output counts as complete
MOST_BYTES = 1 << 16


def number_text(number: object) -> str:
    """Returns the name of a sample of which only the number is known."""
    return f"sample {number}"


SAMPLE = re.compile(r"\b[Ss]ample (\d+)\b")  # in the notes of workers, and in errors raised in `data/`


def name_sample(error: BaseException, *, where: str, name: Name = number_text) -> None:
    """Adds a note to an error raised while fetching a batch: which sample it was, and how it differs from the others.

    Args:
        error: the error that gets the note.
        where: description of the data, for the message.
        name: returns the name of a sample by its number. Workers do not know the names, so their numbers are replaced
            here.
    """
    note = make_note(error, name)
    if note:
        error.add_note(f"{note} This was in {where}.")
        return
    name_numbers(error, name)
    if "DataLoader worker process" in str(error):
        error.add_note(f"The worker read {where}.")
    else:
        found = (frame.f_locals.get("workers") for frame, _ in walk_tb(error.__traceback__))
        workers = next((one for one in found if isinstance(one, LoaderWorkers)), None)
        if workers is not None and workers.note:
            error.add_note(f"The workers read {where}. {workers.note}")


class LoaderWorkers:
    """The worker processes of one dataloader, in order, and the number of batches from them in this epoch."""

    def __init__(self, dataloader: DataLoader[Any], processes: Iterable[BaseProcess]) -> None:
        self.note = ""  # description of a failed worker, after an error
        self.num_given = 0
        self._processes = sorted(processes, key=_start_order)
        self._stacks: Pipe | None = getattr(dataloader.worker_init_fn, "keywords", {}).get("stacks")

    def look_at(self, error: BaseException) -> None:
        """Describes workers that were killed by a signal, or the worker that timed out, with its stack."""
        if isinstance(error, (OSError, EOFError)):  # from the pipe to a worker that is about to be found dead
            ready = wait([worker.sentinel for worker in self._processes], timeout=STACK_S)
            for worker in self._processes:
                if worker.sentinel in ready:
                    worker.join(timeout=STACK_S)  # the pipe closes a moment before there is an exit code
        codes = [(number, worker.exitcode) for number, worker in enumerate(self._processes)]
        ended = [
            f"{self._name(number)} was ended by {signal.Signals(-code).name}."
            for number, code in codes
            if code and code < 0
        ]
        self.note = " ".join(ended)
        if not ended and self._processes and self._stacks is not None and "DataLoader timed out" in str(error):
            number, stack = self._late_one(self._stacks)
            self.note = f"{self._name(number)} returned no batch within dataloader_timeout. Its stack:\n{stack}"

    def _name(self, number: int) -> str:
        return f"Worker {number} (process {self._processes[number].pid})"

    def _late_one(self, stacks: Pipe) -> tuple[int, str]:
        """Returns the current worker, or the next that is not idle, and its stack."""
        num = len(self._processes)
        turns = [number % num for number in range(self.num_given, self.num_given + num)]
        for number in turns:
            stack = request_stack(self._processes[number].pid or 0, stacks)
            if not stack:
                return number, "It does not respond."
            if "in fetch" in stack:
                return number, stack
        return turns[0], "It is waiting for work."


def _start_order(process: BaseProcess) -> tuple[int, str]:
    """Sorts processes by the order of their start: multiprocessing numbers them in their names."""
    return len(process.name), process.name


def request_stack(pid: int, stacks: Pipe) -> str:
    """Asks a worker started with `stacks` for the stack of its main thread; "" if it does not respond.

    Only one worker may be asked at a time.
    """
    if not hasattr(faulthandler, "register"):
        return ""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGUSR2)
    found = b""
    wait_s = STACK_S
    while len(found) < MOST_BYTES and stacks[0].poll(wait_s):
        found += os.read(stacks[0].fileno(), MOST_BYTES)
        wait_s = QUIET_S
    return found.decode(errors="replace").rstrip()


def name_worker_samples() -> None:
    """Makes this worker's errors name the sample from now on; called when the worker starts."""
    add_to_errors(_describe_current)


def name_numbers(error: BaseException, name: Name) -> None:
    """Adds a note to an error with the names of the samples that it gives by number."""
    numbers = dict.fromkeys(SAMPLE.findall(str(error)))
    named = [
        f"Sample {number} is {name(int(number))}." for number in numbers if name(int(number)) != number_text(number)
    ]
    if named:
        error.add_note(" ".join(named))


@contextlib.contextmanager
def naming_numbers(name: Name) -> Iterator[None]:
    """Wraps the construction of an order: an error about a sample gets the sample's name."""
    try:
        yield
    except DataError as error:
        name_numbers(error, name)
        raise


def _describe_current() -> str:
    """Returns the note for the error being handled."""
    error = sys.exc_info()[1]
    return "" if error is None else make_note(error)


def make_note(error: BaseException, name: Name = number_text) -> str:
    """Returns a sentence about the sample; "" if the error was not raised while fetching a batch.

    `name` returns the name of the sample at an index.
    """
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    first = next((place for place, frame in enumerate(frames) if _is_fetch(frame)), None)
    if first is None:
        return ""
    values = frames[first].f_locals
    below = frames[first + 1 :]
    if isinstance(values["self"].dataset, IterableDataset):
        rows = values.get("data")
        origin = getattr(rows, "origin", None)
        if rows is None or origin is None:
            return _describe_stream(below)
        return _describe_rows(rows, [number_text(number) for number in _numbers(origin)])
    indices = _flat(values.get("possibly_batched_index"))
    if "data" in values:
        data = values["data"]
        is_group = len(data) == 1 and isinstance(data[0], list)
        return _describe_rows(data[0] if is_group else data, list(map(name, indices)))
    index = _find_index(below, indices)
    batch = f"the batch of {listed(list(map(name, indices)), MOST_NAMED)}"
    return f"Reading {batch} failed." if index is None else f"Reading {name(index)} failed ({batch})."


def _is_fetch(frame: FrameType) -> bool:
    """Returns True for the frame in which torch's DataLoader fetches a batch."""
    is_of_torch = str(frame.f_globals.get("__name__")).startswith("torch.utils.data.")
    return is_of_torch and frame.f_code.co_name == "fetch" and "possibly_batched_index" in frame.f_locals


def _describe_stream(frames: Iterable[FrameType]) -> str:
    """Returns the position in the stream, from the frames of `streaming/chunks.py` and `lookahead_buffer.py`."""
    for frame in frames:
        values = frame.f_locals
        if frame.f_code.co_name == "_chunk_items":
            number = values["position"] + len(values.get("items", ()))
        elif frame.f_code.co_name == "fill":
            number = values["at"] + len(values.get("more", ()))
        else:
            continue
        return f"Reading item {number} of the stream failed (counted from 0, among the items that this process reads)."
    return "Reading the stream failed before its first batch."


def _numbers(origin: Any) -> list[object]:
    """Positions of the rows in the stream; empty if batches are formed by length."""
    if origin.place is None or origin.num_samples is not None:
        return []
    first = origin.place.samples - origin.size + (0 if origin.part is None else origin.part.start)
    return list(range(first, first + origin.size))


def _describe_rows(rows: Rows, names: Sequence[str]) -> str:
    note = f"Collating the batch of {listed(names, MOST_NAMED)} failed." if names else "Collating a batch failed."
    if (odd := odd_one(rows)) is None:
        ids = [row["input_ids"] for row in rows if isinstance(row, Mapping) and "input_ids" in row]
        is_ragged = len({len(one) for one in ids if isinstance(one, (list, tuple))}) > 1
        has_texts = any(map(_has_text_label, rows))
        return " ".join([note, *[PADDING_CURE] * is_ragged, *[TEXT_LABELS] * has_texts])
    row, what = odd
    which = names[row] if row < len(names) else f"its item {row}"
    return f"{note} The odd one out is {which}: {what}."


def _has_text_label(row: object) -> bool:
    labels = [row[name] for name in row if "label" in str(name)] if isinstance(row, Mapping) else []
    return any(isinstance(one[0] if isinstance(one, list) and one else one, str) for one in labels)


def _find_index(frames: Iterable[FrameType], indices: Sequence[object]) -> object:
    """The index being read: the loop variable over the batch, or the argument of the dataset's `__getitem__`."""
    for frame in frames:
        code = frame.f_code
        values = frame.f_locals
        names: list[str] = [name for name in ("idx", "index") if name in values]
        if code.co_name == "__getitem__" and code.co_argcount > 1:
            names.append(code.co_varnames[1])
        for name in names:
            if any(values.get(name) is one for one in indices):
                return values[name]
    return indices[0] if len(indices) == 1 else None


def odd_one(rows: Rows) -> tuple[int, str] | None:
    """Returns the first sample of a batch that differs from most of the others, and how; None if none does."""
    if len(rows) < 3:
        return None
    if not all(isinstance(row, Mapping) for row in rows):
        return _odd([type(row).__name__ for row in rows], "it is a {}, the others are a {}")
    names = dict.fromkeys(name for row in rows for name in dict(row))
    for kind, text in ((_type, "{name!r} is {}, and theirs is {}"), (_shape, "{name!r} has {}, and theirs has {}")):
        for name in names:
            odd = _odd([kind(dict(row), name) for row in rows], text.replace("{name!r}", repr(name)))
            if odd is not None:
                return odd
    return None


def _odd(kinds: list[str], text: str) -> tuple[int, str] | None:
    usual, number = Counter(kinds).most_common(1)[0]
    if number != len(kinds) - 1:
        return None
    row = next(row for row, kind in enumerate(kinds) if kind != usual)
    return row, text.replace("{}", kinds[row], 1).replace("{}", usual, 1)


def _type(row: Mapping[Any, Any], name: object) -> str:
    value = row.get(name)
    dtype = getattr(value, "dtype", None)
    kind = "None" if value is None else f"a {type(value).__name__}" + (f" of {dtype}" if dtype is not None else "")
    return kind if name in row else "missing"


def _shape(row: Mapping[Any, Any], name: object) -> str:
    value = row.get(name)
    if (shape := getattr(value, "shape", None)) is not None:
        return f"the shape {tuple(shape)}"
    return counted(len(value), "element") if isinstance(value, (list, tuple)) else "no length"


def _flat(indices: Any) -> list[object]:
    """Returns the indices of a batch; a group of indices that forms a batch is flattened."""
    if not isinstance(indices, (list, tuple)):
        return [indices]
    return [index for one in indices for index in (one if isinstance(one, (list, tuple)) else [one])]
