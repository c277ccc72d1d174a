"""Collators that draw random numbers in the main process, as GLiNER's: a resume goes on as the run would have."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from trainwright import Trainer

from .._support.small import StopAt, data, differing, make_trainer, module, weights

DRAWS = {
    "python": lambda: random.random(),
    "numpy": lambda: float(np.random.rand()),
    "torch": lambda: float(torch.rand(())),
}


class Collator:
    """Adds a random number to the inputs of a batch; `signal_at` numbers a batch during which a signal arrives."""

    def __init__(self, kind: str, signal_at: int | None = None) -> None:
        self.draw = DRAWS[kind]
        self.signal_at = signal_at
        self.num_made = 0

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        self.num_made += 1
        if self.num_made == self.signal_at:
            signal.raise_signal(signal.SIGTERM)
        inputs = torch.stack([row["x"] for row in rows]) + self.draw()
        return {"x": inputs, "labels": torch.tensor([row["labels"] for row in rows])}


class OwnLoader(Trainer):
    """Makes its dataloader as GLiNER's trainer does, and has accelerate prepare it.

    That dataloader fetches one batch ahead of the one that it gives.
    """

    def get_train_dataloader(self) -> Any:
        parts = {"batch_size": self._train_batch_size, "collate_fn": self.data_collator}
        return self.accelerator.prepare(DataLoader(self.train_dataset, sampler=self._get_train_sampler(), **parts))


@pytest.mark.parametrize(
    ("cls", "kind"),
    [(cls, kind) for cls in (Trainer, OwnLoader) for kind in DRAWS],
)
def test_a_resume_draws_what_the_run_would_have_drawn(cls: type[Trainer], kind: str, tmp_path: Path) -> None:
    def trained(folder: str, *, resume: bool = False, stop: int | None = None) -> Any:
        callbacks = [] if stop is None else [StopAt(stop)]
        one = make_trainer(
            tmp_path / folder,
            cls=cls,
            model=module(),
            data_collator=Collator(kind),
            callbacks=callbacks,
            train_dataset=data.vectors(26),
            remove_unused_columns=False,
        )
        one.train(resume_from_checkpoint=resume)
        return weights(one.model)

    whole = trained("whole")
    trained("cut", stop=3)
    assert differing(trained("cut", resume=True), whole) == {}


class DispatchesStream(OwnLoader):
    """As accelerate prepares an iterable dataset: one process reads for all."""

    def get_train_dataloader(self) -> Any:
        stream = Streamed(self.train_dataset)
        return self.accelerator.prepare(DataLoader(stream, batch_size=4, collate_fn=self.data_collator))


class Streamed(IterableDataset[Any]):
    def __init__(self, rows: Any) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[Any]:
        return iter(self.rows)


def whole_and_resumed(
    folder: Path, cls: type[Trainer], *, stop: int, signal_at: int | None = None, **settings: Any
) -> tuple[Any, Any]:
    """Returns the weights of an uninterrupted run, and of a run that was resumed twice.

    That one was stopped after a step, or by a signal while a batch was made, and then one step later.
    """

    def trainer(name: str, *callbacks: Any, signal_at: int | None = None) -> Any:
        return make_trainer(
            folder / name,
            cls=cls,
            model=module(),
            data_collator=Collator("torch", signal_at),
            callbacks=list(callbacks),
            train_dataset=data.vectors(26),
            remove_unused_columns=False,
            **settings,
        )

    whole = trainer("whole")
    whole.train()
    if signal_at is None:
        trainer("cut", StopAt(stop)).train()
    else:
        with pytest.raises(SystemExit):
            trainer("cut", signal_at=signal_at).train()
    trainer("cut", StopAt(stop + 1)).train(resume_from_checkpoint=True)
    resumed = trainer("cut")
    resumed.train(resume_from_checkpoint=True)
    return weights(whole.model), weights(resumed.model)


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
@pytest.mark.parametrize("stop", [1, 2, 5])
def test_a_batch_that_accelerate_had_fetched_ahead_is_made_as_before(
    stop: int, micro_batches: int, tmp_path: Path
) -> None:
    settings = {"gradient_accumulation_steps": micro_batches}
    whole, resumed = whole_and_resumed(tmp_path, OwnLoader, stop=stop, **settings)
    assert differing(resumed, whole) == {}


def test_so_is_that_of_a_stream_read_for_all_processes(tmp_path: Path) -> None:
    whole, resumed = whole_and_resumed(tmp_path, DispatchesStream, stop=3, max_steps=7)
    assert differing(resumed, whole) == {}


@pytest.mark.parametrize(("signal_at", "micro_batches", "done"), [(3, 1, 1), (5, 1, 3), (4, 2, 1), (5, 2, 1)])
def test_a_signal_while_it_is_fetched_saves_the_step_before(
    signal_at: int, micro_batches: int, done: int, tmp_path: Path
) -> None:
    settings = {"gradient_accumulation_steps": micro_batches, "save_strategy": "steps"}
    whole, resumed = whole_and_resumed(tmp_path, OwnLoader, stop=done, signal_at=signal_at, **settings)
    assert (tmp_path / "cut" / f"checkpoint-{done}").is_dir()
    assert differing(resumed, whole) == {}
