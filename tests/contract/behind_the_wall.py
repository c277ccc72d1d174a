"""Trains, evaluates, predicts, saves and resumes with what is left of the package: `behind_the_wall.py FOLDER`.

The package on the path is a copy without all that is outside of the wall; the test next to this file makes the copy.
"""

import sys
from pathlib import Path

import torch

import trainwright
from tests.capabilities.without_one import Line, rows
from trainwright import Trainer, TrainingArguments


def run(folder: Path, resume: Path | None = None, *, steps: int = 6) -> Trainer:
    """Trains with the default arguments, but for a length, and returns the trainer."""
    args = TrainingArguments(str(folder), max_steps=steps, save_steps=2, logging_steps=1, use_cpu=True)
    trainer = Trainer(Line(), args, train_dataset=rows(), eval_dataset=rows()[:5])
    result = trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert result.global_step == steps
    return trainer


def main(folder: Path) -> None:
    assert not (Path(trainwright.__file__).parent / "capabilities").exists()
    whole = run(folder / "whole")
    metrics = whole.evaluate()
    assert metrics["eval_loss"] > 0
    assert len(whole.predict(rows()[:3]).predictions) == 3
    whole.save_model()
    assert (folder / "whole" / "model.safetensors").is_file()
    resumed = run(folder / "resumed", folder / "whole" / "checkpoint-2")
    again = run(folder / "again", folder / "whole" / "checkpoint-4")
    for other in (resumed, again):
        for one, two in zip(whole.model.parameters(), other.model.parameters(), strict=True):
            assert torch.equal(one, two)
        assert other.evaluate()["eval_loss"] == metrics["eval_loss"]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
