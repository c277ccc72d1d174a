"""A run of two processes that goes on in one: every sample of the epoch once, steps that add up."""

from __future__ import annotations

from pathlib import Path

import pytest

from .._support.small import Diary, data, make_trainer
from .._support.two_processes import run

pytestmark = pytest.mark.process

SCRIPT = """
    from tests._support.small import Diary, StopAt, data, make_trainer
    from tests._support.two_processes import tell
    diary = Diary(data.vectors(26))
    trainer = make_trainer("run", train_dataset=diary, callbacks=[StopAt(2)])
    trainer.train()
    tell(reads=diary.reads, max_steps=trainer.state.max_steps)
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_processes_then_one(tmp_path: Path) -> None:
    """Batches of 4: two steps of 8 samples, then the ten that are left of the epoch and another epoch, 4 a step."""
    first = run(SCRIPT, folder=tmp_path, timeout_s=200)
    assert [told["max_steps"] for told in first.told] == [8, 8]
    trained = [i for told in first.told for i in told["reads"][:8]]  # a batch lay ready, and was not trained
    diary = Diary(data.vectors(26))
    alone = make_trainer(tmp_path / "run", train_dataset=diary)
    alone.train(resume_from_checkpoint=True)
    assert (alone.state.global_step, alone.state.max_steps, alone.state.epoch) == (12, 12, 2.0)
    assert sorted(trained + diary.reads[:10]) == [*range(26)]
    assert sorted(diary.reads[10:]) == [*range(26)]
