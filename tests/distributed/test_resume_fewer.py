"""A run of two processes that goes on in one, and back: every sample of the epoch once, steps that add up."""

from __future__ import annotations

from pathlib import Path

from .._support.small import Diary, StopAt, data, make_trainer
from .._support.two_processes import run

SCRIPT = """
    import sys
    from tests._support.small import Diary, StopAt, data, make_trainer
    from tests._support.two_processes import tell
    stop, resume = int(sys.argv[1]), sys.argv[2] == "resume"
    diary = Diary(data.vectors(26))
    trainer = make_trainer("run", train_dataset=diary, callbacks=[StopAt(stop)])
    trainer.train(resume_from_checkpoint=resume)
    tell(reads=diary.reads, step=trainer.state.global_step, max_steps=trainer.state.max_steps,
         epoch=trainer.state.epoch)
"""


def test_two_processes_then_one_then_two(tmp_path: Path) -> None:
    """Batches of 4: two steps of 8 samples, one of 4, then what is left of the epoch and another one, 8 a step."""
    first = run(SCRIPT, "2", "fresh", folder=tmp_path)
    trained = [i for told in first.told for i in told["reads"][:8]]
    diary = Diary(data.vectors(26))
    alone = make_trainer(tmp_path / "run", train_dataset=diary, callbacks=[StopAt(3)])
    alone.train(resume_from_checkpoint=True)
    assert alone.state.max_steps == 2 + 3 + 7
    trained += diary.reads[:4]
    last = run(SCRIPT, "99", "resume", folder=tmp_path)
    assert [told["max_steps"] for told in last.told] == [3 + 1 + 4] * 2
    assert [(told["step"], told["epoch"]) for told in last.told] == [(8, 2.0)] * 2
    rest = [told["reads"] for told in last.told]
    trained += rest[0][:3] + rest[1][:3]  # six were left: three for each
    assert sorted(trained) == [*range(26)]
    assert sorted({i for reads in rest for i in reads[3:]}) == [*range(26)]
