"""Worker processes that hang, are signalled or killed, or outlive the main process; and workers that are spawned."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from trainwright import Trainer, TrainerCallback, get_last_checkpoint

from .._support import forked
from .._support.small import StopAt, data, differing, make_trainer, weights
from .draws import Draws

pytestmark = pytest.mark.process

WORKER: dict[str, Any] = {"dataloader_num_workers": 1, "max_steps": 5, "save_strategy": "no"}


class Meets(Dataset[Any]):
    """A dataset with an incident in the worker that reads one of its samples, once."""

    def __init__(self, incident: Callable[[], None], folder: Path, sample: int) -> None:
        self.samples = data.vectors(26)
        self.incident = incident
        self.mark = folder / "met"
        self.sample = sample

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if index == self.sample and get_worker_info() is not None and not self.mark.exists():
            self.mark.write_text(str(os.getpid()))
            self.incident()
        return self.samples[index]


def hangs() -> None:
    time.sleep(600)


def is_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def is_terminated() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)


def in_order(folder: Path, incident: Callable[[], None], sample: int, **settings: Any) -> Any:
    dataset = Meets(incident, folder, sample)
    return make_trainer(
        folder / "run", train_dataset=dataset, train_sampling_strategy="sequential", **WORKER | settings
    )


def test_a_worker_that_hangs_is_named_with_its_stack(tmp_path: Path) -> None:
    trainer = in_order(tmp_path, hangs, 9, dataloader_timeout=1.0)
    with pytest.raises(RuntimeError, match=r"DataLoader timed out after 1\.0 seconds") as raised:
        trainer.train()
    pid = (tmp_path / "met").read_text()
    note = "\n".join(raised.value.__notes__)
    assert f"Worker 0 (process {pid}) returned no batch within dataloader_timeout." in note
    assert "epoch 0 (counted from 0) of the training data" in note
    first, second = note.splitlines()[2:4]
    assert first.endswith("in hangs")
    assert second.endswith("in __getitem__")
    assert all(__file__ in line for line in (first, second))


def test_an_evaluation_names_it_too(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", eval_dataset=Meets(hangs, tmp_path, 0), dataloader_timeout=1.0, **WORKER)
    with pytest.raises(RuntimeError, match="timed out") as raised:
        trainer.evaluate()
    assert "in hangs" in "\n".join(raised.value.__notes__)


def test_worker_that_is_killed_is_named_and_the_last_step_is_saved(tmp_path: Path) -> None:
    whole = in_order(tmp_path / "whole", int, 0)
    whole.train()
    trainer = in_order(tmp_path, is_killed, 17, save_on_exception=True)
    with pytest.raises((RuntimeError, OSError, EOFError)) as raised:  # the latter two while a batch is received
        trainer.train()
    said = " ".join([str(raised.value), *getattr(raised.value, "__notes__", [])])
    pid = (tmp_path / "met").read_text()
    assert f"worker (pid {pid}) is killed by signal" in said or f"(process {pid}) was ended by SIGKILL" in said
    saved = get_last_checkpoint(tmp_path / "run")
    assert saved == str(tmp_path / "run" / f"checkpoint-{trainer.state.global_step}")
    again = in_order(tmp_path, is_killed, 17)  # it was met
    again.train(resume_from_checkpoint=True)
    assert differing(weights(again.model), weights(whole.model)) == {}


def test_a_worker_leaves_signals_to_the_main_process(tmp_path: Path) -> None:
    whole = in_order(tmp_path / "whole", int, 0)
    whole.train()
    trainer = in_order(tmp_path, is_terminated, 9)
    trainer.train()
    assert (tmp_path / "met").exists()
    assert differing(weights(trainer.model), weights(whole.model)) == {}


@pytest.mark.parametrize("by", ["argument", pytest.param("start method", marks=pytest.mark.slow)])  # starts torch anew
def test_spawned_workers_train_to_the_same_weights(by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    for context in ("fork", "spawn"):
        if by == "start method":
            monkeypatch.setattr(multiprocessing.context._default_context, "_actual_context", None)
            multiprocessing.set_start_method(context)
        settings = {"dataloader_multiprocessing_context": context} if by == "argument" else {}
        trainer = make_trainer(tmp_path / context, train_dataset=Draws(), **settings, **WORKER)
        trainer.train()
        trained.append(weights(trainer.model))
    assert differing(*trained) == {}


MAIN = """
import sys, time
sys.path.insert(0, {root!r})
from pathlib import Path
from tests.data.test_workers import in_order, hangs
in_order(Path({folder!r}), hangs, 9, dataloader_num_workers=2).train()
"""


def test_workers_end_when_the_main_process_is_killed(tmp_path: Path) -> None:
    """One that hangs, which torch does not end, and one that waits."""
    root = str(Path(__file__).parents[2])
    process = forked.start(["-c", MAIN.format(root=root, folder=str(tmp_path))])
    workers: list[psutil.Process] = []
    try:
        until(lambda: (tmp_path / "met").exists() and (tmp_path / "met").read_text() != "")
        workers = psutil.Process(process.pid).children()
        assert int((tmp_path / "met").read_text()) in [worker.pid for worker in workers]
        process.send_signal(signal.SIGKILL)
        until(lambda: not any(is_running(worker) for worker in workers))
    finally:
        for left in (process, *filter(is_running, workers)):
            left.kill()
        process.communicate()


def is_running(worker: psutil.Process) -> bool:
    return worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE


def until(condition: Callable[[], bool]) -> None:
    for _ in range(600):
        if condition():
            return
        time.sleep(0.1)
    pytest.fail("it did not happen within a minute")


def test_workers_that_persist_end_with_the_run_and_with_a_collected_trainer(tmp_path: Path) -> None:
    settings = {"dataloader_num_workers": 1, "dataloader_persistent_workers": True, "max_steps": 2}
    before = set(multiprocessing.active_children())
    trainer = make_trainer(tmp_path, eval_dataset=data.vectors(4), **settings)
    trainer.train()
    assert set(multiprocessing.active_children()) == before
    trainer.evaluate()
    assert len(set(multiprocessing.active_children()) - before) == 1
    assert len(list(trainer.callback_handler.train_dataloader)) == 7  # starts a worker anew
    assert len(set(multiprocessing.active_children()) - before) == 2
    del trainer
    gc.collect()
    assert set(multiprocessing.active_children()) == before


class PersistentLoader(Trainer):
    """Has a dataloader of its own, in an order that torch's generator draws, whose workers persist."""

    def get_train_dataloader(self) -> Any:
        rows = self.train_dataset
        return self.accelerator.prepare(
            DataLoader(rows, batch_size=4, shuffle=True, num_workers=1, persistent_workers=True)
        )


