"""RecordedMetrics: numbers of `Trainer.record` between two logs. `read_with` and `totals` read them back.

Recording copies a scalar on its device into a list, without a wait. A log reads all of them back in the copy that
reads the loss, adds them up in double precision, and joins the processes in the exchange of the loss:

    mean   sum of value x weight, divided by the sum of weights        3 items with 2.0 and 1 item with 6.0: 3.0
    sum    sum of the values                                           8.0
    max    the largest value                                           6.0
    last   the newest value, of the first process that has one         6.0

Processes need not record the same names: each sends its names with its numbers, and how many bytes that takes is agreed
on in the exchange of counters (`Progress.settle`), which precedes each log and each save anyway.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Sequence
from numbers import Real
from typing import NamedTuple

import torch

from trainwright._types import Batch, JSONObject, TailBatch
from trainwright.errors import ArgumentError, did_you_mean
from trainwright.support.door import parse_json

REDUCTIONS = ("mean", "sum", "max", "last")
# Entry of a batch in which a collator records: name -> number, or a dict of the arguments of `record`.
METRICS = "_metrics"
# Names that the logs of training and evaluation have already; `guard/...` too.
TAKEN = frozenset(
    (
        "loss",
        "grad_norm",
        "learning_rate",
        "epoch",
        "step",
        "num_input_tokens_seen",
        "num_non_finite_losses",
        "total_flos",
        "train_loss",
        "runtime",
        "samples_per_second",
        "steps_per_second",
        "tokens_per_second",
        "train_runtime",
        "train_samples_per_second",
        "train_steps_per_second",
        "train_tokens_per_second",
        "train_model_flops_utilization",
    )
)
COMPACT_AFTER = 1024  # scalars held as one tensor each before they are packed into one


class Total(NamedTuple):
    """The values recorded under one name, reduced."""

    reduce: str
    value: float  # for a mean, the weighted sum
    weight: float  # sum of the weights; of other reductions, the number of values

    def joined(self, other: Total) -> Total:
        """Returns this total with a later one added."""
        if self.reduce in ("mean", "sum"):
            value = self.value + other.value
        elif self.reduce == "max":
            value = other.value if other.value > self.value or other.value != other.value else self.value
        else:
            value = other.value
        return Total(self.reduce, value, self.weight + other.weight)

    @property
    def result(self) -> float:
        """The number that is logged."""
        return self.value / self.weight if self.reduce == "mean" else self.value


class OnDevice(int):
    """Position of a number on the device."""


class RecordedNumber(NamedTuple):
    """A recorded number."""

    name: str
    step: int  # optimizer step that it belongs to, from 1; 0: recorded between two steps
    value: float | OnDevice
    weight: float | OnDevice


@functools.cache
def widest_float(device: torch.device) -> torch.dtype:
    """Returns float64, or float32 for a device that cannot hold float64, which is tried once."""
    try:
        torch.zeros((), dtype=torch.float64, device=device)
    except (TypeError, RuntimeError):
        return torch.float32
    return torch.float64


class RecordedMetrics:
    """Numbers of one training since its last log, or of one evaluation.

    Args:
        device: of the run.

    Attributes:
        batch: the micro-batch under way; numbers of a filler batch do not count.
        items: over which the loss of an evaluation's batch is a mean, if a `LossOutput` gives it.
        agreed_bytes: size of a process's message in the next exchange.
        on_first: called once, before the first number is recorded.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = torch.device(device)
        self._dtype = widest_float(self._device)
        self._reductions: dict[str, str] = {}
        self._entries: list[RecordedNumber] = []
        self._scalars: list[torch.Tensor] = []
        self._packed: list[torch.Tensor] = []
        self._totals: dict[str, Total] = {}
        self.batch: Batch | None = None
        self.items: torch.Tensor | float | None = None
        self.agreed_bytes = 0
        self.on_first: Callable[[], None] | None = None

    def add(
        self, name: str, value: object, weight: object = 1.0, reduce: str = "mean", *, step: int = 0, share: float = 1.0
    ) -> None:
        """Records a number; see `Trainer.record`.

        `step` is the optimizer step that it belongs to, 0 for none. `share` is that of a part in its micro-batch, which
        has its collator's numbers once.
        """
        if self._reductions.get(name) != reduce:
            self._check(name, reduce)
        if reduce != "mean" and (isinstance(weight, torch.Tensor) or weight != 1.0):
            raise ArgumentError(f"{name!r} is recorded with a weight, which reduce={reduce!r} has no use for; omit it.")
        if isinstance(self.batch, TailBatch) and self.batch.num_samples == 0:
            return
        number = self._number(name, value)
        weighing = self._number(name, weight, what="weight")
        if share != 1.0 and reduce in ("mean", "sum"):
            if reduce == "mean":
                weighing = self._scaled(weighing, share)
            else:
                number = self._scaled(number, share)
        if self.on_first is not None:
            self.on_first()
            self.on_first = None
        self._entries.append(RecordedNumber(name, step, number, weighing))
        self._reductions[name] = reduce

    def add_from_collator(self, metrics: object, *, step: int = 0, share: float = 1.0) -> None:
        """Records the numbers that a collator put into a batch as `METRICS`."""
        if not isinstance(metrics, dict):
            raise ArgumentError(
                f"The entry {METRICS!r} of a batch is a {type(metrics).__name__}; it must be a dict of names and "
                "numbers, or of names and the arguments of record: {'padding': {'value': 0.2, 'weight': 8}}."
            )
        for name, value in metrics.items():
            given = value if isinstance(value, dict) else {"value": value}
            if unknown := given.keys() - {"value", "weight", "reduce"} or {"value"} - given.keys():
                raise ArgumentError(
                    f"The entry {METRICS!r} of a batch has {name!r} with {', '.join(map(str, given)) or 'nothing'}: "
                    f"wrong is {', '.join(map(str, unknown))}. It has a value, and perhaps weight and reduce."
                )
            self.add(name, **given, step=step, share=share)

    def _check(self, name: str, reduce: str) -> None:
        if not isinstance(name, str) or not name:
            raise ArgumentError(f"A recorded number is named {name!r}; names are text.")
        if name in TAKEN or name.startswith("guard/"):
            raise ArgumentError(f"{name!r} cannot be recorded: logs have a value of that name. Choose another name.")
        if reduce not in REDUCTIONS:
            raise ArgumentError(
                f"reduce={reduce!r} of {name!r} is not one of: {', '.join(REDUCTIONS)}."
                f"{did_you_mean(reduce, REDUCTIONS)}"
            )
        if name in self._reductions:
            raise ArgumentError(
                f"{name!r} is recorded with reduce={reduce!r}, and was with {self._reductions[name]!r} before."
            )

    def _number(self, name: str, value: object, *, what: str = "value") -> float | OnDevice:
        if isinstance(value, torch.Tensor):
            if value.ndim or value.is_complex():
                raise ArgumentError(
                    f"The {what} of {name!r} is a {value.dtype} tensor of shape {tuple(value.shape)}; record one real "
                    "number, as value.mean() is."
                )
            return self._keep(value.detach().to(self._device, self._dtype, non_blocking=True, copy=True))
        if isinstance(value, Real):
            return float(value)
        raise ArgumentError(f"The {what} of {name!r} is a {type(value).__name__}; record a number or a scalar tensor.")

    def _scaled(self, number: float | OnDevice, share: float) -> float | OnDevice:
        return self._keep(self._scalars[-1] * share) if isinstance(number, OnDevice) else number * share

    def _keep(self, scalar: torch.Tensor) -> OnDevice:
        if len(self._scalars) == COMPACT_AFTER:
            self._packed.append(torch.stack(self._scalars))
            self._scalars = []
        self._scalars.append(scalar)
        return OnDevice(len(self._packed) * COMPACT_AFTER + len(self._scalars) - 1)

    # -- steps that are given up ---------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Numbers recorded since the last reading."""
        return len(self._entries)

    def rewind(self, count: int) -> None:
        """Removes the newest numbers down to a count."""
        del self._entries[count:]

    def drop(self, step: int) -> None:
        """Removes the numbers of a refused step."""
        self._entries = [entry for entry in self._entries if entry.step != step]

    # -- reading -------------------------------------------------------------------------------------------------------

    def read_with(self, total: torch.Tensor) -> float:
        """Returns the number in a scalar, and reads all recorded ones back in the same copy."""
        if not self._scalars:
            self._add_up(())
            return total.item()
        parts = [total.reshape(1).to(self._dtype), *self._packed, torch.stack(self._scalars)]
        first, *numbers = torch.cat(parts).tolist()
        self._add_up(numbers)
        return float(first)

    def _add_up(self, numbers: Sequence[float]) -> None:
        for name, _, value, weight in self._entries:
            value, weight = (numbers[one] if isinstance(one, OnDevice) else one for one in (value, weight))
            reduce = self._reductions[name]
            if reduce == "mean":
                value = value * weight if weight else 0.0
            self._join(name, Total(reduce, value, weight))
        self._entries = []
        self._scalars = []
        self._packed = []

    def _join(self, name: str, total: Total) -> None:
        before = self._totals.get(name)
        self._reductions.setdefault(name, total.reduce)
        self._totals[name] = total if before is None else before.joined(total)

    def num_bytes(self) -> int:
        """Size of the message of this process, which need not be read for it."""
        names = {**self._totals, **dict.fromkeys(entry.name for entry in self._entries)}
        return len(self._header(list(names))) + 16 * len(names) if names else 0

    def _header(self, names: Sequence[str]) -> bytes:
        text = json.dumps([[name, self._reductions[name]] for name in names]).encode()
        return struct.pack("<I", len(text)) + text

    def message(self) -> torch.Tensor:
        """Returns names and totals as `agreed_bytes` bytes, after a reading; the rest waits for the next."""
        names = list(self._totals)
        numbers = (number for total in self._totals.values() for number in total[1:])
        text = self._header(names) + struct.pack(f"<{2 * len(names)}d", *numbers) if names else b""
        if len(text) > self.agreed_bytes:
            text = b""
        else:
            self._totals = {}
        return torch.tensor(list(text.ljust(self.agreed_bytes, b"\0")), dtype=torch.uint8)

    def receive(self, messages: torch.Tensor) -> None:
        """Adds the totals in the messages of all processes (processes, bytes); the first process's are the newest."""
        for message in map(bytes, reversed(messages.tolist())):
            (length,) = struct.unpack_from("<I", message)
            known = parse_json(message[4 : 4 + length]) if length else []
            for place, (name, reduce) in enumerate(known):
                self._join(name, Total(reduce, *struct.unpack_from("<2d", message, 4 + length + 16 * place)))

    def take(self) -> dict[str, float]:
        """Returns the results of all totals and starts again; a mean without weight is omitted."""
        totals = self._totals
        self._totals = {}
        return {name: total.result for name, total in totals.items() if total.weight}

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state(self) -> JSONObject:
        """Returns the totals since the last log, after a reading."""
        return {name: list(total) for name, total in self._totals.items()}

    def load(self, state: JSONObject) -> None:
        """Continues from a result of `state`."""
        for name, total in state.items():
            self._join(name, Total(*total))
