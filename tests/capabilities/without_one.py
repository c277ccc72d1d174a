"""Trains, saves, evaluates and resumes with the package on the path: `without_one.py FOLDER [NAMES OF ARGUMENTS]`.

The arguments must not exist. The package is a copy without a capability; the test beside it makes the copy.
"""

import importlib
import inspect
import os
import sys
from pathlib import Path

import torch
from torch import nn

from trainwright import Trainer, TrainingArguments
from trainwright.errors import UnknownArgumentError

STEPS = 4


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(3, 1)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        y = self.inner(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(y, labels), "logits": y}


def rows() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(3, generator=generator), "labels": torch.tensor(float(n))} for n in range(16)]


def run(folder: Path, resume: Path | None = None) -> Trainer:
    args = TrainingArguments(
        str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(Line(), args, train_dataset=rows(), eval_dataset=rows()[:5])
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    assert "eval_loss" in trainer.evaluate()
    assert len(trainer.predict(rows()[:3]).predictions) == 3
    return trainer


def main(folder: Path, names: list[str]) -> None:
    app = importlib.import_module("trainwright.cli.main").app
    there = {one.name or one.callback.__name__ for one in app.registered_commands}
    assert "train" in there
    assert not there & {*os.environ.get("COMMANDS_OF_IT", "").split()}
    assert not set(names) & set(inspect.signature(TrainingArguments).parameters)
    for name in names:
        try:
            TrainingArguments(str(folder), **{name: True})
        except UnknownArgumentError:
            continue
        raise AssertionError(f"{name} is still an argument")
    whole = run(folder / "whole")
    resumed = run(folder / "resumed", folder / "whole" / "checkpoint-2")
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
