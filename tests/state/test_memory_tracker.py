"""Memory of the stages: the entries of transformers, and no thread left behind."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import TrainerCallback, TrainerMemoryTracker

from .._support.small import OURS, REFERENCE, data, make_trainer


@pytest.mark.framework
def test_the_entries_of_transformers(tmp_path: Path) -> None:
    found = []
    for side in (OURS, REFERENCE):
        trainer = make_trainer(tmp_path, side, skip_memory_metrics=False, eval_dataset=data.vectors(4))
        stages = [trainer.train().metrics, trainer.evaluate(), trainer.predict(data.vectors(4)).metrics]
        found.append([sorted(name for name in metrics if "_mem_" in name) for metrics in stages])
    assert found[0] == found[1]
    assert any("init_mem" in name for name in found[0][0])


def test_nothing_is_measured_by_default(tmp_path: Path) -> None:
    before = threading.active_count()
    trainer = make_trainer(tmp_path, eval_dataset=data.vectors(4))
    assert not any("_mem_" in name for name in {**trainer.train().metrics, **trainer.evaluate()})
    assert threading.active_count() == before


class Memory:
    """Stands in for `psutil.Process`: memory that the test sets, and not what else this process does."""

    def __init__(self) -> None:
        self.rss = 100
        self.peak = 180
        self.peak_was_read = threading.Event()

    def memory_info(self) -> Any:
        rss = self.rss
        if rss == self.peak:
            self.peak_was_read.set()
        return SimpleNamespace(rss=rss)


def test_a_peak_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    monkeypatch.setattr("psutil.Process", lambda: memory)
    tracker = TrainerMemoryTracker()
    tracker.start("train")
    memory.rss = memory.peak
    assert memory.peak_was_read.wait(100)
    memory.rss = 120
    metrics: dict[str, Any] = {}
    tracker.stop_and_update_metrics(metrics, stage="train")
    assert metrics["train_mem_cpu_alloc_delta"] == 20
    assert metrics["train_mem_cpu_peaked_delta"] == 60


def test_an_inner_stage_belongs_to_the_outer_one() -> None:
    tracker = TrainerMemoryTracker()
    outer: dict[str, Any] = {}
    inner: dict[str, Any] = {}
    tracker.start("train")
    tracker.start("eval")
    tracker.stop_and_update_metrics(inner, stage="eval")
    tracker.stop_and_update_metrics(outer, stage="train")
    assert inner == {}
    assert {name.split("_")[0] for name in outer} == {"train"}


def test_a_training_that_fails_leaves_no_thread_and_can_be_measured_again(tmp_path: Path) -> None:
    class Fails(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

    trainer = make_trainer(tmp_path, skip_memory_metrics=False, callbacks=[Fails], eval_dataset=data.vectors(4))
    before = threading.active_count()
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert threading.active_count() == before
    assert any("eval_mem_" in name for name in trainer.evaluate())


def test_no_error_leaves_a_thread(tmp_path: Path) -> None:
    """In an evaluation, in a prediction, and in a training that is refused before it begins."""

    class Fails(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            raise ZeroDivisionError

    trainer = make_trainer(tmp_path, model=Fails(), skip_memory_metrics=False, eval_dataset=data.vectors(4))
    before = threading.active_count()
    for work, error in (
        (trainer.evaluate, ZeroDivisionError),
        (lambda: trainer.predict(data.vectors(4)), ZeroDivisionError),
        (lambda: trainer.train(resume_from_checkpoint=str(tmp_path / "nowhere")), ValueError),
    ):
        with pytest.raises(error):
            work()
        assert threading.active_count() == before


def test_a_stage_that_begins_again_leaves_no_thread() -> None:
    tracker = TrainerMemoryTracker()
    before = threading.active_count()
    tracker.start("train")
    tracker.start("train")
    tracker.stop_and_update_metrics({}, stage="train")
    assert threading.active_count() == before
