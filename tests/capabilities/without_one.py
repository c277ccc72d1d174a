"""Trains, saves, evaluates and resumes with the package on the path: `without_one.py FOLDER [NAMES OF ARGUMENTS]`.

The arguments must not exist, nor the commands and public names in the environment. Help, check-up and report work, and
mention none of them. The package is a copy without a capability; the test beside it makes the copy.
"""

import importlib
import inspect
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

import trainwright
from trainwright import HfArgumentParser, Trainer, TrainingArguments
from trainwright.capability_table import PUBLIC_NAMES
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


def check_mentions(text: str, words: list[str]) -> None:
    """Asserts that a text has none of these words; parts of longer words do not count."""
    for word in words:
        found = re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text)
        assert found is None, f"{word} is mentioned: {text[max(found.start() - 80, 0) : found.end() + 80]}"


def help_text(*words: str) -> str:
    """Returns what a command of the program shows."""
    testing: Any = importlib.import_module("typer.testing")
    result = testing.CliRunner().invoke(importlib.import_module("trainwright.cli.main").app, [*words, "--help"])
    assert result.exit_code == 0, result.output
    text: str = result.output
    return text


def check_program(arguments: list[str], commands: list[str]) -> None:
    """Checks commands, help and schema of the command line."""
    app = importlib.import_module("trainwright.cli.main").app
    there = {one.name or one.callback.__name__ for one in app.registered_commands}
    assert "train" in there
    assert not there & {*commands}
    listed = {line.split()[1] for line in help_text().splitlines() if len(line.split()) > 2}
    assert "train" in listed
    assert not listed & {*commands}
    check_mentions(help_text("train"), arguments)
    schema = importlib.import_module("trainwright.cli.recipe.json_schema").json_schema()
    assert not {*arguments} & schema["properties"]["training"]["properties"].keys()


def check_arguments(folder: Path, names: list[str]) -> None:
    """Checks that the arguments do not exist, in no form."""
    assert not set(names) & set(inspect.signature(TrainingArguments).parameters)
    assert not set(names) & TrainingArguments(str(folder)).to_dict().keys()
    check_mentions(HfArgumentParser(TrainingArguments).format_help(), [f"--{name}" for name in names])
    for name in names:
        try:
            TrainingArguments(str(folder), **{name: True})
        except UnknownArgumentError:
            continue
        raise AssertionError(f"{name} is still an argument")


def check_names(names: list[str]) -> None:
    """Checks that the public names of the other capabilities are there, and none of these."""
    others = [name for public in PUBLIC_NAMES.values() for name in public]
    assert set(others) <= {*dir(trainwright)}
    assert not set(names) & {*dir(trainwright)}
    for name in others:
        getattr(trainwright, name)


def main(folder: Path, names: list[str]) -> None:
    check_program(names, os.environ.get("COMMANDS_OF_IT", "").split())
    check_arguments(folder, names)
    check_names(os.environ.get("NAMES_OF_IT", "").split())
    whole = run(folder / "whole")
    resumed = run(folder / "resumed", folder / "whole" / "checkpoint-2")
    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
    found = whole.check()
    assert found.passed
    check_mentions(str(found), names)
    report: Any = importlib.import_module("trainwright.report.run_page")
    shown = report.write_report(folder / "whole").read_text(encoding="utf-8")
    check_mentions(shown, [f">{name}<" for name in names])


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
