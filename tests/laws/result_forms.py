"""Forms of outputs, labels and losses of an evaluation, in which each prediction and label names its row."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers.modeling_outputs import SequenceClassifierOutput

from ..parity.sides import OURS, Side

NUM = 10
BATCH_SIZE = 4
ROWS = list(range(NUM))
MEAN = 4.5  # of the losses of all rows: a row's loss is its number

Pair = namedtuple("Pair", ["logits", "hidden"])
WithLoss = namedtuple("WithLoss", ["loss", "logits"])
LossLast = namedtuple("LossLast", ["logits", "loss"])


@dataclass
class Record:
    loss: Any
    logits: Any


def boxes(logits: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """For each sample as many boxes as its number says, in a dict."""
    return [{"id": row[:1], "boxes": row[:1].repeat(1 + int(row[0]) % 3, 4)} for row in logits]


def texts(logits: torch.Tensor) -> list[str]:
    return [f"row {int(row[0])}" for row in logits]


Form = tuple[Callable[[torch.Tensor, torch.Tensor], Any], Callable[[Any], Any]]  # how it is made, and how it is read


def _numbers(array: Any) -> list[int]:
    return [int(row[0]) for row in array]


def _texts(found: Any) -> list[int]:
    return [int(text.split()[-1]) for text in found]


def _ids(found: Any) -> list[int]:
    return [int(one["id"][0]) for one in found if len(one["boxes"]) == 1 + int(one["id"][0]) % 3]


def _each(read: Callable[[Any], list[int]]) -> Callable[[Any], list[int]]:
    """Reads every part; all must say the same."""

    def read_all(found: Any) -> list[int]:
        parts = [read(part) for part in found]
        assert all(part == parts[0] for part in parts)
        return parts[0]

    return read_all


def _ragged(found: Any) -> list[int]:
    assert [len(one) for one in found] == [1 + int(one[0][0]) % 3 for one in found]
    return [int(one[0][0]) for one in found]


def _first_and(read: Callable[[Any], list[int]]) -> Callable[[Any], list[int]]:
    def read_both(found: Any) -> list[int]:
        assert len(found) == 2
        numbers = _numbers(found[0])
        assert read(found[1]) == numbers
        return numbers

    return read_both


def _layers(found: Any) -> list[int]:
    assert len(found) == 2
    assert len(found[1]) == BATCH_SIZE
    return _each(_numbers)([found[0], *found[1]])


OUTPUTS: dict[str, Form] = {
    "tensor": (lambda logits, loss: logits, _numbers),
    "tuple": (lambda logits, loss: (logits, logits + 0), _each(_numbers)),
    "tuple of one": (lambda logits, loss: (logits,), _numbers),
    "tuple with a loss": (lambda logits, loss: (loss, logits), _numbers),
    "tuple with another loss": (lambda logits, loss: (loss * 3, logits, logits + 0), _each(_numbers)),
    "tuple with losses of rows": (lambda logits, loss: (logits[:, 0], logits), _numbers),
    "tuple with None": (lambda logits, loss: (None, logits), _numbers),
    "list": (lambda logits, loss: [logits, logits + 0, logits + 0], _each(_numbers)),
    "list of one": (lambda logits, loss: [logits], _numbers),
    "list with a loss": (lambda logits, loss: [loss, logits], _numbers),
    "dict": (lambda logits, loss: {"logits": logits}, _numbers),
    "dict with a loss": (lambda logits, loss: {"loss": loss, "logits": logits}, _numbers),
    "dict with None": (lambda logits, loss: {"logits": logits, "more": None}, _numbers),
    "dict with its loss last": (lambda logits, loss: {"a": logits, "b": logits, "loss": loss}, _each(_numbers)),
    "dict in a dict": (
        lambda logits, loss: {"parts": {"a": logits, "b": logits}},
        lambda f: _each(_numbers)(f.values()),
    ),
    "output": (lambda logits, loss: SequenceClassifierOutput(loss=None, logits=logits), _numbers),
    "output with a loss": (lambda logits, loss: SequenceClassifierOutput(loss=loss, logits=logits), _numbers),
    "named tuple": (lambda logits, loss: Pair(logits, logits + 0), _each(_numbers)),
    "named tuple with a loss": (lambda logits, loss: WithLoss(loss, logits), _numbers),
    "named tuple with its loss last": (lambda logits, loss: LossLast(logits, loss), _numbers),
    "dataclass": (lambda logits, loss: Record(loss, logits), _numbers),
    "namespace": (lambda logits, loss: SimpleNamespace(loss=loss, logits=logits), _numbers),
    "layers": (lambda logits, loss: {"a": logits, "layers": (logits,) * BATCH_SIZE}, _layers),
    "layers in a list": (lambda logits, loss: {"a": logits, "layers": [logits] * BATCH_SIZE}, _layers),
    "texts": (lambda logits, loss: texts(logits), _texts),
    "texts in a tuple": (lambda logits, loss: tuple(texts(logits)), _texts),
    "texts beside logits": (lambda logits, loss: {"loss": loss, "a": logits, "b": texts(logits)}, _first_and(_texts)),
    "boxes": (lambda logits, loss: boxes(logits), _ids),
    "boxes beside logits": (lambda logits, loss: {"a": logits, "b": boxes(logits)}, _first_and(_ids)),
    "ragged": (lambda logits, loss: [one["boxes"] for one in boxes(logits)], _ragged),
    "square": (lambda logits, loss: [row.expand(BATCH_SIZE, 2) for row in logits], lambda f: [int(o[0, 0]) for o in f]),
    "scalars": (lambda logits, loss: [row[0] for row in logits], lambda found: [int(one) for one in found]),
    "numbers": (lambda logits, loss: [float(row[0]) for row in logits], lambda found: [int(one) for one in found]),
    "lists": (lambda logits, loss: [[int(row[0])] * (1 + int(row[0]) % 3) for row in logits], _numbers),
}
# Forms in which a model can return its own loss, so that training works.
INSIDE = (
    "tuple with a loss",
    "list with a loss",
    "dict with a loss",
    "dict with its loss last",
    "output with a loss",
    "named tuple with a loss",
    "texts beside logits",
)
LABELS: dict[str, Form] = {
    "tensor": (lambda rows, _: rows[:, 0].long(), lambda found: [int(one) for one in found]),
    "texts": (lambda rows, _: texts(rows), _texts),
    "boxes": (lambda rows, _: boxes(rows), _ids),
    "boxes in a tuple": (lambda rows, _: tuple(boxes(rows)), _ids),
    "ragged": (lambda rows, _: [one["boxes"] for one in boxes(rows)], _ragged),
    "ragged in a tuple": (lambda rows, _: tuple(one["boxes"] for one in boxes(rows)), _ragged),
    "lists": (lambda rows, _: [[int(row[0])] * (1 + int(row[0]) % 3) for row in rows], _numbers),
    "numbers": (lambda rows, _: [int(row[0]) for row in rows], lambda found: [int(one) for one in found]),
    "dict": (lambda rows, _: {"a": rows, "b": texts(rows)}, lambda f: _first_and(_texts)([f["a"], f["b"]])),
    "two tasks": (lambda rows, _: [rows, rows + 0], _each(_numbers)),
}


class Net(nn.Module):
    """Returns its output in any form; logits (B, 2) whose first column is the number of the row."""

    main_input_name = "x"

    def __init__(self, form: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.form = form
        self.loss: Any = None

    def forward(self, x: torch.Tensor, labels: Any = None) -> Any:
        logits = x * self.scale
        self.loss = logits[:, 0].mean()
        return OUTPUTS[self.form][0](logits, self.loss)


class Unlabelled(Net):
    def forward(self, x: torch.Tensor) -> Any:  # type: ignore[override]
        return super().forward(x)


class AnyEntry(Net):
    def forward(self, **entries: Any) -> Any:  # type: ignore[override]
        return super().forward(entries["x"])


def collate(labels: str | None) -> Callable[[list[dict[str, Any]]], dict[str, Any]]:
    def batch(rows: list[dict[str, Any]]) -> dict[str, Any]:
        x = torch.stack([row["x"] for row in rows])
        return {"x": x} if labels is None else {"x": x, "labels": LABELS[labels][0](x, None)}

    return batch


def samples() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.tensor([float(i), -float(i)])} for i in range(NUM)]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(samples())


def overriding(base: Any) -> Any:
    class Overriding(base):  # type: ignore[misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            outputs = model(inputs["x"])
            return (self.model.loss, outputs) if return_outputs else self.model.loss

    return Overriding


# Where the loss is computed -> model, subclass of the trainer, and whether there is a `compute_loss_func`.
PLACES: dict[str, tuple[type[Net], bool, bool]] = {
    "inside": (Net, False, False),
    "inside, any entry": (AnyEntry, False, False),
    "override": (Net, True, False),
    "override, forward without labels": (Unlabelled, True, False),
    "function": (Net, False, True),
    "function, forward without labels": (Unlabelled, False, True),
    "nowhere": (Unlabelled, False, False),
}


def trainer_of(place: str, form: str, labels: str | None, folder: Path, side: Side = OURS, **settings: Any) -> Any:
    names = ("compute_metrics", "preprocess_logits_for_metrics", "eval_dataset")
    parts = {"eval_dataset": samples()} | {name: settings.pop(name) for name in names if name in settings}
    build, overrides, has_function = PLACES[place]
    net = build(form)
    if has_function:
        parts["compute_loss_func"] = lambda outputs, labels, num_items_in_batch=None: net.loss
    cls = overriding(side.trainer) if overrides else side.trainer
    settings = {"per_device_eval_batch_size": BATCH_SIZE, "remove_unused_columns": False, "seed": 5} | settings
    chosen = Side(side.name, cls, side.arguments)
    return chosen.make(net, folder / side.name, settings, data_collator=collate(labels), **parts)


# Cases for several processes.
OF_PROCESSES = (
    ("override", "tensor", "tensor"),
    ("override", "list", "tensor"),
    ("function", "tuple", "tensor"),
    ("inside", "dict with a loss", "boxes"),
    ("inside", "texts beside logits", "texts"),
    ("override, forward without labels", "boxes", "ragged in a tuple"),
    ("override, forward without labels", "square", "boxes in a tuple"),
    ("function, forward without labels", "boxes beside logits", "two tasks"),
    ("override", "ragged", "dict"),
    ("override", "lists", "numbers"),
)


def named(case: tuple[str, str, str], size: int, settings: dict[str, Any]) -> str:
    return f"{case} {size} {settings}"
