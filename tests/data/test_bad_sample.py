"""A bad sample is named: index or position, epoch, worker and, where it shows, the entry; the error keeps its type."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, default_collate

from trainwright.data.bad_sample import odd_one

from .._support.small import data, make_trainer

BAD = 17
SAMPLES = data.vectors(26)


class OutOfTune(ValueError):
    """The user's own error."""


def read(index: int) -> Any:
    if index == BAD:
        raise OutOfTune("cannot decode")
    return SAMPLES[index]


class Reads(Dataset[Any]):
    def __len__(self) -> int:
        return len(SAMPLES)

    def __getitem__(self, number: int) -> Any:
        return read(number)


class ReadsMany(Reads):
    """With torch's protocol for a whole batch."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [read(index) for index in indices]


class Streams(IterableDataset[Any]):
    def __init__(self, samples: Any = None) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Any]:
        for index in range(26):
            yield read(index) if self.samples is None else self.samples[index]


NO_LABEL = [{**s, "labels": None} if i == BAD else s for i, s in enumerate(SAMPLES)]
SHORT = [{**s, "x": s["x"][:5]} if i == BAD else s for i, s in enumerate(SAMPLES)]
KINDS: dict[str, tuple[Any, Any, type[Exception], tuple[str, ...]]] = {  # dataset, settings, error, words
    "map": (Reads(), {}, OutOfTune, (f"train[{BAD}]", "failed (the batch of ")),
    "map-many": (ReadsMany(), {}, OutOfTune, (f"Reading train[{BAD}] failed (the batch of train[",)),
    "map-seeded": (Reads(), {"seed_samples": True}, OutOfTune, (f"Reading train[{BAD}] failed",)),
    "map-mixture": ({"chat": Reads(), "code": SAMPLES[:7]}, {}, OutOfTune, (f"Reading chat[{BAD}] failed",)),
    "stream": (Streams(), {"max_steps": 7}, OutOfTune, (f"Reading item {BAD} of the stream failed",)),
    "collated": (
        SHORT,
        {"data_collator": default_collate},
        RuntimeError,
        ("Collating the batch of ", f"train[{BAD}]", "The odd one out is ", "'x' has the shape (5,), and theirs"),
    ),
    "collated-entry": (
        NO_LABEL,
        {"data_collator": default_collate},
        TypeError,
        (f"The odd one out is train[{BAD}]: 'labels' is None",),
    ),
    "collated_stream": (
        Streams(SHORT),
        {"data_collator": default_collate, "max_steps": 7},
        RuntimeError,
        ("Collating the batch of sample 16, sample 17, sample 18, sample 19 failed", f"sample {BAD}: 'x' has"),
    ),
}


@pytest.mark.parametrize(
    ("kind", "workers"), [*((kind, 0) for kind in KINDS), *((kind, 2) for kind in KINDS if "-" not in kind)]
)
def test_the_sample_is_named(kind: str, workers: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset, settings, expected, words = KINDS[kind]
    trainer = make_trainer(
        tmp_path,
        train_dataset=dataset,
        dataloader_num_workers=workers,
        save_on_exception=True,
        save_strategy="no",
        report_to="none",
        num_train_epochs=1,
        **settings,
    )
    with caplog.at_level(logging.WARNING, logger="trainwright"), pytest.raises(expected) as caught:
        trainer.train()
    text = "".join(traceback.format_exception(caught.value))
    notes = " ".join(getattr(caught.value, "__notes__", ()))
    assert type(caught.value) is expected
    assert [word for word in words if word not in text] == [], text
    assert "epoch 0 (counted from 0) of the training data" in notes
    assert ("DataLoader worker process" in text) == (workers > 0)
    assert notes in caplog.text, "for those who read only the log"
    step = trainer.state.global_step
    assert (tmp_path / f"checkpoint-{step}").is_dir(), "save_on_exception saves the last finished step"
    if expected is OutOfTune:
        assert "cannot decode" in text
        assert "in read" in text, "the traceback ends where the error was raised"


def test_an_evaluation_names_it_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, eval_dataset=Reads())
    with pytest.raises(OutOfTune) as caught:
        trainer.evaluate()
    assert f"Reading eval[{BAD}] failed" in caught.value.__notes__[0]
    assert "the data of 'eval'" in caught.value.__notes__[0]


def test_other_errors_have_no_note(tmp_path: Path) -> None:
    class Fails(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(6, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
            raise OutOfTune("in the model")

    with pytest.raises(OutOfTune) as caught:
        make_trainer(tmp_path, model=Fails()).train()
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"a": 1}] * 3, None),
        ([{"a": 1}, {"a": 2}, {"a": "x"}], (2, "'a' is a str, and theirs is a int")),
        ([{"a": None}, {"a": 2}, {"a": 3}], (0, "'a' is None, and theirs is a int")),
        ([{"a": [1, 2]}, {"a": [1]}, {"a": [1, 2]}], (1, "'a' has 1 element, and theirs has 2 elements")),
        ([{"a": [1, 2]}, {"a": [1]}, {"a": [1, 2, 3]}], None),
        ([{"a": 1}, "text", {"a": 3}], (1, "it is a str, the others are a dict")),
        ([{"a": 1}, {"a": "x"}], None),
    ],
)
def test_what_is_odd(rows: list[Any], expected: Any) -> None:
    assert odd_one(rows) == expected