@pytest.mark.parametrize("step", [7, 9])  # the end of an epoch, and the middle of the next one
def test_resume_with_workers_that_persist_in_dataloader_of_the_user_is_exact(step: int, tmp_path: Path) -> None:
    def trained(folder: str, *callbacks: Any, resume: bool = False) -> Any:
        trainer = make_trainer(tmp_path / folder, cls=PersistentLoader, callbacks=list(callbacks), num_train_epochs=3)
        trainer.train(resume_from_checkpoint=resume)
        return weights(trainer.model)

    whole = trained("whole")
    trained("cut", StopAt(step))
    assert differing(trained("cut", resume=True), whole) == {}


class WithOwnLoader(Trainer):
    own: DataLoader[Any]

    def get_train_dataloader(self) -> DataLoader[Any]:
        return self.own


def test_persistent_workers_of_an_own_loader_live_as_long_as_the_loader(tmp_path: Path) -> None:
    """As with the original: the second training uses the same processes, and they end with the loader."""
    trainer = make_trainer(tmp_path, cls=WithOwnLoader, max_steps=2)
    samples = data.vectors(8)
    trainer.own = DataLoader(samples, batch_size=2, num_workers=1, persistent_workers=True)
    before = set(multiprocessing.active_children())
    trainer.train()
    first = set(multiprocessing.active_children()) - before
    trainer.train()
    assert len(first) == 1
    assert set(multiprocessing.active_children()) - before == first
    assert sum(1 for _ in trainer.own) == 4, "its owner can go on with it"
    del trainer
    gc.collect()
    for worker in first:
        worker.join(20)
    assert set(multiprocessing.active_children()) - before == set()


class Ends(Exception):
    pass


class EndsBeforeWorkers(Trainer):
    """Ends where the first batch would be fetched, and has a training loader of the user's."""

    own_workers = 0

    def get_train_dataloader(self) -> Any:
        if not self.own_workers:
            return super().get_train_dataloader()
        return DataLoader(self.train_dataset, batch_size=4, num_workers=self.own_workers)

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.add_callback(RaisesAtBegin())
        return super()._inner_training_loop(*args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        raise Ends


class RaisesAtBegin(TrainerCallback):
    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        raise Ends


@pytest.mark.parametrize(
    ("call", "workers", "own_workers", "length", "sharing", "num_warnings"),
    [
        ("train", 2, 0, 76, "file_descriptor", 1),
        ("train", 0, 2, 76, "file_descriptor", 1),
        ("evaluate", 2, 0, 76, "file_descriptor", 1),
        ("predict", 2, 0, 76, "file_descriptor", 1),
        ("train", 2, 0, 74, "file_system", 1),
        ("train", 2, 0, 73, "file_system", 0),
        ("train", 2, 0, 75, "file_descriptor", 0),
        ("train", 0, 0, 90, "file_descriptor", 0),
    ],
)
def test_a_temporary_directory_without_room_for_sockets_is_named(
    call: str,
    workers: int,
    own_workers: int,
    length: int,
    sharing: str,
    num_warnings: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Their batches would not come; torch says nothing."""
    trainer = make_trainer(
        tmp_path,
        cls=EndsBeforeWorkers,
        dataloader_num_workers=workers,
        log_level="warning",
        eval_dataset=data.vectors(8),
    )
    trainer.own_workers = own_workers
    monkeypatch.setattr(tempfile, "tempdir", "/" + (length - 1) * "a")
    monkeypatch.setattr(torch.multiprocessing, "get_sharing_strategy", lambda: sharing)
    with pytest.raises(Ends):
        getattr(trainer, call)(*[data.vectors(8)] * (call == "predict"))
    assert len([one for one in caplog.records if "Set TMPDIR to a shorter path" in one.getMessage()]) == num_warnings
